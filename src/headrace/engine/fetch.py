"""Fetch: the only stage that waits on a network or a disk.

A window of long-lived fetcher coroutines draws samples from the plans across batch borders, so that the pipe never
drains at the end of a batch. Nothing is created, locked or queued for a single sample.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from headrace.batches import BatchPlan, Failure, HostBatch, RawBatch
from headrace.io.control import Control
from headrace.io.traffic import Traffic

__all__ = ["BatchFetch", "Deliver", "Filling", "SampleFetch", "Source", "Spawn", "SteeredBatchFetch", "Window"]

LOOK = 0.02  # seconds between two looks at the rate; `Control` measures over 0.05 at least

Deliver = Callable[[RawBatch], None]
Spawn = Callable[[Callable[[], Coroutine[Any, Any, None]]], object]


class Source:
    """Turns plans into raw batches, on the engine's loop. `deliver` and `spawn` come with construction."""

    _stopping = False

    def admit(self, plan: BatchPlan) -> None:
        """Take on one plan; its `RawBatch` is delivered in time."""
        raise NotImplementedError  # each source has its own way

    def settle(self, raw: RawBatch, host: HostBatch) -> HostBatch:
        """See what became of a delivered batch; a source may change what it says about the stream's end."""
        return host

    def stop(self) -> None:
        """Cancellation comes next: what user code raises from now on is its way of ending, and is not looked at."""
        self._stopping = True


class Filling:
    """A batch whose slots are being filled."""

    __slots__ = ("missing", "plan", "samples")

    def __init__(self, plan: BatchPlan) -> None:
        self.plan = plan
        self.missing = len(plan.indices)
        self.samples: list[Any] = [None] * self.missing


class Window:
    """Fetchers that wait for work and call one more when there is more than they can take.

    At most `size` run; `resize` changes that. Each that starts calls the next, so that a window fills as fast as
    fetches begin to wait, and a store that answers at once is served by one fetcher without waking the others.
    """

    def __init__(self, size: int, work: Callable[[], Coroutine[Any, Any, None]], spawn: Spawn) -> None:
        self.size = size
        self.shrinking = False  # whether fetchers have to look if they are too many
        self._work = work
        self._spawn = spawn
        self._hired = 0
        self._idle: list[asyncio.Future[None]] = []

    def call_one(self) -> None:
        """Wake an idle fetcher, or hire one."""
        if self.busy >= self.size:
            return
        if self._idle:
            fetcher = self._idle.pop()
            if not fetcher.done():  # else it is being cancelled
                fetcher.set_result(None)
        else:
            self._hired += 1
            self._spawn(self._work)

    @property
    def busy(self) -> int:
        """How many have not come to rest."""
        return self._hired - len(self._idle)

    def resize(self, size: int) -> None:
        """Let `size` run from now on; those that are too many rest when they have what they fetch."""
        grows = size > self.size
        self.size = size
        self.shrinking = self.busy > size
        if grows:
            self.call_one()

    def must_rest(self) -> bool:
        """Whether the fetcher that asks is one too many."""
        self.shrinking = self.busy > self.size
        return self.shrinking

    async def rest(self) -> None:
        """Wait to be called."""
        called = asyncio.get_running_loop().create_future()
        self._idle.append(called)
        await called


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
        concurrency: int | Control,
        deliver: Deliver,
        spawn: Spawn,
        requests: Traffic | None = None,
    ) -> None:
        self._aget = aget
        self._requests = Traffic() if requests is None else requests
        self._control = concurrency if isinstance(concurrency, Control) else None
        self._steering = False
        self._admitted = 0
        self._spawn = spawn
        self._deliver = deliver
        self._draws: deque[tuple[Filling, int, Any]] = deque()
        self._window = Window(
            concurrency.limit if isinstance(concurrency, Control) else concurrency, self._fetch, spawn
        )

    def admit(self, plan: BatchPlan) -> None:
        """Queue the plan's samples."""
        if not plan.indices:
            self._deliver(RawBatch(plan, ()))
            return
        filling = Filling(plan)
        self._draws.extend((filling, slot, index) for slot, index in enumerate(plan.indices))
        self._admitted += len(plan.indices)
        self._begin()

    def _begin(self) -> None:
        """See to it that what is queued is fetched."""
        self._window.call_one()
        if self._control is not None and not self._steering:
            self._steering = True
            self._spawn(functools.partial(self._steer, self._control))

    def stop(self) -> None:
        """Draw nothing more."""
        super().stop()
        self._draws.clear()

    async def _fetch(self) -> None:
        draws, aget, window = self._draws, self._aget, self._window
        while True:
            if len(draws) > 1:
                window.call_one()
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
                if window.shrinking and window.must_rest():
                    break
            await window.rest()

    def _failed(self, error: BaseException, filling: Filling, index: Any) -> Failure:
        if isinstance(error, TimeoutError):
            self._requests.pushed_back += 1
        return Failure.caught(error, stage="fetch", batch=filling.plan.number, index=index)

    @property
    def _queued(self) -> int:
        """What has been admitted and not begun."""
        return len(self._draws)

    async def _steer(self, control: Control) -> None:
        """Look from time to time how the fetching goes; nothing is counted for a single sample."""
        window = self._window
        while self._queued or window.busy:
            await asyncio.sleep(LOOK)
            if self._stopping:
                break
            limit = control.tell(
                time.monotonic(),
                completed=self._admitted - self._queued - window.busy,
                pushed_back=self._requests.pushed_back,
                full=bool(self._queued) and window.busy >= window.size,
            )
            if limit != window.size:
                window.resize(limit)
        self._steering = False


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


class SteeredBatchFetch(SampleFetch):
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
        control: Control,
        deliver: Deliver,
        spawn: Spawn,
        requests: Traffic,
    ) -> None:
        super().__init__(agets, control, deliver, spawn, requests)
        self._plans: deque[BatchPlan] = deque()

    def admit(self, plan: BatchPlan) -> None:
        """Queue the plan."""
        self._plans.append(plan)
        self._admitted += 1
        self._begin()

    def stop(self) -> None:
        """Start no more calls."""
        super().stop()
        self._plans.clear()

    @property
    def _queued(self) -> int:
        return len(self._plans)

    async def _fetch(self) -> None:
        plans, window = self._plans, self._window
        while True:
            if len(plans) > 1:
                window.call_one()
            while plans:
                plan = plans.popleft()
                samples = await _samples_of(plan, self._aget)
                if self._stopping:
                    return
                if samples and isinstance(samples[0], Failure) and isinstance(samples[0].error, TimeoutError):
                    self._requests.pushed_back += 1
                self._deliver(RawBatch(plan, samples))
                if window.shrinking and window.must_rest():
                    break
            await window.rest()


async def _samples_of(plan: BatchPlan, agets: Callable[[list[Any]], Awaitable[Sequence[Any]]]) -> list[Any]:
    """What `agets` gives for a batch, or what was wrong."""
    try:
        samples = list(await agets(list(plan.indices)))
        if len(samples) != len(plan.indices):
            raise ValueError(f"agets returned {len(samples)} samples for {len(plan.indices)} indices")
    except BaseException as error:  # user code; or cancellation, when nobody looks at this
        return [Failure.caught(error, stage="fetch", batch=plan.number)]
    return samples
