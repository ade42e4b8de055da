"""Executors, which turn a `RawBatch` into a `HostBatch` off the loop. The engine owns one."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import itertools
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace._core.batches import HostBatch, RawBatch, SessionStart
from headrace._core.engine.config import EngineConfig, name_unpicklable
from headrace._core.engine.serving import WorkerMain
from headrace._core.engine.stepping import Chunk, Outcomes, StepsTask, settle
from headrace._core.engine.worker_tasks import not_picklable
from headrace._core.failure import Stage, as_exception
from headrace._core.messages import SessionEnd, StepsAnswer, Unread
from headrace._core.pool.children import ApplySteps, Children, Job, ProcessLink, StartSession
from headrace._core.pool.dealing import Dealer
from headrace._core.pool.group import WorkerGroup, log_idle_death
from headrace._core.pool.launch import WorkerProcess, launch_by_context, launch_by_zygote
from headrace._core.pool.settings import Settings
from headrace._core.ranks.rankinfo import RankInfo, provide_rank
from headrace._core.transport.channel import Connection
from headrace._core.transport.pickling import dump_message
from headrace._core.transport.shared_pickle import SharedPickle
from headrace.errors import EngineDiedError, NotPicklableError

Work = Callable[[RawBatch], HostBatch] | SharedPickle | None
"""The assembly of a batch: a function for a thread; for workers a task, or None for the task they were started with."""

FIRST_CHUNK = -(1 << 60)  # the number of the first job on samples that are not yet in a batch; others follow


class ThreadExecutor:
    """A thread beside the loop, of an engine without workers.

    If `deferred`, there is no thread: the CPU work is left to the consumer's thread, and a batch's data is the
    `RawBatch` itself.
    """

    broken = False
    workers = 1

    def __init__(self, rank: RankInfo, *, deferred: bool) -> None:
        self._rank = rank
        # Calls with their answers; to end the thread, no call, and what is set then.
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        run = contextvars.copy_context().run  # in the caller's context, as `numpy.errstate` is one of its variables
        thread = threading.Thread(target=run, args=(self._work,), name="headrace-assemble", daemon=True)
        self._thread = None if deferred else thread

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._thread is not None:
            self._thread.start()

    def begin(self, work: Work, start: SessionStart) -> ThreadSession:
        """The thread's part of a session."""
        return ThreadSession(self, work)

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


@dataclass(frozen=True, slots=True)
class ThreadSession:
    """A session of the engine without workers."""

    executor: ThreadExecutor
    work: Work

    async def assemble(self, raw: RawBatch) -> HostBatch:
        return await self.executor.assemble(raw, self.work)

    async def apply(self, task: StepsTask, chunk: Chunk) -> Outcomes:
        return await self.executor.apply(task, chunk)

    def worker_of(self, number: int) -> int | None:
        return None

    def take_deaths(self) -> int:
        return 0

    def close(self) -> None:
        pass  # the thread is the executor's


class ProcessExecutor:
    """Worker processes, started here, before there is a loop; `NotPicklableError` if they cannot have the functions."""

    def __init__(self, config: EngineConfig, work: SharedPickle | None) -> None:
        self.numbers = config.workers
        self._context = config.context
        self._task = None  # each session brings its own
        if config.context is not None:
            self._task = config.worker_task() if work is None else work.loads()
        self._modules = () if work is None else work.modules
        self._settings = Settings.here()  # not later: some belong to the caller's thread
        self._children = Children(self._launch, self._on_idle_death, keeps=True)
        self.idle_deaths = 0  # since a session took their number
        self._sessions: set[WorkerSession] = set()
        self._broken = False
        self.pickles: OrderedDict[tuple[int, ...], SharedPickle] = OrderedDict()  # see `StepsTask.pickle`
        try:
            for number in self.numbers:
                self._children.start(number)
        except BaseException as error:  # Ctrl-C too: nothing owns the processes that have started
            self.kill()
            self.release()
            if isinstance(error, Exception):
                name_unpicklable(config, error)
            raise

    def _launch(self, number: int) -> tuple[WorkerProcess, Connection]:
        main = WorkerMain(number, self.numbers.stop, self._task)
        if self._context is None:
            return launch_by_zygote(main, self._modules, self._settings, has_control=False)
        return launch_by_context(self._context, main)

    def _on_idle_death(self, number: int, process: WorkerProcess) -> None:
        self.idle_deaths += 1
        log_idle_death(number, process)

    @property
    def workers(self) -> int:
        return len(self.numbers)

    @property
    def broken(self) -> bool:
        """Whether workers could not be replaced."""
        return self._broken or any(session.group.broken for session in self._sessions)

    async def open(self) -> None:
        pass  # each session opens its part

    def begin(self, work: Work, start: SessionStart) -> WorkerSession:
        """The workers' part of a session, on the running loop."""
        assert work is None or isinstance(work, SharedPickle)
        opening = StartSession(work, 0, start)

        def connect(number: int) -> ProcessLink:
            return self._children.connect(number, opening)

        session = WorkerSession(connect, self)
        self._sessions.add(session)
        return session

    def forget(self, session: WorkerSession) -> None:
        """Forget a session that has ended."""
        self._sessions.discard(session)
        self._broken = self._broken or session.group.broken is not None

    def resize(self, stop: int) -> None:
        """Have workers with the numbers below `stop`; others end when they have answered their plans."""
        self.numbers = range(self.numbers.start, stop, self.numbers.step)
        for session in self._sessions:
            session.group.resize(self.numbers)
        for number in list(self._children.started):
            if number not in self.numbers:
                self._children.end(number)

    async def close(self, deadline: float) -> None:
        """End all workers; each finishes its current request."""
        self._children.close()

    def kill(self) -> None:
        self._children.kill()

    def release(self) -> None:
        self._children.release()


