"""Fetching from a dataset of ranges: those of all planned batches that lie near each other are read by one request."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from headrace.batches import BatchPlan, RawBatch, Rows
from headrace.datasets.ranged import RangedDataset, RangedView
from headrace.engine.fetch import Deliver, Filling, SampleFetch, Spawn
from headrace.engine.rounds import Round
from headrace.io.control import Control
from headrace.io.ranges import Ranges
from headrace.io.traffic import Traffic

__all__ = ["RangeFetch"]

UNPACKED = 4  # bytes of a sample to one of its range: tokens of two bytes become int64; what is compressed, stays so


class _Filling(Filling):
    """A batch whose bytes are coming.

    Attributes:
        around: what it was planned with, and its place there; None if that could not be.
        alone: the slots whose samples come, or came, by themselves.
    """

    __slots__ = ("alone", "around")

    def __init__(self, plan: BatchPlan) -> None:
        super().__init__(plan)
        self.around: tuple[Round, int] | None = None
        self.alone: set[int] = set()


class RangeFetch(SampleFetch):
    """As `SampleFetch`, by requests that serve several samples.

    Whatever is wanted when a fetcher is free is planned together, the request that the oldest batch waits for first.
    The first batch is planned alone: joined with all that are behind it, it would come last.

    Args:
        dataset: where samples are fetched.
        concurrency: how many requests may be in flight, or what finds that out.
        deliver: takes the batches that are complete.
        spawn: starts a fetcher as a task.
        requests: where refusals are noted, for what finds it out.
    """

    def __init__(
        self,
        dataset: RangedDataset[Any] | RangedView,
        concurrency: int | Control,
        deliver: Deliver,
        spawn: Spawn,
        requests: Traffic,
    ) -> None:
        super().__init__(dataset.aget, concurrency, deliver, spawn, requests)  # type: ignore[union-attr]
        self._dataset = dataset
        self._wanted: list[tuple[_Filling, Ranges]] = []
        self._spans: deque[tuple[Round, Sequence[_Filling], int]] = deque()
        self._alone: deque[tuple[_Filling, int, Any]] = deque()
        self._first = True

    def admit(self, plan: BatchPlan) -> None:
        """Note the plan's ranges."""
        if not plan.indices:
            self._deliver(RawBatch(plan, ()))
            return
        filling = _Filling(plan)
        try:
            ranges = self._dataset.ranges(plan.indices)
            ranges.check(filling.missing)
            self._wanted.append((filling, ranges))
        except Exception:  # user code, or one of the indices is wrong: its own `aget` says which
            for slot in range(filling.missing):
                self._fetch_alone_soon(filling, slot)
        self._begin()

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

    @property
    def _queued(self) -> int:
        return len(self._alone) + len(self._spans)

    async def _fetch(self) -> None:
        alone, spans, window = self._alone, self._spans, self._window
        while True:
            while True:
                if not spans and self._wanted:
                    self._plan()
                if self._queued > 1 or self._wanted:
                    window.call_one()
                if alone:
                    await self._fetch_alone(*alone.popleft())
                elif spans:
                    await self._read(*spans.popleft())
                else:
                    break
                if self._stopping:
                    return
                if window.shrinking and window.must_rest():
                    break
            await window.rest()

    def _plan(self) -> None:
        """Make requests of what is wanted."""
        wanted = self._wanted[:1] if self._first else self._wanted[:]
        del self._wanted[: len(wanted)]
        self._first = False
        around = Round([ranges for _, ranges in wanted])
        fillings = [filling for filling, _ in wanted]
        for place, filling in enumerate(fillings):
            filling.around = around, place
        self._spans.extend((around, fillings, number) for number in range(len(around.spans)))
        self._admitted += len(around.spans)
        for place, count in around.without_bytes():
            self._came(fillings[place], count)

    async def _read(self, around: Round, fillings: Sequence[_Filling], number: int) -> None:
        """Make one request, and hand out what it brings."""
        span = around.spans[number]
        try:
            data = await self._dataset.read_range(span.object, span.start, span.stop)
            if len(data) != span.stop - span.start:
                raise ValueError(f"read_range gave {len(data)} bytes in place of {span.stop - span.start}")
        except BaseException:  # user code: what is wrong, and with which sample, each one's own `aget` says
            if not self._stopping:
                for place, slot in around.members(number):
                    self._fetch_alone_soon(fillings[place], slot)
            return
        for place, count in around.bring(number, data):
            if self._came(fillings[place], count):
                await asyncio.sleep(0)

    def _fetch_alone_soon(self, filling: _Filling, slot: int) -> None:
        filling.alone.add(slot)
        self._alone.append((filling, slot, filling.plan.indices[slot]))
        self._admitted += 1

    async def _fetch_alone(self, filling: _Filling, slot: int, index: Any) -> None:
        try:
            sample = await self._aget(index)
        except BaseException as error:  # user code
            if self._stopping:
                return
            sample = self._failed(error, filling, index)
        filling.samples[slot] = sample
        self._came(filling, 1)

    def _came(self, filling: _Filling, count: int) -> bool:
        """Note that so many have come; returns whether they were the last of their batch."""
        filling.missing -= count
        if filling.missing:
            return False
        self._make(filling)
        return True

    def _make(self, filling: _Filling) -> None:
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

    def _make_one_by_one(self, filling: _Filling, views: Sequence[memoryview]) -> None:
        for slot, (index, view) in enumerate(zip(filling.plan.indices, views, strict=True)):
            if slot in filling.alone:
                continue
            try:
                filling.samples[slot] = self._dataset.sample_of(index, view)
            except BaseException:  # user code, or the bytes are damaged: by itself it may come whole
                filling.missing += 1
                self._fetch_alone_soon(filling, slot)
