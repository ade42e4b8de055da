"""The process placement: engines in separate processes, called sidecars.

The trainer's Python code and the engines do not slow each other. The consumer's process needs no
thread for the engines: the consumer's thread sends plans and receives batches. A blocking consumer
waits for a socket, an async consumer for the descriptor of the socket.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import time
import warnings
from collections import deque

from headrace._engine.config import EngineConfig, pickled_config
from headrace._eventloop.waiting import wait_readable
from headrace._links.group import EngineGroup
from headrace._links.placement import CLOSE_DEADLINE, Placement
from headrace._links.session import Session
from headrace._links.sidecar import OPEN, SidecarTask, StartSession
from headrace._pool.launch import WorkerProcess, fork_from_zygote
from headrace._pool.settings import Settings
from headrace._pool.supervisor import WORK_DEADLINE
from headrace._pool.worker import BootMessage, ProcessEnvironment
from headrace._records.batches import BatchPlan, HostBatch, SessionStart
from headrace._records.messages import (
    Answer,
    EngineRequest,
    Link,
    SessionEnd,
    check_not_forked,
)
from headrace._transport.channel import BlockingChannel, Connection, Disconnected
from headrace._transport.pickling import Message, dump_message
from headrace._transport.shared_pickle import SharedPickle
from headrace.errors import EngineDiedError


class ProcessPlacement(Placement):
    name = "process"

    def __init__(
        self, config: EngineConfig, work: SharedPickle, engines: int = 1
    ) -> None:
        super().__init__()
        self._pickled = pickled_config(config)
        self._config = config
        self._modules = (*self._pickled.modules, *work.modules)
        self._count = engines
        self._engines: dict[int, SidecarProcess] = {}  # engines that have been started

    @property
    def alive(self) -> bool:
        return self._pid == os.getpid() and not all(
            engine.process.ended() for engine in self._engines.values()
        )

    def connect(
        self, work: SharedPickle, start: SessionStart, engine: int, first: int
    ) -> ProcessLink:
        """Open a link to an engine's part of a session.

        The engine is started if there is no engine with this number, or if the engine has died.
        """
        opening = StartSession(work, start._replace(batch=first))
        if (running := self._engines.get(engine)) is not None:
            if not running.process.ended():
                with contextlib.suppress(EngineDiedError):  # the process has just died
                    return running.connect(opening)
            del self._engines[engine]
            running.close()
            running.join()
        if engine not in self._engines:
            task = SidecarTask(self._pickled, self._config.rank, engine, self._count)
            self._engines[engine] = SidecarProcess(task, self._modules)
        return self._engines[engine].connect(opening)

    def _open(
        self, config: EngineConfig, work: SharedPickle | None, start: SessionStart
    ) -> Session:
        assert work is not None
        connect = functools.partial(self.connect, work, start)
        return Session(EngineGroup(config, connect, self._count, first=start.batch))

    def _end(self) -> None:
        for engine in self._engines.values():
            engine.close()
        for engine in self._engines.values():
            engine.join()


class SidecarProcess:
    """A sidecar process.

    The constructor does not wait until the process runs. `modules` are imported before the fork.
    """

    def __init__(self, task: SidecarTask, modules: tuple[str, ...]) -> None:
        message = BootMessage(
            ProcessEnvironment.here(), Settings.here(), modules, task, None, 0
        )
        self.process, self._connection = fork_from_zygote(modules)
        try:
            BlockingChannel(self._connection).send(message)
        except BaseException as error:
            self._connection.close()
            reason, death = end_of(self.process)
            self.process.release()
            if death is not None and isinstance(
                error, BrokenPipeError | ConnectionResetError
            ):
                raise reason from error
            raise

    def connect(self, opening: StartSession) -> ProcessLink:
        """Start a session: send an end of a connection to the process."""
        ours, theirs = Connection.pair()
        try:
            with contextlib.closing(theirs):
                self.hand_over(theirs)
            return ProcessLink(ours, self.process, opening)
        except BaseException as error:
            # Also of user code: `__reduce__` of an object in a state.
            ours.close()
            if isinstance(error, OSError):
                raise end_of(self.process)[0] from error
            raise

    def hand_over(self, connection: Connection) -> None:
        """Send a connection to the process, which opens a session. `connection` stays open here.

        Raises:
            OSError: the process has ended.
        """
        ends = [connection.frames.fileno(), connection.descriptors.fileno()]
        socket.send_fds(self._connection.descriptors, [OPEN], ends)

    def close(self) -> None:
        """Let the process end, without waiting. Idempotent; `join` follows."""
        self._connection.close()

    def join(self) -> None:
        """Wait for the end of the process, after `close`; kill it after a deadline."""
        process = self.process
        if process.sentinel == -1:
            return
        # A process without a pid has not started yet, and ends as soon as it starts.
        if (
            not _ends_within(process, 5 * CLOSE_DEADLINE + WORK_DEADLINE)
            and process.pid is not None
        ):
            warnings.warn(
                f"the loader's process {process.pid} did not end within its deadline and is "
                f"killed: code in aget or __aiter__ blocks, or does not let CancelledError pass.",
                RuntimeWarning,
                stacklevel=2,
            )
            process.signal(signal.SIGKILL)
            _ends_within(process, CLOSE_DEADLINE)
        process.release()


class ProcessLink(Link):
    """A link to an engine in a sidecar process.

    The link ends with the connection. No other process has the connection open.
    """

    source: socket.socket

    def __init__(
        self, connection: Connection, process: WorkerProcess, opening: StartSession
    ) -> None:
        self.source = connection.frames
        self._channel = BlockingChannel(connection)
        self._channel.catch = Exception  # in this process, signals raise other errors
        self._channel.send(opening)
        self._process = process
        self._pid = os.getpid()
        # Plans without an arrived batch, by number.
        self._plans: dict[int, BatchPlan] = {}
        self._over = False  # nothing more is read
        self.messages: deque[Answer] = deque()

    def send(self, message: EngineRequest) -> None:
        if self._over:
            return
        if isinstance(message, list):
            for plan in message:
                self._plans[plan.number] = plan
        try:
            self._channel.send_message(dump_request(message))
        except (BrokenPipeError, ConnectionResetError):
            return  # `receive` finds the end, after the batches on their way
        except OSError:
            if not self._over:  # otherwise another thread has closed it
                raise

    def receive(self) -> None:
        if self._over:
            return
        try:
            for obj in self._channel.receive_ready():
                if type(obj) is tuple:
                    self.messages.append(
                        HostBatch.from_flat(obj, self._plans.pop(obj[0]))
                    )
                    continue
                if isinstance(obj, BaseException):
                    # of unpickling: no other batch may take the place of this batch
                    obj = SessionEnd(obj)
                self.messages.append(obj)
                if isinstance(obj, SessionEnd):
                    self._over = True
                    return
        except Disconnected:
            if not self._over:
                # after Ctrl-C, `receive` is called again
                self.messages.append(SessionEnd(*end_of(self._process)))
                self._over = True
        except OSError:
            check_not_forked(self._pid)  # in a fork, the connection is closed
            if not self._over:  # otherwise another thread has closed it
                raise

    def leave(self) -> None:
        self._over = True
        with contextlib.suppress(OSError):  # already closed, which wakes waiters too
            self.source.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.leave()
        self._channel.close()


def dump_request(message: EngineRequest) -> Message:
    """Pickle a message.

    cloudpickle takes three times as long, and is needed for indices of a class of a script.
    """
    return dump_message(
        message,
        plain=not isinstance(message, list) or all(plan.is_plain for plan in message),
    )


def _ends_within(process: WorkerProcess, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not process.ended():
        if not wait_readable(
            process.sentinel, timeout=max(0.0, deadline - time.monotonic())
        ):
            return process.ended()
    return True


def end_of(process: WorkerProcess) -> tuple[Exception, str | None]:
    """Return the error for a sidecar that ended or closed a session, and how the sidecar ended.

    Waits a second for the end of the process.
    """
    # Also reads why a process was not started.
    if not _ends_within(process, CLOSE_DEADLINE):
        # On a busy machine the end is known late. In any case the process is of no use any more.
        process.signal(signal.SIGKILL)
        if not _ends_within(process, WORK_DEADLINE):
            return EngineDiedError(
                why=f"its process {process.pid} has closed the session"
            ), None
    how = process.how_it_ended()
    if process.refusal is not None:
        return process.refusal, how
    if process.pid is None:
        return EngineDiedError(
            why="its process could not be started; its error is on standard error"
        ), how
    where = "the reason is on standard error"
    if (process.exit_code or 0) <= 0:
        where = "if it was killed, look for the out-of-memory killer in the kernel's log"
    return EngineDiedError(
        why=f"its process {process.pid} {how}; {where}"
    ), f"(process {process.pid}) {how}"
