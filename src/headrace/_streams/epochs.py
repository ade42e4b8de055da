"""Epochs, orders and seeds of streams."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple

from headrace._base.text import whole_number
from headrace._random.seeding import batch_seed
from headrace._ranks.rankinfo import bound
from headrace._streams.kinds import children, propagate_epoch

session_epoch: ContextVar[int | None] = ContextVar("headrace_epoch", default=None)
"""Epoch of the loader for which the running code reads."""

session_seed: ContextVar[int | None] = ContextVar("headrace_seed", default=None)
"""Seed of the same loader, used by streams without a seed."""

current_repetition: ContextVar[int] = ContextVar("headrace_repetition", default=0)
"""A different number for each repetition of a stream within an epoch; 0 for the first."""


def checked_seed(seed: int | None) -> int | None:
    """Return a seed as an int of 64 bits; None stays None."""
    return None if seed is None else whole_number("seed", seed, 0, 2**64 - 1)


class Order(NamedTuple):
    """The order of a stream during a pass.

    `number` distinguishes several orders of the same stream.
    """

    seed: int
    epoch: int
    repetition: int
    number: int = 0

    def key(self) -> int:
        derived = batch_seed(self.seed, self.epoch, self.number)
        return batch_seed(derived, self.repetition, 0) if self.repetition else derived


class FollowsEpoch:
    """A stream with a different order in each epoch.

    The epoch is the number passed to `set_epoch`. Without a call of `set_epoch` (for example, if a
    generator function makes the stream) the epoch is the loader's. Without a loader the epoch is 0.
    """

    wants_epoch = True  # loaders call `set_epoch` before each epoch
    _epoch: int | None = None
    _of_loader = True  # whether the number is the loader's own

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, also of inner streams.

        Loaders call this method.
        """
        self._epoch = epoch = whole_number("epoch", epoch)
        self._of_loader = epoch == session_epoch.get()
        for part in children(self):
            propagate_epoch(part, epoch)

    def _order_for(self, seed: int | None) -> Order:
        seed = (session_seed.get() or 0) if seed is None else seed
        epoch = session_epoch.get() if self._of_loader else None
        # Another iteration may have set `_epoch` meanwhile.
        epoch = self._epoch if epoch is None else epoch
        return Order(seed, epoch or 0, current_repetition.get())


# Seeds depend on the place of a stream in the composition, not on the time when the stream starts:
# a restored stream has the same seeds as before. Keys are spawned as by NumPy's `SeedSequence`:
# each composition takes a key, and derives keys for the children.

stream_seeds: ContextVar[Iterator[int]] = ContextVar(
    "headrace_stream_seeds",
    default=itertools.repeat(0),  # noqa: B039
)
"""Keys for streams started now; all keys are equal without a loader."""


def keys_within(key: int) -> bound:
    """Give streams started within this context keys derived from `key`.

    Each stream takes the next key, in the order of starting.
    """
    return bound(
        stream_seeds, (batch_seed(key, 0, number) for number in itertools.count())
    )


def spawn_key() -> int:
    """Return the key for a stream started now."""
    return next(stream_seeds.get())


def child_seeds(key: int, child: int) -> bound:
    """Give child number `child` keys derived from the parent's `key`.

    The same number gives the same seeds again.
    """
    return keys_within(batch_seed(key, 1, child))
