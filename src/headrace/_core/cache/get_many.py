"""Fetching of several cache entries by one read, each with its own lock and file.

While a task holds locks it waits for nothing but the read itself, so two processes that want the same entries in
different orders cannot deadlock.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from headrace._core.cache.disk_cache import FIRST_PAUSE, LONGEST_PAUSE, DiskCache
from headrace._core.cache.in_flight import Flight

WRITE_SLICE = 64  # entries written before other tasks get a turn: about 6 ms, at 0.1 ms a file

Views = tuple[list[int], list[memoryview]]
"""Positions in the requested entries, and the bytes of each."""


async def get_many(
    cache: DiskCache,
    names: Sequence[bytes],
    read: Callable[[list[int], list[int]], Awaitable[list[memoryview]]],
    accept: Callable[[Views], Views],
) -> AsyncGenerator[Views, None]:
    """The bytes of entries that are not cached, in parts; entries that `accept` rejects are left out.

    Args:
        cache: the cache.
        names: the entries' names; duplicates are allowed.
        read: gets the bytes at the positions of the first list, in their order. The entries at the positions of the
            second are being fetched by other tasks or processes.
        accept: returns the entries whose bytes are good: these are cached.
    """
    counts = cache.counts()
    deadline = cache.deadline()
    left = candidates = list(range(len(names)))
    pause = FIRST_PAUSE
    while left:
        if cache.pause.active or time.monotonic() > deadline:
            counts.cache_misses += len(left)
            views = await read(left, [])
            for first in range(0, len(left), WRITE_SLICE):
                yield accept((left[first : first + WRITE_SLICE], views[first : first + WRITE_SLICE]))
            return
        attempt = _Attempt(cache, names, candidates)
        try:
            published, locked = await attempt.lock()
            if published[0]:
                counts.cache_hits += len(published[0])
                yield published
            if locked:
                counts.cache_misses += len(locked)
                own_names = {names[position] for position in locked}
                others = [position for position in left if names[position] not in own_names]
                views = await read(locked, others)
                for first in range(0, len(locked), WRITE_SLICE):
                    good = accept((locked[first : first + WRITE_SLICE], views[first : first + WRITE_SLICE]))
                    # Published before they are given: an epoch that is left at its last sample is cached completely.
                    counts.cache_evicted += await attempt.publish(good)
                    yield good
        finally:
            attempt.leave()
        received = await attempt.wait_for_tasks(deadline)  # while no lock is held
        if received[0]:
            counts.cache_hits += len(received[0])
            yield received
        done = {*published[0], *locked, *received[0]}
        if pause == FIRST_PAUSE:
            counts.cache_waits += len(left) - len(done) + len(received[0])
        left = [position for position in left if position not in done]
        if len(candidates) == 1 and done:
            candidates = left  # its holder has finished that one, and so perhaps others
        elif left:
            # One stands for all: polling thousands of locks ten times a second would take a core.
            candidates = left[:1]
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(1.5 * pause, LONGEST_PAUSE)


class _Attempt:
    """One attempt to lock several entries."""

    def __init__(self, cache: DiskCache, names: Sequence[bytes], positions: Sequence[int]) -> None:
        self._cache = cache
        self._names = names
        self._own: dict[int, Flight] = {}
        self._others: dict[int, Flight] = {}  # of other tasks of this process
        for position in positions:
            flight, fetches = cache.in_flight.join(names[position], hedge=False)
            (self._own if fetches else self._others)[position] = flight

    async def lock(self) -> tuple[Views, list[int]]:
        """Try to lock; returns what other processes have published meanwhile, and the positions to fetch here."""
        own = self._own
        reads = (self._cache.lock_and_read(flight, self._names[position]) for position, flight in own.items())
        published: Views = [], []
        locked: list[int] = []
        for position, found in zip(list(own), await asyncio.gather(*reads, return_exceptions=True), strict=True):
            if isinstance(found, memoryview):
                own[position].set_result(found)
                published[0].append(position)
                published[1].append(found)
            elif isinstance(found, OSError):  # without a lock it is fetched, and not cached
                self._cache.pause.on_error(found)
                locked.append(position)
            elif isinstance(found, BaseException):
                raise found
            elif own[position].locked:
                locked.append(position)
        return published, locked

    async def publish(self, good: Views) -> int:
        """Give waiting tasks the bytes, and write the locked entries; returns the number of entries evicted."""
        entries = []
        for position, data in zip(*good, strict=True):
            flight = self._own[position]
            flight.set_result(data)
            if flight.locked:
                entries.append((flight, self._names[position], data))
        try:
            return await self._cache.write_all(entries) if entries else 0
        except OSError as error:
            self._cache.pause.on_error(error)
            return 0

    def leave(self) -> None:
        while self._own:
            position, flight = self._own.popitem()
            self._cache.in_flight.leave(self._names[position], flight)

    async def wait_for_tasks(self, deadline: float) -> Views:
        """The bytes that other tasks of this process fetch."""
        received: Views = [], []
        for position, flight in self._others.items():
            data = await flight.wait(deadline - time.monotonic())
            if data is not None:
                received[0].append(position)
                received[1].append(data)
        return received
