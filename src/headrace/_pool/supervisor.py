"""Numbered worker processes: requests, answers, and replacement of dead workers.

A request goes to the first free worker. A pinned request goes to the worker with a given number.
If a worker dies, a new process takes over the number, and the request is tried once more. If a
worker dies repeatedly before the first answer, the pool breaks: otherwise the pool would start
processes for ever.
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

from headrace._base.descriptors import explained
from headrace._base.text import shorten_list
from headrace._pool.launch import WorkerProcess, fork_from_zygote, launch_worker
from headrace._pool.settings import Settings
from headrace._pool.worker import (
    INHERITED,
    BootMessage,
    Failed,
    ProcessEnvironment,
    Request,
    WorkerStarted,
    WorkerTask,
    unpicklable_sample,
)
from headrace._records.batches import BatchPlan
from headrace._transport.channel import Connection, EngineChannel
from headrace._transport.pickling import dump_message
from headrace._transport.shared_pickle import SharedPickle
from headrace.errors import WorkerDiedError

# If a worker dies, its request is tried once more: another process may be the cause (memory).
ATTEMPTS = 2
# A worker may hold this many pinned requests, so the worker need not wait for the next request.
# Other requests only go to free workers, so no request waits behind a slow request.
PINNED_AHEAD = 2
# The same limit while batches are quick. The limit is not higher, because workers still answer the
# requests after the consumer has left an epoch.
PINNED_QUICK = 16
# Seconds in which workers may finish the current request when the pool is closed, as in torch.
WORK_DEADLINE = 5.0
STARTS_WITHOUT_ANSWER = 3  # deaths before the first answer; the pool then breaks
_log = logging.getLogger("headrace")


@dataclass(slots=True, eq=False)
class Job:
    """A request for a worker, and the future of the answer."""

    request: object  # the task's argument
    # The task to run, if the pool sends tasks. A worker without the task gets the task with the
    # request. None: the latest task.
    task: SharedPickle | None = None
    # Before sending: the worker to use, or None for any worker. After sending: the worker in use.
    worker: int | None = None
    plan: BatchPlan | None = None  # the plan of the batch, for `WorkerDiedError`
    doing: str = ""  # the work in words, for a request without a batch
    plain: bool = False  # whether the request holds no object of a user's class
    attempt: int = 1  # number of workers so far, including the current worker
    answer: asyncio.Future[Any] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def fail(self, error: Exception) -> None:
        """Answer with an error, unless the job is answered or cancelled."""
        if not self.answer.done():
            self.answer.set_result(Failed(error))


@dataclass(slots=True, eq=False)
class NumberedWorker:
    """A process with a worker number.

    A replacement takes over the number and the pinned jobs.
    """

    number: int
    process: WorkerProcess
    connection: Connection
    pinned: deque[Job] = field(default_factory=deque)  # waiting jobs for this number
    # Processes of this number started since the last answer, including this process.
    failed_starts: int = 1
    started: bool = False  # whether the process has begun to read jobs
    channel: EngineChannel | None = None  # owns the connection; None before `Pool.open`
    leaving: bool = False  # whether the pool has ended the process, as a surplus worker
    # Numbers of the tasks in the process, if the pool sends tasks.
    loaded: set[int] = field(default_factory=set)
    jobs: deque[Job] = field(default_factory=deque)  # jobs sent to the process, in order
    # Set after the end of the process. The worker then keeps `pinned` for the replacement.
    exited: asyncio.Event = field(default_factory=asyncio.Event)

    def close_channel(self) -> None:
        (self.channel or self.connection).close()

    def release(self) -> None:
        if not self.exited.is_set():
            asyncio.get_running_loop().remove_reader(self.process.sentinel)
        self.process.release()
        self.close_channel()

    def discard(self) -> None:
        """Kill the process, and close all descriptors. Any thread may call."""
        self.process.signal(signal.SIGKILL)
        self.process.release()
        self.connection.close()

    def cannot_start(self, error: Exception) -> WorkerDiedError:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        return WorkerDiedError(
            f"worker {self.number} cannot be started: {reason}", worker=self.number
        )

    def death(self, job: Job | None) -> WorkerDiedError:
        """Return the error for the end of the process, which had a job or no job."""
        plan = None if job is None else job.plan
        batch, indices = (
            (None, ()) if plan is None else (plan.number, tuple(plan.indices))
        )
        attempts = self.failed_starts if job is None else job.attempt
        pid, how, code = (
            self.process.pid,
            self.process.how_it_ended(),
            self.process.exit_code,
        )
        if plan is not None:
            doing = f"on batch {batch}, indices {shorten_list(indices, len(indices))}"
        elif job is not None:
            doing = job.doing
        else:
            doing = "while starting" if attempts else "while idle"
        # People and tools look for torch's words.
        torchs = f"DataLoader worker (pid(s) {pid}) exited unexpectedly"
        if code is not None and code < 0:
            torchs = f"DataLoader worker (pid {pid}) is killed by signal: {signal.strsignal(-code)}"
        attempt = f", attempt {attempts}" if attempts else ""
        message = (
            f"worker {self.number} (pid {pid}) {how} {doing}{attempt}. "
            "To see a crash of your code, do the same with num_workers=0; if it was killed, look "
            "for the out-of-memory killer in the kernel's log. "
            f"In torch's words: {torchs}."
        )
        return WorkerDiedError(
            message, worker=self.number, exit_code=code, batch=batch, indices=indices
        )


class Pool:
    """Worker processes for tasks, owned by the engine.

    The constructor starts the processes from any thread, and does not wait for them to run. Call
    `open`, `run` and `close` on one event loop. If the zygote forks the workers, the constructor
    pickles the first task and raises pickling errors.

    Args:
        task: The first task.
        numbers: The numbers of the workers. `resize` keeps start and step.
        context: The context of `multiprocessing` for starting workers, and the workers inherit the
            task. None: the zygote forks the workers, and the pool sends tasks.
        stateful: The state of the task cannot be rebuilt (for example the position of a stream). A
            dead worker is then not replaced, and no request is tried again.
    """

    def __init__(
        self,
        task: WorkerTask | SharedPickle,
        *,
        numbers: range,
        context: BaseContext | None,
        stateful: bool,
    ) -> None:
        self._inherited: WorkerTask | None = None
        self._latest: SharedPickle | None = None  # the first task for new workers
        self._in_use: weakref.WeakValueDictionary[int, SharedPickle] = (
            weakref.WeakValueDictionary()
        )
        if context is None:
            self._latest = (
                task if isinstance(task, SharedPickle) else SharedPickle.dumps(task)
            )
            self._in_use[self._latest.number] = self._latest
            # Here and not in `open`, because some settings belong to the caller's thread.
            self._settings = Settings.here()
        else:
            self._inherited = task.loads() if isinstance(task, SharedPickle) else task
        self._numbers = numbers
        self._context = context
        self._stateful = stateful
        # A worker with a number outside of `_numbers` ends as soon as it is idle.
        self._workers: dict[int, NumberedWorker] = {}
        self.pinned_ahead = PINNED_AHEAD
        self._waiting: deque[Job] = deque()
        # The reason why the pool runs no more jobs.
        self.broken: WorkerDiedError | None = None
        # Deaths of started processes since the reader of this count last set it to 0.
        self.deaths = 0
        # Has a thread call a function that may fork this process.
        self.call: Callable[[Callable[[], None]], None] = lambda function: function()
        self._closing = False
        try:
            for number in self._numbers:
                self._workers[number] = self._start(number)
        except BaseException:  # Ctrl-C too: nothing owns the workers that have started
            self.release()
            raise

    @property
    def workers(self) -> int:
        return len(self._numbers)

    def _start(self, number: int) -> NumberedWorker:
        if self._context is None:
            modules = () if self._latest is None else self._latest.modules
            process, connection = fork_from_zygote(modules)
        else:
            process, connection = launch_worker(
                self._context, self._inherited, number, self._numbers.stop
            )
        return NumberedWorker(number, process, connection)

    def open(self) -> None:
        """Connect the launched workers to the running loop, once.

        Also ask again for the replacements of dead workers.
        """
        for worker in self._workers.values():
            if worker.channel is None:
                try:
                    self._connect(worker)
                except Exception as error:
                    self._break(worker.cannot_start(error))
                    raise
            elif worker.exited.is_set() and self.broken is None:
                self._replace(worker)

    def resize(self, stop: int) -> None:
        """Change the workers to the numbers below `stop`.

        A surplus worker ends after answering the remaining jobs. At least one number is below
        `stop`.
        """
        self.open()
        self._numbers = range(self._numbers.start, stop, self._numbers.step)
        for worker in self._workers.values():
            self._next_job(worker)
        self._start_missing()

    def _start_missing(self) -> None:
        if self.broken is not None or self._closing:
            return
        try:
            for number in self._numbers:
                if number not in self._workers:
                    with explained(f"start worker {number}"):
                        worker = self._workers[number] = self._start(number)
                    self._connect(worker)
        except OSError as error:  # the other workers go on
            _log.warning("%s", error)

    def _connect(self, worker: NumberedWorker) -> None:
        on_object = functools.partial(self._on_object, worker)
        # A worker cannot work without a channel.
        on_lost = functools.partial(worker.process.signal, signal.SIGKILL)
        self._watch(worker)
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
                # After the last answers, the first remaining job is the job of the dead process.
                if worker.channel is not None:
                    worker.channel.receive()
                if not self._closing:
                    self._on_exit(worker)

        if not worker.exited.is_set():
            asyncio.get_running_loop().add_reader(worker.process.sentinel, check)

    async def run(self, job: Job) -> Any:
        """Wait for a worker's answer to a job.

        The answer is the result of the task, or `Failed`: the task raised an error, the worker died
        (`WorkerDiedError`), or the request cannot be pickled (`NotPicklableError`).
        """
        if self.broken is not None:
            return Failed(copy.copy(self.broken))
        if job.task is not None:
            self._in_use[job.task.number] = job.task
            self._latest = self._latest if job.plan is None else job.task
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
        """Send a request to every worker, without waiting for answers.

        Workers receive the request before later requests. `request` returns the request for a
        worker number.
        """
        if self.broken is not None:
            return
        for worker in self._workers.values():
            worker.pinned.append(
                Job(request(worker.number), doing="while starting an epoch")
            )
            self._next_job(worker)

    def worker_of(self, batch: int) -> int | None:
        """Return the worker with the request for a batch, or None."""
        for worker in self._workers.values():
            if any(
                job.plan is not None and job.plan.number == batch for job in worker.jobs
            ):
                return worker.number
        return None

    async def close(self, deadline: float) -> None:
        """End all workers by closing their channels.

        Each worker first finishes the current request, because a worker may be writing a file.
        After `WORK_DEADLINE`, remaining workers get SIGTERM, and SIGKILL after `deadline` more
        seconds.
        """
        self._closing = True
        workers = list(self._workers.values())
        for worker in workers:
            worker.close_channel()
            self._watch(worker)  # for a worker without a channel
        living = [asyncio.ensure_future(worker.exited.wait()) for worker in workers]
        for last, patience in (
            (signal.SIGTERM, WORK_DEADLINE),
            (signal.SIGKILL, deadline),
            (signal.SIGKILL, 1.0),
        ):
            # The last wait follows SIGKILL, and ends within milliseconds.
            late = (await asyncio.wait(living, timeout=patience))[1] if living else ()
            if not late:
                break
            for worker in workers:
                worker.process.signal(last)
        for task in living:
            task.cancel()
        for worker in workers:
            worker.release()
        self._forget()

    def kill(self) -> None:
        """Send SIGKILL to all workers.

        Call from any thread, if the loop cannot close the pool.
        """
        for worker in self._workers.values():
            worker.process.signal(signal.SIGKILL)

    def release(self) -> None:
        """Kill the remaining workers and close their handles, after the loop is closed."""
        for worker in self._workers.values():
            worker.discard()
        self._forget()

    def _forget(self) -> None:
        """Free descriptors and shared memory before garbage collection.

        The pool is part of reference cycles.
        """
        self._workers.clear()
        self._latest = None

    def _next_job(self, worker: NumberedWorker) -> None:
        if worker.number not in self._numbers:
            if not worker.jobs:
                worker.leaving = True
                worker.close_channel()
            return
        while worker.channel is not None and not (
            worker.leaving or worker.exited.is_set()
        ):
            # Waiting jobs go first.
            queue, most = (
                (self._waiting, 1)
                if self._waiting
                else (worker.pinned, self.pinned_ahead)
            )
            if not queue or len(worker.jobs) >= most:
                return
            job = queue.popleft()
            if not job.answer.done():  # otherwise the caller was cancelled
                self._send(worker, worker.channel, job)

    def _send(self, worker: NumberedWorker, channel: EngineChannel, job: Job) -> None:
        """Send a job, and the task if necessary.

        A pickling error becomes the job's answer.
        """
        request = Request(job.request, INHERITED if job.task is None else job.task.number)
        ships = job.task is not None and request.number not in worker.loaded
        if ships:
            in_use = frozenset((INHERITED, *self._in_use))
            request = request._replace(task=job.task, in_use=in_use)
        try:
            channel.send(dump_message(tuple(request), plain=job.plain and not ships))
        except BaseException as error:
            # user code: __reduce__ of a sample's class; descriptors that cannot be sent
            job.fail(unpicklable_sample(error))
            return
        job.worker = worker.number
        worker.jobs.append(job)
        if ships:
            worker.loaded = (worker.loaded & request.in_use) | {request.number}

    def _on_object(self, worker: NumberedWorker, obj: Any) -> None:
        if isinstance(obj, WorkerStarted):
            worker.started = True
            return
        if isinstance(obj, BaseException):  # of unpickling the answer
            obj = Failed(obj)
        worker.failed_starts = 0
        if isinstance(obj, Failed):  # a task may have been lost together with its request
            worker.loaded.clear()
        job = worker.jobs.popleft() if worker.jobs else None
        if job is not None and not job.answer.done():
            job.answer.set_result(obj)
        self._next_job(worker)

    def _on_exit(self, worker: NumberedWorker) -> None:
        if worker.leaving:
            del self._workers[worker.number]
            worker.release()
            self._start_missing()
            return
        refusal = worker.process.refusal
        self.deaths += refusal is None
        job = worker.jobs.popleft() if worker.jobs else None
        # A worker reads no job before the start.
        suspect = job if worker.started else None
        died = worker.death(suspect)
        worker.close_channel()
        # `multiprocessing` may start the replacement late. If another worker took the job, random
        # draws would depend on the time.
        again = self._waiting if self._context is None else worker.pinned
        # The worker had not begun the remaining jobs. All remaining jobs are pinned.
        worker.pinned.extendleft(reversed(worker.jobs))
        worker.jobs.clear()
        if suspect is not None and (self._stateful or suspect.attempt >= ATTEMPTS):
            suspect.fail(died)
        elif job is not None:
            job.attempt += suspect is not None
            again.appendleft(job)
        if suspect is not None:
            worker.failed_starts = 0  # the attempts of the job are the limit here
        if worker.number not in self._numbers:  # other workers take over the jobs
            del self._workers[worker.number]
            worker.release()
            for candidate in self._workers.values():
                self._next_job(candidate)
            return
        if self.broken or (
            refusal is None
            and (self._stateful or worker.failed_starts >= STARTS_WITHOUT_ANSWER)
        ):
            self._break(self.broken or died)
            return
        worker.release()
        if refusal is not None:
            self._break(worker.cannot_start(refusal))
            return
        if suspect is None or not suspect.answer.done():
            # Otherwise an error reports the death.
            _log.warning("%s Another process takes its place.", died)
        self._replace(worker)

    def _replace(self, dead: NumberedWorker) -> None:
        """Start a process in place of a dead process.

        `multiprocessing` starts the process on the thread of `call`, perhaps later.
        """
        if self._context is None:
            self._take_over(dead, self._successor(dead))
            return
        loop = asyncio.get_running_loop()

        def start() -> None:
            if self._workers.get(dead.number) is dead:
                # Otherwise an earlier call was enough.
                successor = self._successor(dead)
                try:
                    loop.call_soon_threadsafe(self._take_over, dead, successor)
                except RuntimeError:  # the loop has ended
                    if isinstance(successor, NumberedWorker):
                        successor.discard()

        self.call(start)

    def _successor(self, dead: NumberedWorker) -> NumberedWorker | Exception:
        try:
            with explained(f"replace worker {dead.number}"):
                return self._start(dead.number)
        except Exception as error:
            return error

    def _take_over(
        self, dead: NumberedWorker, successor: NumberedWorker | Exception
    ) -> None:
        if isinstance(successor, Exception):
            self._break(dead.cannot_start(successor))
        elif self._closing or self._workers.get(dead.number) is not dead:
            successor.discard()
        else:
            successor.pinned, successor.failed_starts = (
                dead.pinned,
                dead.failed_starts + 1,
            )
            self._workers[dead.number] = successor
            try:
                self._connect(successor)
            except Exception as error:
                successor.process.signal(signal.SIGKILL)
                self._break(successor.cannot_start(error))

    def _break(self, died: WorkerDiedError) -> None:
        """Fail all requests.

        Each request gets a copy of the error, because each consumer adds a note to the error.
        """
        self.broken = died
        for queue in [
            self._waiting,
            *(worker.pinned for worker in self._workers.values()),
        ]:
            while queue:
                queue.popleft().fail(copy.copy(died))
