"""Several entries of a disk cache, fetched by one read: each under its own claim and lock, as if it came alone.

Nothing is waited for while a claim is held but the read itself, so that two processes which want the same entries in
different order cannot wait for each other.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from headrace._core.cache.disk_cache import FIRST_PAUSE, LONGEST_PAUSE, DiskCache
from headrace._core.cache.in_flight import Claim

SLICE = 64  # entries that are written before they come, and others have their turn: some 6 ms, 0.1 ms a file

Found = tuple[list[int], list[memoryview]]
"""Positions in what was asked for, and the bytes of each."""


async def get_many(
    cache: DiskCache,
    names: Sequence[bytes],
    read: Callable[[list[int], list[int]], Awaitable[list[memoryview]]],
    accept: Callable[[Found], Found],
) -> AsyncGenerator[Found, None]:
    """The bytes of entries that were not there, some at a time; those that are not accepted do not come.

    Args:
        cache: the cache.
        names: the entries'; one may come twice.
        read: gets the bytes at some positions, in their order. Those at the other positions it is given are being
            fetched by somebody else, and need not be fetched here as well.
        accept: looks at bytes, and returns those that are what they must be: they are cached.
    """
    counts = cache.counts()
    until = cache.until()
    left = trying = list(range(len(names)))
    pause = FIRST_PAUSE
    while left:
        if cache.rests or time.monotonic() > until:
            counts.cache_misses += len(left)
            views = await read(left, [])
            for first in range(0, len(left), SLICE):
                yield accept((left[first : first + SLICE], views[first : first + SLICE]))
            return
        round_ = _Round(cache, names, trying)
        try:
            found, free = await round_.lock()
            if found[0]:
                counts.cache_hits += len(found[0])
                yield found
            if free:
                counts.cache_misses += len(free)
                ours = {names[position] for position in free}
                others = [position for position in left if names[position] not in ours]
                views = await read(free, others)
                for first in range(0, len(free), SLICE):
                    good = accept((free[first : first + SLICE], views[first : first + SLICE]))
                    # Published first: an epoch that has come whole is cached whole, though it is left at once then.
                    counts.cache_evicted += await round_.publish(good)
                    yield good
        finally:
            round_.leave()
        told = await round_.others(until)  # with nothing held
        if told[0]:
            counts.cache_hits += len(told[0])
            yield told
        done = {*found[0], *free, *told[0]}
        if pause == FIRST_PAUSE:
            counts.cache_waits += len(left) - len(done) + len(told[0])
        left = [position for position in left if position not in done]
        if len(trying) == 1 and done:
            trying = left  # who had that one has done, and so perhaps with more
        elif left:
            # One is looked after for all: looking after thousands ten times a second would take a core.
            trying = left[:1]
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(1.5 * pause, LONGEST_PAUSE)


class _Round:
    """One attempt at the claims of some entries."""

    def __init__(self, cache: DiskCache, names: Sequence[bytes], positions: Sequence[int]) -> None:
        self._cache = cache
        self._names = names
        self._claims: dict[int, Claim] = {}
        self._others: dict[int, Claim] = {}  # of this process, where another task fetches
        for position in positions:
            claim, mine = cache.claims.enter(names[position], second=False)
            (self._claims if mine else self._others)[position] = claim

    async def lock(self) -> tuple[Found, list[int]]:
        """Try the locks; returns what others have published meanwhile, and what is to be fetched here."""
        claims = self._claims
        looks = (self._cache.lock_and_look(claim, self._names[position]) for position, claim in claims.items())
        found: Found = [], []
        free: list[int] = []
        for position, look in zip(list(claims), await asyncio.gather(*looks, return_exceptions=True), strict=True):
            if isinstance(look, memoryview):
                claims[position].settle(look)
                found[0].append(position)
                found[1].append(look)
            elif isinstance(look, OSError):  # without a lock it is fetched, and not cached
                self._cache.note(look)
                free.append(position)
            elif isinstance(look, BaseException):
                raise look
            elif claims[position].locked:
                free.append(position)
        return found, free

    async def publish(self, good: Found) -> int:
        """Tell who waits, and write what is locked; returns how many others had to go for it."""
        entries = []
        for position, data in zip(*good, strict=True):
            claim = self._claims[position]
            claim.settle(data)
            if claim.locked:
                entries.append((claim, self._names[position], data))
        try:
            return await self._cache.write_all(entries) if entries else 0
        except OSError as error:
            self._cache.note(error)
            return 0

    def leave(self) -> None:
        while self._claims:
            position, claim = self._claims.popitem()
            self._cache.claims.leave(self._names[position], claim)

    async def others(self, until: float) -> Found:
        """What other tasks of this process have fetched, once they have."""
        told: Found = [], []
        for position, claim in self._others.items():
            data = await claim.wait(until - time.monotonic())
            if data is not None:
                told[0].append(position)
                told[1].append(data)
        return told