class WorkerSession:
    """The workers' part of a session of the engine, on its loop."""

    def __init__(self, connect: Callable[[int], ProcessLink], executor: ProcessExecutor) -> None:
        self.group = WorkerGroup(connect, Dealer(executor.numbers, room=1))
        self._executor = executor
        self._answers: dict[int, asyncio.Future[Any]] = {}  # by the numbers of jobs
        self._chunks = itertools.count(FIRST_CHUNK)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.group.source, self._receive)

    async def apply(self, task: StepsTask, chunk: Chunk) -> Outcomes:
        steps = task.pickle(self._executor.pickles)
        number = next(self._chunks)
        message = dump_message(ApplySteps(number, steps.number, tuple(chunk)))
        answer = await self._answer(Job(number, message, steps=steps))
        if answer.error is None:
            return Outcomes(*answer.outcomes)
        if not isinstance(answer, Unread) and answer.packing:
            remedy = "It is sent back from a worker process: return tensors, arrays, or classes that both can import."
            raise not_picklable("the result of a function before batching", answer.error, remedy)
        raise answer.error

    async def assemble(self, raw: RawBatch) -> HostBatch:
        plan = raw.plan
        sent = raw._replace(stream_state=None, origin=None)  # they stay here
        try:
            message = dump_message(sent.flat())
        except BaseException as error:  # user code: __reduce__ of a sample's class
            return HostBatch.failed(plan, _unpicklable_sample(error), Stage.ASSEMBLE)
        answer = await self._answer(Job(plan.number, message, plan))
        if isinstance(answer, Unread):
            return HostBatch.failed(plan, _unpicklable_sample(answer.error), Stage.ASSEMBLE)
        host: HostBatch = answer
        return host

    async def _answer(self, job: Job) -> Any:
        answer = self._answers[job.number] = self._loop.create_future()
        self.group.send([job])
        self._take_in()  # a group that is broken has answered
        try:
            return await answer
        finally:
            del self._answers[job.number]

    def _receive(self) -> None:
        self.group.receive()
        self._take_in()

    def _take_in(self) -> None:
        messages = self.group.messages
        while messages:
            message = messages.popleft()
            if isinstance(message, SessionEnd):  # a process has closed the session without an answer
                for answer in list(self._answers.values())[:1]:
                    answer.set_exception(message.error or EngineDiedError(why="a worker has closed the session"))
                return
            if isinstance(message, HostBatch):
                waiting = self._answers.get(message.plan.number)
            else:
                assert isinstance(message, StepsAnswer | Unread)
                waiting = self._answers.get(message.number or 0)
            if waiting is not None and not waiting.done():  # otherwise the session was cancelled
                waiting.set_result(message)

    def worker_of(self, number: int) -> int | None:
        """The number of the worker that has a batch."""
        return self.group.worker_of(number)

    def take_deaths(self) -> int:
        """The workers that died since the last call, also those whose batch another worker has made since."""
        deaths = self.group.deaths + self._executor.idle_deaths
        self.group.deaths = self._executor.idle_deaths = 0
        return deaths

    def close(self) -> None:
        self._loop.remove_reader(self.group.source)
        self.group.leave()
        self.group.close()
        self._executor.forget(self)


Executor = ThreadExecutor | ProcessExecutor


def _unpicklable_sample(reason: BaseException) -> NotPicklableError:
    remedy = "The result of aget is sent to a worker process: return bytes or arrays, or use num_workers=0."
    return not_picklable("a fetched sample", reason, remedy)
