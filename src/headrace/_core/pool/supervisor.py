"""Numbered worker processes under supervision: requests in, answers out, dead workers replaced.

A request goes to the first free worker, or to the one it is pinned to. A worker that dies is
replaced under the same number, and its request is tried once more; a worker that dies repeatedly
before it has answered anything breaks the pool, so that processes are not started for ever.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import logging
import signal
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext
from typing import Any

from headrace._core.descriptors import explained
from headrace._core.failure import as_exception
from headrace._core.pool.launch import WorkerProcess, launch_worker
from headrace._core.pool.settings import Settings
from headrace._core.pool.worker import (
    INHERITED,
    Answer,
    BootMessage,
    ProcessEnvironment,
    Request,
    Started,
    WorkerTask,
)
from headrace._core.text import shorten_list
from headrace._core.transport.channel import Connection, EngineChannel
from headrace._core.transport.pickling import dump_message
from headrace._core.transport.shared_pickle import SharedPickle
from headrace.errors import WorkerDiedError

# a request whose worker died is tried once more: another process may be the cause (memory)
ATTEMPTS = 2
# Pinned requests are sent while the worker is still busy with the one before, so that it need not
# wait for the next. Other requests go to a free worker, so that none waits for a slow one.
PINNED_AHEAD = 2
# the same, while batches are quick: those of an epoch that is left are answered in vain
PINNED_QUICK = 16
# seconds in which workers finish their current request when the pool is closed, as torch's have
WORK_DEADLINE = 5.0
STARTS_WITHOUT_ANSWER = 3  # deaths before the first answer after which a worker is given up
_log = logging.getLogger("headrace")


@dataclass(slots=True, eq=False)
class Job:
    request: object  # the task's argument
    # where tasks are sent, with the request to a worker that lacks it; None: the last
    task: SharedPickle | None = None
    # the number of the worker to use, None for any; later of the one that it was sent to
    worker: int | None = None
    batch: int | None = None  # the batch's number, and its indices, for `WorkerDiedError`
    indices: tuple[object, ...] = ()
    # a description of a request that has a task of its own; None for a batch
    doing: str | None = None
    plain: bool = False  # whether the request holds no object of the user's
    attempt: int = 1  # counts the workers that it was given to
    answer: asyncio.Future[Answer] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def fail(self, error: Exception) -> None:
        """Answer with an error, unless it is answered or its caller was cancelled."""
        if not self.answer.done():
            self.answer.set_exception(error)


@dataclass(slots=True, eq=False)
class NumberedWorker:
    """One process of a numbered worker; its replacement takes over the number and the pinned jobs."""

    number: int
    process: WorkerProcess
    connection: Connection
    pinned: deque[Job] = field(default_factory=deque)  # jobs that have to go to this number
    # processes of this number that have died since the last answer, this one included
    failed_starts: int = 1
    started: bool = False  # whether it has begun to read jobs
    # None before it is connected, and after it was closed by this end
    channel: EngineChannel | None = None
    connected: bool = False  # whether the connection is or was the channel's, which closes it
    # the numbers of the tasks that it has, if tasks are sent
    loaded: set[int] = field(default_factory=set)
    jobs: deque[Job] = field(default_factory=deque)  # those that were sent to it, in order
    exited: asyncio.Event = field(default_factory=asyncio.Event)

    def close_channel(self) -> None:
        channel, self.channel = self.channel, None
        if channel is not None:
            channel.close()
        elif not self.connected:
            self.connection.close()

    def release(self) -> None:
        if not self.exited.is_set():
            asyncio.get_running_loop().remove_reader(self.process.sentinel)
        self.process.release()
        self.close_channel()

    def death(self, job: Job | None, obstacle: Exception | None = None) -> WorkerDiedError:
        """The error that reports the end of the process, which was doing `job`, and could not be replaced."""
        batch, indices = (None, ()) if job is None else (job.batch, job.indices)
        attempts = self.failed_starts if job is None else job.attempt
        pid, how, code = self.process.pid, self.process.how_it_ended(), self.process.exit_code
        if job is not None and job.doing is not None:
            doing = job.doing
            remedy = (
                "Call the function that map or filter was given in this process to see the crash"
            )
        elif batch is not None:
            doing = f"on batch {batch}, indices {shorten_list(indices, len(indices))}"
            remedy = "Run the transform and collate_fn over these indices with num_workers=0 to see the crash"
        elif attempts:
            doing = "while starting"
            remedy = "Call worker_init_fn, and import what the transform needs, in this process to see the crash"
        else:
            doing, remedy = "while idle", "None of your code was running in it"
        # which people and tools look for
        torchs = f"DataLoader worker (pid(s) {pid}) exited unexpectedly"
        if code is not None and code < 0:
            torchs = f"DataLoader worker (pid {pid}) is killed by signal: {signal.strsignal(-code)}"
        message = (
            f"worker {self.number} (pid {pid}) {how} {doing}{f', attempt {attempts}' if attempts else ''}. {remedy}; "
            f"if it was killed, look for the out-of-memory killer in the kernel's log. In torch's words: {torchs}."
        )
        if obstacle is not None:
            ended = "" if pid is None else f" (pid {pid}) {how}, and"
            reason = getattr(obstacle, "strerror", None) or f"{type(obstacle).__name__}: {obstacle}"
            message = f"worker {self.number}{ended} cannot be started: {reason}"
        return WorkerDiedError(
            message, worker=self.number, exit_code=code, batch=batch, indices=indices
        )


class Pool:
    """Worker processes that run tasks; the engine owns it.

    Construct and `launch` from any thread; then `open`, `run` and `close` on one event loop. Where
    the zygote forks the workers, the first task is pickled here, and its error of pickling is
    raised.

    A task may have state that cannot be rebuilt (a stream's position). With `stateful`, a dead
    worker is not replaced, and its requests are not tried again.
    """

    def __init__(
        self,
        task: WorkerTask | SharedPickle,
        *,
        numbers: range,  # of the workers; those that are added go on in its steps
        context: BaseContext
        | None,  # starts the workers, which inherit the task; None: the zygote, and tasks are sent
        stateful: bool,
    ) -> None:
        self._inherited: WorkerTask | None = None
        self._latest: SharedPickle | None = None  # the first task of new workers
        self._in_use: weakref.WeakValueDictionary[int, SharedPickle] = weakref.WeakValueDictionary()
        if context is None:
            self._latest = task if isinstance(task, SharedPickle) else SharedPickle.dumps(task)
            self._in_use[self._latest.number] = self._latest
            self._settings = Settings.here()  # not in `open`: some belong to the caller's thread
        else:
            self._inherited = task.loads() if isinstance(task, SharedPickle) else task
        self._numbers = numbers
        self._context = context
        self._attempts = 1 if stateful else ATTEMPTS
        self._stateful = stateful
        self._workers: dict[int, NumberedWorker] = {}
        self._leaving: set[NumberedWorker] = set()  # they end when they are idle
        self.pinned_ahead = PINNED_AHEAD
        self._waiting: deque[Job] = deque()
        self.broken: WorkerDiedError | None = None  # why it runs nothing any more
        self.deaths = 0  # of processes that had started, since the reader of this set it to 0
        self._closing = False

    @property
    def workers(self) -> int:
        return len(self._numbers)

    def launch(self) -> None:
        """Start the processes, without waiting until they run."""
        try:
            for number in self._numbers:
                self._workers[number] = self._start(number)
        except BaseException:  # Ctrl-C too: nothing owns the workers that have started
            self.kill()
            self.release()
            raise

    def _start(self, number: int) -> NumberedWorker:
        modules = () if self._latest is None else self._latest.modules
        stop = self._numbers.stop
        started = launch_worker(self._context, self._inherited, number, stop, modules)
        return NumberedWorker(number, *started)

    async def open(self) -> None:
        for worker in list(self._workers.values()):
            if not worker.connected:  # by `resize`, which may come before
                self._connect(worker)

    def resize(self, stop: int) -> None:
        """Have workers with the numbers below `stop`; others end when they have answered their jobs.

        At least one number is below `stop`.
        """
        self._numbers = range(self._numbers.start, stop, self._numbers.step)
        if self.broken is not None or self._closing:
            return
        for number in [number for number in self._workers if number not in self._numbers]:
            worker = self._workers.pop(number)
            self._leaving.add(worker)
            self._next_job(worker)
        try:
            for number in self._numbers:
                if number not in self._workers:
                    with explained(f"start worker {number}"):
                        worker = self._workers[number] = self._start(number)
                    self._connect(worker)
        except OSError as error:  # the others go on
            _log.warning("%s", error)

    def _connect(self, worker: NumberedWorker) -> None:
        on_object, on_lost = (
            functools.partial(self._on_object, worker),
            functools.partial(self._on_lost, worker),
        )
        self._watch(worker)
        worker.connected = True
        worker.channel = channel = EngineChannel(worker.connection, on_object, on_lost)
        if (task := self._latest) is not None:
            place = worker.number, self._numbers.stop
            boot = BootMessage(
                ProcessEnvironment.here(), self._settings, task.modules, task, *place
            )
            channel.send(dump_message(boot))
            worker.loaded.add(task.number)
        self._next_job(worker)

    def _watch(self, worker: NumberedWorker) -> None:
        def check() -> None:
            if worker.process.ended():
                asyncio.get_running_loop().remove_reader(worker.process.sentinel)
                worker.exited.set()
                if worker.channel is not None:  # so that it is known which job it has ended in
                    worker.channel.receive_rest()
                if not self._closing:
                    self._on_exit(worker)

        if not worker.exited.is_set():
            asyncio.get_running_loop().add_reader(worker.process.sentinel, check)

    async def run(self, job: Job) -> Answer:
        """Have a worker answer a job. Raises `WorkerDiedError`, or whatever pickling the request raises."""
        if self.broken is not None:
            raise copy.copy(self.broken)
        if job.task is None:
            job.task = self._latest
        else:
            self._in_use[job.task.number] = job.task
            self._latest = job.task if job.doing is None else self._latest
        if job.worker is not None:
            chosen = self._workers[job.worker]
            chosen.pinned.append(job)
            self._next_job(chosen)
        else:
            self._waiting.append(job)
            for candidate in self._workers.values():
                self._next_job(candidate)
        return await job.answer

    def broadcast(self, request: Callable[[int], object]) -> None:
        """Send each worker, by its number, a request ahead of later ones, without waiting for the answers."""
        if self.broken is not None:
            return
        for worker in self._workers.values():
            job = Job(request(worker.number), self._latest)
            # it is retrieved
            job.answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())
            worker.pinned.append(job)
            self._next_job(worker)

    def worker_of(self, batch: int) -> int | None:
        """The number of the worker that the request for a batch has been sent to, if it has been."""
        return next(
            (w.number for w in self._all() if any(job.batch == batch for job in w.jobs)), None
        )

    async def close(self, deadline: float) -> None:
        """End all workers by closing their channels: each finishes the request that it is busy with.

        A worker may be writing a file. One that has not ended after `WORK_DEADLINE` is sent
        SIGTERM, and SIGKILL after `deadline` seconds more.
        """
        self._closing = True
        for worker in self._all():
            worker.close_channel()
            self._watch(worker)  # if it could not be connected
        living = [asyncio.ensure_future(worker.exited.wait()) for worker in self._all()]
        for last, patience in (
            (signal.SIGTERM, WORK_DEADLINE),
            (signal.SIGKILL, deadline),
            (None, 1.0),
        ):
            # SIGKILL takes milliseconds
            late = (await asyncio.wait(living, timeout=patience))[1] if living else ()
            if not late:
                break
            for worker in self._all():
                if last is not None:
                    worker.process.signal(last)
        for task in living:
            task.cancel()
        for worker in self._all():
            worker.release()
        self._forget()

    def kill(self) -> None:
        """Send SIGKILL to all workers; from any thread, when the loop cannot close the pool."""
        for worker in self._all():
            worker.process.signal(signal.SIGKILL)

    def release(self) -> None:
        """Close the remaining handles, after the loop is closed."""
        for worker in self._all():
            worker.process.release()
            worker.connection.close()
        self._forget()

    def _forget(self) -> None:
        """Free descriptors and shared memory now, not when the cycles of this pool are collected."""
        self._workers.clear()
        self._leaving.clear()
        self._latest = None

    def _all(self) -> list[NumberedWorker]:
        return [*self._workers.values(), *self._leaving]

    def _next_job(self, worker: NumberedWorker) -> None:
        if worker in self._leaving:
            if not worker.jobs:
                worker.close_channel()  # its process ends by itself
            return
        while worker.channel is not None:
            # Those that wait are first: for pinned requests, they are those of a dead worker.
            queue, most = (
                (self._waiting, 1) if self._waiting else (worker.pinned, self.pinned_ahead)
            )
            if not queue or len(worker.jobs) >= most:
                return
            job = queue.popleft()
            if not job.answer.done():  # otherwise its caller was cancelled
                self._send(worker, worker.channel, job)

    def _send(self, worker: NumberedWorker, channel: EngineChannel, job: Job) -> None:
        """Send a job, with its task if the worker lacks it; an error of pickling is the job's answer."""
        task, number = job.task, INHERITED if job.task is None else job.task.number
        ships = task is not None and number not in worker.loaded
        try:
            request: Request = job.request, number, None, frozenset()
            if ships:
                numbers = frozenset((INHERITED, *self._in_use))
                worker.loaded &= numbers
                request = job.request, number, task, numbers
            channel.send(dump_message(request, plain=job.plain and not ships))
        except BaseException as error:
            # user code: __reduce__ of a sample's class; descriptors that cannot be sent
            job.answer.set_exception(as_exception(error))
            return
        job.worker = worker.number
        worker.jobs.append(job)
        if ships:
            worker.loaded.add(number)

    def _on_object(self, worker: NumberedWorker, obj: Any) -> None:
        if isinstance(obj, Started):
            worker.started = True
            return
        if type(obj) is tuple:
            obj = Answer(*obj)
        elif isinstance(obj, BaseException):
            obj = Answer(error=obj, step="unpack")
        worker.failed_starts = 0
        if obj.step == "receive":  # the task may have been sent with it
            worker.loaded.clear()
        job = worker.jobs.popleft() if worker.jobs else None
        if job is not None and not job.answer.done():
            job.answer.set_result(obj)
        self._next_job(worker)

    def _on_lost(self, worker: NumberedWorker) -> None:
        # otherwise it was closed here, and the process ends by itself
        if worker.channel is not None:
            worker.process.signal(signal.SIGKILL)  # it cannot work without a channel

    def _on_exit(self, worker: NumberedWorker) -> None:
        if worker in self._leaving and not worker.jobs:
            self._leaving.remove(worker)
            worker.release()
            return
        refusal = worker.process.refusal
        self.deaths += refusal is None
        job = worker.jobs.popleft() if worker.jobs else None
        suspect = job if worker.started else None  # before, it had not read its job
        died = worker.death(suspect)
        worker.close_channel()
        again = worker.pinned if self._stateful else self._waiting
        # it had not started these, which are all pinned
        worker.pinned.extendleft(reversed(worker.jobs))
        worker.jobs.clear()
        if suspect is not None and suspect.attempt >= self._attempts:
            suspect.fail(died)
        elif job is not None:
            job.attempt += suspect is not None
            again.appendleft(job)
        if suspect is not None:
            worker.failed_starts = 0  # the job's attempts are the bound here
        if worker in self._leaving:  # its jobs go to the others
            self._leaving.remove(worker)
            worker.release()
            for candidate in self._workers.values():
                self._next_job(candidate)
            return
        if self.broken or (
            refusal is None and (self._stateful or worker.failed_starts >= STARTS_WITHOUT_ANSWER)
        ):
            self._break(self.broken or died)
            return
        worker.release()
        if refusal is not None:
            self._break(worker.death(None, obstacle=refusal))
            return
        try:
            with explained(f"replace worker {worker.number}"):
                successor = self._start(worker.number)
        except Exception as error:
            worker.failed_starts += 1
            self._break(worker.death(None, obstacle=error))
            return
        if suspect is None or not suspect.answer.done():  # else the error reports it
            _log.warning("%s Another process has taken its place.", died)
        successor.pinned, successor.failed_starts = worker.pinned, worker.failed_starts + 1
        self._workers[worker.number] = successor
        try:
            self._connect(successor)
        except Exception as error:
            successor.process.signal(signal.SIGKILL)
            self._break(successor.death(None, obstacle=error))

    def _break(self, died: WorkerDiedError) -> None:
        """Fail all requests, with a copy of the error each: their consumer adds a note of its own."""
        self.broken = died
        for queue in [self._waiting, *(worker.pinned for worker in self._workers.values())]:
            while queue:
                queue.popleft().fail(copy.copy(died))
