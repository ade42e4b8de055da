"""Hedging for requests that serve several samples: one that holds up the next batch is made a second time.

As `headrace._core.engine.hedging` does for single samples, by the same rules and within the same bounds.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import time
from collections.abc import Awaitable, Callable

from headrace._core.engine.fetch_pool import Spawn
from headrace._core.engine.hedging import BEYOND, LONGEST_LOOK, MOST, NEXT, SHARE, SHORTEST_LOOK, Latencies
from headrace._core.store.request_stats import RequestStats

# Bytes that take as long as a request without any: at 50 MB/s of one connection 1 MiB takes 20 ms, and the first byte
# 10 to 30. By this requests of unequal size are compared; without it the largest would be taken for slow.
LIKE_A_REQUEST = 2**20


class _Race:
    """One request on its way: the attempts at it, of which one is the first to answer."""

    __slots__ = ("answer", "attempts", "batch", "began", "read", "running", "weight")

    def __init__(self, batch: int, size: int, read: Callable[[], Awaitable[memoryview]]) -> None:
        self.batch = batch
        self.weight = 1 + size / LIKE_A_REQUEST
        self.read = read
        self.began = time.perf_counter()  # of the last attempt
        self.attempts = 1
        self.running: list[asyncio.Task[object]] = []
        self.answer: asyncio.Future[memoryview] = asyncio.get_running_loop().create_future()


class HedgedRequests:
    """The joined requests of one epoch.

    Args:
        spawn: starts an attempt as a task.
        requests: where extra attempts are counted.
    """

    def __init__(self, spawn: Spawn, requests: RequestStats) -> None:
        self._spawn = spawn
        self._requests = requests
        self._latencies = Latencies()
        self._running: set[_Race] = set()
        self._watching = False
        self._begun, self._begun_weight = 0, 0.0
        self._hedged, self._hedged_weight = 0, 0.0

    async def first(self, batch: int, size: int, read: Callable[[], Awaitable[memoryview]]) -> memoryview:
        """The first answer of `read`, which may be called again; an error counts if it is the first call's.

        Args:
            batch: the number of the oldest batch that waits for it.
            size: bytes that are asked for.
            read: makes the request.
        """
        race = _Race(batch, size, read)
        self._begun += 1
        self._begun_weight += race.weight
        self._running.add(race)
        self._spawn(functools.partial(self._attempt, race, second=False))
        if not self._watching:
            self._watching = True
            self._spawn(self._watch)
        try:
            return await race.answer
        finally:
            self._running.discard(race)
            for attempt in race.running:
                attempt.cancel()

    async def _attempt(self, race: _Race, *, second: bool) -> None:
        task = asyncio.current_task()
        assert task is not None
        if race.answer.done():
            return
        race.running.append(task)
        began = time.perf_counter()
        try:
            data = await race.read()
        except BaseException as error:  # user code; the first attempt speaks for the request
            if not second and not race.answer.done():
                race.answer.set_exception(error)
            return
        finally:
            race.running.remove(task)
        if race.answer.done():
            return
        self._latencies.add((time.perf_counter() - began) / race.weight)
        self._requests.hedges_won += second
        race.answer.set_result(data)

    async def _watch(self) -> None:
        while self._running:
            usual = self._latencies.percentile(0.95)
            limit = LONGEST_LOOK if usual is None else usual * BEYOND
            await asyncio.sleep(min(max(limit / 4, SHORTEST_LOOK), LONGEST_LOOK))
            if usual is not None:
                self._begin_again(limit)
        self._watching = False

    def _begin_again(self, limit: float) -> None:
        next_ones = heapq.nsmallest(NEXT, {race.batch for race in self._running})
        now = time.perf_counter()
        # As for single samples: where many are slow at once it is no straggler.
        left = max(1, int(SHARE * len(self._running)))
        for race in [race for race in self._running if race.batch in next_ones]:
            if now - race.began < limit * race.weight or race.attempts > MOST:
                continue
            too_many = self._hedged + 1 > SHARE * self._begun
            if not left or too_many or self._hedged_weight + race.weight > SHARE * self._begun_weight:
                return
            left -= 1
            self._hedged += 1
            self._hedged_weight += race.weight
            self._requests.hedges += 1
            race.attempts += 1
            race.began = now
            self._spawn(functools.partial(self._attempt, race, second=True))
