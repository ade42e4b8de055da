"""The fetch stage: from plans to raw batches, on the event loop.

No other stage waits for a network or a disk. A pool of long-lived coroutines takes jobs from a
queue, across batch borders. So the pipeline never drains at the end of a batch, and a single sample
needs no task, lock or queue of its own.
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

from headrace._base.array_types import join_indices
from headrace._engine.concurrency import AdaptiveLimit
from headrace._engine.hedging import HedgedRequests, Spawn
from headrace._records.batches import (
    BatchPlan,
    FetchLoad,
    FetchTimes,
    HostBatch,
    RawBatch,
    Rows,
)
from headrace._records.failure import Failure, Stage
from headrace._store.request_stats import RequestStats

# Seconds between two updates of an `AdaptiveLimit`. A measurement takes 0.05 s at least.
CONTROL_INTERVAL = 0.02

# Maximum number of samples in a call of `agets` for several batches. Taking 256 rows of 32 row
# groups costs 25 µs with this limit, and 47 µs in calls of 4,096 rows.
JOINED_SAMPLES = 1 << 15

Fetch = Callable[[Any], Awaitable[Any]]
Job = tuple[Any, int, Fetch, Any]
"""The batch of a sample, the sample's slot in the batch, the fetch function, and its argument.

If the batch is None, the function delivers the result, handles errors of user code and measures the
time."""

MISSING = object()


class FetchRecorder:
    """Records the ended fetches of a session for a trace.

    The next batch carries the records to the consumer. Use on the engine's loop only.
    """

    def __init__(self) -> None:
        self._rows = array("d")

    def add(self, batch: int, slot: int, began: float) -> None:
        """Add a fetch that ends now. For the arguments see `FetchTimes`."""
        self._rows.extend((batch, slot, began, time.perf_counter()))

    def take(self) -> FetchTimes:
        rows = self._rows.tobytes()
        del self._rows[:]
        return FetchTimes(os.getpid(), threading.get_native_id(), rows)


@dataclass(slots=True, eq=False)
class FetchContext:
    deliver: Callable[[RawBatch], None]  # takes a complete batch
    spawn: Spawn  # starts a coroutine as a task
    requests: RequestStats
    hedges: bool = False  # whether slow requests are sent twice
    # Recorder of single fetches, while a trace is written.
    recorder: FetchRecorder | None = None
    # Whether the session is ending. Then no fetch begins, and exceptions are ignored.
    stopping: bool = False

    def hedged_requests(self) -> HedgedRequests | None:
        """Return the hedging for a stage, or None without hedging."""
        return HedgedRequests(self.spawn, self.requests) if self.hedges else None


class FetchStage(ABC):
    """Turns plans into raw batches."""

    def __init__(self, context: FetchContext) -> None:
        self.context = context
        self.deliver = context.deliver  # takes a complete batch

    @abstractmethod
    def admit(self, plan: BatchPlan) -> None:
        """Take on a plan. The plan's `RawBatch` is delivered later."""

    def missing(self, plan: BatchPlan) -> Sequence[object]:
        """Return the indices of missing samples.

        If the missing samples are unknown, return all indices of the plan.
        """
        return plan.indices

    def fetched_at_once(self, plan: BatchPlan) -> int | None:
        """Return the number of samples fetched at once, if known.

        `plan` is an example of a batch.
        """
        return None

    def load(self) -> FetchLoad:
        return FetchLoad()

    def on_assembled(self, raw: RawBatch, host: HostBatch) -> HostBatch:
        """Note the assembly of a delivered batch.

        The result may differ in `end`: whether the batch ends the stream.
        """
        return host


@dataclass(slots=True, eq=False)
class PartialBatch:
    plan: BatchPlan
    missing: int = field(init=False)  # number of missing results
    # Results, with `MISSING` in place of missing results.
    samples: list[Any] = field(init=False)
    began: float = 0.0  # start time of the first fetch; 0.0 before the start
    fetch_seconds: float = 0.0  # duration of the first fetch
    # Slots of samples fetched by `aget` after a joint fetch.
    single: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.missing = len(self.plan.indices)
        self.samples = [MISSING] * self.missing


