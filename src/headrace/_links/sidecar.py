"""The sidecar: the main function of a process with an engine.

The engine is the same as in the thread placement. The consumer requests sessions over a connection.
Each session has a separate connection: plans come in, and batches go out in slabs mapped by the
consumer.
"""

from __future__ import annotations

import asyncio
import socket
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, cast

from headrace._base.descriptors import Reserve, explained, shortage
from headrace._engine.config import EngineConfig
from headrace._engine.engine import Engine, EngineSession
from headrace._engine.executors import Work
from headrace._engine.worker_tasks import dump_batch
from headrace._eventloop.loop_thread import end_tasks, new_event_loop
from headrace._links.placement import CLOSE_DEADLINE
from headrace._pool.launch import adopt_control
from headrace._ranks.rankinfo import RankInfo, bound, set_process_rank
from headrace._records.batches import BatchPlan, HostBatch, RawBatch, SessionStart
from headrace._records.messages import Answer, EngineRequest, SessionEnd, SessionStarted
from headrace._streams.epochs import session_epoch
from headrace._streams.kinds import propagate_epoch
from headrace._transport.channel import BlockingChannel, Connection, EngineChannel
from headrace._transport.log_records import unsent_records
from headrace._transport.pickling import dump_message, noted_error
from headrace._transport.shared_pickle import SharedPickle
from headrace._transport.slabs import enable_forwarding
from headrace.errors import LoaderClosedError

# A request for a session, sent with two ends of a connection. A `StartSession` follows on the new
# connection.
OPEN = b"o"


class StartSession(NamedTuple):
    """The first message of a session's connection."""

    work: SharedPickle  # the functions for assembling batches
    start: SessionStart


@dataclass(frozen=True, slots=True)
class SidecarTask:
    """The main function of a sidecar, with an engine among `engines`."""

    # The configuration without functions. If unpickling fails, the error ends each session.
    config: SharedPickle
    rank: RankInfo  # the rank of the consumer's process
    engine: int
    engines: int

    def __call__(
        self,
        channel: BlockingChannel,
        connection: Connection,
        control: socket.socket,
        prepare: Callable[[], None],
    ) -> None:
        adopt_control(control)
        set_process_rank(self.rank)
        enable_forwarding()
        # For the connection of a session, so that a shortage can be reported to the consumer.
        reserve = Reserve(2)
        try:
            with explained("start the loader's process"):
                loop = new_event_loop()
        except OSError as error:
            reserve.close()
            with suppress(OSError):  # closed, or no connection could be received
                if (refused := _accept(connection)) is not None:
                    BlockingChannel(refused).send(SessionEnd(error))
            channel.close()
            return
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(_Sidecar(self, connection, reserve, prepare).serve())
            if late := loop.run_until_complete(end_tasks(CLOSE_DEADLINE)):
                warnings.warn(
                    f"cancelled, and still running: {late}", RuntimeWarning, stacklevel=2
                )
        finally:
            loop.close()
            channel.close()


def _accept(connection: Connection) -> Connection | None:
    """Return the connection of a requested session.

    None at the end of `connection`.

    Raises:
        OSError: The descriptors could not be received. The consumer sees a closed connection.
    """
    message, descriptors, _, _ = socket.recv_fds(connection.descriptors, len(OPEN), 2)
    sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    if len(sockets) < 2:
        for each in sockets:
            each.close()
        if message:
            raise shortage("open a session in the loader's process")
        return None
    return Connection(*sockets)


