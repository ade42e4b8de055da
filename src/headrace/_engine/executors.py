"""Executors turn a `RawBatch` into a `HostBatch` off the event loop.

The engine owns an executor.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from torch import multiprocessing

from headrace._engine.config import EngineConfig, name_unpicklable
from headrace._engine.look_ahead import QUICK
from headrace._engine.sample_functions import Chunk, FunctionsTask, Outcomes, settle
from headrace._pool.supervisor import PINNED_AHEAD, PINNED_QUICK, Job, Pool
from headrace._pool.worker import Failed
from headrace._ranks.rankinfo import RankInfo, set_rank
from headrace._records.batches import HostBatch, RawBatch
from headrace._records.failure import Failure, Stage, as_exception
from headrace._streams.resumable import copies_have_state
from headrace._transport.shared_pickle import SharedPickle
from headrace.errors import WorkerDiedError

T = TypeVar("T")

Work = Callable[[RawBatch], HostBatch] | SharedPickle | None
"""The assembly of a batch: a function for a thread, or a task for processes.

None stands for the first task of the processes."""


class _Call(NamedTuple):
    """A call in the thread, and the future of the answer."""

    work: Callable[[], Any]
    answer: asyncio.Future[Any]


class ThreadExecutor:
    """A thread beside the loop, in an engine without workers.

    If `deferred`, there is no thread. The consumer's thread does the CPU work, and the data of a
    batch are the `RawBatch`.
    """

    broken = None
    workers = 1
    deaths = 0

    def __init__(self, rank: RankInfo, *, deferred: bool) -> None:
        self._rank = rank
        # Calls, and None for the end of the thread.
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        # Run in the caller's context, because `numpy.errstate` is a context variable.
        run = contextvars.copy_context().run
        thread = threading.Thread(
            target=run, args=(self._work,), name="headrace-assemble", daemon=True
        )
        self._thread = None if deferred else thread

    def open(self) -> None:
        if self._thread is not None and self._thread.ident is None:
            self._thread.start()

    async def assemble(self, raw: RawBatch, work: Work) -> HostBatch:
        if self._thread is None:
            return HostBatch(raw.plan, raw, len(raw.plan.indices), end=raw.end)
        assert callable(work)
        return await self._call(functools.partial(work, raw))

    async def apply(self, task: FunctionsTask, chunk: Chunk) -> Outcomes:
        return await self._call(functools.partial(task.apply, chunk))

    def _call(self, work: Callable[[], T]) -> asyncio.Future[T]:
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.put(_Call(work, answer))
        return answer

    async def close(self, deadline: float) -> None:
        """Let the thread finish the current work.

        After the deadline the thread remains, as a daemon.
        """
        if self._thread is None or self._thread.ident is None:
            return
        last = self._call(lambda: None)
        self._calls.put(None)
        # Without an answer in time, user code still holds the thread.
        if (await asyncio.wait([last], timeout=deadline))[0]:
            self._thread.join()

    def worker_of(self, batch: int) -> int | None:
        return None

    def kill(self) -> None:
        """Let the thread end at the next call.

        A thread cannot be killed.
        """
        self._calls.put(None)

    def release(self) -> None:
        pass  # there are no descriptors

    def _work(self) -> None:
        set_rank(self._rank)
        while (call := self._calls.get()) is not None:
            if not call.answer.done():
                try:
                    settle(call.answer, call.work())
                except BaseException as error:
                    # Not an error of user code (the result holds such errors), but for example a
                    # failed import.
                    settle(call.answer, None, as_exception(error))
            del call  # hold no batch while waiting for the next call


class ProcessExecutor(Pool):
    """A pool of worker processes, started before the event loop.

    Raises:
        NotPicklableError: The task cannot be sent to the processes.
    """

    def __init__(self, config: EngineConfig, first_task: SharedPickle | None) -> None:
        torchs = not config.kind.is_async  # a torch dataset lives in the workers
        # The last pickles of stream functions, see `FunctionsTask.pickle`.
        self._pickles: OrderedDict[tuple[int, ...], SharedPickle] = OrderedDict()
        try:
            super().__init__(
                config.worker_task() if first_task is None else first_task,
                numbers=config.workers,
                # Workers with a torch dataset start by torch's method. Workers without a dataset
                # are forks of the zygote.
                context=config.context
                or (multiprocessing.get_context() if torchs else None),
                stateful=copies_have_state(config.kind, config.dataset),
            )
        except Exception as error:
            name_unpicklable(config, error)

    async def apply(self, task: FunctionsTask, chunk: Chunk) -> Outcomes:
        job = Job(
            chunk,
            task.pickle(self._pickles),
            doing="on samples that are not yet in a batch",
        )
        outcomes: Outcomes | Failed = await self.run(job)
        if isinstance(outcomes, Failed):
            raise outcomes.error
        return outcomes

    async def assemble(self, raw: RawBatch, work: Work) -> HostBatch:
        assert work is None or isinstance(work, SharedPickle)
        plan, pinned = raw.plan, raw.worker is not None
        if pinned:  # the worker reads the samples
            job = Job(tuple(plan), work, raw.worker, plan, plain=plan.is_plain)
        else:
            job = Job((tuple(plan), raw.samples, raw.end), work, plan=plan)
        answer = await self.run(job)
        if isinstance(answer, Failed):
            # A worker that died or cannot start has no stream to continue.
            ends = pinned and (
                answer.starting or isinstance(answer.error, WorkerDiedError)
            )
            stage = Stage.WORKER_START if answer.starting else Stage.ASSEMBLE
            failure = Failure.caught(
                answer.error, stage, plan.number, traceback=answer.traceback
            )
            host = HostBatch.nothing(plan, (failure,), end=ends)
        else:
            host = HostBatch.from_flat(answer, plan)
            quick = host.times.work_ended - host.times.work_began < QUICK
            self.pinned_ahead = PINNED_QUICK if quick else PINNED_AHEAD
        if not host.failures:
            return host
        located = (
            replace(f, worker=job.worker, attempt=job.attempt) for f in host.failures
        )
        return host._replace(failures=tuple(located))


Executor = ThreadExecutor | ProcessExecutor
