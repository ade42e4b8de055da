"""A session: one epoch's life on the engine's loop, and the one place that knows the order of the stages there."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol

from headrace.batches import BatchPlan, HostBatch, RawBatch
from headrace.engine.assemble import Assembler
from headrace.engine.executors import Executor
from headrace.engine.fetch import Deliver, Source
from headrace.engine.reorder import Reorder
from headrace.engine.window import Spawn
from headrace.io.traffic import Traffic, traffic

__all__ = ["Outlet", "Session"]


class Outlet(Protocol):
    """Where a session puts its batches: a handoff, or the way to one in another process."""

    def put(self, host: HostBatch) -> None:
        """Hand a batch on."""

    def end(self, error: BaseException | None = None) -> None:
        """Say that nothing more will come, and why, if not as it should."""


class Session:
    """Runs one epoch: plans in, batches out to the handoff, until it is cancelled.

    `admit` and `cancel` are called on the loop; `run` is its only task, with the fetchers and one short task for each
    batch as children, so that when it has ended nothing of the epoch is left.

    Args:
        make_source: makes the fetch stage, from `deliver`, `spawn` and `requests`.
        assembler: knows when there is CPU work to do.
        executor: does it; shared by the loader's sessions.
        handoff: where batches go; the consumer's.
        in_order: whether batches leave in plan order, or as they are completed.
        sample_key: what the dataset calls an index, for errors.
        requests: what the requests made below this session share.
    """

    def __init__(
        self,
        *,
        make_source: Callable[[Deliver, Spawn, Traffic], Source],
        assembler: Assembler,
        executor: Executor,
        handoff: Outlet,
        in_order: bool,
        sample_key: Callable[[Any], str | None],
        requests: Traffic,
    ) -> None:
        self._make_source = make_source
        self._assembler = assembler
        self._executor = executor
        self._handoff = handoff
        self._reorder = Reorder() if in_order else None
        self._sample_key = sample_key
        self._requests = requests
        self._plans: deque[BatchPlan] = deque()
        self._news = asyncio.Event()
        self._source: Source | None = None
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False

    def admit(self, plans: Sequence[BatchPlan]) -> None:
        """Take on plans."""
        self._plans.extend(plans)
        self._news.set()

    def cancel(self) -> None:
        """Admit nothing more and end; a consumer that has what it wants calls this too."""
        if self._cancelled:
            return
        self._cancelled = True
        if self._source is not None:
            self._source.stop()
        if self._task is not None:
            self._task.cancel()

    async def run(self, prepare: Callable[[], Any]) -> None:
        """Run until `cancel`; `prepare` is awaited first. Whatever ends it, the consumer is told."""
        self._task = asyncio.current_task()
        traffic.set(self._requests)  # in this task's context, which those of the fetchers are copies of
        error: BaseException | None = None
        try:
            if not self._cancelled:
                await prepare()
                await self._work()
        except BaseException as caught:  # a bug of ours, or the loop is being closed: the consumer must not wait on
            error = None if self._cancelled else _single(caught)
            if not isinstance(error, Exception | None):
                raise
        finally:
            self._handoff.end(error)

    async def _work(self) -> None:
        # Not anyio's task group: it cancels again whatever awaits while it is being cancelled, and so cuts off what
        # user code does in a `finally`. asyncio's cancels once; the deadline of closing is the engine's.
        async with asyncio.TaskGroup() as self._tasks:
            self._source = self._make_source(self._assemble_soon, self._spawn, self._requests)
            while True:
                self._news.clear()
                while self._plans:
                    self._source.admit(self._plans.popleft())
                await self._news.wait()

    def _spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._tasks.create_task(work())

    def _assemble_soon(self, raw: RawBatch) -> None:
        self._tasks.create_task(self._assemble(raw))

    async def _assemble(self, raw: RawBatch) -> None:
        assert self._source is not None
        if raw.samples is None:
            host = await self._executor.assemble(raw)
        else:
            # Failures stay on this side: an exception of user code is not sent to a worker to come back from there.
            kept, lost = raw.without_failures()
            host = self._assembler.nothing_to_do(kept, lost) or await self._executor.assemble(kept)
            host = host.with_lost(raw, lost)
        host = self._located(self._source.settle(raw, host))
        if (counts := self._requests.take()) is not None:
            host = replace(host, requests=counts)
        for ready in self._reorder.put(host) if self._reorder else (host,):
            self._handoff.put(ready)

    def _located(self, host: HostBatch) -> HostBatch:
        if not host.failures:
            return host
        failures = (
            failure if failure.index is None else replace(failure, key=self._sample_key(failure.index))
            for failure in host.failures
        )
        return replace(host, failures=tuple(failures))


def _single(error: BaseException) -> BaseException:
    """One error is raised as itself, not as a group."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
