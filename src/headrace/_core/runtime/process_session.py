"""The consumer's end of a session in the sidecar: plans sent and batches received on the consumer's own thread."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import Sequence

import anyio

from headrace._core.batches import BatchPlan, HostBatch
from headrace._core.eventloop.waiting import CloseGuard, wait_readable
from headrace._core.open_session import check_not_forked
from headrace._core.pool.launch import WorkerProcess, how_it_ended
from headrace._core.runtime.sidecar import (
    CLOSE_DEADLINE,
    Consumed,
    EndSession,
    StartSession,
    Status,
    StatusRequest,
    TraceRequest,
)
from headrace._core.transport.channel import BlockingChannel, Connection, Disconnected
from headrace._core.transport.pickling import Message, dump_message, dump_plain
from headrace.errors import EngineDiedError, LoaderClosedError


class ProcessSession:
    """A session and its queue in one.

    Args:
        connection: its own; this owns it.
        process: the sidecar.
        begin: the first message.
    """

    is_current = False

    def __init__(
        self,
        connection: Connection,
        process: WorkerProcess,
        begin: StartSession,
    ) -> None:
        self._connection = connection
        self._channel = BlockingChannel(connection)
        self._channel.send(begin)
        self._process = process
        self._pid = os.getpid()
        self._guard = CloseGuard(self.wake, self._channel.close)
        self._ready: deque[HostBatch] = deque()
        self.ended = False
        self.error: BaseException | None = None
        self._status: str | None = None

    @property
    def handoff(self) -> ProcessSession:
        return self

    @property
    def started(self) -> bool:
        return True  # or will be soon: what is sent to it waits until then

    @property
    def sources(self) -> tuple[socket.socket, int]:
        """Descriptors that are readable when there is something to take, or the process has started or ended."""
        return self._connection.frames, self._process.sentinel

    @property
    def process_ended(self) -> bool:
        """Whether the engine's process has ended; then the session ends when the batches that arrived are taken."""
        if not self._process.ended():
            return False
        if not self.ended:
            self._receive()
            self._died()
        return True

    @property
    def how_process_ended(self) -> str:
        """How the engine's process has ended, in words."""
        pid = "" if self._process.pid is None else f"(process {self._process.pid}) "
        return f"{pid}{how_it_ended(self._process)}"

    def admit(self, plans: Sequence[BatchPlan]) -> None:
        check_not_forked(self._pid)
        self._send(dump_plans(plans))

    def on_consumed(self, number: int) -> None:
        self._send(dump_plain(Consumed(number)))

    def request_status(self, number: int) -> None:
        self._send(dump_plain(StatusRequest(number)))

    def trace(self, on: bool) -> None:
        self._send(dump_plain(TraceRequest(on)))

    def _send(self, packed: Message) -> None:
        with self._guard.acquire() as entered:
            if not entered:
                return  # another thread has closed the loader; the iterator raises at its next batch
            try:
                self._channel.send_message(packed)
            except (BrokenPipeError, ConnectionResetError):
                self._receive()  # the batches that arrived before are still delivered
                self._died()

    def take(self) -> HostBatch | None:
        if not self._ready and not self.ended:
            self._receive()
        return self._ready.popleft() if self._ready else None

    def take_status(self) -> str | None:
        if not self.ended:
            self._receive()
        status, self._status = self._status, None
        return status

    def ready(self) -> int:
        if not self.ended:
            self._receive()
        return len(self._ready)

    def certain(self) -> int:
        if not self.ended:
            self._receive()
        return sum(not host.empty for host in self._ready)

    def _receive(self) -> None:
        try:
            for obj in self._channel.receive_ready():
                if isinstance(obj, HostBatch):
                    self._ready.append(obj)
                elif isinstance(obj, Status):
                    self._status = obj.text
                else:
                    self.ended = True
                    self.error = obj.error if isinstance(obj, EndSession) else obj
                    return  # after an error of unpickling, no batch may take the place of the one that is missing
        except Disconnected:
            self._died()
        except OSError:
            check_not_forked(self._pid)  # a fork, in which the connection is closed
            if not self.ended:  # otherwise another thread has closed it
                raise

    def _died(self) -> None:
        if not self.ended:
            ends_within(self._process, CLOSE_DEADLINE)
            self.ended = True
            self.error = error_of_end(self._process)

    def wait(self, timeout: float | None) -> bool:
        """Block until a message arrives, or the sidecar ends; False after `timeout` seconds."""
        with self._guard.acquire() as entered:
            if not entered or self._ready or self.ended:  # batches received with a status are no longer in the socket
                return True
            deadline = None if timeout is None else time.monotonic() + timeout
            while not (self._ready or self.ended or self._status is not None or self.process_ended):
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not wait_readable(*self.sources, timeout=left):
                    return False
                self._receive()  # it may be no more than a log record
            return True

    async def wait_async(self, timeout: float | None) -> bool:
        with self._guard.acquire() as entered:
            if not entered or self._ready or self.ended:
                return True
            with anyio.move_on_after(timeout) as scope:
                while not (self._ready or self.ended or self._status is not None):
                    await anyio.wait_readable(self._connection.frames)
                    self._receive()
            return not scope.cancelled_caught

    def close(self) -> None:
        """Close the connection, which cancels the session; idempotent."""
        if self._pid != os.getpid():
            return  # a fork: the session is the parent's
        self.abandon()
        self._guard.close()

    def abandon(self) -> None:
        """Drop the batches, and expect no more."""
        if not self.ended:
            self.ended = True
            self.error = LoaderClosedError()
        self._ready.clear()

    def wake(self) -> None:
        """Make waiters return."""
        with contextlib.suppress(OSError):  # closed at either end, which wakes waiters as well
            self._connection.frames.shutdown(socket.SHUT_RDWR)


def dump_plans(plans: Sequence[BatchPlan]) -> Message:
    """Pickle plans. Classes of a script need cloudpickle, which takes three times as long."""
    return dump_plain(plans) if all(plan.is_plain for plan in plans) else dump_message(plans)


def ends_within(process: WorkerProcess, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not process.ended():
        left = deadline - time.monotonic()
        if left <= 0 or not wait_readable(process.sentinel, timeout=left):
            return process.ended()
    return True


def error_of_end(process: WorkerProcess) -> Exception:
    """The error for a sidecar that has ended, or has closed a session without an error."""
    ended = ends_within(process, CLOSE_DEADLINE)  # which reads a refusal, too
    if process.refusal is not None:
        return process.refusal
    if not ended:
        return EngineDiedError(why=f"its process {process.pid} has closed the session")
    if process.pid is None:
        return EngineDiedError(why="its process could not be started; its error is on standard error")
    if (process.exit_code or 0) > 0:
        return EngineDiedError(
            why=f"its process {process.pid} {how_it_ended(process)}; the reason is on standard error"
        )
    oom = "if it was killed, look for the out-of-memory killer in the kernel's log"
    return EngineDiedError(why=f"its process {process.pid} {how_it_ended(process)}; {oom}")
