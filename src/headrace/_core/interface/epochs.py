"""The epoch that a stream is read in; its order derives from the seed and the epoch."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from contextvars import ContextVar

from headrace._core.seeding import batch_seed

session_epoch: ContextVar[int | None] = ContextVar("headrace_epoch", default=None)
"""The epoch of the loader for which the running code reads."""

_repetition: ContextVar[int] = ContextVar("headrace_repetition", default=0)


def repetition() -> int:
    """How many times the running reader has read a stream before in this epoch; 0 at first."""
    return _repetition.get()


@contextlib.contextmanager
def repeated(number: int) -> Iterator[None]:
    """Streams that begin within a ``with`` block have another order than in the repetitions before.

    Args:
        number: as `repetition` is to give it.
    """
    token = _repetition.set(number)
    try:
        yield
    finally:
        _repetition.reset(token)


class FollowsEpoch:
    """A stream whose order differs from epoch to epoch.

    It is the epoch that `set_epoch` was called with. Where it never was, because the stream is made inside a generator
    function, say, it is the epoch of the loader that reads the stream; without a loader it is 0.
    """

    wants_epoch = True
    """Loaders call `set_epoch` before each epoch."""

    _epoch: int | None = None
    _read_in: int | None = None  # the loader's epoch in which a pass has begun since `set_epoch`
    _warned = False

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch; loaders call this."""
        self._epoch = epoch
        self._read_in = None

    def _current_epoch(self) -> int:
        return self._epoch if self._epoch is not None else session_epoch.get() or 0

    def _order_seed(self, seed: int, number: int = 0) -> int:
        """The seed of the pass that begins now; `number` tells the orders within one pass apart."""
        again, derived = repetition(), batch_seed(seed, self._current_epoch(), number)
        return batch_seed(derived, again, 0) if again else derived

    def _note_pass(self) -> None:
        """Warn where a loader begins to read a stream in another epoch, and nothing has called `set_epoch` since."""
        reading = session_epoch.get()
        if self._epoch is None or reading is None:
            return
        if self._read_in not in (None, reading) and self._epoch != reading and not self._warned:
            self._warned = True
            warnings.warn(
                f"{type(self).__name__} gives the order of epoch {self._epoch} again in the loader's epoch {reading}: "
                f"its set_epoch was called before, and the loader cannot find it to do so now. Hold it in an attribute "
                f"of the dataset that the loader is given, or call its set_epoch in the set_epoch of that dataset.",
                UserWarning,
                stacklevel=3,
            )
        self._read_in = reading
