"""The sidecar: the engine in a process of its own, beside the pool, seen from within.

It runs the same engine as the thread placement does. The consumer asks for sessions over the sidecar's line, and each
session has a line of its own: plans come in, batches go out in slabs that the consumer maps.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import struct
from dataclasses import dataclass
from typing import Any

from headrace.batches import BatchPlan, HostBatch
from headrace.datasets.protocol import tell_epoch
from headrace.engine.engine import Engine, Recipe
from headrace.engine.programs import travelling
from headrace.engine.session import Session
from headrace.io.perloop import close_resources
from headrace.loopthread import new_event_loop
from headrace.pool.channel import BlockingChannel, EngineChannel, Line
from headrace.pool.launch import adopt_control
from headrace.pool.packing import pack, pack_error, printed
from headrace.rankinfo import RankInfo, adopt_rank

__all__ = ["CLOSE_DEADLINE", "OPEN", "Ask", "End", "SidecarProgram", "Status"]

OPEN = struct.Struct("<Q?")  # a session's epoch, and whether the dataset is to be told; with the two ends of its line
CLOSE_DEADLINE = 1.0  # seconds for each step of closing


@dataclass(frozen=True, slots=True)
class End:
    """The last thing a session sends: nothing more will come, and why, if not as it should."""

    error: BaseException | None


@dataclass(frozen=True, slots=True)
class Ask:
    """The consumer's question: how far is this batch?"""

    number: int


@dataclass(frozen=True, slots=True)
class Status:
    """The answer, in words."""

    text: str


@dataclass(frozen=True, slots=True)
class SidecarProgram:
    """What the sidecar runs.

    Attributes:
        recipe: what its engine runs, pickled: what unpickling it raises is told to the consumer.
        rank: the rank of the consumer's process.
    """

    recipe: bytes
    rank: RankInfo

    def take_over(self, channel: BlockingChannel, line: Line, control: socket.socket) -> None:
        """Serve sessions until the consumer closes the line."""
        adopt_control(control)
        adopt_rank(self.rank)
        loop = new_event_loop()
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(_Sidecar(self.recipe, line).serve())
        finally:
            loop.close()
            channel.close()


class _Sidecar:
    def __init__(self, recipe: bytes, line: Line) -> None:
        self._pickled = recipe
        self._line = line
        self._over = asyncio.Event()
        self._outlets: set[_Outlet] = set()
        self._opening: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._recipe: Recipe = pickle.loads(self._pickled)
            self._engine: Engine | BaseException = Engine(self._recipe, owns_process=True)
        except BaseException as error:  # user code: imports of the user's modules; told to whoever opens a session
            self._engine = error
        loop.add_reader(self._line.descriptors, self._on_open)
        loop.add_reader(self._line.frames, self._over.set)  # nothing is sent there: it has closed
        await self._over.wait()
        loop.remove_reader(self._line.frames)
        loop.remove_reader(self._line.descriptors)
        if isinstance(self._engine, Engine):
            await self._engine.close(CLOSE_DEADLINE)
        await close_resources(CLOSE_DEADLINE)
        for outlet in self._outlets:
            outlet.close()

    def _on_open(self) -> None:
        message, descriptors, _, _ = socket.recv_fds(self._line.descriptors, OPEN.size, 2)
        if not message:
            self._over.set()
            return
        epoch, tell = OPEN.unpack(message)
        line = Line(*(socket.socket(fileno=descriptor) for descriptor in descriptors))
        task = asyncio.ensure_future(self._open(line, epoch, tell))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, line: Line, epoch: int, tell: bool) -> None:
        outlet = _Outlet()
        self._outlets.add(outlet)
        if isinstance(self._engine, BaseException):
            await self._refuse(outlet, line, self._engine)
            return
        try:
            tell_epoch(self._recipe.dataset, epoch, only_wanted=not tell)
        except BaseException as error:  # user code
            await self._refuse(outlet, line, error)
            return
        session = self._engine.session(outlet)

        def on_lost() -> None:
            session.cancel()
            self._outlets.discard(outlet)

        await outlet.connect(line, session, on_lost)
        self._engine.start(session, epoch, tell_dataset=tell)

    async def _refuse(self, outlet: _Outlet, line: Line, error: BaseException) -> None:
        await outlet.connect(line, None, lambda: self._outlets.discard(outlet))
        outlet.end(error)


class _Outlet:
    """The sidecar's end of one session's line."""

    _channel: EngineChannel | None = None
    _told: str | None = None

    async def connect(self, line: Line, session: Session | None, on_lost: Any) -> None:
        def on_object(obj: list[BatchPlan] | Ask) -> None:
            if session is None:
                return
            if isinstance(obj, Ask):
                session.tell(obj.number)
            else:
                session.admit(obj)

        self._channel = await EngineChannel.connect(line, on_object, on_lost)
        if self._told is not None:
            self.tell(self._told)

    def put(self, host: HostBatch) -> None:
        """Send a batch to the consumer."""
        assert self._channel is not None
        self._channel.send(pack(travelling(host)))

    def tell(self, status: str) -> None:
        """Send the answer to what the consumer asked; it may ask before this end is connected."""
        if self._channel is None:
            self._told = status
        else:
            self._channel.send(pack(Status(status)))

    def end(self, error: BaseException | None = None) -> None:
        """Send the end."""
        if error is not None:
            traceback = printed(error).rstrip()
            error = pack_error(error)
            with contextlib.suppress(Exception):  # user code: a class whose exceptions take no notes
                error.add_note(f"in the loader's process:\n{traceback}")
        assert self._channel is not None
        self._channel.send(pack(End(error)))

    def close(self) -> None:
        """Close the line."""
        if self._channel is not None:
            self._channel.close()
