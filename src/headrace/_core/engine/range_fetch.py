"""The fetch stage for datasets of ranges: neighbouring ranges of all planned batches are read by one request."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import operator
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace._core.batches import BatchPlan, Rows
from headrace._core.engine.fetch import FetchContext, FetcherPool, PartialBatch
from headrace._core.store.ranges import Ranges, Span, cut, plan_spans
from headrace._core.streams.kinds import capabilities

Positions = Sequence[int] | NDArray[np.intp]

_EMPTY = memoryview(b"")
CACHE_SLICE = 256  # samples that are looked up before other tasks get a turn


@dataclass(slots=True, eq=False)
class RangedBatch(PartialBatch):
    # The plan of its requests, and its number there; None if it has none, or its bytes were taken.
    read_plan: tuple[ReadPlan, int] | None = None
    single: set[int] = field(default_factory=set)  # slots whose samples are or were fetched by `aget`


class ReadPlan:
    """Batches whose ranges are read by joint requests. A range is referred to by its position among those of all."""

    def __init__(self, batches: Sequence[RangedBatch], ranges: Ranges) -> None:
        self.ranges = ranges  # of all batches, concatenated
        self._batches = batches
        sizes = [len(batch.samples) for batch in batches]
        self._borders = np.cumsum([0, *sizes]).tolist()
        self._owners = np.repeat(np.arange(len(sizes)), sizes)
        self._views = [_EMPTY] * len(self._owners)

    def plan(self, positions: Sequence[int] | None) -> tuple[list[Span], list[RangedBatch]]:
        """Plan the requests for the ranges at `positions`, or for all.

        Returns the requests, the one that the first batch needs first, whose members are positions; and the batches
        that need none.
        """
        chosen = np.arange(len(self._owners)) if positions is None else np.array(positions, np.int64)
        wanted = self.ranges.at(chosen)
        spans = [span._replace(members=chosen[span.members]) for span in plan_spans(wanted)]
        spans.sort(key=lambda span: int(span.members.min()))
        return spans, self._complete(chosen[wanted.stops == wanted.starts])

    def put(self, positions: Positions, views: Iterable[memoryview]) -> list[RangedBatch]:
        """Keep the bytes of ranges; returns the batches that they complete."""
        for position, view in zip(np.asarray(positions, np.int64).tolist(), views, strict=True):
            self._views[position] = view
        return self._complete(positions)

    def _complete(self, positions: Positions) -> list[RangedBatch]:
        counts = np.bincount(self._owners[positions], minlength=len(self._batches))
        arrived = [(self._batches[owner], int(counts[owner])) for owner in np.flatnonzero(counts).tolist()]
        for batch, count in arrived:
            batch.missing -= count
        return [batch for batch, _ in arrived if not batch.missing]

    def locate(self, positions: Positions) -> Iterator[tuple[RangedBatch, int]]:
        """The batch of each position, and the slot in it."""
        owners = self._owners[positions].tolist()
        pairs = zip(owners, np.asarray(positions).tolist(), strict=True)
        return ((self._batches[owner], position - self._borders[owner]) for owner, position in pairs)

    def first(self, span: Span) -> RangedBatch:
        return self._batches[int(self._owners[span.members].min())]

    def pop_batch(self, batch: int) -> list[memoryview]:
        """Remove and return the bytes of a batch, in the order of its ranges; empty where none have arrived."""
        first, stop = self._borders[batch], self._borders[batch + 1]
        views = self._views[first:stop]
        self._views[first:stop] = [_EMPTY] * len(views)  # frees the responses
        return views


class RangeFetch(FetcherPool):
    """Fetches by requests that serve several samples, in layers: the store, hedging around it, a cache around both.

    All batches that wait when a fetcher is free are planned together; the request that the oldest of them needs first
    is made first. The first batch is planned alone: joined with the others it would be complete when they are.

    A job is a coroutine function: `aget` of a single sample, or, without a target, a request, which handles errors of
    user code and times itself. `concurrency` is their number.
    """

    _planning = False  # a job that plans is queued
    _first = True

    def __init__(self, context: FetchContext, dataset: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(context, dataset, *args, **kwargs)
        self._cached = capabilities(dataset).cached_reads
        self._waiting: list[RangedBatch] = []

    def admit(self, plan: BatchPlan) -> None:
        batch = self._partial[plan.number] = RangedBatch(plan)
        if not plan.indices:
            self._deliver(batch, ())
            return
        self._waiting.append(batch)
        self._plan_soon()

    def requester(self) -> Any:
        return operator.call

    def _plan_soon(self) -> None:
        if not self._planning:
            self._planning = True
            self._submit(((None, 0, self._plan),))

    def _fetch_singly(self, members: Iterable[tuple[RangedBatch, int]]) -> None:
        """Queue single samples, ahead of requests; an error is then about one sample, and names it."""
        jobs = []
        for batch, slot in members:
            batch.single.add(slot)
            jobs.append((batch, slot, functools.partial(self._dataset.aget, batch.plan.indices[slot])))
        self._submit(reversed(jobs), first=True)

    async def _plan(self) -> None:
        waiting = self._waiting[:1] if self._first else self._waiting[:]
        del self._waiting[: len(waiting)]
        self._first = self._planning = False
        if self._waiting:
            self._plan_soon()
        await self._plan_requests(waiting)

    async def _plan_requests(self, batches: list[RangedBatch]) -> None:
        """Plan the requests for batches; the samples of one whose ranges are not known are fetched singly.

        All ranges are asked for in one call: of windows of tokens it takes a ninth of the time of one for each batch.
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
        spans, complete = plan.plan(await self._read_cached(plan) if self._cached else None)
        read = self._read_and_cache if self._cached else self._read
        self._submit((None, 0, functools.partial(read, plan, span)) for span in spans)
        await self._make_all(complete)

    async def _read_cached(self, plan: ReadPlan) -> list[int]:
        """Take the ranges that are cached; returns the positions of the others."""
        missing: list[int] = []
        count = len(plan.ranges.starts)
        for first in range(0, count, CACHE_SLICE):
            positions = range(first, min(first + CACHE_SLICE, count))
            indices = [batch.plan.indices[slot] for batch, slot in plan.locate(positions)]
            try:
                views = dict(zip(positions, await self._dataset.cached_reads(indices), strict=True))
            except BaseException:  # user code, or a folder that must not be read
                if self.context.stopping:
                    raise
                self._fetch_singly(plan.locate(positions))
                continue
            missing += [position for position in positions if views[position] is None]
            found = {position: view for position, view in views.items() if view is not None}
            await self._make_all(plan.put(list(found), found.values()))
        return missing

    async def _read(self, plan: ReadPlan, span: Span) -> None:
        began = time.perf_counter()
        try:
            data = await self._read_range(plan.first(span), span.object, span.start, span.stop)
        except BaseException:  # user code; each member's own `aget` names the error and the sample
            if not self.context.stopping:
                self._fetch_singly(plan.locate(span.members))
            return
        seconds = time.perf_counter() - began
        complete = plan.put(span.members, cut(data, span.start, plan.ranges.at(span.members)))
        for batch in complete:
            batch.fetch_seconds = seconds
        await self._make_all(complete)

    async def _read_and_cache(self, plan: ReadPlan, span: Span) -> None:
        """As `_read`, through the dataset's cache, which gives members in parts."""
        left = dict(enumerate(span.members.tolist()))
        indices = [batch.plan.indices[slot] for batch, slot in plan.locate(span.members)]
        read_range = functools.partial(self._read_range, plan.first(span))
        reading = self._dataset.read_missing(span.object, plan.ranges.at(span.members), indices, read_range)
        async with contextlib.aclosing(reading) as parts:
            while True:
                try:
                    members, views = await anext(parts)
                except StopAsyncIteration:
                    break
                except BaseException:  # user code, as in `_read`
                    if self.context.stopping:
                        return
                    break
                read = {left.pop(member): view for member, view in zip(members, views, strict=True) if member in left}
                await self._make_all(plan.put(list(read), read.values()))
                await asyncio.sleep(0)
        self._fetch_singly(plan.locate(list(left.values())))

    async def _read_range(self, batch: RangedBatch, number: int, start: int, stop: int) -> memoryview:
        """Read from the store, hedged if so configured; `batch` is the oldest that waits."""
        read = functools.partial(self._dataset.read_range, number, start, stop)
        began = time.perf_counter()
        data: memoryview = await (
            read() if self._hedged is None else self._hedged.first(batch.plan.number, stop - start, read)
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
        samples: Sequence[Any] | None = None
        if batch.read_plan is not None:
            (plan, position), batch.read_plan = batch.read_plan, None
            views = plan.pop_batch(position)
            samples = None if batch.single else self._make_together(batch.plan.indices, views)
            if samples is None:
                self._make_one_by_one(batch, views)
        if not batch.missing:
            self._deliver(batch, batch.samples if samples is None else samples)

    def _make_together(self, indices: Sequence[Any], views: Sequence[memoryview]) -> Sequence[Any] | None:
        try:
            made = self._dataset.samples_of(indices, views)
            samples = Rows(made) if isinstance(made, torch.Tensor) else list(made)
            if len(samples) != len(indices):
                raise ValueError(f"samples_of gave {len(samples)} samples for {len(indices)} indices")
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
            except BaseException:  # user code, or corrupt bytes, which may be intact when read singly
                failed.append((batch, slot))
        batch.missing = len(failed)
        self._fetch_singly(failed)
