"""One of the numbered workers of a pool: its process, its connection, and its requests."""

from __future__ import annotations

import asyncio
import copy
import signal
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace._core.failure import as_exception
from headrace._core.pool.processes import WorkerProcess, how_it_ended
from headrace._core.pool.worker import Answer, BootMessage, Request
from headrace._core.transport.channel import Connection, EngineChannel
from headrace._core.transport.pickling import dump_message
from headrace._core.transport.shared_pickle import SharedPickle
from headrace.errors import WorkerDiedError


class Reply(NamedTuple):
    """An answer, with the worker and the attempt that it came from."""

    answer: Answer
    worker: int
    attempt: int


@dataclass(slots=True, eq=False)
class Job:
    """A request and who waits for its answer; attributes are the arguments of `Pool.run`."""

    request: object
    task: SharedPickle | None
    reply: asyncio.Future[Reply]
    batch: int | None = None
    indices: tuple[object, ...] = ()
    doing: str | None = None
    attempt: int = 1
    ships_task: bool = False

    def fail(self, error: Exception) -> None:
        """Answer with an error, unless it is answered or its caller was cancelled."""
        if not self.reply.done():
            self.reply.set_exception(error)


def fail_all(queues: Iterable[deque[Job]], error: WorkerDiedError) -> None:
    """Empty the queues, and answer each job with a copy of the error: each batch's consumer adds its own note."""
    for queue in queues:
        while queue:
            queue.popleft().fail(copy.copy(error))


@dataclass(slots=True, eq=False)
class NumberedWorker:
    """One process of a numbered worker; its replacement takes over the number and the pinned jobs.

    Attributes:
        pinned: jobs that have to go to this number.
        jobs: jobs that were sent to it, in order.
        failed_starts: processes of this number that have died since the last answer, this one included.
        loaded: the numbers of the tasks that it has, if tasks are sent.
        watched: whether the loop watches for its exit.
        vacant: its process has died and could not be replaced.
        closed: the channel was closed by this end.
    """

    number: int
    process: WorkerProcess
    connection: Connection
    pinned: deque[Job] = field(default_factory=deque)
    failed_starts: int = 1
    started: bool = False
    channel: EngineChannel | None = None
    loaded: set[int] = field(default_factory=set)
    jobs: deque[Job] = field(default_factory=deque)
    exited: asyncio.Event = field(default_factory=asyncio.Event)
    watched: bool = False
    connecting: bool = False
    vacant: bool = False
    closed: bool = False

    def watch(self, on_exit: Callable[[], None]) -> None:
        """Call `on_exit` on the running loop when the process has ended."""

        def check() -> None:
            if self.process.ended():
                self._unwatch()
                self.exited.set()
                on_exit()

        asyncio.get_running_loop().add_reader(self.process.sentinel, check)
        self.watched = True

    def _unwatch(self) -> None:
        if self.watched:
            asyncio.get_running_loop().remove_reader(self.process.sentinel)
            self.watched = False

    async def connect(self, on_object: Callable[[object], None]) -> bool:
        """Connect to the process; False if it has exited meanwhile."""
        self.connecting = True
        try:
            channel = await EngineChannel.connect(
                self.connection,
                on_object=on_object,
                on_lost=self._on_lost,
            )
        finally:
            self.connecting = False
        if self.exited.is_set():  # it may have a successor
            channel.close()
            return False
        self.channel = channel
        return True

    def _on_lost(self) -> None:
        if not self.closed:  # otherwise it ends by itself
            self.process.signal(signal.SIGKILL)  # it cannot work without a channel

    def boot(self, message: BootMessage) -> None:
        """Send the first message, with the first task."""
        assert self.channel is not None
        assert isinstance(message.task, SharedPickle)
        self.channel.send(dump_message(message))
        self.loaded.add(message.task.number)

    def send(self, job: Job, in_use: Iterable[int]) -> None:
        """Send a job, with its task if the worker lacks it; an error of pickling is the job's answer."""
        assert self.channel is not None
        try:
            self.channel.send(dump_message(self._request(job, in_use)))
        except BaseException as error:  # user code: __reduce__ of a sample's class; descriptors that cannot be sent
            job.reply.set_exception(as_exception(error))
            return
        self.jobs.append(job)
        if job.task is not None:
            self.loaded.add(job.task.number)

    def _request(self, job: Job, in_use: Iterable[int]) -> object:
        if job.task is None:
            return job.request
        job.ships_task = job.task.number not in self.loaded
        if not job.ships_task:
            return Request(job.request, job.task.number)
        numbers = frozenset(in_use)
        self.loaded &= numbers
        return Request(job.request, job.task.number, job.task, numbers)

    def answered(self, answer: Answer) -> None:
        """Give an answer to the first of the jobs that were sent."""
        job = self.jobs.popleft() if self.jobs else None
        if answer.step == "receive" and job is not None and job.task is not None and job.ships_task:
            self.loaded.discard(job.task.number)
        self.failed_starts = 0
        if job is not None and not job.reply.done():
            job.reply.set_result(Reply(answer, self.number, job.attempt))

    def close_channel(self) -> None:
        self.closed = True
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def release(self) -> None:
        """Close its handles, on the loop."""
        self._unwatch()
        self.process.release()
        if not self.connecting:
            self.connection.close()

    def death(self, job: Job | None, obstacle: Exception | None = None) -> WorkerDiedError:
        """The error that reports the end of the process.

        Args:
            job: what it was doing, if that is known.
            obstacle: why it could not be replaced.
        """
        return WorkerDiedError(
            worker=self.number,
            pid=self.process.pid,
            how=how_it_ended(self.process),
            exit_code=self.process.exit_code,
            batch=None if job is None else job.batch,
            indices=() if job is None else job.indices,
            doing=None if job is None else job.doing,
            attempts=self.failed_starts if job is None else job.attempt,
            obstacle=obstacle,
        )
