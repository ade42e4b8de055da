"""The fetch stage for datasets of ranges: neighbouring ranges of all planned batches are read by one request."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from headrace._core.array_types import IntArray
from headrace._core.batches import BatchPlan, Rows
from headrace._core.engine.fetch import PartialBatch, SampleFetch
from headrace._core.store.ranges import Ranges, Span, plan_spans

_EMPTY = memoryview(b"")


@dataclass(slots=True, eq=False)
class RangedBatch(PartialBatch):
    # The plan of its requests, and its number there; None if it has none, or its bytes were taken.
    read_plan: tuple[ReadPlan, int] | None = None
    pieces: dict[int, memoryview] = field(default_factory=dict)  # by the numbers of `ReadPlan`


class ReadPlan:
    """Batches whose ranges are read by joint requests. A range is referred to by its position among those of all.

    Places are arrays, and a batch holds the pieces that its ranges are in. A view for each range
    would be thousands of objects at once, for which the garbage collector looks at all objects of
    the program: 0.3 s in one epoch of four.
    """

    def __init__(self, batches: Sequence[RangedBatch], ranges: Ranges) -> None:
        self.ranges = ranges  # of all batches, concatenated
        self._batches = batches
        sizes = [len(batch.samples) for batch in batches]
        self._borders = np.cumsum([0, *sizes])
        self._owners = np.repeat(np.arange(len(sizes)), sizes)
        # The number of the piece with each range, and the range's offset in the piece.
        self._pieces = np.full(len(self._owners), -1)
        self._offsets = np.zeros(len(self._owners), np.int64)

    def plan(self) -> tuple[list[Span], list[RangedBatch]]:
        """Plan the requests.

        Returns:
            The requests, sorted by the first position that each serves.
            The batches that need no request.
        """
        spans = plan_spans(self.ranges)
        spans.sort(key=lambda span: int(span.members.min()))
        return spans, self._complete(np.flatnonzero(self.ranges.stops == self.ranges.starts))

    def put(self, span: Span, data: memoryview) -> list[RangedBatch]:
        """Keep the bytes of a request; returns the batches that they complete."""
        number = int(span.members[0])
        self._pieces[span.members] = number
        self._offsets[span.members] = self.ranges.starts[span.members] - span.start
        return self._complete(span.members, number, data)

    def _complete(
        self, positions: IntArray, number: int = -1, data: memoryview = _EMPTY
    ) -> list[RangedBatch]:
        """Note that a piece with the bytes of some ranges has arrived."""
        counts = np.bincount(self._owners[positions])
        complete = []
        for owner in np.flatnonzero(counts).tolist():
            batch = self._batches[owner]
            batch.pieces[number] = data
            batch.missing -= int(counts[owner])
            if not batch.missing:
                complete.append(batch)
        return complete

    def locate(self, positions: IntArray) -> Iterator[tuple[RangedBatch, int]]:
        """The batch of each position, and the slot in it."""
        owners = self._owners[positions]
        pairs = zip(owners.tolist(), (positions - self._borders[owners]).tolist(), strict=True)
        return ((self._batches[owner], slot) for owner, slot in pairs)

    def first(self, span: Span) -> RangedBatch:
        return self._batches[int(self._owners[span.members].min())]

    def views(self, number: int) -> list[memoryview]:
        """The bytes of a batch, in the order of its ranges; empty where none have arrived."""
        own = slice(*self._borders[number : number + 2])
        pieces, offsets = self._batches[number].pieces, self._offsets[own]
        sizes = self.ranges.stops[own] - self.ranges.starts[own]
        places = zip(
            self._pieces[own].tolist(), offsets.tolist(), (offsets + sizes).tolist(), strict=True
        )
        return [pieces.get(piece, _EMPTY)[start:stop] for piece, start, stop in places]


class RangeFetch(SampleFetch):
    """Fetches by requests that serve several samples.

    All batches that wait when a fetcher is free are planned together; the request that the oldest
    of them needs first is made first. `concurrency` is the number of requests.
    """

    def admit(self, plan: BatchPlan) -> None:
        batch = self._partial[plan.number] = RangedBatch(plan)
        if not plan.indices:
            self._deliver(batch, ())
            return
        self._submit(((None, 0, self._plan, plan),))

    async def _plan(self, plan: BatchPlan) -> None:
        plans = self._take_waiting(self._plan, plan)
        await self._plan_requests([self._partial[each.number] for each in plans])

    async def _plan_requests(self, batches: list[Any]) -> None:
        """Plan the requests for batches; the samples of one whose ranges are not known are fetched singly.

        All ranges are asked for in one call: of windows of tokens it takes a ninth of the time of
        one for each batch.
        """
        began = time.perf_counter()
        indices = [index for batch in batches for index in batch.plan.indices]
        try:
            ranges = self._dataset.ranges(indices)
            ranges.check(len(indices))
        except Exception:  # user code, or a wrong index, which its own `aget` names
            if len(batches) == 1:
                self._fetch_singly((batches[0], slot) for slot in range(len(indices)))
            else:
                for batch in batches:
                    await self._plan_requests([batch])
            return
        plan = ReadPlan(batches, ranges)
        for number, batch in enumerate(batches):
            batch.read_plan = plan, number
            batch.began = began
        spans, complete = plan.plan()
        self._submit((None, 0, self._read, (plan, span)) for span in spans)
        await self._make_all(complete)

    async def _read(self, planned: tuple[ReadPlan, Span]) -> None:
        plan, span = planned
        began = time.perf_counter()
        try:
            data = await self._read_range(plan.first(span), span.object, span.start, span.stop)
            seconds = time.perf_counter() - began
        except BaseException:  # user code; each member's own `aget` names the error and the sample
            if not self.context.stopping:
                self._fetch_singly(plan.locate(span.members))
            return
        complete = plan.put(span, data)
        for batch in complete:
            batch.fetch_seconds = seconds
        await self._make_all(complete)

    async def _read_range(
        self, batch: RangedBatch, number: int, start: int, stop: int
    ) -> memoryview:
        """Read bytes, hedged if so configured; `batch` is the oldest that waits."""
        read = functools.partial(self._dataset.read_range, number, start, stop)
        began = time.perf_counter()
        data: memoryview = await (
            read()
            if self._hedged is None
            else self._hedged.first(batch.plan.number, stop - start, read)
        )
        if self.context.recorder is not None:
            self.context.recorder.add(batch.plan.number, number, began)
        if len(data) != stop - start:
            raise ValueError(f"read_range gave {len(data)} bytes in place of {stop - start}")
        return data

    async def _make_all(self, batches: Iterable[RangedBatch]) -> None:
        for batch in batches:
            self._make(batch)
            await asyncio.sleep(0)  # other tasks get a turn

    def _make(self, batch: RangedBatch) -> None:
        """Make samples of a batch's bytes, and deliver it; those that cannot be made are first fetched singly."""
        samples: Sequence[Any] = batch.samples
        if batch.read_plan is not None:
            (plan, number), batch.read_plan = batch.read_plan, None
            views = plan.views(number)
            batch.pieces.clear()  # frees the responses
            made = None if batch.single else self._make_together(batch.plan.indices, views)
            if made is None:
                self._make_one_by_one(batch, views)
            else:
                samples = made
        if not batch.missing:
            self._deliver(batch, samples)

    def _make_together(
        self, indices: Sequence[Any], views: Sequence[memoryview]
    ) -> Sequence[Any] | None:
        try:
            made = self._dataset.samples_of(indices, views)
            samples = Rows(made) if isinstance(made, torch.Tensor) else list(made)
            if len(samples) != len(indices):
                raise ValueError(
                    f"samples_of gave {len(samples)} samples for {len(indices)} indices"
                )
        except BaseException:  # user code; made one by one, the sample shows
            return None
        return samples

    def _make_one_by_one(self, batch: RangedBatch, views: Sequence[memoryview]) -> None:
        failed = []
        for slot, (index, view) in enumerate(zip(batch.plan.indices, views, strict=True)):
            if slot in batch.single:
                continue
            try:
                batch.samples[slot] = self._dataset.sample_of(index, view)
            except BaseException:
                # user code, or corrupt bytes, which may be intact when read singly
                failed.append((batch, slot))
        batch.missing = len(failed)
        self._fetch_singly(failed)
