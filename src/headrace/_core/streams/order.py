"""The epoch that a stream is read in, the order that follows from it, and the seeds of the functions in it.

The place of a stream in its composition decides its seeds, and not the order in which streams happen to start: a
restored stream has the seeds that it had. Keys are spawned as by NumPy's `SeedSequence`: each composition takes one,
and derives its children's from that.
"""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import NamedTuple

from headrace._core.ranks.rankinfo import bound
from headrace._core.seeding import batch_seed
from headrace._core.streams.kinds import children, propagate_epoch

session_epoch: ContextVar[int | None] = ContextVar("headrace_epoch", default=None)
"""The epoch of the loader that the running code reads for."""

counted_epoch: ContextVar[int | None] = ContextVar("headrace_counted_epoch", default=None)
"""The epoch whose length a loader asks for; None: that of `set_epoch`, which may be the one before."""

current_repetition: ContextVar[int] = ContextVar("headrace_repetition", default=0)
"""A number that differs for each repetition of a stream within one epoch; 0 for the first."""


class Order(NamedTuple):
    """The order of a stream in one pass.

    Attributes:
        seed: the user's seed.
        epoch: the number of the epoch.
        repetition: the number of the repetition within it.
        number: distinguishes several orders of one stream.
    """

    seed: int
    epoch: int
    repetition: int
    number: int = 0

    def key(self) -> int:
        """The seed of the order's random generator."""
        derived = batch_seed(self.seed, self.epoch, self.number)
        return batch_seed(derived, self.repetition, 0) if self.repetition else derived


class FollowsEpoch:
    """A stream whose order differs from epoch to epoch.

    The epoch is the one passed to `set_epoch`; without a call (the stream is made inside a generator function, say)
    that of the loader that reads the stream; without a loader 0.
    """

    wants_epoch = True
    """Loaders call `set_epoch` before each epoch."""

    _epoch: int | None = None

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, of the streams inside, too; loaders call this."""
        self._epoch = epoch
        for part in children(self):
            propagate_epoch(part, epoch)

    def _current_epoch(self) -> int:
        counted = counted_epoch.get()
        if counted is not None:
            return counted
        return self._epoch if self._epoch is not None else session_epoch.get() or 0

    def _order_for(self, seed: int) -> Order:
        """The order for the iterator that starts now."""
        return Order(seed, self._current_epoch(), current_repetition.get())


class StreamSeeds:
    """Keys for the streams that start within one place, numbered in the order in which they start.

    Args:
        key: the place's own key.
    """

    def __init__(self, key: int) -> None:
        self._key = key
        self._spawned = 0

    def spawn(self) -> int:
        """The key of the next stream."""
        key = batch_seed(self._key, 0, self._spawned)
        self._spawned += 1
        return key


stream_seeds: ContextVar[StreamSeeds | None] = ContextVar("headrace_stream_seeds", default=None)
"""The keys of the streams that start now; None without a loader."""


def spawn_key() -> int | None:
    """The key of the stream that starts now; None without a loader."""
    seeds = stream_seeds.get()
    return None if seeds is None else seeds.spawn()


def child_seeds(key: int | None, child: int) -> AbstractContextManager[None]:
    """Start a child of the stream that has a key; again with the same number, it gets the same seeds."""
    return seeds_of(None if key is None else StreamSeeds(batch_seed(key, 1, child)))


def seeds_of(seeds: StreamSeeds | None) -> AbstractContextManager[None]:
    """Start streams with the keys of `seeds`; no change if there are none."""
    return nullcontext() if seeds is None else bound(stream_seeds, seeds)


class Draws:
    """Random numbers from 0 to 1, found by their position: each block of 1,024 has a generator of its own.

    Seeding a generator takes some 10 µs and a number 50 ns; a hash for each number would take 1.5 µs.

    Args:
        seed: the seed.
    """

    _BLOCK = 1024

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._random = random.Random()
        self._position = -1  # of the last number
        self._number = 0.0

    def at(self, position: int) -> float:
        """The number at a position."""
        if position != self._position:
            block, offset = divmod(position, self._BLOCK)
            if not offset or position != self._position + 1:
                self._random.seed(batch_seed(self._seed, 0, block))
                for _ in range(offset):
                    self._random.random()
            self._position, self._number = position, self._random.random()
        return self._number
