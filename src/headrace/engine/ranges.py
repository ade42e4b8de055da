"""Fetching from a dataset of ranges: those of all planned batches that lie near each other are read by one request."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.batches import BatchPlan, RawBatch
from headrace.datasets.ranged import RangedDataset, RangedView
from headrace.engine.fetch import Deliver, Filling, SampleFetch, Spawn
from headrace.io.control import Control
from headrace.io.ranges import Ranges, Span, plan_spans
from headrace.io.traffic import Traffic

__all__ = ["RangeFetch"]

SLICE = 256  # samples that are made of one request's bytes before others have their turn; 1 ms for windows of 2,048

Slot = tuple[Filling, int]


@dataclass(frozen=True, slots=True)
class _Round:
    """What was planned together: the ranges that were wanted at one time, and whose they are."""

    slots: Sequence[Slot]
    ranges: Ranges


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
        self._wanted: list[tuple[Filling, Ranges]] = []
        self._spans: deque[tuple[_Round, Span]] = deque()
        self._first = True

    def admit(self, plan: BatchPlan) -> None:
        """Note the plan's ranges."""
        if not plan.indices:
            self._deliver(RawBatch(plan, ()))
            return
        try:
            ranges = self._dataset.ranges(plan.indices)
        except Exception:  # user code, or one of the indices is wrong: its own `aget` says which
            super().admit(plan)
            return
        self._wanted.append((Filling(plan), ranges))
        self._begin()

    def stop(self) -> None:
        """Draw nothing more."""
        super().stop()
        self._wanted.clear()
        self._spans.clear()

    @property
    def _queued(self) -> int:
        return len(self._draws) + len(self._spans)

    async def _fetch(self) -> None:
        draws, spans, window = self._draws, self._spans, self._window
        while True:
            while True:
                if not spans and self._wanted:
                    self._plan()
                if self._queued > 1 or self._wanted:
                    window.call_one()
                if draws:
                    filling, slot, index = draws.popleft()
                    try:
                        sample = await self._aget(index)
                    except BaseException as error:  # user code
                        if self._stopping:
                            return
                        sample = self._failed(error, filling, index)
                    self._put(filling, slot, sample)
                elif spans:
                    await self._read(*spans.popleft())
                    if self._stopping:
                        return
                else:
                    break
                if window.shrinking and window.must_rest():
                    break
            await window.rest()

    def _plan(self) -> None:
        """Make requests of what is wanted."""
        planned = self._wanted[:1] if self._first else self._wanted[:]
        del self._wanted[: len(planned)]
        self._first = False
        ranges = Ranges.joined([ranges for _, ranges in planned])
        slots = [(filling, slot) for filling, _ in planned for slot in range(len(filling.samples))]
        around = _Round(slots, ranges)
        spans = plan_spans(ranges)
        spans.sort(key=lambda span: int(span.members.min()))
        self._spans.extend((around, span) for span in spans)
        self._admitted += len(spans)
        for position in (ranges.stops == ranges.starts).nonzero()[0].tolist():
            self._make(slots[position], _NOTHING)

    async def _read(self, around: _Round, span: Span) -> None:
        members = span.members.tolist()
        try:
            data = await self._dataset.read_range(span.object, span.start, span.stop)
            if len(data) != span.stop - span.start:
                raise ValueError(f"read_range gave {len(data)} bytes in place of {span.stop - span.start}")
        except BaseException:  # user code: what is wrong, and with which sample, each one's own `aget` says
            if not self._stopping:
                for position in members:
                    self._alone(around.slots[position])
            return
        begins = (around.ranges.starts[span.members] - span.start).tolist()
        ends = (around.ranges.stops[span.members] - span.start).tolist()
        for done, (position, begin, end) in enumerate(zip(members, begins, ends, strict=True), 1):
            self._make(around.slots[position], data[begin:end])
            if not done % SLICE:
                await asyncio.sleep(0)

    def _make(self, slot: Slot, data: memoryview) -> None:
        filling, number = slot
        try:
            sample = self._dataset.sample_of(filling.plan.indices[number], data)
        except BaseException:  # user code, or the bytes are damaged: by itself it may come whole
            self._alone(slot)
        else:
            self._put(filling, number, sample)

    def _alone(self, slot: Slot) -> None:
        """Have a sample fetched by itself."""
        filling, number = slot
        self._draws.append((filling, number, filling.plan.indices[number]))
        self._admitted += 1

    def _put(self, filling: Filling, slot: int, sample: Any) -> None:
        filling.samples[slot] = sample
        filling.missing -= 1
        if not filling.missing:
            self._deliver(RawBatch(filling.plan, filling.samples))


_NOTHING = memoryview(b"")
