"""The fetch stage, the only one that waits for a network or a disk: plans in, raw batches out, on the engine's loop.

A pool of long-lived coroutines takes jobs from one queue, across batch borders, so that the pipeline never drains at
the end of a batch, and no task, lock or queue hop is needed for a single sample.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import operator
import os
import threading
import time
from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace._core.array_types import join_indices
from headrace._core.batches import BatchPlan, FetchLoad, FetchTimes, HostBatch, RawBatch
from headrace._core.engine.concurrency import AdaptiveLimit
from headrace._core.engine.hedging import HedgedRequests, Spawn
from headrace._core.failure import Failure, Stage
from headrace._core.store.request_stats import RequestStats
from headrace._core.streams.map_style import positions
from headrace.errors import ShardError

CONTROL_INTERVAL = 0.02  # seconds between two updates of an `AdaptiveLimit`, which measures over 0.05 at least

# The most of a call of `BlockFetch`: taking 256 rows of 32 row groups costs 200 µs in calls of 4,096 rows, and 70 here.
JOINED_SAMPLES = 1 << 15

Job = tuple[Any, int, Any]
"""The target of a result, the slot in it, and the argument of the fetch."""

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
    deliver: Callable[..., None]  # called with each complete batch, or with several that were fetched together
    spawn: Spawn  # starts a coroutine as a task
    requests: RequestStats
    recorder: FetchRecorder | None = None  # of single fetches, while a trace is written
    stopping: bool = False  # the session ends: no fetch begins, and exceptions raised from then on are ignored


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
    samples: list[Any] = field(init=False)  # those that have arrived; `MISSING` in place of the others
    began: float = 0.0  # when its first fetch began; 0.0 before that
    fetch_seconds: float = 0.0  # the duration of that fetch

    def __post_init__(self) -> None:
        self.missing = len(self.plan.indices)
        self.samples = [MISSING] * self.missing


class FetcherPool(FetchStage):
    """A stage with at most `_size` fetchers, each of which runs one job after the other; idle ones park.

    A fetcher that starts wakes the next one while more jobs are queued. So the pool grows as fast as fetches begin to
    wait, and a store that answers at once is served by one fetcher without waking others.
    """

    def __init__(
        self, context: FetchContext, dataset: Any, concurrency: int | AdaptiveLimit, *, hedge: bool = False
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
        self._surplus = False  # fetchers must check whether to park
        self._submitted = 0
        self._controlled = False

    @abstractmethod
    def requester(self) -> Callable[[Any], Awaitable[Any]]:
        """The function that makes the request of a job from its argument."""

    def on_result(self, batch: Any, slot: int, result: Any, /) -> bool:
        """Take the result of a job that has a target; returns whether it completes a batch."""
        batch.samples[slot] = result
        batch.missing -= 1
        if batch.missing:
            return False
        self._make(batch)
        return True

    def on_error(self, error: BaseException, target: Any, slot: int, /) -> Any:
        """The result in place of an error of user code; without a target the error is ours, and is raised."""
        if target is None:
            raise error
        return Failure.caught(error, Stage.FETCH, target.plan.number, index=target.plan.indices[slot])

    def missing(self, plan: BatchPlan) -> Sequence[object]:
        batch = self._partial.get(plan.number)
        slots = zip(plan.indices, batch.samples if batch is not None else (), strict=False)
        return [index for index, sample in slots if sample is MISSING]

    def load(self) -> FetchLoad:
        busy, queued = self._busy, len(self._queue)
        return FetchLoad(busy, self._size, queued, unused=0 if queued else max(0, self._size - busy))

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

    def _resize(self, size: int) -> None:
        """Change `_size`; surplus fetchers park after their current job."""
        self._size = size
        self._surplus = self._busy > size
        if self._queue:
            self._wake_one()

    async def _run(self) -> None:
        context, queue, clock = self.context, self._queue, time.perf_counter
        fetch, on_result = self.requester(), self.on_result
        while True:
            if len(queue) > 1:
                self._wake_one()
            while queue:
                target, slot, argument = queue.popleft()
                # One of each batch: enough for percentiles.
                began = 0.0 if slot and context.recorder is None else clock()
                try:
                    result = await fetch(argument)
                except BaseException as error:  # user code
                    if context.stopping:
                        return
                    if isinstance(error, TimeoutError):  # a sign of too many requests
                        context.requests.throttle_events += 1
                    result = self.on_error(error, target, slot)
                if context.stopping:  # user code has outlasted its cancellation
                    return
                if began and target is not None:  # otherwise the job has timed its requests
                    if not slot:
                        target.began, target.fetch_seconds = began, clock() - began
                    if context.recorder is not None:
                        context.recorder.add(target.plan.number, slot, began)
                completes = target is not None and on_result(target, slot, result)
                # In a wait it holds no sample, and no error with the program's frames.
                target = argument = result = None
                if completes:
                    await asyncio.sleep(0)  # the batch gets its turn, also if no fetch ever waits
                if self._surplus:
                    self._surplus = self._busy > self._size
                    if self._surplus:
                        break
            woken = asyncio.get_running_loop().create_future()
            self._parked.append(woken)
            await woken

    def _wake_one(self) -> None:
        if self._busy >= self._size:
            return
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


class SampleFetch(FetcherPool):
    def admit(self, plan: BatchPlan) -> None:
        batch = self._partial[plan.number] = PartialBatch(plan)
        if not plan.indices:
            self._deliver(batch, ())
            return
        wanted: Iterable[object] = plan.indices
        if self._hedged is not None:
            wanted = zip(itertools.repeat(plan.number), plan.indices, strict=False)
        self._submit(zip(itertools.repeat(batch), itertools.count(), wanted, strict=False))

    def requester(self) -> Any:
        return self._dataset.aget if self._hedged is None else self._fetch_hedged

    def _fetch_hedged(self, wanted: tuple[int, object]) -> Awaitable[object]:
        assert self._hedged is not None
        number, index = wanted
        return self._hedged.first(number, 0, functools.partial(self._dataset.aget, index))

    def fetched_at_once(self, plan: BatchPlan) -> int:
        return self._size


class BatchFetch(FetcherPool):
    """Fetches with `agets`, a batch in a call.

    `concurrency` is the number of samples in flight, which the calls in flight cover; or an `AdaptiveLimit` that finds
    the number of calls.
    """

    _of_call = 1  # samples of the last batch; 1 where the number of calls is found
    _samples = 0  # in flight; 0 where the number of calls is found

    def admit(self, plan: BatchPlan) -> None:
        if self._limit is None:
            self._samples = self._samples or self._size
            self._of_call = max(1, len(plan.indices))
            self._resize(-(-self._samples // self._of_call))
        batch = self._partial[plan.number] = PartialBatch(plan)
        self._submit(((batch, 0, list(plan.indices)),))

    def requester(self) -> Any:
        return self._dataset.agets

    def on_result(self, batch: PartialBatch, _slot: int, result: Any) -> bool:
        wanted = len(batch.plan.indices)
        try:
            samples = [result] if isinstance(result, Failure) else list(result)
            if len(samples) != wanted and not isinstance(result, Failure):
                raise ValueError(f"agets returned {len(samples)} samples for {wanted} indices")
        except BaseException as error:  # user code
            samples = [self.on_error(error, batch, 0)]
        self._deliver(batch, samples)
        return True

    def on_error(self, error: BaseException, batch: PartialBatch, _slot: int) -> Failure:
        return Failure.caught(error, Stage.FETCH, batch.plan.number)

    def fetched_at_once(self, plan: BatchPlan) -> int:
        return self._size * len(plan.indices)

    def load(self) -> FetchLoad:
        """The calls that run and wait; in samples, if `concurrency` is a number of samples."""
        busy, size, queued, *_, unused = (self._of_call * count for count in super().load())
        return FetchLoad(busy, size, queued, unused=unused)


class BlockFetch(FetcherPool):
    """Fetches from a dataset that reads whole blocks, as row groups: batches that wait together by one call of `agets`.

    A block is read once for all samples that wait for it, so a call costs little, and all planned batches may be in
    calls. If a call fails, each batch is fetched by itself. If that fails too, so are its samples of each block, and
    then single samples, so that each error names its sample.

    Args:
        calls: number of calls in flight.
        samples: the most samples of a call for several batches.
    """

    def __init__(self, context: FetchContext, dataset: Any, calls: int, samples: int = JOINED_SAMPLES) -> None:
        super().__init__(context, dataset, calls)
        self._most_samples = samples
        self._waiting: deque[BatchPlan] = deque()
        self._first = True

    def admit(self, plan: BatchPlan) -> None:
        self._waiting.append(plan)
        self._fetch_soon()

    def _fetch_soon(self) -> None:
        if self._waiting and not self._queue:
            self._submit(((None, 0, self._fetch_waiting),))

    def requester(self) -> Any:
        return operator.call

    def missing(self, plan: BatchPlan) -> Sequence[object]:
        return plan.indices

    def fetched_at_once(self, plan: BatchPlan) -> int:
        return self._size * len(plan.indices)

    async def _fetch_waiting(self) -> None:
        """Fetch the batches that wait; the first one alone, since joined it would be complete when the others are."""
        plans: list[BatchPlan] = []
        left = 1 if self._first else self._most_samples
        while self._waiting and (not plans or left >= len(self._waiting[0].indices)):
            left -= len(self._waiting[0].indices)
            plans.append(self._waiting.popleft())
        self._fetch_soon()
        if plans:
            self._first = False
            await self._fetch(plans)

    async def _fetch(self, plans: Sequence[BatchPlan]) -> None:
        began = time.perf_counter()
        try:
            indices = join_indices([plan.indices for plan in plans])
            samples = await self._dataset.agets(indices) if indices else ()
            if len(samples) != len(indices):
                raise ValueError(f"agets returned {len(samples)} samples for {len(indices)} indices")
        except BaseException:  # user code, or corrupt data
            if self.context.stopping:
                raise
            if len(plans) == 1:
                await self._fetch_singly(plans[0])
                return
            for plan in plans:
                await self._fetch([plan])
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

    async def _fetch_singly(self, plan: BatchPlan) -> None:
        """Fetch the samples of each block by themselves, and singly if that fails and the block can be read."""
        batch = PartialBatch(plan)
        for slots in self._by_block(plan.indices):
            indices = [plan.indices[slot] for slot in slots]
            try:
                found = [*await self._dataset.agets(indices)]
            except BaseException as error:  # user code, or corrupt data
                found = [error] * len(slots)
                if not (isinstance(error, ShardError) and error.of_block) and not self.context.stopping:
                    found = await asyncio.gather(*map(self._dataset.aget, indices), return_exceptions=True)
            if self.context.stopping:
                return
            for slot, sample in zip(slots, found, strict=True):
                failed = isinstance(sample, BaseException)
                batch.samples[slot] = self.on_error(sample, batch, slot) if failed else sample
        self._make(batch)

    def _by_block(self, indices: Sequence[Any]) -> list[list[int]]:
        """The slots of the samples of each block; each slot by itself if an index is wrong."""
        try:
            places = positions(indices, len(self._dataset))
        except Exception:  # an index is wrong, or of an odd type: fetched by itself, it is the error of its sample
            return [[slot] for slot in range(len(indices))]
        numbers = np.searchsorted(self._dataset.blocks.borders, places, side="right")
        return [np.flatnonzero(numbers == number).tolist() for number in np.unique(numbers)]
