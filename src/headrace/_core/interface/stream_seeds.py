"""Seeds for the functions of streams, by the place of a stream in its composition.

The place decides, and not the order in which streams happen to start: a restored stream has the seeds that it had. Keys
are spawned as by NumPy's `SeedSequence`: each composition takes one, and derives its children's from that.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from contextvars import ContextVar

from headrace._core.seeding import batch_seed


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


def child_seeds(key: int | None, child: int) -> contextlib.AbstractContextManager[None]:
    """Start a child of the stream that has a key; again with the same number, it gets the same seeds."""
    return seeds_of(None if key is None else StreamSeeds(batch_seed(key, 1, child)))


@contextlib.contextmanager
def seeds_of(seeds: StreamSeeds | None) -> Iterator[None]:
    """Start streams with the keys of `seeds`; no change if there are none."""
    if seeds is None:
        yield
        return
    token = stream_seeds.set(seeds)
    try:
        yield
    finally:
        stream_seeds.reset(token)


class Draws:
    """Random numbers from 0 to 1 whose position is one int: each block of 1,024 has a generator of its own.

    Seeding a generator takes some 10 µs and a number 50 ns; a hash for each number would take 1.5 µs.

    Args:
        seed: the seed.
    """

    _BLOCK = 1024

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._random = random.Random()
        self.drawn = 0

    def next(self) -> float:
        """The next number."""
        block, offset = divmod(self.drawn, self._BLOCK)
        if not offset:
            self._random.seed(batch_seed(self._seed, 0, block))
        self.drawn += 1
        return self._random.random()

    def skip(self, drawn: int) -> None:
        """Continue after `drawn` numbers."""
        block, offset = divmod(drawn, self._BLOCK)
        self.drawn = block * self._BLOCK
        for _ in range(offset):
            self.next()
