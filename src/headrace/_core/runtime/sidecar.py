"""The sidecar: the main function of a process that runs the engine.

It runs the same engine as the thread placement. The consumer requests sessions over a connection, and each session has
a connection of its own: plans come in, batches go out in slabs that the consumer maps.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from headrace._core.batches import HostBatch, RawBatch, SessionStart
from headrace._core.descriptors import Reserve, explained, shortage
from headrace._core.engine.config import EngineConfig
from headrace._core.engine.engine import Engine
from headrace._core.engine.executors import Work
from headrace._core.engine.session import Session
from headrace._core.engine.worker_tasks import to_wire, unpicklable_state
from headrace._core.eventloop.loop_thread import end_tasks, new_event_loop
from headrace._core.eventloop.per_loop import close_resources
from headrace._core.failure import Stage
from headrace._core.interface.kinds import propagate_epoch
from headrace._core.notes import add_note
from headrace._core.pool.launch import adopt_control, report_ready
from headrace._core.rankinfo import RankInfo, adopt_rank
from headrace._core.transport.channel import BlockingChannel, Connection, EngineChannel
from headrace._core.transport.log_records import Record, send_no_more_by, send_records_by
from headrace._core.transport.pickling import Message, dump_message, dump_plain, format_error, picklable_error
from headrace._core.transport.shared_pickle import SharedPickle
from headrace._core.transport.slabs import enable_forwarding
from headrace.errors import LoaderClosedError

OPEN = b"o"  # requests a session; sent with the two ends of its connection, on which a `StartSession` follows
CLOSE_DEADLINE = 1.0  # seconds for each step of closing


@dataclass(frozen=True, slots=True)
class StartSession:
    """The first message of a session's connection.

    Attributes:
        epoch: the session's number.
        set_epoch: whether to call the dataset's `set_epoch`.
        work: the functions that assemble its batches.
        seed: of the functions of a stream that are applied before batching.
        start: where it begins within its epoch.
    """

    epoch: int
    set_epoch: bool
    work: SharedPickle
    seed: int
    start: SessionStart


@dataclass(frozen=True, slots=True)
class EndSession:
    """The last message of a session, with the error that ended it, if any."""

    error: BaseException | None


@dataclass(frozen=True, slots=True)
class Consumed:
    """The number up to which all batches have been taken."""

    number: int


@dataclass(frozen=True, slots=True)
class StatusRequest:
    """The consumer's request for the progress of a batch."""

    number: int


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """The consumer's request to measure single fetches, or no longer."""

    on: bool


@dataclass(frozen=True, slots=True)
class Status:
    text: str


@dataclass(frozen=True, slots=True)
class SidecarTask:
    """The main function of the sidecar.

    Attributes:
        config: the loader's config, without functions. An error of its unpickling ends each session.
        rank: the rank of the consumer's process.
        engine: the number of this engine, from 0.
        engines: how many the loader has.
    """

    config: SharedPickle
    rank: RankInfo
    engine: int = 0
    engines: int = 1

    def run_process(
        self, channel: BlockingChannel, connection: Connection, control: socket.socket, prepare: Callable[[], None]
    ) -> None:
        """Serve sessions until the consumer closes the connection."""
        adopt_control(control)
        adopt_rank(self.rank)
        enable_forwarding()
        reserve = Reserve(2)  # for a session's connection, so that a shortage can be reported on it
        try:
            with explained("start the loader's process"):
                loop = new_event_loop()
        except OSError as error:
            reserve.close()
            _refuse(connection, error)
            channel.close()
            return
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(_Sidecar(self, connection, reserve, prepare).serve())
            loop.run_until_complete(end_tasks(CLOSE_DEADLINE))
        finally:
            loop.close()
            channel.close()


def _refuse(connection: Connection, error: OSError) -> None:
    """End the first session with the error by which no event loop could be made."""
    _, descriptors, _, _ = socket.recv_fds(connection.descriptors, len(OPEN), 2)
    sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    with contextlib.suppress(BrokenPipeError):  # the consumer has closed it
        if len(sockets) == 2:
            BlockingChannel(Connection(*sockets)).send(EndSession(error))
    for each in sockets:
        each.close()


_Assembling = Callable[[RawBatch], HostBatch]


