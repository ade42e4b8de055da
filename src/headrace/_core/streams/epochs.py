"""The epoch that a stream is read in, the order that follows from it, and the seeds of what is in the stream."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple

from headrace._core.ranks.rankinfo import bound
from headrace._core.seeding import batch_seed
from headrace._core.streams.kinds import children, propagate_epoch
from headrace._core.text import whole_number

session_epoch: ContextVar[int | None] = ContextVar("headrace_epoch", default=None)
"""The epoch of the loader that the running code reads for."""

session_seed: ContextVar[int | None] = ContextVar("headrace_seed", default=None)
"""The `seed=` of that loader, which orders of streams without a seed of their own follow."""

current_repetition: ContextVar[int] = ContextVar("headrace_repetition", default=0)
"""A number that differs for each repetition of a stream within one epoch; 0 for the first."""


def checked_seed(seed: int | None) -> int | None:
    """Return a seed as a plain int of 64 bits; None stays None."""
    return None if seed is None else whole_number("seed", seed, 0, 2**64 - 1)


class Order(NamedTuple):
    """The order of a stream in one pass, by its seed; `number` distinguishes several of one stream."""

    seed: int
    epoch: int
    repetition: int
    number: int = 0

    def key(self) -> int:
        derived = batch_seed(self.seed, self.epoch, self.number)
        return batch_seed(derived, self.repetition, 0) if self.repetition else derived


class FollowsEpoch:
    """A stream whose order differs from epoch to epoch.

    The epoch is the one passed to `set_epoch`; without a call (the stream is made inside a
    generator function, say) that of the loader that reads the stream; without a loader 0.
    """

    wants_epoch = True  # loaders call `set_epoch` before each epoch
    _epoch: int | None = None

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, of the streams inside, too; loaders call this."""
        self._epoch = epoch = whole_number("epoch", epoch)
        for part in children(self):
            propagate_epoch(part, epoch)

    def _order_for(self, seed: int | None) -> Order:
        seed = (session_seed.get() or 0) if seed is None else seed
        epoch = (session_epoch.get() or 0) if self._epoch is None else self._epoch
        return Order(seed, epoch, current_repetition.get())


# The place of a stream in its composition decides its seeds, and not the order in which streams
# happen to start: a restored stream has the seeds that it had. Keys are spawned as by NumPy's
# `SeedSequence`: each composition takes one, and derives its children's from that.

stream_seeds: ContextVar[Iterator[int]] = ContextVar(
    "headrace_stream_seeds",
    default=itertools.repeat(0),  # noqa: B039
)
"""The keys of the streams that start now; equal ones without a loader."""


def keys_within(key: int) -> bound:
    """Start streams with keys of their own, in the order in which they start, within the place that has `key`."""
    return bound(stream_seeds, (batch_seed(key, 0, number) for number in itertools.count()))


def spawn_key() -> int:
    """The key of the stream that starts now."""
    return next(stream_seeds.get())


def child_seeds(key: int, child: int) -> bound:
    """Start a child of the stream that has a key; again with the same number, it gets the same seeds."""
    return keys_within(batch_seed(key, 1, child))