class Fetchers:
    """A pool of long-lived coroutines that run jobs.

    At most `size` fetchers exist, and each fetcher runs a job after the other. Idle fetchers park.
    When a fetcher starts and more jobs are queued, the fetcher wakes another fetcher. So the pool
    grows as fast as fetches begin to wait. A store that answers at once is served by a single
    fetcher.

    Attributes:
        size: maximum number of running jobs.
    """

    def __init__(self, context: FetchContext, concurrency: int | AdaptiveLimit) -> None:
        self.context = context
        self._limit = concurrency if isinstance(concurrency, AdaptiveLimit) else None
        self.size = (
            concurrency.limit if isinstance(concurrency, AdaptiveLimit) else concurrency
        )
        self._queue: deque[Job] = deque()
        self._parked: list[asyncio.Future[None]] = []
        self._spawned = 0
        self._waking = False  # whether the last woken fetcher does not run yet
        self._surplus = False  # whether fetchers must check if they have to park
        self._submitted = 0
        self._controlled = False

    def load(self) -> FetchLoad:
        busy, queued = self._busy, len(self._queue)
        return FetchLoad(
            busy, self.size, queued, unused=0 if queued else max(0, self.size - busy)
        )

    @property
    def _busy(self) -> int:
        return self._spawned - len(self._parked)

    def submit(self, jobs: Iterable[Job], *, first: bool = False) -> None:
        """Queue jobs.

        With `first`, the jobs go before all other jobs, in reverse order.
        """
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

    def _resize(self, size: int) -> None:
        """Change `size`. Surplus fetchers park after the current job."""
        self.size = size
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
                # Measure a single fetch for each batch: enough for percentiles.
                began = 0.0 if slot and context.recorder is None else clock()
                try:
                    result = await fetch(argument)
                except BaseException as error:  # user code
                    if context.stopping:
                        return
                    if batch is None:  # an error of headrace
                        raise
                    self.note_failed(error)
                    index = batch.plan.indices[slot]
                    result = Failure.caught(
                        error, Stage.FETCH, batch.plan.number, index=index
                    )
                if context.stopping:  # user code has outlasted the cancellation
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
                # While waiting, hold no sample, and no error with frames of the program.
                batch = argument = result = None
                if completes:
                    # Send the batch now, even if no fetch ever waits.
                    await asyncio.sleep(0)
                if self._surplus:
                    self._surplus = self._busy > self.size
                    if self._surplus:
                        break
            woken = asyncio.get_running_loop().create_future()
            self._parked.append(woken)
            await woken

    def _make(self, batch: Any) -> None:
        """Take a batch, after the last job of the batch."""
        raise NotImplementedError  # jobs without a batch

    def note_failed(self, error: BaseException) -> None:
        """Note the failure of a fetch."""
        if isinstance(error, TimeoutError):  # a sign of too many requests
            self.context.requests.throttle_events += 1

    def _wake_one(self) -> None:
        if self._busy >= self.size:
            return
        self._waking = True
        if self._parked:
            fetcher = self._parked.pop()
            if not fetcher.done():  # otherwise the fetcher is being cancelled
                fetcher.set_result(None)
        else:
            self._spawned += 1
            self.context.spawn(self._run)

    async def _control(self, limit: AdaptiveLimit) -> None:
        """Measure at intervals while there is work.

        Nothing is counted for a single job.
        """
        while self._queue or self._busy:
            await asyncio.sleep(CONTROL_INTERVAL)
            queued = len(self._queue)
            size = limit.update(
                time.monotonic(),
                completed=self._submitted - queued - self._busy,
                throttle_events=self.context.requests.throttle_events,
                full=bool(queued) and self._busy >= self.size,
            )
            if size != self.size:
                self._resize(size)
        self._controlled = False


