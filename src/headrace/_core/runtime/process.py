"""The process placement: the engine in a sidecar process, where neither it nor the trainer's Python slows the other.

The consumer's process runs no thread of headrace. Plans are sent and batches received on the consumer's own thread; a
blocking consumer waits for a socket, an async one for its descriptor.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
import warnings
import weakref
from collections import deque
from collections.abc import Sequence

import anyio

from headrace._core.batches import BatchPlan, HostBatch, SessionStart, Stage
from headrace._core.engine.config import EngineConfig, name_unpicklable
from headrace._core.eventloop.waiting import CloseGuard, wait_readable
from headrace._core.interface.traversal import propagate_epoch
from headrace._core.pool.launch import launch_with_control
from headrace._core.pool.processes import WorkerProcess, how_it_ended
from headrace._core.pool.settings import Settings
from headrace._core.pool.worker import BootMessage, ProcessEnvironment
from headrace._core.runtime.change_detection import Snapshot, held_functions
from headrace._core.runtime.exit_hooks import close_at_exit
from headrace._core.runtime.sidecar import (
    CLOSE_DEADLINE,
    OPEN,
    EndSession,
    SidecarTask,
    StartSession,
    Status,
    StatusRequest,
)
from headrace._core.transport.channel import BlockingChannel, Connection, Disconnected
from headrace._core.transport.frames import RegionError
from headrace._core.transport.pickling import Message, dump_message, dump_plain
from headrace._core.transport.shared_pickle import SharedPickle
from headrace._core.transport.sharing import fingerprint
from headrace.errors import EngineDiedError, ForkedError, LoaderClosedError

_PLAIN = frozenset({int, str, type(None)})


class ProcessPlacement:
    """A sidecar process. The loader owns it.

    Args:
        config: the engine's config; pickled here with the dataset, without the functions.
        work: the functions, pickled.

    Raises:
        NotPicklableError: the dataset cannot be pickled.
    """

    is_current = False

    def __init__(self, config: EngineConfig, work: SharedPickle) -> None:
        try:
            pickled = SharedPickle.dumps(config.without_functions())
        except Exception as error:
            name_unpicklable(config, error)
        self._config = config
        self._fixed = None if config.functions_of_epoch else work
        self._copied = _Seen(config.dataset)
        self.dataset_bytes = pickled.nbytes
        """The size of the copied part of the dataset, in bytes."""
        self._pid = os.getpid()
        self._sessions: weakref.WeakSet[ProcessSession] = weakref.WeakSet()
        settings = Settings.here()
        modules = tuple(dict.fromkeys((*settings.modules, *pickled.modules, *work.modules)))
        message = BootMessage(ProcessEnvironment.here(), settings, modules, SidecarTask(pickled, config.rank), None, 0)
        self._process, self._connection = launch_with_control(modules)
        try:
            BlockingChannel(self._connection).send(message)
        except BaseException as error:
            self._connection.close()
            ended = _ends_within(self._process, CLOSE_DEADLINE)
            self._process.release()
            if ended and isinstance(error, BrokenPipeError | ConnectionResetError):
                raise _ended(self._process) from error
            raise
        close_at_exit(self)

    def serves(self, config: EngineConfig, work: SharedPickle | None) -> bool:
        """Whether this sidecar is alive, of this process, and does what `config` asks for, of the current dataset."""
        alive = self._pid == os.getpid() and not self._process.ended()
        same = alive and self._config.same_engine(config) and (config.functions_of_epoch or work is self._fixed)
        return same and self._copied == _Seen(config.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Call the dataset's `set_epoch` here. Its copy gets the epoch with the next session, and stays valid."""
        same = self._copied == _Seen(self._config.dataset)
        propagate_epoch(self._config.dataset, epoch)
        if same:
            self._copied = _Seen(self._config.dataset)

    def open(
        self, config: EngineConfig, work: SharedPickle | None, epoch: int, *, set_epoch: bool, start: SessionStart
    ) -> ProcessSession:
        """Start a session.

        Args:
            config: the loader's current config.
            work: its functions, pickled.
            epoch: its number.
            set_epoch: whether to call `set_epoch` of the sidecar's copy of the dataset.
            start: where it begins within its epoch.
        """
        assert work is not None
        ours, theirs = Connection.pair()
        try:
            socket.send_fds(self._connection.descriptors, [OPEN], [theirs.frames.fileno(), theirs.descriptors.fileno()])
            opening = StartSession(epoch, set_epoch, work, config.steps_seed(epoch), start)
            session = ProcessSession(ours, self._process, opening)
        except OSError as error:
            ours.close()
            raise _ended(self._process) from error
        except BaseException:  # user code: `__reduce__` of an object in a state
            ours.close()
            raise
        finally:
            theirs.close()
        self._sessions.add(session)
        return session

    @property
    def idle(self) -> bool:
        """Whether none of its sessions is open."""
        return all(session.handoff.ended for session in self._sessions)

    def close(self) -> None:
        """End all sessions, the workers and the sidecar."""
        if self._pid != os.getpid() or self._connection.frames.fileno() == -1:
            return
        for session in list(self._sessions):
            session.close()
        self._connection.close()
        # One that has no pid yet has not started; it ends as soon as it has.
        if not _ends_within(self._process, 5 * CLOSE_DEADLINE) and self._process.pid is not None:
            warnings.warn(
                f"the loader's process {self._process.pid} did not end within its deadline and is killed: code in aget "
                f"or __aiter__ blocks, or does not let CancelledError pass.",
                RuntimeWarning,
                stacklevel=2,
            )
            self._process.signal(signal.SIGKILL)
            _ends_within(self._process, CLOSE_DEADLINE)
        self._process.release()


