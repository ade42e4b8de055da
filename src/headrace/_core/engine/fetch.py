"""The fetch stage, the only one that waits for a network or a disk: plans in, raw batches out, on the engine's loop.

A pool of long-lived coroutines takes jobs from one queue, across batch borders, so that the
pipeline never drains at the end of a batch, and no task, lock or queue hop is needed for a single
sample.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace._core.array_types import join_indices
from headrace._core.batches import BatchPlan, FetchLoad, FetchTimes, HostBatch, RawBatch, Rows
from headrace._core.engine.concurrency import AdaptiveLimit
from headrace._core.engine.hedging import HedgedRequests, Spawn
from headrace._core.failure import Failure, Stage
from headrace._core.store.request_stats import RequestStats

# seconds between two updates of an `AdaptiveLimit`, which measures over 0.05 at least
CONTROL_INTERVAL = 0.02

# The most of a call of `agets`: taking 256 rows of 32 row groups costs 47 µs in calls of 4,096
# rows, and 25 here.
JOINED_SAMPLES = 1 << 15

Job = tuple[Any, int, Callable[[Any], Awaitable[Any]], Any]
"""The batch of a sample, the slot in it, the function that fetches, and its argument.

Without a batch the function delivers what it fetches, handles errors of user code and times itself.
"""

MISSING = object()


class FetchRecorder:
    """The fetches of a session that have ended, until they travel with the next batch; only while a trace is written.

    Used on the engine's loop.
    """

    def __init__(self) -> None:
        self._rows = array("d")

    def add(self, batch: int, slot: int, began: float) -> None:
        """Add a fetch that ends now; arguments as in `FetchTimes`."""
        self._rows.extend((batch, slot, began, time.perf_counter()))

    def take(self) -> FetchTimes:
        rows = self._rows.tobytes()
        del self._rows[:]
        return FetchTimes(os.getpid(), threading.get_native_id(), rows)


@dataclass(slots=True, eq=False)
class FetchContext:
    deliver: Callable[
        ..., None
    ]  # called with each complete batch, or with several that were fetched together
    spawn: Spawn  # starts a coroutine as a task
    requests: RequestStats
    recorder: FetchRecorder | None = None  # of single fetches, while a trace is written
    # the session ends: no fetch begins, and exceptions raised from then on are ignored
    stopping: bool = False


class FetchStage(ABC):
    """Turns plans into raw batches."""

    def __init__(self, context: FetchContext) -> None:
        self.context = context

    @abstractmethod
    def admit(self, plan: BatchPlan) -> None:
        """Take on a plan; its `RawBatch` is delivered later."""

    def missing(self, plan: BatchPlan) -> Sequence[object]:
        """The indices of a plan whose samples have not arrived, if known; otherwise all of them."""
        return plan.indices

    def fetched_at_once(self, plan: BatchPlan) -> int | None:
        """The number of samples that are fetched at once, in batches like this one, if it is known."""
        return None

    def load(self) -> FetchLoad:
        return FetchLoad()

    def on_assembled(self, raw: RawBatch, host: HostBatch) -> HostBatch:
        """Note that a delivered batch was assembled; may change whether it ends the stream."""
        return host


@dataclass(slots=True, eq=False)
class PartialBatch:
    plan: BatchPlan
    missing: int = field(init=False)  # results that have not arrived
    # those that have arrived; `MISSING` in place of the others
    samples: list[Any] = field(init=False)
    began: float = 0.0  # when its first fetch began; 0.0 before that
    fetch_seconds: float = 0.0  # the duration of that fetch
    # slots of samples fetched by `aget` after a fetch of several
    single: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.missing = len(self.plan.indices)
        self.samples = [MISSING] * self.missing


class SampleFetch(FetchStage):
    """Fetches samples with `aget`, by at most `_size` fetchers, each of which runs one job after the other.

    Idle fetchers park. A fetcher that starts wakes the next one while more jobs are queued. So the
    pool grows as fast as fetches begin to wait, and a store that answers at once is served by one
    fetcher without waking others.
    """

    _first = True  # whether no batch has been fetched, of those that may be joined

    def __init__(
        self,
        context: FetchContext,
        dataset: Any,
        concurrency: int | AdaptiveLimit,
        *,
        hedge: bool = False,
    ) -> None:
        super().__init__(context)
        self._dataset = dataset
        self._limit = concurrency if isinstance(concurrency, AdaptiveLimit) else None
        self._size = concurrency.limit if isinstance(concurrency, AdaptiveLimit) else concurrency
        self._hedged = HedgedRequests(context.spawn, context.requests) if hedge else None
        self._partial: dict[int, PartialBatch] = {}  # by number
        self._queue: deque[Job] = deque()
        self._parked: list[asyncio.Future[None]] = []
        self._spawned = 0
        self._waking = False  # whether the fetcher that was woken last does not run yet
        self._surplus = False  # fetchers must check whether to park
        self._submitted = 0
        self._controlled = False

    def admit(self, plan: BatchPlan) -> None:
        batch = self._partial[plan.number] = PartialBatch(plan)
        if not plan.indices:
            self._deliver(batch, ())
            return
        fetch = self._dataset.aget
        if self._hedged is not None:
            fetch = functools.partial(self._fetch_hedged, self._hedged, plan.number)
        self._submit((batch, slot, fetch, index) for slot, index in enumerate(plan.indices))

    def _fetch_hedged(
        self, hedged: HedgedRequests, number: int, index: object
    ) -> Awaitable[object]:
        return hedged.first(number, 0, functools.partial(self._dataset.aget, index))

    def fetched_at_once(self, plan: BatchPlan) -> int:
        return self._size

    def missing(self, plan: BatchPlan) -> Sequence[object]:
        if (batch := self._partial.get(plan.number)) is None:
            return plan.indices
        slots = zip(plan.indices, batch.samples, strict=True)
        return [index for index, sample in slots if sample is MISSING]

    def load(self) -> FetchLoad:
        busy, queued = self._busy, len(self._queue)
        return FetchLoad(
            busy, self._size, queued, unused=0 if queued else max(0, self._size - busy)
        )

    def _make(self, batch: Any) -> None:
        """Deliver a batch of which nothing is missing."""
        self._deliver(batch, batch.samples)

    def _deliver(self, batch: PartialBatch, samples: Sequence[Any]) -> None:
        self._partial.pop(batch.plan.number, None)
        raw = RawBatch(batch.plan, samples, began=batch.began, fetch_seconds=batch.fetch_seconds)
        self.context.deliver(raw)

    @property
    def _busy(self) -> int:
        return self._spawned - len(self._parked)

    def _submit(self, jobs: Iterable[Job], *, first: bool = False) -> None:
        """Queue jobs, with `first` ahead of all others and in reverse order."""
        queue = self._queue
        before = len(queue)
        if first:
            queue.extendleft(jobs)
        else:
            queue.extend(jobs)
        self._submitted += len(queue) - before
        self._wake_one()
        if self._limit is not None and not self._controlled:
            self._controlled = True
            self.context.spawn(functools.partial(self._control, self._limit))

    def _fetch_singly(self, members: Iterable[tuple[PartialBatch, int]]) -> None:
        """Queue single samples, ahead of other jobs; an error is then about one sample, and names it."""
        jobs = []
        for batch, slot in members:
            batch.single.add(slot)
            jobs.append((batch, slot, self._dataset.aget, batch.plan.indices[slot]))
        self._submit(reversed(jobs), first=True)

    def _take_waiting(
        self,
        fetch: Callable[[Any], Coroutine[Any, Any, None]],
        plan: BatchPlan,
        most: int = sys.maxsize,
    ) -> list[BatchPlan]:
        """A plan whose job `fetch` was taken, with plans that wait behind it, to fetch at most so many samples.

        The first batch is fetched alone: joined with the others it would be complete when they are.
        """
        plans, left = [plan], 0 if self._first else most - len(plan.indices)
        self._first = False
        while self._queue and self._queue[0][2] == fetch:
            following: BatchPlan = self._queue[0][3]
            left -= len(following.indices)
            if left < 0:
                break
            self._queue.popleft()
            self._submitted -= 1  # a number of fetches
            plans.append(following)
        return plans

    def _resize(self, size: int) -> None:
        """Change `_size`; surplus fetchers park after their current job."""
        self._size = size
        self._surplus = self._busy > size
        if self._queue:
            self._wake_one()

    async def _run(self) -> None:
        context, queue, clock = self.context, self._queue, time.perf_counter
        while True:
            self._waking = False
            if len(queue) > 1:
                self._wake_one()
            while queue:
                batch, slot, fetch, argument = queue.popleft()
                # One of each batch: enough for percentiles.
                began = 0.0 if slot and context.recorder is None else clock()
                try:
                    result = await fetch(argument)
                except BaseException as error:  # user code
                    if context.stopping:
                        return
                    if batch is None:  # ours
                        raise
                    self._note(error)
                    index = batch.plan.indices[slot]
                    result = Failure.caught(error, Stage.FETCH, batch.plan.number, index=index)
                if context.stopping:  # user code has outlasted its cancellation
                    return
                completes = False
                if batch is not None:
                    if not slot:
                        batch.began, batch.fetch_seconds = began, clock() - began
                    if context.recorder is not None:
                        context.recorder.add(batch.plan.number, slot, began)
                    batch.samples[slot] = result
                    batch.missing -= 1
                    if completes := not batch.missing:
                        self._make(batch)
                # In a wait it holds no sample, and no error with the program's frames.
                batch = argument = result = None
                if completes:
                    await asyncio.sleep(0)  # the batch gets its turn, also if no fetch ever waits
                if self._surplus:
                    self._surplus = self._busy > self._size
                    if self._surplus:
                        break
            woken = asyncio.get_running_loop().create_future()
            self._parked.append(woken)
            await woken

    def _note(self, error: BaseException) -> None:
        if isinstance(error, TimeoutError):  # a sign of too many requests
            self.context.requests.throttle_events += 1

    def _wake_one(self) -> None:
        if self._busy >= self._size:
            return
        self._waking = True
        if self._parked:
            fetcher = self._parked.pop()
            if not fetcher.done():  # else it is being cancelled
                fetcher.set_result(None)
        else:
            self._spawned += 1
            self.context.spawn(self._run)

    async def _control(self, limit: AdaptiveLimit) -> None:
        """Measure at intervals while there is work; nothing is counted for a single job."""
        while self._queue or self._busy:
            await asyncio.sleep(CONTROL_INTERVAL)
            queued = len(self._queue)
            size = limit.update(
                time.monotonic(),
                completed=self._submitted - queued - self._busy,
                throttle_events=self.context.requests.throttle_events,
                full=bool(queued) and self._busy >= self._size,
            )
            if size != self._size:
                self._resize(size)
        self._controlled = False


class BatchFetch(SampleFetch):
    """Fetches with `agets`: a batch in a call, or, of a dataset that reads whole blocks, batches that wait together.

    A block, as a row group, is read once for all samples that wait for it, so a call costs little,
    and all planned batches may be in calls. If a call for several batches fails, each batch is
    fetched by itself. If that fails too, so is each of its samples, so that each error names its
    sample. Without blocks the error is that of the batch.

    Args:
        concurrency: number of samples in flight, which the calls in flight cover; an
            `AdaptiveLimit` that finds the number of calls; or the number of calls that `joins`.
        blocks: whether the dataset reads whole blocks.
        joins: whether calls are for several batches.
    """

    def __init__(
        self,
        context: FetchContext,
        dataset: Any,
        concurrency: int | AdaptiveLimit,
        *,
        blocks: bool = False,
        joins: bool = False,
    ) -> None:
        super().__init__(context, dataset, concurrency)
        self._blocks, self._joins = blocks, joins
        self._samples = 0 if joins or self._limit is not None else self._size  # 0: of any number
        self._of_call = 1  # samples of the last batch; 1 where calls are counted

    def admit(self, plan: BatchPlan) -> None:
        if self._samples:
            self._of_call = max(1, len(plan.indices))
            self._resize(-(-self._samples // self._of_call))
        self._submit(((None, 0, self._fetch_waiting, plan),))

    def fetched_at_once(self, plan: BatchPlan) -> int:
        return self._size * len(plan.indices)

    def load(self) -> FetchLoad:
        """The calls that run and wait; in samples, if `concurrency` is a number of samples."""
        busy, size, queued, *_, unused = (self._of_call * count for count in super().load())
        return FetchLoad(busy, size, queued, unused=unused)

    def _wake_one(self) -> None:
        # A fetcher that joins takes many plans: a task for each plan would find none.
        if not (self._joins and self._waking):
            super()._wake_one()

    async def _fetch_waiting(self, plan: BatchPlan) -> None:
        await self._fetch(
            self._take_waiting(self._fetch_waiting, plan, JOINED_SAMPLES) if self._joins else [plan]
        )

    async def _fetch(self, plans: Sequence[BatchPlan]) -> None:
        began = time.perf_counter()
        try:
            indices = join_indices([plan.indices for plan in plans])
            samples = (
                await self._dataset.agets(indices if self._blocks else list(indices))
                if indices
                else []
            )
            if type(samples) is not Rows:
                samples = list(samples)
            if len(samples) != len(indices):
                raise ValueError(
                    f"agets returned {len(samples)} samples for {len(indices)} indices"
                )
        except BaseException as error:  # user code, or corrupt data
            if self.context.stopping:
                raise
            self._note(error)
            if len(plans) > 1:
                for plan in plans:
                    await self._fetch([plan])
                return
            batch = PartialBatch(plans[0])
            if self._blocks:
                self._partial[plans[0].number] = batch
                self._fetch_singly((batch, slot) for slot in range(len(batch.samples)))
                return
            samples = [Failure.caught(error, Stage.FETCH, plans[0].number)]
        if self.context.stopping:  # user code has outlasted its cancellation
            return
        if self.context.recorder is not None:
            self.context.recorder.add(plans[0].number, 0, began)
        seconds = time.perf_counter() - began
        fetched, start = [], 0
        for plan in plans:
            stop = start + len(plan.indices)
            own = samples[start:stop] if len(plans) > 1 else samples
            fetched.append(RawBatch(plan, own, began=began, fetch_seconds=seconds))
            start = stop
        self.context.deliver(*fetched)
        await asyncio.sleep(0)  # other tasks get a turn
