"""The process placement: the engine in a sidecar process, where neither it nor the trainer's Python slows the other.

In the consumer's process only the thread for `headrace top` is headrace's, and it sleeps. Plans are sent and batches
received on the consumer's own thread; a blocking consumer waits for a socket, an async one for its descriptor.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import socket
import warnings
import weakref

from headrace._core.batches import SessionStart
from headrace._core.engine.config import EngineConfig, name_unpicklable
from headrace._core.interface.traversal import propagate_epoch
from headrace._core.pool.launch import launch_with_control
from headrace._core.pool.settings import Settings
from headrace._core.pool.worker import BootMessage, ProcessEnvironment
from headrace._core.runtime.change_detection import Snapshot, held_functions
from headrace._core.runtime.exit_hooks import close_at_exit
from headrace._core.runtime.process_session import ProcessSession, ends_within, error_of_end
from headrace._core.runtime.sidecar import CLOSE_DEADLINE, OPEN, SidecarTask, StartSession
from headrace._core.transport.channel import BlockingChannel, Connection
from headrace._core.transport.shared_pickle import SharedPickle
from headrace._core.transport.sharing import fingerprint


class ProcessPlacement:
    """A sidecar process. The loader owns it.

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
        self._numbers = itertools.count()
        self._sessions: weakref.WeakSet[ProcessSession] = weakref.WeakSet()
        settings = Settings.here()
        modules = tuple(dict.fromkeys((*settings.modules, *pickled.modules, *work.modules)))
        message = BootMessage(ProcessEnvironment.here(), settings, modules, SidecarTask(pickled, config.rank), None, 0)
        self._process, self._connection = launch_with_control(modules)
        try:
            BlockingChannel(self._connection).send(message)
        except BaseException as error:
            self._connection.close()
            ended = ends_within(self._process, CLOSE_DEADLINE)
            self._process.release()
            if ended and isinstance(error, BrokenPipeError | ConnectionResetError):
                raise error_of_end(self._process) from error
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
        """Start a session."""
        assert work is not None
        try:
            ours = _connect(self._connection)
        except OSError as error:
            raise error_of_end(self._process) from error
        opening = StartSession(epoch, set_epoch, next(self._numbers), work, config.steps_seed(epoch), start)
        try:
            session = ProcessSession(ours, self._process, opening, functools.partial(_connect, self._connection))
        except OSError as error:
            ours.close()
            raise error_of_end(self._process) from error
        except BaseException:  # user code: `__reduce__` of an object in a state
            ours.close()
            raise
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
        if not ends_within(self._process, 5 * CLOSE_DEADLINE) and self._process.pid is not None:
            warnings.warn(
                f"the loader's process {self._process.pid} did not end within its deadline and is killed: code in aget "
                f"or __aiter__ blocks, or does not let CancelledError pass.",
                RuntimeWarning,
                stacklevel=2,
            )
            self._process.signal(signal.SIGKILL)
            ends_within(self._process, CLOSE_DEADLINE)
        self._process.release()


def _connect(sidecar: Connection) -> Connection:
    """A new connection to a sidecar; from any thread."""
    ours, theirs = Connection.pair()
    try:
        socket.send_fds(sidecar.descriptors, [OPEN], [theirs.frames.fileno(), theirs.descriptors.fileno()])
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
    return ours


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
