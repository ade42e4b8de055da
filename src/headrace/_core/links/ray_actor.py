"""The actor of an engine: it starts the engine's process on its node, and passes messages on.

The engine is the same process as on the consumer's machine (see `headrace._core.links.sidecar`), so that Ray's Python
does not slow it, and user code does not block Ray's event loop. A batch is copied once here, from its slab to Ray's
store.
"""

from __future__ import annotations

import asyncio
import os

import ray

from headrace._core.batches import BatchPlan, HostBatch
from headrace._core.engine.config import EngineConfig
from headrace._core.links.process import ProcessLink, ProcessPlacement
from headrace._core.links.ray_wire import (
    EnginePart,
    Packed,
    SessionRequest,
    pack,
    packed_message,
    unpack,
    unpack_views,
)
from headrace._core.links.sidecar import dump_batch, portable_error
from headrace._core.messages import SessionEnd, Status, StatusRequest
from headrace._core.transport.shared_pickle import SharedPickle


class EngineActor:
    """One engine of a loader, on the node where Ray has placed it.

    Args:
        part: which engine it is.
    """

    def __init__(self, part: EnginePart) -> None:
        self._part = part
        self._config: EngineConfig | None = None
        self._placement: ProcessPlacement | None = None
        self._work: tuple[int, SharedPickle] | None = None
        self._sessions: dict[int, _Served] = {}
        self._ended: set[int] = set()
        self._opening = asyncio.Lock()

    def __repr__(self) -> str:
        return f"headrace engine {self._part.engine}"  # Ray puts this before each line that the actor writes

    async def open(self, request: SessionRequest, config: Packed, work: Packed) -> tuple[str, str, int]:
        """Start a session; its errors answer its plans. Returns the node's id and address, and the process id."""
        served = self._served(request.number)
        if served is not None:
            try:
                async with self._opening:
                    link = await asyncio.to_thread(self._connect, request, config, work)
            except BaseException as error:  # user code: imports of its modules, unpickling
                served.end(SessionEnd(error))
            else:
                served.begin(link)
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), os.getpid()

    def _connect(self, request: SessionRequest, packed: Packed, work: Packed) -> ProcessLink:
        if self._config is None:
            self._part.settings.adopt()
            config: EngineConfig = unpack_views(packed)
            self._config = config.part(self._part.engine, self._part.engines)._replace(in_order=False)
        config = self._config._replace(base_seed=request.base_seed)
        same = self._work is not None and self._work[0] == request.work
        if self._work is None or not same:
            self._work = request.work, SharedPickle.dumps(unpack_views(work))
        functions = self._work[1]
        if self._placement is None or not (self._placement.alive and (same or config.functions_of_epoch)):
            if self._placement is not None:
                self._placement.close()
            self._placement = ProcessPlacement(config, functions)
        return self._placement.connect(config, functions, request.start)

    def _served(self, number: int) -> _Served | None:
        """A session, also before it is open; None after its end."""
        if number in self._ended:
            return None
        return self._sessions.setdefault(number, _Served())

    async def send(self, session: int, sequence: int, message: Packed) -> str | None:
        """Pass on a message; returns the answer to a `StatusRequest`.

        Args:
            session: the session's number.
            sequence: the message's: Ray may start calls in another order than they were made in.
            message: the message.
        """
        served = self._served(session)
        if served is None:
            return None
        request = served.send(sequence, message)
        return await served.status if isinstance(request, StatusRequest) else None

    async def batch(self, session: int, number: int, sequence: int = -1, plans: Packed = b"") -> Packed | None:
        """Make a batch.

        Args:
            session: the session's number.
            number: the batch's.
            sequence: that of the message of plans that is sent with this call; -1 for none.
            plans: these plans.

        Returns:
            The batch, or the `SessionEnd`; None if the consumer has left it.
        """
        served = self._served(session)
        if served is None:
            return None
        if sequence >= 0:
            served.send(sequence, plans)
        return await served.batch(number)

    async def end_session(self, session: int) -> None:
        """Leave a session: the consumer wants no more of its batches."""
        self._ended.add(session)
        if (served := self._sessions.pop(session, None)) is not None:
            served.end(None)

    async def stop(self) -> None:
        """End all sessions and the engine's process."""
        for session in list(self._sessions):
            await self.end_session(session)
        if self._placement is not None:
            await asyncio.to_thread(self._placement.close)


class _Served:
    """A session in the actor.

    Attributes:
        status: the answer to the last `StatusRequest`.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._link: ProcessLink | None = None
        self._plans: dict[int, BatchPlan] = {}  # of batches that have not arrived
        self._unsent: dict[int, object] = {}  # messages that came before an earlier one, or before the session
        self._next = 0
        self._results: dict[int, asyncio.Future[HostBatch | SessionEnd | None]] = {}
        self._end: tuple[SessionEnd | None] | None = None
        self.status: asyncio.Future[str | None] = self._loop.create_future()

    def begin(self, link: ProcessLink) -> None:
        """Run the session that has been opened; close it if it was left meanwhile."""
        if self._end is not None:
            link.close()
            return
        self._link = link
        for source in link.sources:
            self._loop.add_reader(source, self._receive, link)
        self._send_next(link)
        self._receive(link)

    def send(self, sequence: int, packed: Packed) -> object:
        """Pass on a message, after all before it; returns it."""
        message = unpack(packed)
        self._unsent[sequence] = message
        if isinstance(message, StatusRequest):
            self.status = self._loop.create_future()
            if self._link is None:
                self.status.set_result(f"batch {message.number} has not begun: the engine's process is being started")
        if self._link is not None:
            self._send_next(self._link)
            self._receive(self._link)
        return message

    def _send_next(self, link: ProcessLink) -> None:
        while self._next in self._unsent:
            message: object = self._unsent.pop(self._next)
            self._next += 1
            if isinstance(message, list):
                self._plans.update((plan.number, plan) for plan in message)
            link.send(message)  # type: ignore[arg-type]

    def _receive(self, link: ProcessLink) -> None:
        link.must_wait()  # looks after the process
        messages = link.receive()
        while messages:
            message = messages.popleft()
            if isinstance(message, HostBatch):
                self._put(message.plan.number, message)
            elif isinstance(message, Status):
                if not self.status.done():
                    self.status.set_result(message.text)
            elif isinstance(message, SessionEnd):
                self.end(message)

    def _put(self, number: int, answer: HostBatch | SessionEnd | None) -> None:
        if not (result := self._result(number)).done():
            result.set_result(answer)

    def _result(self, number: int) -> asyncio.Future[HostBatch | SessionEnd | None]:
        if number not in self._results:
            self._results[number] = self._loop.create_future()
        return self._results[number]

    async def batch(self, number: int) -> Packed | None:
        """A batch, when it is made."""
        result = self._result(number)
        if self._end is not None:
            self._put(number, self._end[0])
        answer = await result
        del self._results[number]
        if isinstance(answer, HostBatch):
            return packed_message(dump_batch(answer, self._plans.pop(number)))
        if answer is None:
            return None
        error = portable_error(answer.error, f"on node {ray.util.get_node_ip_address()}")
        return pack(SessionEnd(error, answer.death))

    def end(self, end: SessionEnd | None) -> None:
        """Answer all plans that wait, and all that come, with the end of the session."""
        if self._end is not None:
            return
        self._end = (end,)
        if self._link is not None:
            for source in self._link.sources:
                self._loop.remove_reader(source)
            self._link.close()
        if not self.status.done():
            self.status.set_result(None)
        for number in list(self._results):
            self._put(number, end)
