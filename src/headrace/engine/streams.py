"""Streams: plans filled by whatever comes next, read on the loop or inside the workers."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace
from typing import Any

from headrace.batches import BatchPlan, HostBatch, RawBatch
from headrace.datasets.readers import Filling, Progress
from headrace.engine.fetch import Deliver, Source
from headrace.engine.window import Spawn, Window
from headrace.io.perloop import advise

__all__ = ["InWorkers", "StreamFetch"]


class StreamFetch(Source):
    """Reads an async iterable, one sample after the other, by one coroutine.

    Args:
        dataset: what `aiter` is called on.
        drop_last: whether a last batch that is not full is left out.
        skip: whether to go on behind a sample that failed.
        deliver: takes the batches that are complete.
        spawn: starts the reading coroutine as a task.
    """

    def __init__(self, dataset: Any, drop_last: bool, skip: bool, deliver: Deliver, spawn: Spawn) -> None:
        self._dataset = dataset
        self._drop_last = drop_last
        self._skip = skip
        self._deliver = deliver
        self._plans: deque[BatchPlan] = deque()
        self._window = Window(1, self._fill, spawn)
        self._progress = Progress()

    def admit(self, plan: BatchPlan) -> None:
        """Queue the plan; behind the stream's end it comes back empty."""
        if self._progress.ended:
            self._deliver(RawBatch(replace(plan, indices=()), (), end=True))
        else:
            self._plans.append(plan)
            self._window.call_one()

    async def _fill(self) -> None:
        stream: Any = None
        try:
            while not self._progress.ended:
                while self._plans and not self._progress.ended:
                    filling = Filling(self._plans.popleft(), self._progress, skip=self._skip)
                    stream = self._start(filling) if stream is None else stream
                    while filling.room:
                        await self._read(stream, filling)
                    self._deliver(filling.raw(drop_last=self._drop_last))
                if not self._progress.ended:
                    await self._window.rest()
        finally:
            await self._close(stream)
        while self._plans:
            self.admit(self._plans.popleft())

    def _start(self, filling: Filling) -> Any:
        try:
            return aiter(self._dataset)
        except BaseException as error:  # user code
            filling.fail(error)
            self._progress.ended = True
            return None

    async def _read(self, stream: Any, filling: Filling) -> None:
        """Read on to the batch's end, the stream's, or an error."""
        try:
            for _ in range(filling.room):
                filling.add(await anext(stream))
        except StopAsyncIteration:
            self._progress.ended = True
        except BaseException as error:  # user code
            if self._stopping:
                raise asyncio.CancelledError from None
            advise(error)
            filling.fail(error)

    async def _close(self, stream: Any) -> None:
        if not hasattr(stream, "aclose"):
            return
        try:
            await stream.aclose()
        except BaseException as error:  # user code: its samples are all delivered, or nobody wants them any more
            message = f"closing a stream of {type(self._dataset).__name__} failed"
            asyncio.get_running_loop().call_exception_handler({"message": message, "exception": error})


class InWorkers(Source):
    """Sends plans straight to the numbered workers, where a torch dataset lives, in turn.

    Args:
        workers: how many there are.
        streams: whether each reads a stream, which can end.
        deliver: takes the plans, as raw batches without samples.
    """

    def __init__(self, workers: int, *, streams: bool, deliver: Deliver) -> None:
        self._active = deque(range(workers))
        self._streams = streams
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
        if not self._streams:  # the worker could not start, or died: its next batch is another matter
            return replace(host, end=False)
        if raw.worker is not None and raw.worker in self._active:
            self._active.remove(raw.worker)
        return replace(host, end=not self._active)