class _Sidecar:
    """The engines of the process, and the sessions."""

    def __init__(
        self,
        task: SidecarTask,
        connection: Connection,
        reserve: Reserve,
        prepare: Callable[[], None],
    ) -> None:
        self._task = task
        self._prepare = prepare
        self._reserve = reserve
        # The last engine is in use. Earlier engines have lost the workers.
        self._engines: list[Engine] = []
        self._connection = connection
        # The functions of the last session. The next session may have the same functions.
        self._work: SharedPickle | None = None
        self._assemble: Callable[[RawBatch], HostBatch] | None = None  # `_work`, loaded
        self._over = asyncio.Event()
        self.servers: set[_SessionServer] = set()

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._prepare()
            config: EngineConfig = self._task.config.loads()
            self._config: EngineConfig | BaseException = config.part(
                self._task.engine, self._task.engines
            )
        except BaseException as error:
            # user code: imports of the user's modules. Each session ends with this error.
            self._config = error
        loop.add_reader(self._connection.descriptors, self._on_open)
        # No data is sent on this socket, so a readable socket has been closed.
        loop.add_reader(self._connection.frames, self._over.set)
        await self._over.wait()
        loop.remove_reader(self._connection.frames)
        loop.remove_reader(self._connection.descriptors)
        for engine in self._engines:
            await engine.close(CLOSE_DEADLINE)
            engine.watch.close()
        for server in list(self.servers):
            server.channel.close()

    def _on_open(self) -> None:
        # OSError: other code has taken the reserve.
        with self._reserve.given_up(), suppress(OSError):
            if (connection := _accept(self._connection)) is None:
                self._over.set()
            else:
                self.servers.add(_SessionServer(self, connection))

    def begin(self, server: _SessionServer, opening: StartSession) -> EngineSession:
        """Start a session on the engine.

        A new engine is made for the first session, and after workers could not be replaced.
        """
        if self._reserve.error is not None:
            raise shortage("open a session in the loader's process")
        config = self._config
        if self._over.is_set():  # a session started now would not be closed
            raise LoaderClosedError
        if isinstance(config, BaseException):
            raise config
        if not self._engines or self._engines[-1].executor.broken is not None:
            with explained("start the workers"):
                self._engines.append(Engine(config, opening.work))
        engine, start = self._engines[-1], opening.start
        with bound(session_epoch, start.epoch):
            propagate_epoch(config.dataset, start.epoch, only_wanted=not start.set_epoch)
        work = self._functions(config, opening.work)
        session = EngineSession(engine, server.send, work, start)
        engine.start(session)
        if self._task.engines > 1:
            server.send(SessionStarted())
        return session

    def _functions(self, config: EngineConfig, received: SharedPickle) -> Work:
        if not config.functions_of_epoch:
            return None
        if self._work is None or self._work.number != received.number:
            self._assemble = None if config.has_processes else received.loads().in_thread
            self._work = received
        return self._assemble or self._work


class _SessionServer:
    """The server of a session, for a single consumer."""

    def __init__(self, sidecar: _Sidecar, connection: Connection) -> None:
        self._sidecar = sidecar
        self._session: EngineSession | None = None
        # Plans of batches not yet sent, as known by the consumer.
        self._plans: dict[int, BatchPlan] = {}
        self._ended = False
        self.channel = EngineChannel(connection, self._on_object, self._on_close)

    def _on_object(self, obj: object) -> None:
        try:
            # For example: the class of an index cannot be unpickled, or too few descriptors.
            if isinstance(obj, BaseException):
                raise obj
            if isinstance(obj, StartSession):
                self._session = self._sidecar.begin(self, obj)
            elif self._session is not None:  # otherwise the session could not start
                if isinstance(obj, list):
                    self._plans.update((plan.number, plan) for plan in obj)
                self._session.handle(cast(EngineRequest, obj))
        except BaseException as error:
            # User code: imports of the user's modules, set_epoch.
            if self._session is not None:
                self._session.cancel()
            self.send(SessionEnd(error))

    def _on_close(self) -> None:
        if self._session is not None:
            self._session.cancel()
        self._sidecar.servers.discard(self)

    def send(self, message: Answer) -> None:
        """Send a message, unless the end was sent already."""
        if self._ended:
            return
        for record in unsent_records():
            self.channel.send(dump_message(record, plain=True))
        if isinstance(message, HostBatch):
            packed = dump_batch(message, self._plans.pop(message.plan.number))
        elif isinstance(message, SessionEnd):
            self._ended = True
            if message.error is not None:
                error = noted_error(message.error, "in the loader's process")
                message = message._replace(error=error)
            packed = dump_message(message)
        else:
            packed = dump_message(message)
        self.channel.send(packed)
