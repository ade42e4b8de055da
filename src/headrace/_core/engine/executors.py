"""Executors, which turn a `RawBatch` into a `HostBatch` off the loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from headrace._core.batches import BatchPlan, HostBatch, RawBatch
from headrace._core.engine.config import EngineConfig, name_unpicklable
from headrace._core.engine.stepping import PickledSteps, StepsRequest
from headrace._core.engine.worker_tasks import not_picklable, unpicklable_state
from headrace._core.failure import Failure, Stage, as_exception
from headrace._core.pool.supervisor import Pool, Reply
from headrace._core.pool.worker import Answer
from headrace._core.ranks.rankinfo import RankInfo, provide_rank
from headrace._core.streams.resumable import is_stateful
from headrace._core.transport.shared_pickle import SharedPickle
from headrace.errors import NotPicklableError, WorkerDiedError

Work = Callable[[RawBatch], HostBatch] | SharedPickle | None
"""The assembly of a batch: a function for threads; for processes a task, or None for their first task."""

_STEPS = "on samples that are not yet in a batch"  # a worker's task, for `WorkerDiedError`


class Executor:
    """Runs the CPU work of batches. The engine owns it."""

    @property
    def usable(self) -> bool:
        """False once it assembles nothing any more."""
        return True

    async def open(self) -> None:
        """Start on the running loop."""

    async def assemble(self, raw: RawBatch, work: Work) -> HostBatch:
        """Assemble one batch by `work`; errors become its failures."""
        raise NotImplementedError  # each executor has its own

    async def close(self, deadline: float) -> None:
        """End everything within `deadline` seconds."""

    def worker_of(self, batch: int) -> int | None:
        """The worker that a batch was sent to; None without workers, or while the batch waits for one."""
        return None

    def take_deaths(self) -> int:
        """The number of worker processes that died since the last call."""
        return 0

    def kill(self) -> None:
        """End at once what can be; from any thread, when the loop no longer runs."""

    def release(self) -> None:
        """Close the remaining descriptors, after the loop is closed."""


def make_executor(config: EngineConfig, first_task: SharedPickle | None, *, owns_process: bool) -> Executor:
    """The executor that a configuration asks for; worker processes are started here, before there is a loop."""
    if config.has_processes:
        return ProcessExecutor(_launched(config, first_task))
    if config.deferred:
        return DeferringExecutor()
    threads = max(1, config.num_workers)
    return ThreadExecutor(threads, config.rank, seeds=owns_process and threads == 1)


def _launched(config: EngineConfig, first_task: SharedPickle | None) -> Pool:
    torchs = not config.kind.is_async  # which lives in the workers
    stateful = torchs and (config.kind.is_iterable or is_stateful(config.dataset))
    try:
        first = config.worker_task() if first_task is None else first_task
        pool = Pool(
            first,
            workers=config.num_workers,
            launcher=config.launcher(),
            stateful=stateful,
            first=config.first_worker,
            of=config.all_workers or None,
        )
        pool.launch()
    except Exception as error:
        name_unpicklable(config, error)
    return pool


class DeferringExecutor(Executor):
    """Defers the CPU work to the consumer's thread: the data of each batch is the `RawBatch` itself."""

    async def assemble(self, raw: RawBatch, work: Work) -> HostBatch:
        return HostBatch(raw.plan, raw, len(raw.plan.indices), end=raw.end)


class ThreadExecutor(Executor):
    """Threads beside the loop: one without workers, or several for decoders that release the GIL.

    They share the process's random generators; the functions they call seed them where that is right.
    """

    def __init__(self, threads: int, rank: RankInfo, *, seeds: bool) -> None:
        self._rank = rank
        self._seeds = seeds
        self._requests: queue.SimpleQueue[tuple[Callable[[], object], asyncio.Future[object]] | None] = (
            queue.SimpleQueue()
        )
        self.parallel = threads
        self._threads = [
            # In the caller's context, which has the settings of `numpy.seterr`.
            threading.Thread(
                target=contextvars.copy_context().run,
                args=(self._work,),
                name=f"headrace-assemble-{number}",
                daemon=True,
            )
            for number in range(threads)
        ]

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._running = len(self._threads)
        self._ended = asyncio.Event()
        for thread in self._threads:
            thread.start()

    async def assemble(self, raw: RawBatch, work: Work) -> HostBatch:
        assert callable(work)
        host: HostBatch = await self._call(functools.partial(work, raw))
        return host

    async def apply(self, request: StepsRequest) -> list[object]:
        outcomes: list[object] = await self._call(functools.partial(request.run, seeds=self._seeds))
        return outcomes

    async def _call(self, work: Callable[[], object]) -> Any:
        answer: asyncio.Future[object] = self._loop.create_future()
        self._requests.put((work, answer))
        return await answer

    async def close(self, deadline: float) -> None:
        """Let the threads finish their current work; after the deadline they remain, as daemons."""
        if self._threads[0].ident is None:
            return
        self.kill()
        try:
            await asyncio.wait_for(self._ended.wait(), deadline)
        except TimeoutError:  # user code holds one of them
            return
        for thread in self._threads:
            thread.join()

    def kill(self) -> None:
        """Let each thread end at its next request; a thread cannot be killed."""
        for _ in self._threads:
            self._requests.put(None)

    def _work(self) -> None:
        provide_rank(self._rank)
        while (request := self._requests.get()) is not None:
            work, answer = request
            if not answer.done():
                try:
                    self._call_on_loop(_settle, answer, work())
                except BaseException as error:  # not of user code, whose errors are in the result: a failed import, say
                    self._call_on_loop(_fail, answer, as_exception(error))
            del request, work, answer  # hold no batch while waiting for the next
        self._call_on_loop(self._on_thread_end)

    def _on_thread_end(self) -> None:
        self._running -= 1
        if not self._running:
            self._ended.set()

    def _call_on_loop(self, callback: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback, *args)


