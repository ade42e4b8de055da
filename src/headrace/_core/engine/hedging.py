"""Hedging: a fetch that holds up the next batch for longer than is usual is begun a second time.

The first answer counts, and the other attempt is cancelled ("hedged requests" of Dean and Barroso, "The Tail at Scale",
2013). Only the oldest batches that are not complete are looked at: no others can be the next ones.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from headrace._core.batches import BatchPlan, RawBatch
from headrace._core.engine.concurrency import AdaptiveLimit
from headrace._core.engine.fetch import Deliver, Filling, SampleFetch
from headrace._core.engine.fetch_pool import Spawn
from headrace._core.store.request_stats import RequestStats, second_attempt

SHARE = 0.05  # extra fetches, at most, of all that were begun
MOST = 2  # extra attempts at one sample; with 2 % of stalls, one in 125,000 meets three
# How much slower than the 95th percentile a fetch must be. By definition 5 % of all fetches are slower than that, most
# of them by little; beginning those again would leave nothing of the 5 % for the ones that stall.
BEYOND = 1.25
# Batches that are looked at: the next, and the one behind it, which is the next by the time the answer is there.
# benchmarks/hedging.py: 0.90 of the rate without stalls with the next alone.
NEXT = 2
KNOWN = 50  # fetches that must have come before a percentile means something
SHORTEST_LOOK, LONGEST_LOOK = 0.001, 0.02  # seconds between two looks at what is in flight


class Latencies:
    """A running percentile of the last few hundred fetches.

    Args:
        kept: how many are looked back at.

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
        """The time within which `share` of the fetches came, in seconds; None while too few have come."""
        if len(self._last) < KNOWN:
            return None
        return sorted(self._last)[int(share * len(self._last))]


class _Flight:
    """One sample on its way: the attempts at it, of which one will be the first."""

    __slots__ = ("attempts", "began", "done", "fetcher", "filling", "index", "slot")

    def __init__(self, filling: Filling, slot: int, index: Any, fetcher: asyncio.Task[Any], began: float) -> None:
        self.filling = filling
        self.slot = slot
        self.index = index
        self.fetcher = fetcher
        self.began = began  # of the last attempt
        self.attempts: list[asyncio.Task[Any]] = []
        self.done = False


class HedgedFetch(SampleFetch):
    """As `SampleFetch`, with slow fetches begun again.

    Args:
        aget: the dataset's; it is called twice for some samples.
        concurrency: how many first attempts may be in flight, or what finds that out.
        deliver: takes the batches that are complete.
        spawn: starts a fetcher as a task.
        requests: where extra attempts are counted.
    """

    def __init__(
        self,
        aget: Callable[[Any], Awaitable[Any]],
        concurrency: int | AdaptiveLimit,
        deliver: Deliver,
        spawn: Spawn,
        requests: RequestStats,
    ) -> None:
        super().__init__(aget, concurrency, deliver, spawn, requests)
        self._latencies = Latencies()
        self._flights: dict[Filling, dict[int, _Flight]] = {}
        self._watching = False
        self._begun = 0
        self._hedged = 0

    def admit(self, plan: BatchPlan) -> None:
        """Queue the plan's samples."""
        super().admit(plan)
        if not self._watching and self._draws:
            self._watching = True
            self._spawn(self._watch)

    async def _fetch(self) -> None:
        draws, aget = self._draws, self._aget
        task = asyncio.current_task()
        assert task is not None
        while True:
            if len(draws) > 1:
                self._window.wake_one()
            while draws:
                filling, slot, index = draws.popleft()
                began = time.perf_counter()
                flight = _Flight(filling, slot, index, task, began)
                self._flights.setdefault(filling, {})[slot] = flight
                self._begun += 1
                try:
                    sample = await aget(index)
                except BaseException as error:  # user code, or the second attempt was faster
                    if self._stopping:
                        return
                    if flight.done:
                        if task.uncancel() > 0:
                            raise
                        continue
                    sample = self._failed(error, filling, index)
                else:
                    if flight.done:  # it did not let itself be cancelled
                        task.uncancel()
                        continue
                    self._latencies.add(time.perf_counter() - began)
                self._finish(flight, sample)
                if self._window.shrinking and self._window.should_park():
                    break
            await self._window.rest()

    def _finish(self, flight: _Flight, sample: Any) -> None:
        """Take the first answer, and end the other attempts."""
        flight.done = True
        for attempt in flight.attempts:
            attempt.cancel()
        filling = flight.filling
        flights = self._flights[filling]
        del flights[flight.slot]
        if not flights:
            del self._flights[filling]
        filling.samples[flight.slot] = sample
        filling.missing -= 1
        if not filling.missing:
            self._deliver(RawBatch(filling.plan, filling.samples))

    async def _watch(self) -> None:
        while self._flights or self._draws:
            usual = self._latencies.percentile(0.95)
            if usual is None:
                await asyncio.sleep(LONGEST_LOOK)
                continue
            limit = usual * BEYOND
            await asyncio.sleep(min(max(limit / 4, SHORTEST_LOOK), LONGEST_LOOK))
            if self._flights:
                self._begin_again(limit)
        self._watching = False

    def _begin_again(self, limit: float) -> None:
        next_ones = heapq.nsmallest(NEXT, self._flights, key=lambda filling: filling.plan.number)
        now = time.perf_counter()
        # Where many are slow at once it is the store, or this process that was held up, and no straggler: a pause must
        # not use up what is allowed, or the next fetch that stalls has to be waited for.
        left = max(1, int(SHARE * sum(map(len, self._flights.values()))))
        for flight in [flight for filling in next_ones for flight in self._flights[filling].values()]:
            if now - flight.began < limit or len(flight.attempts) >= MOST:
                continue
            if not left or self._hedged + 1 > SHARE * self._begun:
                return
            left -= 1
            self._hedged += 1
            self._requests.hedges += 1
            flight.began = now
            self._spawn(functools.partial(self._attempt, flight))

    async def _attempt(self, flight: _Flight) -> None:
        task = asyncio.current_task()
        assert task is not None
        if flight.done:
            return
        flight.attempts.append(task)
        second_attempt.set(True)  # in this task's context
        began = time.perf_counter()
        try:
            sample = await self._aget(flight.index)
        except BaseException:  # the first attempt speaks for the sample, be it by its error
            return
        if flight.done or self._stopping:
            return
        self._latencies.add(time.perf_counter() - began)
        self._requests.hedges_won += 1
        flight.attempts.remove(task)
        self._finish(flight, sample)
        flight.fetcher.cancel()
