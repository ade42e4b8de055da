"""Streams: plans filled by whatever comes next, read on the loop or inside the workers."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace
from typing import Any

from headrace.batches import BatchPlan, Failure, HostBatch, RawBatch
from headrace.engine.fetch import Deliver, Source, Spawn, Window

__all__ = ["InWorkers", "StreamFetch"]


class StreamFetch(Source):
    """Reads an async iterable, one sample after the other, by one coroutine.

    Args:
        dataset: what `aiter` is called on.
        drop_last: whether a last batch that is not full is left out.
        deliver: takes the batches that are complete.
        spawn: starts the reading coroutine as a task.
    """

    def __init__(self, dataset: Any, drop_last: bool, deliver: Deliver, spawn: Spawn) -> None:
        self._dataset = dataset
        self._drop_last = drop_last
        self._deliver = deliver
        self._plans: deque[BatchPlan] = deque()
        self._window = Window(1, self._read, spawn)
        self._position = 0
        self._ended = False

    def admit(self, plan: BatchPlan) -> None:
        """Queue the plan; behind the stream's end it comes back empty."""
        if self._ended:
            self._deliver(RawBatch(replace(plan, indices=()), (), end=True))
        else:
            self._plans.append(plan)
            self._window.call_one()

    async def _read(self) -> None:
        stream: Any = None
        try:
            while not self._ended:
                while self._plans and not self._ended:
                    plan = self._plans.popleft()
                    try:
                        stream = aiter(self._dataset) if stream is None else stream
                    except BaseException as error:  # user code
                        self._fail(plan, error)
                        break
                    self._deliver(await self._batch(stream, plan))
                if not self._ended:
                    await self._window.rest()
        finally:
            if hasattr(stream, "aclose"):
                await stream.aclose()
        while self._plans:
            self.admit(self._plans.popleft())

    async def _batch(self, stream: Any, plan: BatchPlan) -> RawBatch:
        samples: list[Any] = []
        start = self._position
        while len(samples) < len(plan.indices):
            try:
                samples.append(await anext(stream))
            except StopAsyncIteration:
                self._ended = True
                break
            except BaseException as error:  # user code
                if self._stopping:
                    raise asyncio.CancelledError from None
                samples.append(Failure.caught(error, stage="fetch", batch=plan.number, index=self._position))
            self._position += 1
        if self._drop_last and len(samples) < len(plan.indices):
            samples = []
        return RawBatch(replace(plan, indices=range(start, start + len(samples))), samples, self._ended)

    def _fail(self, plan: BatchPlan, error: BaseException) -> None:
        self._ended = True
        failure = Failure.caught(error, stage="fetch", batch=plan.number, index=0)
        self._deliver(RawBatch(replace(plan, indices=(0,)), (failure,), end=True))


class InWorkers(Source):
    """Sends plans straight to the numbered workers, where a torch dataset lives, in turn.

    Args:
        workers: how many there are.
        deliver: takes the plans, as raw batches without samples.
    """

    def __init__(self, workers: int, deliver: Deliver) -> None:
        self._active = deque(range(workers))
        self._deliver = deliver

    def admit(self, plan: BatchPlan) -> None:
        """Give the plan to the next worker whose stream has not ended."""
        if not self._active:
            self._deliver(RawBatch(replace(plan, indices=()), (), end=True))
            return
        worker = self._active[0]
        self._active.rotate(-1)
        self._deliver(RawBatch(plan, None, worker=worker))

    def settle(self, raw: RawBatch, host: HostBatch) -> HostBatch:
        """A worker's stream has ended: the whole ends when all have."""
        if not host.end:
            return host
        if raw.worker is not None and raw.worker in self._active:
            self._active.remove(raw.worker)
        return replace(host, end=not self._active)