class ProcessExecutor(Executor):
    """The pool's worker processes."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._steps: PickledSteps = PickledSteps()

    @property
    def usable(self) -> bool:
        return self._pool.broken is None

    async def open(self) -> None:
        await self._pool.open()

    def broadcast(self, request: Callable[[int], object]) -> None:
        """Send each worker, by its number, a request ahead of later ones; its errors come with its next batch."""
        self._pool.broadcast(request)

    @property
    def parallel(self) -> int:
        return self._pool.workers

    async def apply(self, request: StepsRequest) -> list[object]:
        """Apply steps in the first free worker. The functions are sent only to a worker that lacks them."""
        reply = await self._pool.run(request.to_worker(self._steps, with_functions=False), doing=_STEPS)
        if reply.answer.value is None and reply.answer.error is None:
            reply = await self._pool.run(request.to_worker(self._steps, with_functions=True), doing=_STEPS)
        answer = reply.answer
        if answer.error is None:
            outcomes: list[object] = answer.value
            return outcomes
        if answer.step == "pack":
            remedy = "It is sent back from a worker process: return tensors, arrays, or classes that both can import."
            raise not_picklable("the result of a function before batching", answer.error, remedy)
        raise answer.error

    async def assemble(self, raw: RawBatch, work: Work) -> HostBatch:
        assert work is None or isinstance(work, SharedPickle)
        plan = raw.plan
        if raw.stream_state is not None:
            raw = raw._replace(stream_state=None)  # it stays here
        try:
            reply = await self._pool.run(
                raw.flat(),
                work,
                worker=raw.worker,
                batch=plan.number,
                indices=tuple(plan.indices),
                plain=raw.is_plain,
            )
        except WorkerDiedError as died:
            return HostBatch.failed(plan, died, stage=Stage.ASSEMBLE)._replace(end=raw.worker is not None)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # user code: __reduce__ of a sample's class
            return HostBatch.failed(plan, _unpicklable_sample(error), stage=Stage.ASSEMBLE)
        return self._host_batch(raw, reply)

    def worker_of(self, batch: int) -> int | None:
        return self._pool.worker_of(batch)

    def take_deaths(self) -> int:
        """The workers that died since the last call, also those whose batch another worker has assembled since."""
        deaths, self._pool.deaths = self._pool.deaths, 0
        return deaths

    async def close(self, deadline: float) -> None:
        await self._pool.close(deadline)

    def kill(self) -> None:
        self._pool.kill()

    def release(self) -> None:
        self._pool.release()

    def _host_batch(self, raw: RawBatch, reply: Reply) -> HostBatch:
        answer, plan = reply.answer, raw.plan
        if answer.error is None:
            host = HostBatch.from_flat(answer.value, plan)
        elif answer.step == "start":
            # The worker cannot run, so its stream cannot continue.
            host = _failed(plan, answer, stage=Stage.WORKER_START)._replace(end=raw.worker is not None)
        elif answer.step == "pack" and raw.worker is not None:  # its data and failures are pickled before
            # Whether the worker's stream has ended is lost with the answer, so that it has to be ended here.
            host = HostBatch.failed(plan, unpicklable_state(answer.error), stage=Stage.SAVE_STATE)._replace(end=True)
        elif answer.step == "receive":
            host = HostBatch.failed(plan, _unpicklable_sample(answer.error), stage=Stage.ASSEMBLE)
        else:
            host = _failed(plan, answer, stage=Stage.ASSEMBLE)
        if not host.failures:
            return host
        located = (replace(f, worker=reply.worker, attempt=reply.attempt) for f in host.failures)
        return host._replace(failures=tuple(located))


def _failed(plan: BatchPlan, answer: Answer, *, stage: Stage) -> HostBatch:
    assert answer.error is not None
    failure = Failure.caught(answer.error, stage=stage, batch=plan.number)
    return HostBatch.nothing(plan, (replace(failure, traceback=answer.traceback),))


def _unpicklable_sample(reason: BaseException) -> NotPicklableError:
    remedy = "The result of aget is sent to a worker process: return bytes or arrays, or use num_workers=0."
    return not_picklable("a fetched sample", reason, remedy)


def _settle(answer: asyncio.Future[object], result: object) -> None:
    if not answer.done():
        answer.set_result(result)


def _fail(answer: asyncio.Future[object], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
