"""Fetch: the only stage that waits on a network or a disk.

A window of long-lived fetcher coroutines draws samples from the plans across batch borders, so that the pipe never
drains at the end of a batch. Nothing is created, locked or queued for a single sample.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

from headrace._core.batches import BatchPlan, Failure, HostBatch, RawBatch, Stage
from headrace._core.engine.concurrency import AdaptiveLimit
from headrace._core.engine.fetch_pool import AdaptiveFetcherPool, Spawn
from headrace._core.eventloop.per_loop import advise
from headrace._core.store.request_stats import RequestStats

Deliver = Callable[[RawBatch], None]


NOT_YET = object()  # in place of a sample that has not come


class Source:
    """Turns plans into raw batches, on the engine's loop. `deliver` and `spawn` come with construction."""

    _stopping = False

    def admit(self, plan: BatchPlan) -> None:
        """Take on one plan; its `RawBatch` is delivered in time."""
        raise NotImplementedError  # each source has its own way

    def missing(self, plan: BatchPlan) -> Sequence[Any]:
        """The indices of a plan whose samples are missing, if that is known; all of them otherwise."""
        return plan.indices

    def foreseen(self, plan: BatchPlan) -> float | None:
        """The bytes that one sample of a plan will hold, about, where that can be said before it has come."""
        return None

    def settle(self, raw: RawBatch, host: HostBatch) -> HostBatch:
        """See what became of a delivered batch; a source may change what it says about the stream's end."""
        return host

    def stop(self) -> None:
        """Cancellation comes next: what user code raises from now on is its way of ending, and is not looked at."""
        self._stopping = True


class Filling:
    """A batch whose slots are being filled."""

    __slots__ = ("__weakref__", "missing", "plan", "samples")

    def __init__(self, plan: BatchPlan) -> None:
        self.plan = plan
        self.missing = len(plan.indices)
        self.samples: list[Any] = [NOT_YET] * self.missing


class SampleFetch(Source):
    """Fetches with `aget`, `concurrency` samples at once.

    Args:
        aget: the dataset's.
        concurrency: how many calls may be in flight, or what finds that out.
        deliver: takes the batches that are complete.
        spawn: starts a fetcher as a task.
        requests: where refusals are noted, for what finds it out.
    """

    def __init__(
        self,
        aget: Callable[[Any], Awaitable[Any]],
        concurrency: int | AdaptiveLimit,
        deliver: Deliver,
        spawn: Spawn,
        requests: RequestStats | None = None,
    ) -> None:
        self._aget = aget
        self._requests = RequestStats() if requests is None else requests
        self._spawn = spawn
        self._deliver = deliver
        self._draws: deque[tuple[Filling, int, Any]] = deque()
        self._fillings: WeakValueDictionary[int, Filling] = WeakValueDictionary()
        self._window = AdaptiveFetcherPool(concurrency, self._fetch, spawn, self._draws.__len__, self._requests)

    def admit(self, plan: BatchPlan) -> None:
        """Queue the plan's samples."""
        if not plan.indices:
            self._deliver(RawBatch(plan, ()))
            return
        filling = self._fillings[plan.number] = Filling(plan)
        self._draws.extend((filling, slot, index) for slot, index in enumerate(plan.indices))
        self._window.admit(len(plan.indices))

    def missing(self, plan: BatchPlan) -> Sequence[Any]:
        """The indices of a plan whose samples are missing."""
        filling = self._fillings.get(plan.number)
        slots = zip(plan.indices, filling.samples if filling is not None else (), strict=False)
        return [index for index, sample in slots if sample is NOT_YET]

    def stop(self) -> None:
        """Draw nothing more."""
        super().stop()
        self._draws.clear()

    async def _fetch(self) -> None:
        draws, aget, window = self._draws, self._aget, self._window
        while True:
            if len(draws) > 1:
                window.wake_one()
            while draws:
                filling, slot, index = draws.popleft()
                try:
                    sample = await aget(index)
                except BaseException as error:  # user code
                    if self._stopping:
                        return
                    sample = self._failed(error, filling, index)
                filling.samples[slot] = sample
                filling.missing -= 1
                if not filling.missing:
                    self._deliver(RawBatch(filling.plan, filling.samples))
                if window.shrinking and window.should_park():
                    break
            await window.rest()

    def _failed(self, error: BaseException, filling: Filling, index: Any) -> Failure:
        self._window.note(error)
        advise(error)
        return Failure.caught(error, stage=Stage.FETCH, batch=filling.plan.number, index=index)


