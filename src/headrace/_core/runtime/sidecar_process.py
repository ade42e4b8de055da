"""The handle of a sidecar process: its start, its sessions, its end."""

from __future__ import annotations

import os
import signal
import socket
import warnings
import weakref

from headrace._core.pool.launch import launch_with_control
from headrace._core.pool.settings import Settings
from headrace._core.pool.supervisor import WORK_DEADLINE
from headrace._core.pool.worker import BootMessage, ProcessEnvironment
from headrace._core.runtime.process_session import ProcessSession, ends_within, error_of_end
from headrace._core.runtime.sidecar import CLOSE_DEADLINE, OPEN, SidecarTask, StartSession
from headrace._core.transport.channel import BlockingChannel, Connection


class SidecarProcess:
    """A sidecar process, started without waiting until it runs. Its placement owns it.

    Args:
        task: its main function.
        modules: to be imported before the process is forked.
        later: whether it starts when the first one of the loader has started, which makes the first batch.
    """

    def __init__(self, task: SidecarTask, modules: tuple[str, ...], *, later: bool = False) -> None:
        self._pid = os.getpid()
        self._sessions: weakref.WeakSet[ProcessSession] = weakref.WeakSet()
        settings = Settings.here()
        modules = tuple(dict.fromkeys((*settings.modules, *modules)))
        message = BootMessage(ProcessEnvironment.here(), settings, modules, task, None, 0)
        self._process, self._connection = launch_with_control(modules, later=later)
        try:
            BlockingChannel(self._connection).send(message)
        except BaseException as error:
            self._connection.close()
            ended = ends_within(self._process, CLOSE_DEADLINE)
            self._process.release()
            if ended and isinstance(error, BrokenPipeError | ConnectionResetError):
                raise error_of_end(self._process) from error
            raise

    @property
    def pid(self) -> int | None:
        """The process id; None until it has started."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.ended()

    @property
    def idle(self) -> bool:
        """Whether none of its sessions is open."""
        return all(session.ended for session in self._sessions)

    def open(self, opening: StartSession) -> ProcessSession:
        """Start a session."""
        ours, theirs = Connection.pair()
        try:
            try:
                socket.send_fds(
                    self._connection.descriptors, [OPEN], [theirs.frames.fileno(), theirs.descriptors.fileno()]
                )
            finally:
                theirs.close()
            session = ProcessSession(ours, self._process, opening)
        except OSError as error:
            ours.close()
            raise error_of_end(self._process) from error
        except BaseException:  # user code: `__reduce__` of an object in a state
            ours.close()
            raise
        self._sessions.add(session)
        return session

    def close(self) -> None:
        """End the sessions, and let the process end; does not wait for it. Not for a fork of the process that made it.

        Idempotent; `join` follows.
        """
        if self._pid != os.getpid() or self._connection.frames.fileno() == -1:
            return
        for session in list(self._sessions):
            session.close()
        self._connection.close()

    def join(self) -> None:
        """Wait until the process has ended, after `close`; it is killed after a deadline."""
        if self._pid != os.getpid() or self._process.sentinel == -1:
            return
        # One that has no pid yet has not started; it ends as soon as it has.
        if not ends_within(self._process, 5 * CLOSE_DEADLINE + WORK_DEADLINE) and self._process.pid is not None:
            warnings.warn(
                f"the loader's process {self._process.pid} did not end within its deadline and is killed: code in aget "
                f"or __aiter__ blocks, or does not let CancelledError pass.",
                RuntimeWarning,
                stacklevel=2,
            )
            self._process.signal(signal.SIGKILL)
            ends_within(self._process, CLOSE_DEADLINE)
        self._process.release()
