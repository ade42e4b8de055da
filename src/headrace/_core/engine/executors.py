"""Executors, which turn a `RawBatch` into a `HostBatch` off the loop. The engine owns one."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import multiprocessing

from headrace._core.batches import HostBatch, RawBatch
from headrace._core.engine.config import EngineConfig, name_unpicklable
from headrace._core.engine.stepping import Chunk, Outcomes, StepsTask, settle
from headrace._core.engine.worker_tasks import not_picklable
from headrace._core.failure import Failure, Stage, as_exception
from headrace._core.look_ahead import QUICK
from headrace._core.pool.supervisor import PINNED_AHEAD, PINNED_QUICK, Job, Pool
from headrace._core.ranks.rankinfo import RankInfo, provide_rank
from headrace._core.streams.resumable import is_stateful
from headrace._core.transport.shared_pickle import SharedPickle
from headrace.errors import NotPicklableError, WorkerDiedError

Work = Callable[[RawBatch], HostBatch] | SharedPickle | None
"""The assembly of a batch: a function for a thread; for processes a task, or None for their first task."""

_STEPS = "on samples that are not yet in a batch"  # a worker's task, for `WorkerDiedError`


class ThreadExecutor:
    """A thread beside the loop, of an engine without workers.

    If `deferred`, there is no thread: the CPU work is left to the consumer's thread, and a batch's
    data is the `RawBatch` itself.
    """

    broken = None
    workers = 1

    def __init__(self, rank: RankInfo, *, deferred: bool) -> None:
        self._rank = rank
        # Calls with their answers; to end the thread, no call, and what is set then.
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # in the caller's context, as `numpy.errstate` is one of its variables
        run = contextvars.copy_context().run
        thread = threading.Thread(
            target=run, args=(self._work,), name="headrace-assemble", daemon=True
        )
        self._thread = None if deferred else thread

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._thread is not None:
            self._thread.start()

    async def assemble(self, raw: RawBatch, work: Work) -> HostBatch:
        if self._thread is None:
            return HostBatch(raw.plan, raw, len(raw.plan.indices), end=raw.end)
        assert callable(work)
        host: HostBatch = await self._call(functools.partial(work, raw))
        return host

    async def apply(self, task: StepsTask, chunk: Chunk) -> Outcomes:
        outcomes: Outcomes = await self._call(functools.partial(task.apply, chunk))
        return outcomes

    async def _call(self, work: Callable[[], object]) -> Any:
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._requests.put((work, answer))
        return await answer

    async def close(self, deadline: float) -> None:
        """Let the thread finish its current work; after the deadline it remains, as a daemon."""
        if self._thread is None or self._thread.ident is None:
            return
        end = self._loop.create_future()
        self._requests.put((None, end))
        if (await asyncio.wait([end], timeout=deadline))[0]:  # otherwise user code holds the thread
            self._thread.join()

    def worker_of(self, batch: int) -> int | None:
        return None

    def take_deaths(self) -> int:
        return 0

    def kill(self) -> None:
        """Let the thread end at its next request; a thread cannot be killed."""
        self._requests.put((None, None))

    def release(self) -> None:
        pass  # there are no descriptors

    def _work(self) -> None:
        provide_rank(self._rank)
        while (request := self._requests.get())[0] is not None:
            work, answer = request
            if not answer.done():
                try:
                    settle(answer, work())
                except BaseException as error:  # not of user code, whose errors are in the result: a failed import, say
                    settle(answer, None, as_exception(error))
            del request, work, answer  # hold no batch while waiting for the next
        if request[1] is not None:
            settle(request[1], None)


class ProcessExecutor(Pool):
    """The pool's worker processes, started here, before there is a loop; `NotPicklableError` if they cannot have it."""

    def __init__(self, config: EngineConfig, first_task: SharedPickle | None) -> None:
        torchs = not config.kind.is_async  # which lives in the workers
        # see `StepsTask.pickle`
        self._steps: OrderedDict[tuple[int, ...], SharedPickle] = OrderedDict()
        try:
            super().__init__(
                config.worker_task() if first_task is None else first_task,
                numbers=config.workers,
                # A torch dataset's are started by torch's method; those of functions are forks of
                # the zygote.
                context=config.context or (multiprocessing.get_context() if torchs else None),
                stateful=torchs and (config.kind.is_iterable or is_stateful(config.dataset)),
            )
            self.launch()
        except Exception as error:
            name_unpicklable(config, error)

    async def apply(self, task: StepsTask, chunk: Chunk) -> Outcomes:
        answer = await self.run(Job(tuple(chunk), task.pickle(self._steps), doing=_STEPS))
        if answer.error is None:
            return Outcomes(*answer.value)
        if answer.step == "pack":
            remedy = "It is sent back from a worker process: return tensors, arrays, or classes that both can import."
            raise not_picklable("the result of a function before batching", answer.error, remedy)
        raise answer.error

    async def assemble(self, raw: RawBatch, work: Work) -> HostBatch:
        assert work is None or isinstance(work, SharedPickle)
        plan, pinned = raw.plan, raw.worker is not None
        if raw.stream_state is not None:
            raw = raw._replace(stream_state=None, origin=None)  # they stay here
        job = Job(
            raw.flat(), work, raw.worker, plan.number, tuple(plan.indices), plain=raw.is_plain
        )
        try:
            answer = await self.run(job)
        except WorkerDiedError as died:
            return HostBatch.failed(plan, died, Stage.ASSEMBLE)._replace(end=pinned)
        except asyncio.CancelledError:
            raise
        except BaseException as caught:  # user code: __reduce__ of a sample's class
            return HostBatch.failed(plan, _unpicklable_sample(caught), Stage.ASSEMBLE)
        if answer.error is None:
            host = HostBatch.from_flat(answer.value, plan)
            quick = host.times.work_ended - host.times.work_began < QUICK
            self.pinned_ahead = PINNED_QUICK if quick else PINNED_AHEAD
        else:
            unread = answer.step == "receive"
            error = _unpicklable_sample(answer.error) if unread else answer.error
            # the worker cannot run, so its stream cannot continue
            cannot_start = answer.step == "start"
            stage = Stage.WORKER_START if cannot_start else Stage.ASSEMBLE
            failure = Failure.caught(error, stage, plan.number)
            failure = replace(failure, traceback=None if unread else answer.traceback)
            host = HostBatch.nothing(plan, (failure,), end=cannot_start and pinned)
        if not host.failures:
            return host
        located = (replace(f, worker=job.worker, attempt=job.attempt) for f in host.failures)
        return host._replace(failures=tuple(located))

    def take_deaths(self) -> int:
        """The workers that died since the last call, also those whose batch another worker has assembled since."""
        deaths, self.deaths = self.deaths, 0
        return deaths


Executor = ThreadExecutor | ProcessExecutor


def _unpicklable_sample(reason: BaseException) -> NotPicklableError:
    remedy = "The result of aget is sent to a worker process: return bytes or arrays, or use num_workers=0."
    return not_picklable("a fetched sample", reason, remedy)