class _Seen:
    """A fingerprint of a dataset and of the functions that it holds."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, dataset: object) -> None:
        self._snapshot = Snapshot(dataset)
        self._functions = [*map(fingerprint, held_functions(dataset))]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Seen):
            return NotImplemented
        return self._snapshot.same_as(other._snapshot) and self._functions == other._functions


class ProcessSession:
    """The consumer's end of a session in the sidecar: a session and its queue in one."""

    is_current = False

    def __init__(self, connection: Connection, process: WorkerProcess, begin: StartSession) -> None:
        self._connection = connection
        self._channel = BlockingChannel(connection)
        self._channel.send(begin)
        self._process = process
        self._pid = os.getpid()
        self._guard = CloseGuard(self._wake, self._channel.close)
        self._ready: deque[HostBatch] = deque()
        self.ended = False
        self.error: BaseException | None = None
        self._status: str | None = None

    @property
    def handoff(self) -> ProcessSession:
        return self

    def admit(self, plans: Sequence[BatchPlan]) -> None:
        if self._pid != os.getpid():
            raise ForkedError("an iterator of headrace", made_in=self._pid, used_in=os.getpid())
        # Classes of a script need cloudpickle, which takes three times as long.
        plain = all(_PLAIN.issuperset(map(type, plan.indices)) for plan in plans)
        self._send(dump_plain(plans) if plain else dump_message(plans))

    def request_status(self, number: int) -> None:
        self._send(dump_plain(StatusRequest(number)))

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

    def _receive(self) -> None:
        try:
            for obj in self._channel.receive_ready():
                if isinstance(obj, RegionError):
                    obj = HostBatch.failed(obj.obj().plan, obj, stage=Stage.CLAIM)
                if isinstance(obj, HostBatch):
                    self._ready.append(obj)
                elif isinstance(obj, Status):
                    self._status = obj.text
                else:
                    self.ended = True
                    self.error = obj.error if isinstance(obj, EndSession) else obj
        except Disconnected:
            self._died()
        except OSError:
            if not self.ended:  # otherwise another thread has closed it
                raise

    def _died(self) -> None:
        if not self.ended:
            _ends_within(self._process, CLOSE_DEADLINE)
            self.ended = True
            self.error = _ended(self._process)

    def wait(self, timeout: float | None) -> bool:
        """Block until a message arrives, or the sidecar ends; False after `timeout` seconds."""
        with self._guard.acquire() as entered:
            if not entered or self._ready or self.ended:  # batches received with a status are no longer in the socket
                return True
            if self._process.ended():
                self._receive()
                self._died()
                return True
            return wait_readable(self._connection.frames, self._process.sentinel, timeout=timeout)

    async def wait_async(self, timeout: float | None) -> bool:
        with self._guard.acquire() as entered:
            if not entered or self._ready or self.ended:
                return True
            with anyio.move_on_after(timeout) as scope:
                await anyio.wait_readable(self._connection.frames)
            return not scope.cancelled_caught

    def close(self) -> None:
        """Close the connection, which cancels the session; idempotent."""
        if self._pid != os.getpid():
            return  # a fork: the session is the parent's
        if not self.ended:
            self.ended = True
            self.error = LoaderClosedError()
        self._ready.clear()
        self._guard.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # closed at either end, which wakes waiters as well
            self._connection.frames.shutdown(socket.SHUT_RDWR)


def _ends_within(process: WorkerProcess, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not process.ended():
        left = deadline - time.monotonic()
        if left <= 0 or not wait_readable(process.sentinel, timeout=left):
            return process.ended()
    return True


def _ended(process: WorkerProcess) -> Exception:
    """The error for a sidecar that has ended, or has closed a session without an error."""
    ended = _ends_within(process, CLOSE_DEADLINE)  # which reads a refusal, too
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