class _Sidecar:
    def __init__(
        self, task: SidecarTask, connection: Connection, reserve: Reserve, prepare: Callable[[], None]
    ) -> None:
        self._task = task
        self._prepare = prepare
        self._reserve = reserve
        self._engine: Engine | None = None
        self._connection = connection
        # The functions of open sessions, by number: an epoch with known functions uses these.
        self._works: weakref.WeakValueDictionary[int, SharedPickle] = weakref.WeakValueDictionary()
        self._functions: weakref.WeakKeyDictionary[SharedPickle, _Assembling] = weakref.WeakKeyDictionary()
        self._over = asyncio.Event()
        self._servers: set[_SessionServer] = set()
        self._opening: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._prepare()
            config: EngineConfig = self._task.config.loads()
            self._config: EngineConfig | BaseException = config.part(self._task.engine, self._task.engines)
        except BaseException as error:  # user code: imports of the user's modules; each session ends with it
            self._config = error
        loop.add_reader(self._connection.descriptors, self._on_open)
        loop.add_reader(self._connection.frames, self._over.set)  # no data is sent there: it has closed
        await self._over.wait()
        loop.remove_reader(self._connection.frames)
        loop.remove_reader(self._connection.descriptors)
        if self._engine is not None:
            await self._engine.close(CLOSE_DEADLINE)
            self._engine.watch.close()
        await close_resources(CLOSE_DEADLINE)
        for server in self._servers:
            server.close()

    def _on_open(self) -> None:
        with self._reserve.given_up():
            message, descriptors, _, _ = socket.recv_fds(self._connection.descriptors, len(OPEN), 2)
        if not message:
            self._over.set()
            return
        sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        if len(sockets) < 2:  # other code took the reserve; the consumer sees its connection closed
            for each in sockets:
                each.close()
            return
        server = _SessionServer(self._begin, self._servers.discard)
        self._servers.add(server)
        task = asyncio.ensure_future(server.connect(Connection(*sockets)))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def _begin(self, server: _SessionServer, begin: StartSession) -> Session:
        if not self._reserve.full:
            raise shortage("open a session in the loader's process")
        config = self._config
        if self._over.is_set():  # a session started now would not be closed
            raise LoaderClosedError
        if isinstance(config, BaseException):
            raise config
        if self._engine is None:
            with explained("start the workers"):
                self._engine = Engine(config, begin.work, owns_process=True)
        propagate_epoch(config.dataset, begin.epoch, only_wanted=not begin.set_epoch)
        session = self._engine.session(server, self._work(config, begin.work), begin.start, begin.seed)
        self._engine.start(session, begin.epoch, set_epoch=begin.set_epoch, start=begin.start)
        return session

    def _work(self, config: EngineConfig, received: SharedPickle) -> Work:
        if not config.functions_of_epoch:
            return None
        known = self._works.setdefault(received.number, received)
        if config.has_processes:
            return known
        if known not in self._functions:
            self._functions[known] = known.loads()
        return _Holding(known, self._functions[known])


@dataclass(frozen=True, slots=True)
class _Holding:
    """Functions that were loaded in this process, with their pickle, while a session uses them."""

    shared: SharedPickle
    function: _Assembling

    def __call__(self, raw: RawBatch) -> HostBatch:
        return self.function(raw)


class _SessionServer:
    """The sidecar's end of one session's connection."""

    def __init__(
        self,
        begin: Callable[[_SessionServer, StartSession], Session],
        on_lost: Callable[[_SessionServer], None],
    ) -> None:
        self._begin = begin
        self._on_lost = on_lost
        self._session: Session | None = None
        self._channel: EngineChannel | None = None
        self._unsent: list[Message] = []  # until this end is connected
        self._ended = False

    async def connect(self, connection: Connection) -> None:
        self._loop = asyncio.get_running_loop()
        self._channel = await EngineChannel.connect(connection, self._on_object, self._on_close)
        for packed in self._unsent:
            self._channel.send(packed)

    def _on_object(self, obj: object) -> None:
        try:
            if isinstance(obj, BaseException):  # an index whose class cannot be unpickled here; too few descriptors
                raise obj
            if isinstance(obj, StartSession):
                send_records_by(self._send_record)
                self._session = self._begin(self, obj)
                report_ready()
            elif self._session is None:  # it could not start
                return
            elif isinstance(obj, Consumed):
                self._session.on_consumed(obj.number)
            elif isinstance(obj, StatusRequest):
                self._session.report_status(obj.number)
            elif isinstance(obj, TraceRequest):
                self._session.trace(obj.on)
            else:
                assert isinstance(obj, list)
                self._session.admit(obj)
        except BaseException as error:  # user code: imports of the user's modules, set_epoch
            if self._session is not None:
                self._session.cancel()
            self.end(error)

    def _send_record(self, record: Record) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._send, dump_plain(record))

    def _on_close(self) -> None:
        send_no_more_by(self._send_record)
        if self._session is not None:
            self._session.cancel()
        self._on_lost(self)

    def _send(self, packed: Message) -> None:
        if self._channel is None:
            self._unsent.append(packed)
        else:
            self._channel.send(packed)

    def put(self, host: HostBatch) -> None:
        host = to_wire(host)
        try:
            packed = dump_message(host)
        except BaseException as error:  # user code: `__reduce__` of an object in the state of a stream
            if host.stream_state is None:
                raise
            failed = HostBatch.failed(host.plan, unpicklable_state(error), stage=Stage.SAVE_STATE)
            packed = dump_message(to_wire(failed.with_failures_of(host._replace(stream_state=None))))
        self._send(packed)

    def put_status(self, status: str) -> None:
        self._send(dump_message(Status(status)))

    def end(self, error: BaseException | None = None) -> None:
        """Send the end, once."""
        if self._ended:
            return
        self._ended = True
        if error is not None:
            traceback = format_error(error).rstrip()
            error = picklable_error(error)
            add_note(error, f"in the loader's process:\n{traceback}")
        self._send(dump_message(EndSession(error)))

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
