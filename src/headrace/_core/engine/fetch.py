"""The fetch of single samples or whole batches from map-style datasets.

Samples are fetched across batch borders, so that the pipeline never drains at the end of a batch, and no task, lock or
queue hop is needed for a single sample.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary

from headrace._core.batches import BatchPlan, FetchLoad, RawBatch
from headrace._core.engine.concurrency import AdaptiveLimit
from headrace._core.engine.fetch_pool import Deliver, FetcherPool
from headrace._core.engine.hedging import Spawn
from headrace._core.failure import Failure, Stage
from headrace._core.store.request_stats import RequestStats

MISSING = object()
"""In place of a sample that has not arrived."""


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
        """Put a sample into its batch, and deliver the batch when it is complete."""
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
        """Deliver a batch."""
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