class SampleFetch(Fetchers, FetchStage):
    """Fetches samples with `aget`, in a pool of fetchers."""

    _first = True  # whether `_take_waiting` has not been called yet

    def __init__(
        self, context: FetchContext, dataset: Any, concurrency: int | AdaptiveLimit
    ) -> None:
        Fetchers.__init__(self, context, concurrency)
        FetchStage.__init__(self, context)
        self._dataset = dataset
        self._hedged = context.hedged_requests()
        self._partial: dict[int, PartialBatch] = {}  # by number

    def admit(self, plan: BatchPlan) -> None:
        batch = self._partial[plan.number] = PartialBatch(plan)
        if not plan.indices:
            self._deliver(batch, ())
            return
        fetch = self._hedge(self._dataset.aget, plan.number)
        self.submit(
            (batch, slot, fetch, index) for slot, index in enumerate(plan.indices)
        )

    def _hedge(self, fetch: Fetch, number: int) -> Fetch:
        """Return a fetch function for samples of a batch, hedged if wanted."""
        return fetch if self._hedged is None else self._hedged.wrap(fetch, number)

    def fetched_at_once(self, plan: BatchPlan) -> int:
        return self.size

    def missing(self, plan: BatchPlan) -> Sequence[object]:
        if (batch := self._partial.get(plan.number)) is None:
            return plan.indices
        slots = zip(plan.indices, batch.samples, strict=True)
        return [index for index, sample in slots if sample is MISSING]

    def _make(self, batch: Any) -> None:
        """Deliver a complete batch."""
        self._deliver(batch, batch.samples)

    def _deliver(self, batch: PartialBatch, samples: Sequence[Any]) -> None:
        self._partial.pop(batch.plan.number, None)
        raw = RawBatch(
            batch.plan, samples, began=batch.began, fetch_seconds=batch.fetch_seconds
        )
        self.deliver(raw)

    def _fetch_singly(self, members: Iterable[tuple[PartialBatch, int]]) -> None:
        """Queue single samples, ahead of other jobs.

        An error then concerns a single sample, and names the sample.
        """
        jobs = []
        for batch, slot in members:
            batch.single.add(slot)
            jobs.append((batch, slot, self._dataset.aget, batch.plan.indices[slot]))
        self.submit(reversed(jobs), first=True)

    def _take_waiting(
        self,
        fetch: Callable[[Any], Coroutine[Any, Any, None]],
        plan: BatchPlan,
        most: int = sys.maxsize,
    ) -> list[BatchPlan]:
        """Return a plan and waiting plans, for a joint fetch.

        The first batch is fetched alone: a joint fetch would delay the first batch until all
        batches arrive.

        Args:
            fetch: The function of the plans' jobs.
            plan: The first plan, already taken from the queue.
            most: Maximum number of samples of all plans.
        """
        plans, left = [plan], 0 if self._first else most - len(plan.indices)
        self._first = False
        while self._queue:
            _, _, function, following = self._queue[0]
            if function != fetch:
                break
            left -= len(following.indices)
            if left < 0:
                break
            self._queue.popleft()
            self._submitted -= 1  # the number counts fetches, not plans
            plans.append(following)
        return plans


class RowFetch(SampleFetch):
    """Applies a coroutine function to each row that another stage reads.

    Args:
        fetch: The function.
        rows: The stage that reads the rows, with the same context.
    """

    def __init__(
        self,
        context: FetchContext,
        fetch: Fetch,
        concurrency: int | AdaptiveLimit,
        rows: FetchStage,
    ) -> None:
        super().__init__(context, None, concurrency)
        self._fetch = fetch
        self._rows = rows
        rows.deliver = self._on_rows

    def admit(self, plan: BatchPlan) -> None:
        self._rows.admit(plan)

    def missing(self, plan: BatchPlan) -> Sequence[object]:
        if plan.number in self._partial:
            return super().missing(plan)
        return self._rows.missing(plan)

    def _on_rows(self, raw: RawBatch) -> None:
        """Take the rows of a batch. A failed row is not fetched."""
        rows = raw.samples
        found = [slot for slot, row in enumerate(rows) if type(row) is not Failure]
        if not found:
            self.deliver(raw)
            return
        batch = self._partial[raw.plan.number] = PartialBatch(raw.plan)
        batch.began, batch.fetch_seconds = raw.began, raw.fetch_seconds
        batch.missing = len(found)
        batch.samples = [row if type(row) is Failure else MISSING for row in rows]
        fetch = self._hedge(self._fetch, raw.plan.number)
        self.submit((batch, slot, fetch, rows[slot]) for slot in found)


