"""The fetch stage for datasets of byte ranges.

A request reads neighbouring ranges of all planned batches.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from headrace._base.array_types import IntArray
from headrace._engine.fetch import PartialBatch, SampleFetch
from headrace._records.batches import BatchPlan, Rows
from headrace._store.ranges import Ranges, Span, plan_spans

_EMPTY = memoryview(b"")


@dataclass(slots=True, eq=False)
class RangedBatch(PartialBatch):
    """A batch whose bytes are read by joint requests."""

    # The plan of the requests. None without a plan, or after the bytes were taken.
    read_plan: ReadPlan | None = None
    number: int = 0  # the number of the batch in `read_plan`
    # Received bytes, by the piece numbers of `ReadPlan`.
    pieces: dict[int, memoryview] = field(default_factory=dict)


class ReadPlan:
    """Batches with ranges, to be read by joint requests.

    A position is the index of a range among the ranges of all batches. A piece is the bytes of a
    request, or of a single range.

    Arrays store the place of each range, and a batch stores pieces. A view for each range would
    create thousands of objects at once. Python would then collect garbage, and visit all objects of
    the program: 0.3 s in an epoch of four.
    """

    def __init__(self, batches: Sequence[RangedBatch], ranges: Ranges) -> None:
        self.ranges = ranges  # of all batches, concatenated
        self._batches = batches
        sizes = [len(batch.samples) for batch in batches]
        self._borders = np.cumsum([0, *sizes])
        self._owners = np.repeat(np.arange(len(sizes)), sizes)
        # For each range: the number of the piece, and the range's offset in the piece.
        self._pieces = np.full(len(self._owners), -1)
        self._offsets = np.zeros(len(self._owners), np.int64)

    def plan(self) -> tuple[list[Span], list[RangedBatch]]:
        """Plan the requests.

        Returns:
            The requests, in the order of their first positions; and the batches without a request.
        """
        spans = plan_spans(self.ranges)
        spans.sort(key=lambda span: int(span.members.min()))
        return spans, self._complete(
            np.flatnonzero(self.ranges.stops == self.ranges.starts)
        )

    def put(self, span: Span, data: memoryview) -> list[RangedBatch]:
        """Keep the bytes of a request, and return the completed batches."""
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
        """Return the batch of each position, and the slot in the batch."""
        owners = self._owners[positions]
        slots = positions - self._borders[owners]
        for owner, slot in zip(owners.tolist(), slots.tolist(), strict=True):
            yield self._batches[owner], slot

    def first(self, span: Span) -> RangedBatch:
        return self._batches[int(self._owners[span.members].min())]

    def views(self, number: int) -> list[memoryview]:
        """Return the bytes of a batch, in the order of the ranges.

        Missing ranges are empty.
        """
        own = slice(*self._borders[number : number + 2])
        sizes = self.ranges.stops[own] - self.ranges.starts[own]
        pieces = self._pieces[own].tolist()
        starts = self._offsets[own].tolist()
        stops = (self._offsets[own] + sizes).tolist()
        data = self._batches[number].pieces
        return [
            data.get(piece, _EMPTY)[start:stop]
            for piece, start, stop in zip(pieces, starts, stops, strict=True)
        ]


class RangeFetch(SampleFetch):
    """Fetches by requests for several samples.

    `concurrency` is the number of requests. When a fetcher is free, all waiting batches are planned
    together. The first request is the request for the oldest batch.
    """

    def admit(self, plan: BatchPlan) -> None:
        batch = self._partial[plan.number] = RangedBatch(plan)
        if not plan.indices:
            self._deliver(batch, ())
            return
        self.submit(((None, 0, self._plan, plan),))

    async def _plan(self, plan: BatchPlan) -> None:
        plans = self._take_waiting(self._plan, plan)
        await self._plan_requests([self._partial[each.number] for each in plans])

    async def _plan_requests(self, batches: list[Any]) -> None:
        """Plan the requests for batches.

        If the ranges of a batch are unknown, the samples of the batch are fetched singly. A single
        call asks for all ranges. For windows of tokens, this takes a ninth of the time of a call
        for each batch.
        """
        began = time.perf_counter()
        indices = [index for batch in batches for index in batch.plan.indices]
        try:
            ranges = self._dataset.ranges(indices)
            ranges.check(len(indices))
        except Exception:  # user code, or a wrong index; `aget` then names the index
            if len(batches) == 1:
                self._fetch_singly((batches[0], slot) for slot in range(len(indices)))
            else:
                for batch in batches:
                    await self._plan_requests([batch])
            return
        plan = ReadPlan(batches, ranges)
        for number, batch in enumerate(batches):
            batch.read_plan, batch.number = plan, number
            batch.began = began
        spans, complete = plan.plan()
        self.submit((None, 0, self._read, (plan, span)) for span in spans)
        await self._make_all(complete)

    async def _read(self, planned: tuple[ReadPlan, Span]) -> None:
        plan, span = planned
        number = span.object
        size = span.stop - span.start
        read = functools.partial(self._dataset.read_range, number, span.start, span.stop)
        oldest = plan.first(span).plan.number
        began = time.perf_counter()
        try:
            data: memoryview
            if self._hedged is None:
                data = await read()
            else:
                data = await self._hedged.first(oldest, size, read)
            if self.context.recorder is not None:
                self.context.recorder.add(oldest, number, began)
            if len(data) != size:
                raise ValueError(f"read_range gave {len(data)} bytes in place of {size}")
        except BaseException:
            # User code; `aget` of each member then names the error and sample.
            if not self.context.stopping:
                self._fetch_singly(plan.locate(span.members))
            return
        complete = plan.put(span, data)
        for batch in complete:
            batch.fetch_seconds = time.perf_counter() - began
        await self._make_all(complete)

    async def _make_all(self, batches: Iterable[RangedBatch]) -> None:
        for batch in batches:
            self._make(batch)
            await asyncio.sleep(0)  # give other tasks a turn

    def _make(self, batch: RangedBatch) -> None:
        """Make samples from the bytes of a batch, and deliver it.

        If samples cannot be made from the bytes, they are first fetched singly.
        """
        samples: Sequence[Any] = batch.samples
        if batch.read_plan is not None:
            views = batch.read_plan.views(batch.number)
            batch.read_plan = None
            batch.pieces.clear()  # free the responses
            made = (
                None if batch.single else self._make_together(batch.plan.indices, views)
            )
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
        except BaseException:
            # User code; making the samples singly finds the failed sample.
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
                # user code, or corrupt bytes; a single read may return intact bytes
                failed.append((batch, slot))
        batch.missing = len(failed)
        self._fetch_singly(failed)
