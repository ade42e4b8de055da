"""Hedged requests: a second attempt for an unusually slow request.

Only requests for the next batches are hedged. The first answer counts, and the other attempts are
cancelled (Dean and Barroso, "The Tail at Scale", 2013).
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from headrace._store.request_stats import RequestStats

T = TypeVar("T")
Spawn = Callable[[Callable[[], Coroutine[Any, Any, None]]], object]

PERCENTILE = 0.95  # of the latencies
# A request is slow if the latency exceeds the percentile by this factor. By definition, 5 % of all
# requests exceed the percentile, most requests by little. Repeating all of the 5 % would use up the
# budget, and leave nothing for stalled requests.
SLOWER = 1.25
BUDGET = 0.05  # extra requests, as a share of all requests
# Extra attempts for a request. With 2 % of stalls, a request in 125,000 stalls three times.
MAX_EXTRA = 2
# Batches with hedged requests: the next batch, and the batch after the next. When the answer
# arrives, the latter is the next batch. With a single batch, the rate is 0.90 of the rate without
# stalls (benchmarks/hedging.py).
HEDGED_BATCHES = 2
# Number of latencies needed for a percentile, and number of latencies kept.
MIN_LATENCIES, MAX_LATENCIES = 50, 500
MIN_INTERVAL, MAX_INTERVAL = 0.001, 0.02  # seconds between two checks
# Bytes with the same duration as an empty request: at 50 MB/s, a connection takes 20 ms for 1 MiB,
# and 10 to 30 ms for the first byte. Latencies are divided by the weight of the request. Otherwise
# the largest requests would seem slow.
BYTES_LIKE_A_REQUEST = 2**20


@dataclass(slots=True, eq=False)
class _Race:
    batch: int
    weight: float
    request: Callable[[], Awaitable[Any]]
    # Result and error. The error is no exception of the future, because a future cannot hold a
    # StopIteration.
    answer: asyncio.Future[tuple[Any, BaseException | None]]
    began: float  # start time of the last attempt
    attempts: list[asyncio.Task[Any]] = field(default_factory=list)


class HedgedRequests:
    """The requests of an epoch, with repetition of slow requests.

    Each attempt is a task.
    """

    def __init__(self, spawn: Spawn, requests: RequestStats) -> None:
        self._spawn = spawn
        self._requests = requests
        self._latencies: deque[float] = deque(maxlen=MAX_LATENCIES)
        self._running: dict[_Race, None] = {}  # oldest first
        self._watching = False
        self._total, self._total_weight = 0, 0.0
        self._extra, self._extra_weight = 0, 0.0

    def wrap(
        self, request: Callable[[Any], Awaitable[T]], batch: int
    ) -> Callable[[Any], Awaitable[T]]:
        """Return a function for hedged requests of a batch, with one argument."""
        return lambda argument: self.first(batch, 0, functools.partial(request, argument))

    async def first(
        self, batch: int, size: int, request: Callable[[], Awaitable[T]]
    ) -> T:
        """Return the first result of `request`, hedged if slow.

        Errors of the first attempt are raised. Errors of other attempts are ignored. If an attempt
        does not end after the cancellation, the result is not delayed.

        Args:
            batch: The number of the oldest waiting batch.
            size: The size of the request in bytes.
            request: Makes the request. Called again for each further attempt.
        """
        weight = 1 + size / BYTES_LIKE_A_REQUEST
        race = _Race(
            batch,
            weight,
            request,
            asyncio.get_running_loop().create_future(),
            time.perf_counter(),
        )
        self._total += 1
        self._total_weight += weight
        self._running[race] = None
        if not self._watching:
            self._watching = True
            self._spawn(self._watch)
        self._spawn(functools.partial(self._attempt, race, False))
        try:
            result, error = await race.answer
        finally:
            del self._running[race]
            for attempt in race.attempts:
                attempt.cancel()
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    async def _attempt(self, race: _Race, extra: bool) -> None:
        if race.answer.done():
            return
        task = asyncio.current_task()
        assert task is not None
        race.attempts.append(task)
        began = time.perf_counter()
        result, error = None, None
        try:
            result = await race.request()
        except BaseException as caught:  # user code; or another attempt was faster
            error = caught
        race.attempts.remove(task)
        if race.answer.done() or (error is not None and extra):
            return
        if error is None:
            self._latencies.append((time.perf_counter() - began) / race.weight)
            self._requests.hedges_won += extra
        race.answer.set_result((result, error))

    async def _watch(self) -> None:
        while self._running:
            if len(self._latencies) < MIN_LATENCIES:
                await asyncio.sleep(MAX_INTERVAL)
                continue
            limit = (
                SLOWER * sorted(self._latencies)[int(PERCENTILE * len(self._latencies))]
            )
            await asyncio.sleep(min(max(limit / 4, MIN_INTERVAL), MAX_INTERVAL))
            self._repeat_slow(limit)
        self._watching = False

    def _repeat_slow(self, limit: float) -> None:
        hedged_batches = heapq.nsmallest(
            HEDGED_BATCHES, {race.batch for race in self._running}
        )
        now = time.perf_counter()
        # If many requests are slow at once, the cause is the store or this process, and not a
        # single request. A pause must not use up the budget: otherwise the next stalled request
        # would not be repeated.
        left = max(1, int(BUDGET * len(self._running)))
        for race in [race for race in self._running if race.batch in hedged_batches]:
            if now - race.began < limit * race.weight or len(race.attempts) > MAX_EXTRA:
                continue
            exhausted = self._extra + 1 > BUDGET * self._total
            if (
                not left
                or exhausted
                or self._extra_weight + race.weight > BUDGET * self._total_weight
            ):
                return
            left -= 1
            self._extra += 1
            self._extra_weight += race.weight
            self._requests.hedges += 1
            race.began = now
            self._spawn(functools.partial(self._attempt, race, True))
