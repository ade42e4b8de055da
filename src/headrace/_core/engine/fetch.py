"""The fetch stage, the only one that waits for a network or a disk: plans in, raw batches out, on the engine's loop.

Samples are fetched across batch borders, so that the pipeline never drains at the end of a batch, and no task, lock or
queue hop is needed for a single sample.
"""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary

from headrace._core.batches import BatchPlan, FetchLoad, HostBatch, RawBatch
from headrace._core.engine.concurrency import AdaptiveLimit
from headrace._core.engine.fetch_pool import FetcherPool, FetchRecorder, Spawn
from headrace._core.engine.hedging import HedgedRequests
from headrace._core.failure import Failure, Stage
from headrace._core.store.request_stats import RequestStats

Deliver = Callable[[RawBatch], None]

MISSING = object()
"""In place of a sample that has not arrived."""


class FetchStage(ABC):
    """Turns plans into raw batches.

    Constructors take `deliver`, which is called with each complete batch, `spawn`, which starts a coroutine as a task,
    and `requests`, the session's counters.
    """

    _stopping = False

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

    def on_consumed(self, number: int) -> None:  # noqa: B027 - by default nothing is held until then
        """Note that all batches up to this number have been taken."""

    def trace(self, recorder: FetchRecorder | None) -> None:  # noqa: B027 - not every stage has single fetches
        """Record the times of single fetches from now on, or no longer; by default none are recorded."""

    def on_assembled(self, raw: RawBatch, host: HostBatch) -> HostBatch:
        """Note that a delivered batch was assembled; may change whether it ends the stream."""
        return host

    def stop(self) -> None:
        """Begin no more fetches. Cancellation follows; exceptions raised after this are ignored."""
        self._stopping = True


class PartialBatch:
    """A batch some of whose samples have not arrived.

    Attributes:
        number: the batch's.
        missing: the number of samples that have not arrived.
        samples: those that have arrived; `MISSING` in place of the others.
        began: when its first fetch began; 0.0 before that.
        fetch_seconds: the duration of that fetch.
    """

    __slots__ = ("__weakref__", "began", "fetch_seconds", "missing", "number", "plan", "samples")

    def __init__(self, plan: BatchPlan) -> None:
        self.plan = plan
        self.number = plan.number
        self.missing = len(plan.indices)
        self.samples: list[object] = [MISSING] * self.missing
        self.began = self.fetch_seconds = 0.0

    def raw(self, samples: Sequence[Any]) -> RawBatch:
        return RawBatch(self.plan, samples, began=self.began, fetch_seconds=self.fetch_seconds)


class SampleFetch(FetchStage):
    """Fetches samples with `aget`, `concurrency` at a time.

    Args:
        concurrency: calls in flight, or an `AdaptiveLimit` that finds the number.
    """

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
        self._aget = aget
        self._hedged = HedgedRequests(spawn, requests) if hedge else None
        self.fetch: Callable[[Any], Awaitable[object]] = self._fetch_hedged if hedge else aget
        self._deliver = deliver
        self._pool = FetcherPool(concurrency, self, spawn, requests)
        self._partial: WeakValueDictionary[int, PartialBatch] = WeakValueDictionary()  # by number, for `missing`

    def admit(self, plan: BatchPlan) -> None:
        if not plan.indices:
            self._deliver(RawBatch(plan, ()))
            return
        batch = self._partial[plan.number] = PartialBatch(plan)
        wanted: Iterable[object] = plan.indices
        if self._hedged is not None:
            wanted = zip(itertools.repeat(plan.number), plan.indices, strict=False)
        self._pool.submit(zip(itertools.repeat(batch), itertools.count(), wanted, strict=False))

    def missing(self, plan: BatchPlan) -> Sequence[object]:
        batch = self._partial.get(plan.number)
        slots = zip(plan.indices, batch.samples if batch is not None else (), strict=False)
        return [index for index, sample in slots if sample is MISSING]

    def stop(self) -> None:
        super().stop()
        self._pool.stop()

    def _fetch_hedged(self, wanted: tuple[int, object]) -> Awaitable[object]:
        assert self._hedged is not None
        number, index = wanted
        return self._hedged.first(number, 0, functools.partial(self._aget, index))

    def on_result(self, batch: PartialBatch, slot: int, sample: object) -> bool:
        """Put a sample into its batch, and deliver the batch when it is complete."""
        batch.samples[slot] = sample
        batch.missing -= 1
        if batch.missing:
            return False
        self._deliver(batch.raw(batch.samples))
        return True

    def on_first(self, batch: PartialBatch, began: float, seconds: float) -> None:
        batch.began, batch.fetch_seconds = began, seconds

    def trace(self, recorder: FetchRecorder | None) -> None:
        self._pool.trace(recorder)

    def fetched_at_once(self, plan: BatchPlan) -> int:
        return self.load().limit

    def load(self) -> FetchLoad:
        return self._pool.load()

    def on_error(self, error: BaseException, batch: PartialBatch, wanted: Any) -> Failure:
        index = wanted if self._hedged is None else wanted[1]
        return Failure.caught(error, stage=Stage.FETCH, batch=batch.plan.number, index=index)


