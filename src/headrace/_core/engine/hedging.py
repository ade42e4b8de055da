"""Hedged requests: a request that delays the next batch for longer than is usual is made a second time.

The first answer counts, and the other attempts are cancelled (Dean and Barroso, "The Tail at
Scale", 2013).
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

from headrace._core.store.request_stats import RequestStats

T = TypeVar("T")
Spawn = Callable[[Callable[[], Coroutine[Any, Any, None]]], object]

PERCENTILE = 0.95  # of the latencies; a request is slow above `SLOWER` times this
# By definition 5 % of all requests are above that percentile, most of them by little; repeating
# those would leave nothing of the budget for the ones that stall.
SLOWER = 1.25
BUDGET = 0.05  # extra requests, of all
# extra attempts at one request; with 2 % of stalls, one in 125,000 stalls three times
MAX_EXTRA = 2
# Batches whose requests are hedged: the next, and the one after it, which is the next by the time
# the answer arrives. benchmarks/hedging.py: 0.90 of the rate without stalls with the next alone.
HEDGED_BATCHES = 2
MIN_LATENCIES, MAX_LATENCIES = 50, 500  # latencies needed for a percentile, and kept for it
MIN_INTERVAL, MAX_INTERVAL = 0.001, 0.02  # seconds between two checks
# Bytes that take as long as a request without any: at 50 MB/s of one connection 1 MiB takes 20 ms,
# and the first byte 10 to 30. Latencies are divided by it, or the largest requests would be taken
# for slow.
BYTES_LIKE_A_REQUEST = 2**20


@dataclass(slots=True, eq=False)
class _Race:
    batch: int
    weight: float
    request: Callable[[], Awaitable[Any]]
    answer: asyncio.Future[
        tuple[Any, BaseException | None]
    ]  # result or error: no future holds a StopIteration
    began: float  # the last attempt
    attempts: list[asyncio.Task[Any]] = field(default_factory=list)


class HedgedRequests:
    """The requests of one epoch, with slow ones repeated. Each attempt is a task."""

    def __init__(self, spawn: Spawn, requests: RequestStats) -> None:
        self._spawn = spawn
        self._requests = requests
        self._latencies: deque[float] = deque(maxlen=MAX_LATENCIES)
        self._running: dict[_Race, None] = {}  # the oldest first
        self._watching = False
        self._total, self._total_weight = 0, 0.0
        self._extra, self._extra_weight = 0, 0.0

    async def first(self, batch: int, size: int, request: Callable[[], Awaitable[T]]) -> T:
        """The first result of `request`, of so many bytes for the oldest batch that waits; called again if it is slow.

        Errors of the first attempt are raised, those of the others ignored. An attempt that does
        not end when it is cancelled does not delay the result.
        """
        weight = 1 + size / BYTES_LIKE_A_REQUEST
        race = _Race(
            batch, weight, request, asyncio.get_running_loop().create_future(), time.perf_counter()
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
            limit = SLOWER * sorted(self._latencies)[int(PERCENTILE * len(self._latencies))]
            await asyncio.sleep(min(max(limit / 4, MIN_INTERVAL), MAX_INTERVAL))
            self._repeat_slow(limit)
        self._watching = False

    def _repeat_slow(self, limit: float) -> None:
        hedged_batches = heapq.nsmallest(HEDGED_BATCHES, {race.batch for race in self._running})
        now = time.perf_counter()
        # Where many are slow at once, the store or this process is slow and not a single request: a
        # pause must not use up the budget, or the next request that stalls has to be waited for.
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
