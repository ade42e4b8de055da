"""Child processes by their numbers, and the links to the sessions in them.

A session has a connection of its own: plans go out, batches come in, in slabs that are mapped here. Nothing here needs
a thread. The owner of a link waits for its socket, or for the descriptor that says when the process has ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from headrace._core.batches import BatchPlan, HostBatch, SessionStart
from headrace._core.descriptors import explained
from headrace._core.eventloop.waiting import wait_readable
from headrace._core.messages import Answer, Link, Request, SessionEnd, Started, StepsAnswer, Unread, check_not_forked
from headrace._core.pool.launch import WorkerProcess
from headrace._core.transport.channel import BlockingChannel, Connection, Disconnected
from headrace._core.transport.pickling import Message, PickledPayload, dump_message
from headrace._core.transport.shared_pickle import SharedPickle
from headrace.errors import EngineDiedError

OPEN = b"o"  # requests a session; sent with the two ends of its connection, on which a `StartSession` follows
STATUS_DEADLINE = 1.0  # seconds in which the exit status of a process follows the end of its connection
WORK_DEADLINE = 5.0  # seconds in which processes finish their current work when they are closed, as torch's have
SIGNAL_DEADLINE = 1.0  # seconds after SIGTERM, and after SIGKILL
_log = logging.getLogger("headrace")


class StartSession(NamedTuple):
    """The first message of a session's connection.

    Attributes:
        work: the functions that make its batches; None where the process was started with them.
        seed: the seed of a stream's functions before batching.
        start: the epoch, and where the session begins in the epoch.
        state: the state of what the process reads by itself; pickled, so that the process reports an error in it.
        again: the number of the first plan, if the process takes the place of one that has died.
    """

    work: SharedPickle | None
    seed: int
    start: SessionStart
    state: PickledPayload | None = None
    again: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """Work on samples that were fetched elsewhere, pickled before it is dealt.

    Attributes:
        number: the number of its batch; negative where the samples are not yet in a batch.
        message: the pickled request.
        plan: the plan of its batch, if there is one.
        steps: the functions that the process needs for samples that are not yet in a batch.
    """

    number: int
    message: Message
    plan: BatchPlan | None = None
    steps: SharedPickle | None = None


class Steps(NamedTuple):
    """Functions that a process needs from now on, by the number of their pickle."""

    task: SharedPickle


class ApplySteps(NamedTuple):
    """The request to apply functions, by the number of their pickle, to samples that are not yet in a batch."""

    number: int
    steps: int
    chunk: tuple[Any, ...]


class Child:
    """A child process, started without waiting until it runs.

    The channel of a session that has ended in order is kept for the next one: its slabs are mapped at both ends.
    """

    def __init__(self, process: WorkerProcess, connection: Connection) -> None:
        self.process = process
        self.answered = False  # whether a session of it has made anything
        self.reported = False  # whether a session has noticed its end
        self.idle: deque[tuple[Connection, BlockingChannel]] = deque()
        self._connection = connection

    def connect(self, opening: StartSession, *, keeps: bool) -> ProcessLink:
        """Start a session, whose channel is kept after the session if `keeps`."""
        try:
            connection, channel = self.idle.popleft() if self.idle else self._request()
            link = ProcessLink(connection, channel, self, keeps=keeps)
            try:
                channel.send(opening)
            except BaseException:  # also of user code: `__reduce__` of an object in a state
                link.close()
                raise
            return link
        except (BrokenPipeError, ConnectionResetError) as error:
            raise end_of(self.process)[0] from error

    def _request(self) -> tuple[Connection, BlockingChannel]:
        """A channel to the process, which is sent the other ends of its connection."""
        with explained("open a session in a process of the loader"):
            ours, theirs = Connection.pair()
        try:
            with contextlib.closing(theirs):
                ends = [theirs.frames.fileno(), theirs.descriptors.fileno()]
                socket.send_fds(self._connection.descriptors, [OPEN], ends)
        except BaseException:
            ours.close()
            raise
        return ours, BlockingChannel(ours, reads_in_send=True)

    def close(self) -> None:
        """Let the process end; does not wait for it. Idempotent."""
        while self.idle:
            self.idle.popleft()[1].close()
        self._connection.close()


class Children:
    """The child processes of one owner, started when they are first needed, and again when they have died."""

    def __init__(
        self,
        launch: Callable[[int], tuple[WorkerProcess, Connection]],
        on_death: Callable[[int, WorkerProcess], None] = lambda number, process: None,  # of one without a session
        *,
        keeps: bool = False,  # whether their channels are kept for the next session
    ) -> None:
        self._launch = launch
        self._keeps = keeps
        self._on_death = on_death
        self.started: dict[int, Child] = {}
        self._pid = os.getpid()

    @property
    def alive(self) -> bool:
        """Whether one of them runs, in this process; also before they are started."""
        living = (not child.process.ended() for child in self.started.values())
        return self._pid == os.getpid() and (not self.started or any(living))

    def start(self, number: int) -> Child:
        """The child with a number, started if there is none, or if it has ended."""
        child = self.started.get(number)
        if child is not None and child.process.ended():
            del self.started[number]
            if not child.reported:
                self._on_death(number, child.process)
            self._release(child)
            child = None
        if child is None:
            child = self.started[number] = Child(*self._launch(number))
        return child

    def connect(self, number: int, opening: StartSession) -> ProcessLink:
        """Start a session in the child with a number."""
        child = self.start(number)
        try:
            return child.connect(opening, keeps=self._keeps)
        except EngineDiedError:
            if not child.process.ended():
                raise
            return self.start(number).connect(opening, keeps=self._keeps)

    def end(self, number: int) -> None:
        """Let a child end that has no session; does not wait for it."""
        self.started[number].close()

    def close(self, *, more: float = 0.0, warning: str | None = None) -> None:
        """End all children: each finishes its current work.

        A child may be writing a file. Those that have not ended after `WORK_DEADLINE` and `more` seconds are sent
        SIGTERM, with a warning, and SIGKILL later.
        """
        patience = WORK_DEADLINE + more
        for child in self.started.values():
            child.close()
        for last, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, SIGNAL_DEADLINE), (None, SIGNAL_DEADLINE)):
            deadline = time.monotonic() + seconds
            for child in self.started.values():
                # One that has no pid yet has not started; it ends as soon as it has.
                if ends_within(child.process, deadline - time.monotonic()) or last is None:
                    continue
                if last is signal.SIGTERM and warning is not None:
                    text = f"the loader's process {child.process.pid} did not end within its deadline and is killed: "
                    warnings.warn(text + warning, RuntimeWarning, stacklevel=2)
                child.process.signal(last)
        self.release()

    def kill(self) -> None:
        """Send SIGKILL to all children, from any thread."""
        for child in self.started.values():
            child.process.signal(signal.SIGKILL)

    def release(self) -> None:
        """Close the descriptors of all children."""
        children, self.started = self.started, {}
        for child in children.values():
            self._release(child)

    def _release(self, child: Child) -> None:
        child.close()
        child.process.release()


class ProcessLink(Link):
    """A link to a session in a child process. Its end is that of the connection, which no other process has open."""

    source: socket.socket

    def __init__(self, connection: Connection, channel: BlockingChannel, child: Child, *, keeps: bool) -> None:
        self.source = connection.frames
        self.child = child
        self.begun = False  # whether the process has begun to read plans
        self._connection = connection
        self._channel = channel
        self._keeps = keeps
        self._closed = False
        self._pid = os.getpid()
        self._held: dict[int, BatchPlan | Job] = {}  # without an answer
        self._steps: set[int] = set()  # numbers of the functions that the process has
        self._over = False  # nothing more is read
        self.messages: deque[Answer] = deque()

    def send(self, message: Request) -> None:
        if self._over:
            return
        try:
            if isinstance(message, list):
                self._held.update((each.number, each) for each in message)
            if isinstance(message, list) and message and isinstance(message[0], Job):
                for job in message:
                    self._send_job(job)
            else:
                self._channel.send_message(dump_request(message))
        except (BrokenPipeError, ConnectionResetError):
            return  # its end is received, after the batches that have arrived
        except OSError:
            if not self._over:  # otherwise another thread has closed it
                raise
        if not self._keeps:
            return
        if self._has_left():  # meanwhile, and may have found that nothing was under way
            self._shut()

    def _send_job(self, job: Job) -> None:
        if job.steps is not None and job.steps.number not in self._steps:
            self._channel.send(Steps(job.steps))
            self._steps.add(job.steps.number)
        self._channel.send_message(job.message)

    def receive(self) -> None:
        if self._over:
            return
        try:
            for obj in self._channel.receive_ready():
                if not self._take_in(obj):
                    return
        except Disconnected:
            self.lose()
        except OSError:
            check_not_forked(self._pid)  # a fork, in which the connection is closed
            if not self._over:  # otherwise another thread has closed it
                raise

    def _take_in(self, obj: object) -> bool:
        """Add a message; returns False after the last one."""
        if type(obj) is tuple:
            held = self._held.pop(obj[0])
            plan = held.plan if isinstance(held, Job) else held
            assert plan is not None
            self.child.answered = True
            self.messages.append(HostBatch.from_flat(obj, plan))
            return True
        if isinstance(obj, Started):
            self.begun = True
        elif isinstance(obj, StepsAnswer | Unread):
            self.child.answered = True
            number = next(iter(self._held)) if obj.number is None else obj.number
            obj = obj._replace(number=number)
            del self._held[number]
        elif isinstance(obj, BaseException):  # of unpickling: no batch may take the place of the missing one
            obj = SessionEnd(obj)
        self.messages.append(obj)  # type: ignore[arg-type]
        self._over = isinstance(obj, SessionEnd)
        return not self._over

    def lose(self) -> None:
        """Add the end of the session, since the process has ended, or has closed the connection."""
        if not self._over:
            self.messages.append(SessionEnd(*end_of(self.child.process)))  # after Ctrl-C it is called again
            self.child.reported = self._over = True

    def _has_left(self) -> bool:
        return self._over

    def leave(self) -> None:
        ended, self._over = self._over, True
        self._keeps = self._keeps and self.begun and not ended
        if self._held or not self._keeps:
            self._shut()

    def _shut(self) -> None:
        self._keeps = False
        with contextlib.suppress(OSError):  # closed at either end, which wakes waiters as well
            self.source.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if not self._over:
            self.leave()
        if self._keeps:
            self.child.idle.append((self._connection, self._channel))
        else:
            self._channel.close()


def dump_request(message: Request) -> Message:
    """Pickle a message. Plans with indices of a class of a script need cloudpickle, which takes three times as long."""
    return dump_message(message, plain=not isinstance(message, list) or all(plan.is_plain for plan in message))


def ends_within(process: WorkerProcess, seconds: float) -> bool:
    """Whether a process ends within so many seconds."""
    deadline = time.monotonic() + seconds
    while not process.ended():
        if not wait_readable(process.sentinel, timeout=max(0.0, deadline - time.monotonic())):
            return process.ended()
    return True


def end_of(process: WorkerProcess) -> tuple[Exception, str | None]:
    """The error of a process that has ended, or has closed a session without an error, and how it has ended."""
    if not ends_within(process, STATUS_DEADLINE):  # which reads a refusal, too
        return EngineDiedError(why=f"its process {process.pid} has closed the session"), None
    how = process.how_it_ended()
    if process.refusal is not None:
        return process.refusal, how
    if process.pid is None:
        return EngineDiedError(why="its process could not be started; its error is on standard error"), how
    where = "the reason is on standard error"
    if (process.exit_code or 0) <= 0:
        where = "if it was killed, look for the out-of-memory killer in the kernel's log"
    return EngineDiedError(why=f"its process {process.pid} {how}; {where}"), f"(process {process.pid}) {how}"