class BatchFetch(FetchStage):
    """Fetches with `agets`, a batch in a call.

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
        self.fetch = agets
        self._deliver = deliver
        self._most = None if isinstance(concurrency, AdaptiveLimit) else concurrency
        self._plans: deque[BatchPlan] = deque()
        self._in_flight = 0  # samples
        self._call = (0.0, 0.0)  # beginning and duration of the call whose result comes next
        self._pool = FetcherPool(concurrency, self, spawn, requests)

    def admit(self, plan: BatchPlan) -> None:
        self._plans.append(plan)
        self._submit()

    def stop(self) -> None:
        super().stop()
        self._plans.clear()
        self._pool.stop()

    def on_result(self, plan: BatchPlan, _slot: int, result: Any) -> bool:
        """Deliver a batch."""
        try:
            samples = list(result)
            if len(samples) != len(plan.indices) and not isinstance(result, _Failed):
                raise ValueError(f"agets returned {len(samples)} samples for {len(plan.indices)} indices")
        except BaseException as error:  # user code
            samples = list(self.on_error(error, plan, None))
        self._in_flight -= len(plan.indices)
        began, seconds = self._call
        self._deliver(RawBatch(plan, samples, began=began, fetch_seconds=seconds))
        self._submit()
        return True

    def on_first(self, _plan: BatchPlan, began: float, seconds: float) -> None:
        self._call = began, seconds

    def trace(self, recorder: FetchRecorder | None) -> None:
        self._pool.trace(recorder)

    def fetched_at_once(self, plan: BatchPlan) -> int:
        """The samples of the calls."""
        return self._pool.load().limit * len(plan.indices) if self._most is None else self._most

    def load(self) -> FetchLoad:
        """The calls that run, and the plans that wait; in samples, if `concurrency` is a number of samples."""
        if self._most is None:
            return self._pool.load()._replace(queued=len(self._plans))
        queued = sum(len(plan.indices) for plan in self._plans)
        unused = 0 if queued else max(0, self._most - self._in_flight)
        return FetchLoad(self._in_flight, self._most, queued, unused=unused)

    def on_error(self, error: BaseException, plan: BatchPlan, _indices: object) -> _Failed:
        return _Failed((Failure.caught(error, stage=Stage.FETCH, batch=plan.number),))

    def _submit(self) -> None:
        while self._plans and (self._most is None or self._in_flight < self._most):
            plan = self._plans.popleft()
            self._in_flight += len(plan.indices)
            self._pool.submit(((plan, 0, list(plan.indices)),))


class _Failed(tuple[Failure]):
    """The failure in place of a batch's samples."""
