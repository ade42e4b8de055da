"""Fetching from a dataset of ranges: those of all planned batches that lie near each other are read by one request."""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from headrace._core.batches import BatchPlan, Failure, RawBatch, Rows, Stage
from headrace._core.engine.concurrency import AdaptiveLimit
from headrace._core.engine.fetch import Deliver, Filling, Source
from headrace._core.engine.fetch_pool import AdaptiveFetcherPool, Spawn
from headrace._core.engine.range_hedging import HedgedRequests
from headrace._core.engine.read_plan import ReadPlan
from headrace._core.interface.joined_reads import JoinedReads
from headrace._core.store.ranges import Ranges
from headrace._core.store.request_stats import RequestStats

UNPACKED = 4  # bytes of a sample to one of its range: tokens of two bytes become int64; what is compressed, stays so


class RangeFilling(Filling):
    """A batch whose bytes are coming.

    Attributes:
        around: what it was planned with, and its place there; None if that could not be, or its bytes are taken.
        alone: the slots whose samples come, or came, by themselves.
    """

    __slots__ = ("alone", "around")

    def __init__(self, plan: BatchPlan) -> None:
        super().__init__(plan)
        self.around: tuple[ReadPlan[RangeFilling], int] | None = None
        self.alone: set[int] = set()


class RangeFetch(Source):
    """Fetches with `read_range`, by requests that serve several samples.

    Whatever is wanted when a fetcher is free is planned together, the request that the oldest batch waits for first.
    The first batch is planned alone: joined with all that are behind it, it would come last.

    Args:
        dataset: where samples are fetched.
        concurrency: how many requests may be in flight, or what finds that out.
        deliver: takes the batches that are complete.
        spawn: starts a fetcher as a task.
        requests: where refusals are noted, for what finds it out, and what is counted.
        hedge: whether slow requests are made again.
    """

    def __init__(
        self,
        dataset: JoinedReads,
        concurrency: int | AdaptiveLimit,
        deliver: Deliver,
        spawn: Spawn,
        requests: RequestStats,
        *,
        hedge: bool = False,
    ) -> None:
        self._dataset: Any = dataset
        self._deliver = deliver
        self._requests = requests
        self._races = HedgedRequests(spawn, requests) if hedge else None
        self._wanted: list[tuple[RangeFilling, Ranges]] = []
        self._spans: deque[tuple[ReadPlan[RangeFilling], int]] = deque()
        self._alone: deque[tuple[RangeFilling, int, Any]] = deque()
        self._window = AdaptiveFetcherPool(concurrency, self._fetch, spawn, self._queued, requests)
        self._first = True

    def admit(self, plan: BatchPlan) -> None:
        """Note the plan's ranges."""
        if not plan.indices:
            self._deliver(RawBatch(plan, ()))
            return
        filling = RangeFilling(plan)
        try:
            ranges = self._dataset.ranges(plan.indices)
            ranges.check(filling.missing)
            self._wanted.append((filling, ranges))
        except Exception:  # user code, or one of the indices is wrong: its own `aget` says which
            for slot in range(filling.missing):
                self._fetch_alone_soon(filling, slot)
        self._window.wake_one()

    def foreseen(self, plan: BatchPlan) -> float | None:
        """As the mean of the ranges says."""
        try:
            ranges = self._dataset.ranges(plan.indices)
            return UNPACKED * float(np.mean(ranges.stops - ranges.starts))
        except Exception:  # user code: `admit` meets the same, and sees that it is told
            return None

    def stop(self) -> None:
        """Draw nothing more."""
        super().stop()
        self._wanted.clear()
        self._spans.clear()
        self._alone.clear()

    def _queued(self) -> int:
        return len(self._alone) + len(self._spans)

    async def _fetch(self) -> None:
        alone, spans, window = self._alone, self._spans, self._window
        while True:
            while True:
                if not spans and self._wanted:
                    await self._plan()
                if self._queued() > 1 or self._wanted:
                    window.wake_one()
                if alone:
                    await self._fetch_alone(*alone.popleft())
                elif spans:
                    await self._read(*spans.popleft())
                elif not self._wanted:
                    break
                if self._stopping:
                    return
                if window.shrinking and window.should_park():
                    break
            await window.rest()

    async def _plan(self) -> None:
        """Make requests of what is wanted."""
        wanted = self._wanted[:1] if self._first else self._wanted[:]
        del self._wanted[: len(wanted)]
        self._first = False
        around = ReadPlan([filling for filling, _ in wanted], [ranges for _, ranges in wanted])
        for place, (filling, _) in enumerate(wanted):
            filling.around = around, place
        missing = await self._uncached(around)
        around.plan(missing)
        self._spans.extend((around, number) for number in range(len(around.spans)))
        self._window.admit(len(around.spans))
        for filling, count in around.empty(missing):
            self._came(filling, count)

    async def _uncached(self, around: ReadPlan[RangeFilling]) -> Sequence[int] | None:
        """Which of the ranges have to be read; None if all."""
        return None

    async def _read(self, around: ReadPlan[RangeFilling], number: int) -> None:
        """Make one request, and hand out what it brings."""
        span = around.spans[number]
        try:
            data = await self._read_range(around.first(number), span.object, span.start, span.stop)
        except BaseException:  # user code: what is wrong, and with which sample, each one's own `aget` says
            if not self._stopping:
                for filling, slot in around.whose(span.members):
                    self._fetch_alone_soon(filling, slot)
            return
        for filling, count in around.bring(number, data):
            if self._came(filling, count):
                await asyncio.sleep(0)

    async def _read_range(self, first: RangeFilling, number: int, start: int, stop: int) -> memoryview:
        """Make a request of the store, perhaps hedged; `first` is the oldest batch that waits for it."""
        read = functools.partial(self._dataset.read_range, number, start, stop)
        data = await (read() if self._races is None else self._races.first(first.plan.number, stop - start, read))
        if len(data) != stop - start:
            raise ValueError(f"read_range gave {len(data)} bytes in place of {stop - start}")
        return data

    def _fetch_alone_soon(self, filling: RangeFilling, slot: int) -> None:
        filling.alone.add(slot)
        self._alone.append((filling, slot, filling.plan.indices[slot]))
        self._window.admit(1)

    async def _fetch_alone(self, filling: RangeFilling, slot: int, index: Any) -> None:
        try:
            sample = await self._dataset.aget(index)
        except BaseException as error:  # user code
            if self._stopping:
                return
            self._window.note(error)
            sample = Failure.caught(error, stage=Stage.FETCH, batch=filling.plan.number, index=index)
        filling.samples[slot] = sample
        self._came(filling, 1)

    def _came(self, filling: RangeFilling, count: int) -> bool:
        """Note that so many have come; returns whether they were the last of their batch."""
        filling.missing -= count
        if filling.missing:
            return False
        self._make(filling)
        return True

    def _make(self, filling: RangeFilling) -> None:
        """Make samples of the bytes of a batch, and deliver it; what cannot be made is fetched by itself first."""
        if filling.around is not None:
            around, place = filling.around
            filling.around = None
            views = around.take(place)
            samples = None if filling.alone else self._made_together(filling.plan.indices, views)
            if samples is not None:
                self._deliver(RawBatch(filling.plan, samples))
                return
            self._make_one_by_one(filling, views)
        if not filling.missing:
            self._deliver(RawBatch(filling.plan, filling.samples))

    def _made_together(self, indices: Sequence[Any], views: Sequence[memoryview]) -> Sequence[Any] | None:
        try:
            made = self._dataset.samples_of(indices, views)
            samples = Rows(made) if isinstance(made, torch.Tensor) else list(made)
            if len(samples) != len(indices):
                raise ValueError(f"samples_of gave {len(samples)} samples for {len(indices)} indices")
        except BaseException:  # user code; which sample it is about, shows one by one
            return None
        return samples

    def _make_one_by_one(self, filling: RangeFilling, views: Sequence[memoryview]) -> None:
        for slot, (index, view) in enumerate(zip(filling.plan.indices, views, strict=True)):
            if slot in filling.alone:
                continue
            try:
                filling.samples[slot] = self._dataset.sample_of(index, view)
            except BaseException:  # user code, or the bytes are damaged: by itself it may come whole
                filling.missing += 1
                self._fetch_alone_soon(filling, slot)