class BatchFetch(SampleFetch):
    """Fetches with `agets`: one or several batches in a call.

    Several batches share a call if the dataset reads whole blocks, for example row groups. A block
    is then read once for all waiting samples. A call therefore costs little, and all planned
    batches may be in calls.

    If a call for several batches fails, each batch is fetched alone. If this fails too, each sample
    is fetched alone if `singly`, and each error names the sample. Otherwise the error is the error
    of the batch.

    Args:
        concurrency: With an `AdaptiveLimit`, the search for the number of calls. With `joins`, the
            number of calls. Otherwise the number of samples in flight, as the sum over the calls.
        blocks: Whether the dataset reads whole blocks.
        singly: Whether to fetch the samples of a failed batch alone, with `aget`.
        joins: Whether a call may fetch several batches.
    """

    def __init__(
        self,
        context: FetchContext,
        dataset: Any,
        concurrency: int | AdaptiveLimit,
        *,
        blocks: bool = False,
        singly: bool = False,
        joins: bool = False,
    ) -> None:
        super().__init__(context, dataset, concurrency)
        self._blocks, self._singly, self._joins = blocks, singly, joins
        # Number of samples in flight; 0 if `concurrency` counts calls.
        self._samples = 0 if joins or self._limit is not None else self.size
        self._of_call = 1  # samples of the last batch; 1 if `concurrency` counts calls

    def admit(self, plan: BatchPlan) -> None:
        if self._samples:
            self._of_call = max(1, len(plan.indices))
            self._resize(-(-self._samples // self._of_call))
        self.submit(((None, 0, self._fetch_waiting, plan),))

    def fetched_at_once(self, plan: BatchPlan) -> int:
        return self.size * len(plan.indices)

    def load(self) -> FetchLoad:
        """Return the running and waiting calls.

        If `concurrency` is a number of samples, the result counts samples.
        """
        return FetchLoad(*(self._of_call * count for count in super().load()))

    def _wake_one(self) -> None:
        # A joint fetch takes many plans. With a task for each plan, most tasks would find no plan.
        if not (self._joins and self._waking):
            super()._wake_one()

    async def _fetch_waiting(self, plan: BatchPlan) -> None:
        most = JOINED_SAMPLES if self._joins else 0
        await self._fetch(self._take_waiting(self._fetch_waiting, plan, most))

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
            self.note_failed(error)
            if len(plans) > 1:
                for plan in plans:
                    await self._fetch([plan])
                return
            batch = PartialBatch(plans[0])
            if self._singly:
                self._partial[plans[0].number] = batch
                self._fetch_singly((batch, slot) for slot in range(len(batch.samples)))
                return
            samples = [Failure.caught(error, Stage.FETCH, plans[0].number)]
        if self.context.stopping:  # user code has outlasted the cancellation
            return
        if self.context.recorder is not None:
            self.context.recorder.add(plans[0].number, 0, began)
        seconds = time.perf_counter() - began
        start = 0
        for plan in plans:
            stop = start + len(plan.indices)
            own = samples[start:stop] if len(plans) > 1 else samples
            self.deliver(RawBatch(plan, own, began=began, fetch_seconds=seconds))
            start = stop
        await asyncio.sleep(0)  # give other tasks a turn
