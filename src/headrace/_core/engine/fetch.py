"""The fetch stage, the only one that waits for a network or a disk: plans in, raw batches out, on the engine's loop.

A pool of long-lived coroutines takes jobs from one queue, across batch borders, so that the pipeline never drains at
the end of a batch, and no task, lock or queue hop is needed for a single sample.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import threading
import time
from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary

from headrace._core.batches import BatchPlan, FetchLoad, FetchTimes, HostBatch, RawBatch
from headrace._core.engine.concurrency import AdaptiveLimit
from headrace._core.engine.hedging import HedgedRequests, Spawn
from headrace._core.failure import Failure, Stage
from headrace._core.store.request_stats import RequestStats

CONTROL_INTERVAL = 0.02  # seconds between two updates of an `AdaptiveLimit`, which measures over 0.05 at least

Deliver = Callable[[RawBatch], None]
Job = tuple[Any, int, Any]
"""The target of a result, the slot in it, and the argument of the fetch."""

MISSING = object()
"""In place of a sample that has not arrived."""


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


class FetchStage(ABC):
    """Turns plans into raw batches.

    Constructors take `deliver`, which is called with each complete batch, `spawn`, which starts a coroutine as a task,
    and `requests`, the session's counters.
    """

    _stopping = False
    _recorder: FetchRecorder | None = None

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
        """The fetches that run and wait now."""
        return FetchLoad()

    def trace(self, recorder: FetchRecorder | None) -> None:
        """Record the times of single fetches from now on, or no longer; a stage without single fetches has none."""
        self._recorder = recorder

    def on_assembled(self, raw: RawBatch, host: HostBatch) -> HostBatch:
        """Note that a delivered batch was assembled; may change whether it ends the stream."""
        return host

    def stop(self) -> None:
        """Begin no more fetches. Cancellation follows; exceptions raised after this are ignored."""
        self._stopping = True


class FetcherPool(FetchStage):
    """A stage with at most `_size` fetchers, each of which runs one job after the other; idle ones park.

    A fetcher that starts wakes the next one while more jobs are queued. So the pool grows as fast as fetches begin to
    wait, and a store that answers at once is served by one fetcher without waking others.

    Args:
        concurrency: the number of fetchers, or an `AdaptiveLimit` that finds it.
        hedge: whether slow requests are repeated.

    Attributes:
        fetch: makes the request of a job from its argument.
    """

    fetch: Callable[[Any], Awaitable[Any]]

    def __init__(
        self,
        concurrency: int | AdaptiveLimit,
        deliver: Deliver,
        spawn: Spawn,
        requests: RequestStats,
        *,
        hedge: bool = False,
    ) -> None:
        self._limit = concurrency if isinstance(concurrency, AdaptiveLimit) else None
        self._size = concurrency.limit if isinstance(concurrency, AdaptiveLimit) else concurrency
        self._deliver = deliver
        self._spawn = spawn
        self._requests = requests
        self._hedged = HedgedRequests(spawn, requests) if hedge else None
        self._queue: deque[Job] = deque()
        self._parked: list[asyncio.Future[None]] = []
        self._spawned = 0
        self._surplus = False  # fetchers must check whether to park
        self._submitted = 0
        self._controlled = False

    def on_result(self, target: Any, slot: int, result: Any, /) -> bool:
        """Take a result; returns whether it completes a batch. By default a job uses its own."""
        return False

    def on_error(self, error: BaseException, target: Any, slot: int, /) -> Any:
        """The result in place of an error of user code; by default jobs handle these, and the error is ours."""
        raise error

    def on_timed(self, target: Any, slot: int, began: float) -> None:
        """Note a job that ends now: that of slot 0 of each batch, and all while a trace is written."""
        if not slot:
            target.began, target.fetch_seconds = began, time.perf_counter() - began
        if self._recorder is not None:
            self._recorder.add(target.plan.number, slot, began)

    def load(self) -> FetchLoad:
        busy, queued = self._busy, len(self._queue)
        return FetchLoad(busy, self._size, queued, unused=0 if queued else max(0, self._size - busy))

    def stop(self) -> None:
        super().stop()
        self._queue.clear()

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
            self._spawn(functools.partial(self._control, self._limit))

    def _count_timeout(self, error: BaseException) -> None:
        if isinstance(error, TimeoutError):  # a sign of too many requests
            self._requests.throttle_events += 1

    def _resize(self, size: int) -> None:
        """Change `_size`; surplus fetchers park after their current job."""
        self._size = size
        self._surplus = self._busy > size
        if self._queue:
            self._wake_one()

    async def _run(self) -> None:
        queue, clock, fetch, on_result = self._queue, time.perf_counter, self.fetch, self.on_result
        while True:
            if len(queue) > 1:
                self._wake_one()
            while queue:
                target, slot, argument = queue.popleft()
                began = 0.0 if slot and self._recorder is None else clock()  # one of each batch: enough for percentiles
                try:
                    result = await fetch(argument)
                except BaseException as error:  # user code
                    if self._stopping:
                        return
                    self._count_timeout(error)
                    result = self.on_error(error, target, slot)
                if began:
                    self.on_timed(target, slot, began)
                if on_result(target, slot, result):
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
            self._spawn(self._run)

    async def _control(self, limit: AdaptiveLimit) -> None:
        """Measure at intervals while there is work; nothing is counted for a single job."""
        while self._queue or self._busy:
            await asyncio.sleep(CONTROL_INTERVAL)
            queued = len(self._queue)
            size = limit.update(
                time.monotonic(),
                completed=self._submitted - queued - self._busy,
                throttle_events=self._requests.throttle_events,
                full=bool(queued) and self._busy >= self._size,
            )
            if size != self._size:
                self._resize(size)
        self._controlled = False


class PartialBatch:
    """A batch some of whose samples have not arrived.

    Attributes:
        missing: the number of results that have not arrived.
        samples: those that have arrived; `MISSING` in place of the others.
        began: when its first fetch began; 0.0 before that.
        fetch_seconds: the duration of that fetch.
    """

    __slots__ = ("__weakref__", "began", "fetch_seconds", "missing", "plan", "samples")

    def __init__(self, plan: BatchPlan) -> None:
        self.plan = plan
        self.missing = len(plan.indices)
        self.samples: list[object] = [MISSING] * self.missing
        self.began = self.fetch_seconds = 0.0

    def raw(self, samples: Sequence[Any]) -> RawBatch:
        return RawBatch(self.plan, samples, began=self.began, fetch_seconds=self.fetch_seconds)


class SampleFetch(FetcherPool):
    """Fetches samples with `aget`, `concurrency` at a time; other arguments as of `FetcherPool`."""

    def __init__(
        self,
        aget: Callable[[object], Awaitable[object]],
        concurrency: int | AdaptiveLimit,
        deliver: Deliver,
        spawn: Spawn,
        requests: RequestStats,
        *,
        hedge: bool = False,
    ) -> None:
        super().__init__(concurrency, deliver, spawn, requests, hedge=hedge)
        self._aget = aget
        self.fetch = self._fetch_hedged if hedge else aget
        self._partial: WeakValueDictionary[int, PartialBatch] = WeakValueDictionary()  # by number, for `missing`

    def admit(self, plan: BatchPlan) -> None:
        if not plan.indices:
            self._deliver(RawBatch(plan, ()))
            return
        batch = self._partial[plan.number] = PartialBatch(plan)
        wanted: Iterable[object] = plan.indices
        if self._hedged is not None:
            wanted = zip(itertools.repeat(plan.number), plan.indices, strict=False)
        self._submit(zip(itertools.repeat(batch), itertools.count(), wanted, strict=False))

    def missing(self, plan: BatchPlan) -> Sequence[object]:
        batch = self._partial.get(plan.number)
        slots = zip(plan.indices, batch.samples if batch is not None else (), strict=False)
        return [index for index, sample in slots if sample is MISSING]

    def _fetch_hedged(self, wanted: tuple[int, object]) -> Awaitable[object]:
        assert self._hedged is not None
        number, index = wanted
        return self._hedged.first(number, 0, functools.partial(self._aget, index))

    def on_result(self, batch: PartialBatch, slot: int, sample: object) -> bool:
        batch.samples[slot] = sample
        batch.missing -= 1
        if batch.missing:
            return False
        self._deliver(batch.raw(batch.samples))
        return True

    def on_error(self, error: BaseException, batch: PartialBatch, slot: int) -> Failure:
        return Failure.caught(error, stage=Stage.FETCH, batch=batch.plan.number, index=batch.plan.indices[slot])

    def fetched_at_once(self, plan: BatchPlan) -> int:
        return self._size


class BatchFetch(FetcherPool):
    """Fetches with `agets`, a batch in a call; other arguments as of `FetcherPool`.

    Args:
        concurrency: samples in flight, which the calls in flight cover; or an `AdaptiveLimit` that finds the number of
            calls.
    """

    def __init__(
        self,
        agets: Callable[[list[object]], Awaitable[Sequence[object]]],
        concurrency: int | AdaptiveLimit,
        deliver: Deliver,
        spawn: Spawn,
        requests: RequestStats,
    ) -> None:
        super().__init__(concurrency, deliver, spawn, requests)
        self.fetch = agets
        self._samples = 0 if isinstance(concurrency, AdaptiveLimit) else concurrency  # in flight
        self._of_call = 1  # samples of the last batch; 1 where the number of calls is found

    def admit(self, plan: BatchPlan) -> None:
        if self._samples:
            self._of_call = max(1, len(plan.indices))
            self._resize(-(-self._samples // self._of_call))
        self._submit(((PartialBatch(plan), 0, list(plan.indices)),))

    def on_result(self, batch: PartialBatch, _slot: int, result: Any) -> bool:
        wanted = len(batch.plan.indices)
        try:
            samples = [result] if isinstance(result, Failure) else list(result)
            if len(samples) != wanted and not isinstance(result, Failure):
                raise ValueError(f"agets returned {len(samples)} samples for {wanted} indices")
        except BaseException as error:  # user code
            samples = [self.on_error(error, batch, 0)]
        self._deliver(batch.raw(samples))
        return True

    def on_error(self, error: BaseException, batch: PartialBatch, _slot: int) -> Failure:
        return Failure.caught(error, stage=Stage.FETCH, batch=batch.plan.number)

    def fetched_at_once(self, plan: BatchPlan) -> int:
        return self._size * len(plan.indices)

    def load(self) -> FetchLoad:
        """The calls that run and wait; in samples, if `concurrency` is a number of samples."""
        busy, size, queued, *_, unused = (self._of_call * count for count in super().load())
        return FetchLoad(busy, size, queued, unused=unused)