class BatchFetch(Source):
    """Fetches with `agets`, a batch in a call, as many at once as cover `concurrency` samples.

    Args:
        agets: the dataset's.
        concurrency: how many samples may be in flight.
        deliver: takes the batches that are complete.
        spawn: starts a call as a task.
    """

    def __init__(
        self, agets: Callable[[list[Any]], Awaitable[Sequence[Any]]], concurrency: int, deliver: Deliver, spawn: Spawn
    ) -> None:
        self._agets = agets
        self._concurrency = concurrency
        self._deliver = deliver
        self._spawn = spawn
        self._plans: deque[BatchPlan] = deque()
        self._in_flight = 0

    def admit(self, plan: BatchPlan) -> None:
        """Queue the plan."""
        self._plans.append(plan)
        self._start()

    def stop(self) -> None:
        """Start no more calls."""
        super().stop()
        self._plans.clear()

    def _start(self) -> None:
        while self._plans:
            if self._in_flight >= self._concurrency:
                return
            self._in_flight += len(self._plans[0].indices)
            self._spawn(functools.partial(self._fetch, self._plans.popleft()))

    async def _fetch(self, plan: BatchPlan) -> None:
        samples = await _samples_of(plan, self._agets)
        if self._stopping:
            return
        self._deliver(RawBatch(plan, samples))
        self._in_flight -= len(plan.indices)
        self._start()


class SteeredBatchFetch(Source):
    """Fetches with `agets`, a batch in a call; how many calls are in flight is found out.

    Args:
        agets: the dataset's.
        control: finds it out, counting a call as one fetch.
        deliver: takes the batches that are complete.
        spawn: starts a fetcher as a task.
        requests: where refusals are noted, for what finds it out.
    """

    def __init__(
        self,
        agets: Callable[[list[Any]], Awaitable[Sequence[Any]]],
        control: AdaptiveLimit,
        deliver: Deliver,
        spawn: Spawn,
        requests: RequestStats,
    ) -> None:
        self._agets = agets
        self._deliver = deliver
        self._plans: deque[BatchPlan] = deque()
        self._window = AdaptiveFetcherPool(control, self._fetch, spawn, self._plans.__len__, requests)

    def admit(self, plan: BatchPlan) -> None:
        """Queue the plan."""
        self._plans.append(plan)
        self._window.admit(1)

    def stop(self) -> None:
        """Start no more calls."""
        super().stop()
        self._plans.clear()

    async def _fetch(self) -> None:
        plans, window = self._plans, self._window
        while True:
            if len(plans) > 1:
                window.wake_one()
            while plans:
                plan = plans.popleft()
                samples = await _samples_of(plan, self._agets)
                if self._stopping:
                    return
                if samples and isinstance(samples[0], Failure):
                    window.note(samples[0].error)
                self._deliver(RawBatch(plan, samples))
                if window.shrinking and window.should_park():
                    break
            await window.rest()


async def _samples_of(plan: BatchPlan, agets: Callable[[list[Any]], Awaitable[Sequence[Any]]]) -> list[Any]:
    """What `agets` gives for a batch, or what was wrong."""
    try:
        samples = list(await agets(list(plan.indices)))
        if len(samples) != len(plan.indices):
            raise ValueError(f"agets returned {len(samples)} samples for {len(plan.indices)} indices")
    except BaseException as error:  # user code; or cancellation, when nobody looks at this
        advise(error)
        return [Failure.caught(error, stage=Stage.FETCH, batch=plan.number)]
    return samples
