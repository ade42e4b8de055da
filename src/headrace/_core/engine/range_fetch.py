"""The fetch stage for datasets of ranges: neighbouring ranges of all planned batches are read by one request."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch

from headrace._core.batches import BatchPlan, FetchLoad, RawBatch, Rows
from headrace._core.engine.concurrency import AdaptiveLimit
from headrace._core.engine.fetch import Deliver, FetchStage, PartialBatch
from headrace._core.engine.fetch_pool import FetcherPool, FetchRecorder, Spawn
from headrace._core.engine.hedging import HedgedRequests
from headrace._core.failure import Failure, Stage
from headrace._core.store.ranges import Ranges, Span, plan_spans
from headrace._core.store.request_stats import RequestStats

if TYPE_CHECKING:
    from numpy.typing import NDArray

Batch = TypeVar("Batch")
_EMPTY = memoryview(b"")
CACHE_SLICE = 256  # samples that are looked up, or taken from a response, before other tasks get a turn


class ReadPlan(Generic[Batch]):
    """Batches whose ranges are read by joint requests.

    A response is not divided before a batch is complete: a range of 4 KB is read in 2 µs.

    Args:
        batches: the caller's objects for the batches.
        wanted: for each batch, its ranges.

    Attributes:
        ranges: the ranges of all batches, concatenated; a range is referred to by its position here.
        spans: the requests, after `plan`, the one that the first batch needs first. Their members are positions.

    Example:
        >>> reads = ReadPlan(["first", "second"], [Ranges.of([(0, 2), (9_000_000, 9_000_001)]), Ranges.of([(2, 4)])])
        >>> reads.plan()
        >>> [(span.start, span.stop) for span in reads.spans]
        [(0, 4), (9000000, 9000001)]
        >>> reads.on_response(0, memoryview(b"abcd"))
        ['second']
        >>> [bytes(view) for view in reads.pop_batch(1)]
        [b'cd']
    """

    def __init__(self, batches: Sequence[Batch], wanted: Sequence[Ranges]) -> None:
        self.ranges = Ranges.joined(wanted)
        self.spans: list[Span] = []
        self._batches = batches
        sizes = [len(each.starts) for each in wanted]
        self._borders = np.cumsum([0, *sizes]).tolist()
        self._owners = np.repeat(np.arange(len(sizes)), sizes)
        self._missing = np.array(sizes, np.int64)  # ranges of each batch that have not arrived
        # Of each range the number of its response, and begin and end in it. Response 0 is that of ranges without one.
        self._responses: list[memoryview | None] = [_EMPTY]
        self._numbers, self._begins, self._ends = np.zeros((3, len(self._owners)), np.int64)
        self._unused = np.zeros(1, np.int64)  # ranges of each response that no batch has taken
        self._singles: dict[int, memoryview] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def plan(self, positions: Sequence[int] | None = None) -> None:
        """Plan the requests for all ranges, or for those at `positions`."""
        chosen = np.arange(len(self)) if positions is None else np.array(positions, np.int64)
        spans = plan_spans(self.ranges.at(chosen))
        self.spans = [span._replace(members=chosen[span.members]) for span in spans]
        self.spans.sort(key=lambda span: int(span.members.min()))
        for number, span in enumerate(self.spans, 1):
            self._numbers[span.members] = number
            self._begins[span.members] = self.ranges.starts[span.members] - span.start
            self._ends[span.members] = self.ranges.stops[span.members] - span.start
        self._responses += [None] * len(self.spans)
        self._unused = np.bincount(self._numbers, minlength=len(self._responses))

    def on_response(self, number: int, data: memoryview) -> list[Batch]:
        """Keep the response to a request; returns the batches that it completes."""
        self._responses[number + 1] = data
        return self.leave_out(self.spans[number].members)

    def put(self, ranges: Sequence[tuple[int, memoryview]]) -> list[Batch]:
        """As `on_response`, for ranges that were read in another way: their positions and bytes."""
        self._singles.update(ranges)
        return self.leave_out([position for position, _ in ranges])

    def put_empty(self, positions: Sequence[int] | None = None) -> list[Batch]:
        """As `on_response`, for those of the ranges that are empty and need no request."""
        empty = self.ranges.stops == self.ranges.starts
        return self.leave_out(np.flatnonzero(empty) if positions is None else [at for at in positions if empty[at]])

    def leave_out(self, positions: Sequence[int] | NDArray[np.intp]) -> list[Batch]:
        """Wait no longer for these ranges; returns the batches of which no other is missing."""
        arrived = np.bincount(self._owners[positions], minlength=len(self._missing))
        self._missing -= arrived
        complete = np.flatnonzero((arrived > 0) & (self._missing == 0))
        return [self._batches[owner] for owner in complete.tolist()]

    def locate(self, positions: Sequence[int] | NDArray[np.intp]) -> Iterator[tuple[Batch, int]]:
        """The batch of each position, and the slot in it."""
        owners = self._owners[positions].tolist()
        pairs = zip(owners, np.asarray(positions).tolist(), strict=True)
        return ((self._batches[owner], position - self._borders[owner]) for owner, position in pairs)

    def first(self, number: int) -> Batch:
        """The first batch that needs a request."""
        return self._batches[int(self._owners[self.spans[number].members].min())]

    def pop_batch(self, batch: int) -> list[memoryview]:
        """Remove and return the bytes of a batch, in the order of its ranges; empty where none have arrived."""
        first, stop = self._borders[batch], self._borders[batch + 1]
        numbers, responses = self._numbers[first:stop], self._responses
        cuts = zip(numbers.tolist(), self._begins[first:stop].tolist(), self._ends[first:stop].tolist(), strict=True)
        views = [_EMPTY if (whole := responses[number]) is None else whole[begin:end] for number, begin, end in cuts]
        taken = np.bincount(numbers, minlength=len(responses))
        self._unused -= taken
        for number in np.flatnonzero((taken > 0) & (self._unused == 0)).tolist():
            responses[number] = None
        if self._singles:
            views = [self._singles.pop(position, view) for position, view in enumerate(views, first)]
        return views


class RangedBatch(PartialBatch):
    """A batch whose bytes are being read.

    Attributes:
        missing: the number of samples that `aget` fetches, and one more while ranges of `read_plan` are missing.
        read_plan: the plan of its requests, and its position there; None if it has none, or its bytes were taken.
        single: slots whose samples are or were fetched by `aget`.
    """

    __slots__ = ("read_plan", "single")

    def __init__(self, plan: BatchPlan) -> None:
        super().__init__(plan)
        self.missing = 0
        self.read_plan: tuple[ReadPlan[RangedBatch], int] | None = None
        self.single: set[int] = set()


class RangeFetch(FetchStage):
    """Fetches by requests that serve several samples, in layers: the store, hedging around it, a cache around both.

    All batches that wait when a fetcher is free are planned together; the request that the oldest of them needs first
    is made first. The first batch is planned alone: joined with the others it would be complete when they are.

    Args:
        concurrency: requests in flight, or an `AdaptiveLimit` that finds the number.
    """

    def __init__(
        self,
        dataset: Any,
        concurrency: int | AdaptiveLimit,
        deliver: Deliver,
        spawn: Spawn,
        requests: RequestStats,
        *,
        hedge: bool = False,
        cached: bool = False,
    ) -> None:
        self._dataset = dataset
        self._cached = cached
        self._deliver = deliver
        self._hedged = HedgedRequests(spawn, requests) if hedge else None
        self._waiting: list[RangedBatch] = []
        self._pool = FetcherPool(concurrency, self, spawn, requests)
        self._planning = False  # a job that plans is queued
        self._singles: deque[tuple[RangedBatch, int]] = deque()
        self._first = True
        self._recorder: FetchRecorder | None = None

    def admit(self, plan: BatchPlan) -> None:
        if not plan.indices:
            self._deliver(RawBatch(plan, ()))
            return
        self._waiting.append(RangedBatch(plan))
        self._plan_soon()

    def stop(self) -> None:
        super().stop()
        self._waiting.clear()
        self._singles.clear()
        self._pool.stop()

    # The policy of the pool, whose jobs are coroutine functions that handle errors of user code.

    def fetch(self, job: Callable[[], Awaitable[None]]) -> Awaitable[None]:
        return job()

    def on_result(self, _target: None, _slot: int, _result: None) -> bool:
        """Do nothing: the job has used its result."""
        return False

    def on_first(self, _target: None, _began: float, _seconds: float) -> None:
        """Do nothing: the job has timed its request."""

    def trace(self, recorder: FetchRecorder | None) -> None:
        """Record each range that is read, with the oldest batch that waits for it."""
        self._recorder = recorder

    def load(self) -> FetchLoad:
        return self._pool.load()

    def on_error(self, error: BaseException, _target: None, _job: Any) -> None:
        """Raise the error, which is ours."""
        raise error

    def _submit(self, jobs: Iterable[Callable[[], Awaitable[None]]], *, first: bool = False) -> None:
        self._pool.submit(((None, 0, job) for job in jobs), first=first)

    def _plan_soon(self) -> None:
        if not self._planning:
            self._planning = True
            self._submit((self._plan,))

    def _fetch_singly(self, members: Iterable[tuple[RangedBatch, int]]) -> None:
        """Queue single samples, ahead of requests; an error is then about one sample, and names it."""
        before = len(self._singles)
        for batch, slot in members:
            batch.single.add(slot)
            batch.missing += 1
            self._singles.append((batch, slot))
        self._submit([self._fetch_single] * (len(self._singles) - before), first=True)

    def _fetch_left_out(self, plan: ReadPlan[RangedBatch], positions: Sequence[int] | NDArray[np.intp]) -> None:
        """Fetch singly ranges that their requests have not brought."""
        self._fetch_singly(plan.locate(positions))
        for batch in plan.leave_out(positions):
            self._on_arrival(batch)

    async def _fetch_single(self) -> None:
        batch, slot = self._singles.popleft()
        index = batch.plan.indices[slot]
        began = time.perf_counter()
        try:
            sample = await self._dataset.aget(index)
        except BaseException as error:  # user code
            if self._stopping:
                return
            self._pool.count_timeout(error)
            sample = Failure.caught(error, stage=Stage.FETCH, batch=batch.plan.number, index=index)
        if self._recorder is not None:
            self._recorder.add(batch.plan.number, slot, began)
        batch.samples[slot] = sample
        self._on_arrival(batch)

    async def _plan(self) -> None:
        """Plan the requests for all waiting batches."""
        waiting = self._waiting[:1] if self._first else self._waiting[:]
        del self._waiting[: len(waiting)]
        self._first = self._planning = False
        if self._waiting:
            self._plan_soon()
        began = time.perf_counter()
        batches, wanted = self._ranges_of(waiting)
        if not batches:
            return
        plan = ReadPlan(batches, wanted)
        for position, batch in enumerate(batches):
            batch.read_plan = plan, position
            batch.missing += 1
            batch.began = began
        missing = await self._read_cached(plan) if self._cached else None
        plan.plan(missing)
        read = self._read_and_cache if self._cached else self._read
        self._submit(functools.partial(read, plan, number) for number in range(len(plan.spans)))
        await self._on_ranges(plan.put_empty(missing))

    def _ranges_of(self, batches: list[RangedBatch]) -> tuple[list[RangedBatch], list[Ranges]]:
        """The ranges of batches; those of a batch whose ranges are not known are fetched singly.

        All are asked for in one call: of windows of tokens it takes a ninth of the time of a call for each batch of 64.
        """
        indices = [index for batch in batches for index in batch.plan.indices]
        try:
            ranges = self._dataset.ranges(indices)
            ranges.check(len(indices))
        except Exception:  # user code, or a wrong index, which its own `aget` names
            if len(batches) > 1:
                apart = [self._ranges_of([batch]) for batch in batches]
                return [batch for found, _ in apart for batch in found], [each for _, found in apart for each in found]
            for batch in batches:
                self._fetch_singly((batch, slot) for slot in range(len(batch.samples)))
            return [], []
        stops = np.cumsum([len(batch.samples) for batch in batches]).tolist()
        bounds = zip([0, *stops], stops, strict=False)
        return batches, [Ranges(*(column[start:stop] for column in ranges)) for start, stop in bounds]

    async def _read_cached(self, plan: ReadPlan[RangedBatch]) -> list[int]:
        """Take the ranges that are cached; returns the positions of the others."""
        missing: list[int] = []
        for first in range(0, len(plan), CACHE_SLICE):
            positions = range(first, min(first + CACHE_SLICE, len(plan)))
            members = list(plan.locate(positions))
            try:
                views = await self._dataset.cached_reads([batch.plan.indices[slot] for batch, slot in members])
            except BaseException:  # user code, or a folder that must not be read
                if self._stopping:
                    raise
                self._fetch_left_out(plan, positions)
                continue
            missing += [position for position, view in zip(positions, views, strict=True) if view is None]
            found = [(position, view) for position, view in zip(positions, views, strict=True) if view is not None]
            await self._on_ranges(plan.put(found))
        return missing

    async def _read(self, plan: ReadPlan[RangedBatch], number: int) -> None:
        span = plan.spans[number]
        began = time.perf_counter()
        try:
            data = await self._read_range(plan.first(number), span.object, span.start, span.stop)
        except BaseException:  # user code; each member's own `aget` names the error and the sample
            if not self._stopping:
                self._fetch_left_out(plan, span.members)
            return
        seconds = time.perf_counter() - began
        complete = plan.on_response(number, data)
        for batch in complete:
            batch.fetch_seconds = seconds
        await self._on_ranges(complete)

    async def _read_and_cache(self, plan: ReadPlan[RangedBatch], number: int) -> None:
        """As `_read`, through the dataset's cache, which gives members in parts."""
        span = plan.spans[number]
        left: list[int | None] = span.members.tolist()
        indices = [batch.plan.indices[slot] for batch, slot in plan.locate(span.members)]
        read_range = functools.partial(self._read_range, plan.first(number))
        reading = self._dataset.read_missing(span.object, plan.ranges.at(span.members), indices, read_range)
        async with contextlib.aclosing(reading) as parts:
            while True:
                try:
                    members, views = await anext(parts)
                except StopAsyncIteration:
                    break
                except BaseException:  # user code, as in `_read`
                    if self._stopping:
                        return
                    break
                read: list[tuple[int, memoryview]] = []
                for member, view in zip(members, views, strict=True):
                    position, left[member] = left[member], None
                    if position is not None:
                        read.append((position, view))
                for first in range(0, len(read), CACHE_SLICE):
                    await self._on_ranges(plan.put(read[first : first + CACHE_SLICE]))
                    await asyncio.sleep(0)
        self._fetch_left_out(plan, [position for position in left if position is not None])

    async def _read_range(self, batch: RangedBatch, number: int, start: int, stop: int) -> memoryview:
        """Read from the store, hedged if so configured; `batch` is the oldest that waits."""
        read = functools.partial(self._dataset.read_range, number, start, stop)
        began = time.perf_counter()
        data: memoryview = await (
            read() if self._hedged is None else self._hedged.first(batch.plan.number, stop - start, read)
        )
        if self._recorder is not None:
            self._recorder.add(batch.plan.number, number, began)
        if len(data) != stop - start:
            raise ValueError(f"read_range gave {len(data)} bytes in place of {stop - start}")
        return data

    async def _on_ranges(self, batches: Iterable[RangedBatch]) -> None:
        """All planned ranges of these batches have arrived; other tasks get a turn after each batch that is made."""
        for batch in batches:
            if self._on_arrival(batch):
                await asyncio.sleep(0)

    def _on_arrival(self, batch: RangedBatch) -> bool:
        """Count its planned ranges, or a single sample, as arrived; returns whether no other was missing.

        Then samples are made of its bytes, and it is delivered; those that cannot be made are first fetched singly.
        """
        batch.missing -= 1
        if batch.missing:
            return False
        samples: Sequence[Any] | None = None
        if batch.read_plan is not None:
            (plan, position), batch.read_plan = batch.read_plan, None
            views = plan.pop_batch(position)
            samples = None if batch.single else self._make_together(batch.plan.indices, views)
            if samples is None:
                self._make_one_by_one(batch, views)
        if not batch.missing:
            self._deliver(batch.raw(batch.samples if samples is None else samples))
        return True

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
        self._fetch_singly(failed)
