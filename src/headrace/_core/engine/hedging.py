"""Hedged requests: a request that delays the next batch for longer than is usual is made a second time.

The first answer counts, and the other attempts are cancelled (Dean and Barroso, "The Tail at Scale", 2013).
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Generic, NamedTuple, TypeVar

from headrace._core.engine.fetch_pool import Spawn
from headrace._core.store.request_stats import RequestStats, second_attempt

Job = TypeVar("Job")

PERCENTILE = 0.95  # of the latencies; a request is slow above `SLOWER` times this
# By definition 5 % of all requests are above that percentile, most of them by little; repeating those would leave
# nothing of the budget for the ones that stall.
SLOWER = 1.25
BUDGET = 0.05  # extra requests, of all
MAX_EXTRA = 2  # extra attempts at one request; with 2 % of stalls, one in 125,000 stalls three times
# Batches whose requests are hedged: the next, and the one after it, which is the next by the time the answer arrives.
# benchmarks/hedging.py: 0.90 of the rate without stalls with the next alone.
HEDGED_BATCHES = 2
MIN_LATENCIES = 50  # latencies needed for a percentile
MIN_INTERVAL, MAX_INTERVAL = 0.001, 0.02  # seconds between two checks
# Bytes that take as long as a request without any: at 50 MB/s of one connection 1 MiB takes 20 ms, and the first byte
# 10 to 30. Latencies are divided by it, or the largest requests would be taken for slow.
BYTES_LIKE_A_REQUEST = 2**20


class Latencies:
    """A running percentile of the last few hundred requests.

    Args:
        kept: latencies that are kept.

    Example:
        >>> latencies = Latencies()
        >>> for i in range(100): latencies.add(i / 1000)
        >>> latencies.percentile(0.95)
        0.095
    """

    def __init__(self, kept: int = 500) -> None:
        self._last: deque[float] = deque(maxlen=kept)
        self.add = self._last.append

    def percentile(self, share: float) -> float | None:
        """The latency below which `share` of the requests were, in seconds; None after too few requests."""
        if len(self._last) < MIN_LATENCIES:
            return None
        return sorted(self._last)[int(share * len(self._last))]


DELIVERED = object()


class _Race(Generic[Job]):
    """One request and its attempts."""

    __slots__ = ("batch", "began", "done", "extra", "first", "job", "others", "weight")

    def __init__(self, first: asyncio.Task[Any], batch: int, size: int, job: Job) -> None:
        self.first = first
        self.others: list[asyncio.Task[Any]] | None = None
        self.batch = batch
        self.weight = 1 + size / BYTES_LIKE_A_REQUEST
        self.job = job
        self.began = time.perf_counter()  # of the last attempt
        self.extra = 0
        self.done = False


class HedgedRequests(Generic[Job]):
    """The requests of one epoch, with slow ones repeated.

    Args:
        spawn: starts a coroutine as a task.
        requests: the session's counters.
        request: makes the request of a job; called again for each attempt.
        on_later: called with a job and its result if an attempt after the first gave it.
    """

    def __init__(
        self,
        spawn: Spawn,
        requests: RequestStats,
        request: Callable[[Job], Awaitable[Any]],
        on_later: Callable[[Job, Any], object],
    ) -> None:
        self._spawn = spawn
        self._requests = requests
        self._request = request
        self._on_later = on_later
        self._latencies = Latencies()
        self._running: dict[_Race[Job], None] = {}  # the oldest first
        self._watching = False
        self._total, self._total_weight = 0, 0.0
        self._extra, self._extra_weight = 0, 0.0

    async def race(self, task: asyncio.Task[Any], batch: int, size: int, job: Job) -> Any:
        """Make a request in the current task, and again in others if it is slow; the first result counts.

        Errors of the first attempt are raised, those of the others ignored. A first attempt that does not end when it
        is cancelled delays the current task, not the result.

        Args:
            task: the current task.
            batch: the number of the oldest batch that waits for the request.
            size: bytes requested.
            job: the argument of `request` and `on_later`.

        Returns:
            The result of the first attempt, or `DELIVERED` if `on_later` was called.
        """
        race = _Race(task, batch, size, job)
        began = race.began
        self._total += 1
        self._total_weight += race.weight
        self._running[race] = None
        if not self._watching:
            self._watching = True
            self._spawn(self._watch)
        try:
            result = await self._request(job)
        except BaseException:  # user code; or another attempt was faster
            if not race.done:
                self._end(race, task)
                raise
            if task.uncancel() > 0:
                raise
            return DELIVERED
        if race.done:  # the request has suppressed its cancellation
            task.uncancel()
            return DELIVERED
        self._latencies.add((time.perf_counter() - began) / race.weight)
        self._end(race, task)
        return result

    def _end(self, race: _Race[Job], winner: asyncio.Task[Any]) -> None:
        race.done = True
        del self._running[race]
        if race.others is not None:
            for attempt in (race.first, *race.others):
                if attempt is not winner:
                    attempt.cancel()

    async def _extra_attempt(self, race: _Race[Job]) -> None:
        if race not in self._running:
            return
        task = asyncio.current_task()
        assert task is not None
        race.others = [*(race.others or ()), task]
        second_attempt.set(True)  # in this task's context
        began = time.perf_counter()
        try:
            result = await self._request(race.job)
        except BaseException:  # user code; the first attempt's error counts
            return
        if race.done:
            return
        self._latencies.add((time.perf_counter() - began) / race.weight)
        self._requests.hedges_won += 1
        self._end(race, task)
        self._on_later(race.job, result)

    async def _watch(self) -> None:
        while self._running:
            usual = self._latencies.percentile(PERCENTILE)
            if usual is None:
                await asyncio.sleep(MAX_INTERVAL)
                continue
            limit = usual * SLOWER
            await asyncio.sleep(min(max(limit / 4, MIN_INTERVAL), MAX_INTERVAL))
            self._repeat_slow(limit)
        self._watching = False

    def _repeat_slow(self, limit: float) -> None:
        hedged_batches = heapq.nsmallest(HEDGED_BATCHES, {race.batch for race in self._running})
        now = time.perf_counter()
        # Where many are slow at once, the store or this process is slow and not a single request: a pause must not use
        # up the budget, or the next request that stalls has to be waited for.
        left = max(1, int(BUDGET * len(self._running)))
        for race in [race for race in self._running if race.batch in hedged_batches]:
            if now - race.began < limit * race.weight or race.extra >= MAX_EXTRA:
                continue
            exhausted = self._extra + 1 > BUDGET * self._total
            if not left or exhausted or self._extra_weight + race.weight > BUDGET * self._total_weight:
                return
            left -= 1
            self._extra += 1
            self._extra_weight += race.weight
            self._requests.hedges += 1
            race.extra += 1
            race.began = now
            self._spawn(functools.partial(self._extra_attempt, race))


class _Read(NamedTuple):
    request: Callable[[], Awaitable[memoryview]]
    answer: asyncio.Future[memoryview]

    def set_result(self, data: memoryview) -> None:
        if not self.answer.done():
            self.answer.set_result(data)


class HedgedReads:
    """Range reads, with slow ones repeated, whose attempts all run in tasks of their own.

    Args:
        spawn: starts a coroutine as a task.
        requests: the session's counters.
    """

    def __init__(self, spawn: Spawn, requests: RequestStats) -> None:
        self._spawn = spawn
        self._hedged = HedgedRequests[_Read](spawn, requests, lambda read: read.request(), _Read.set_result)

    async def first(self, batch: int, size: int, request: Callable[[], Awaitable[memoryview]]) -> memoryview:
        """The first result of `request`; errors and arguments as for `HedgedRequests.race`."""
        read = _Read(request, asyncio.get_running_loop().create_future())
        first: list[asyncio.Task[Any]] = []

        async def first_attempt() -> None:
            task = asyncio.current_task()
            assert task is not None
            first.append(task)
            if read.answer.done():
                return
            try:
                data = await self._hedged.race(task, batch, size, read)
            except BaseException as error:  # user code
                if not read.answer.done():
                    read.answer.set_exception(error)
                return
            if data is not DELIVERED:
                read.set_result(data)

        self._spawn(first_attempt)
        try:
            return await read.answer
        except asyncio.CancelledError:
            for task in first:
                task.cancel()
            raise
