"""The actor of an engine: it starts the engine's process on its node, and passes plans and batches on.

The engine is the same process as on the consumer's machine (see `headrace._core.runtime.sidecar`), so that Ray's Python
does not slow it, and user code does not block Ray's event loop. A batch is copied once here, from its slab to Ray's
store.

Ray may start calls in another order than they were made in: groups of plans have numbers.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

import ray

from headrace._core.batches import BatchPlan, HostBatch
from headrace._core.engine.config import EngineConfig
from headrace._core.engine.worker_tasks import to_wire
from headrace._core.notes import add_note
from headrace._core.runtime.process import ProcessPlacement
from headrace._core.runtime.process_session import ProcessSession
from headrace._core.runtime.ray.messages import EnginePart, OpenSession, SessionEnd
from headrace._core.runtime.ray.wire import Packed, pack, unpack_views
from headrace._core.transport.pickling import format_error, picklable_error
from headrace._core.transport.shared_pickle import SharedPickle

STATUS_TIMEOUT = 1.0  # seconds for the answer of the engine's process


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

    async def open(self, request: OpenSession, config: Packed, work: Packed) -> tuple[str, str, int]:
        """Start a session; its errors answer its plans. Returns the node's id and address, and the process id."""
        served = self._served(request.number)
        if served is not None:
            try:
                async with self._opening:
                    session = await asyncio.to_thread(self._open, request, config, work)
            except BaseException as error:  # user code: imports of its modules, unpickling
                served.end(_ended_with(error))
            else:
                served.begin(session)
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), os.getpid()

    def _open(self, request: OpenSession, packed: Packed, work: Packed) -> ProcessSession:
        if self._placement is None:
            self._part.settings.adopt()
        config = self._config
        if config is None:
            config = unpack_views(packed).part(self._part.engine, self._part.engines)
            config = self._config = config._replace(in_order=False)
        config = config._replace(base_seed=request.base_seed)
        if self._work is None or self._work[0] != request.work:
            self._work = request.work, SharedPickle.dumps(unpack_views(work))
        functions = self._work[1]
        if self._placement is None or not self._placement.serves(config, functions):
            if self._placement is not None:
                self._placement.close()
            self._placement = ProcessPlacement(config, functions)
        session = self._placement.open(
            config, functions, request.epoch, set_epoch=request.set_epoch, start=request.start
        )
        assert isinstance(session, ProcessSession)
        return session

    def _served(self, number: int) -> _Served | None:
        """A session, also before it is open; None after its end."""
        if number in self._ended:
            return None
        if number not in self._sessions:
            self._sessions[number] = _Served()
        return self._sessions[number]

    async def batch(self, session: int, number: int, group: int = -1, plans: Packed = b"") -> Packed | None:
        """Make a batch.

        Args:
            session: the session's number.
            number: the batch's.
            group: the number of the group of plans that is sent with this call; -1 for none.
            plans: these plans.

        Returns:
            The batch, or the end of the session; None if the consumer has left it.
        """
        served = self._served(session)
        if served is None:
            return None
        if group >= 0:
            served.admit(group, plans)
        answer = await served.result(number)
        return None if answer is None else pack(answer)

    async def consumed(self, session: int, number: int) -> None:
        """Note that all batches up to this number have been taken."""
        if (served := self._served(session)) is not None:
            served.on_consumed(number)

    async def trace(self, session: int, on: bool) -> None:
        """Measure single fetches from now on, or no longer."""
        if (served := self._served(session)) is not None:
            served.trace(on)

    async def status(self, session: int, number: int) -> str | None:
        """The progress of a batch."""
        served = self._served(session)
        return None if served is None else await served.status(number)

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
    """A session in the actor."""

    def __init__(self) -> None:
        self._session: ProcessSession | None = None
        self._receiving: asyncio.Task[None] | None = None
        self._groups: dict[int, Sequence[BatchPlan]] = {}  # that came before an earlier one, or before the session
        self._next_group = 0
        self._results: dict[int, asyncio.Future[HostBatch | SessionEnd | None]] = {}
        self._status: asyncio.Future[str] = asyncio.Future()  # the answer to the last request
        self._over = False
        self._end: SessionEnd | None = None
        self._traced = False
        self._consumed: int | None = None  # the number of the last batch that has been taken, if the consumer said so

    def begin(self, session: ProcessSession) -> None:
        """Run the session that has been opened; close it if it was left meanwhile."""
        if self._over:
            session.close()
            return
        self._session = session
        if self._traced:
            session.trace(True)
        if self._consumed is not None:
            session.on_consumed(self._consumed)
        self._admit_next()
        self._receiving = asyncio.get_running_loop().create_task(self._receive(session))

    async def _receive(self, session: ProcessSession) -> None:
        while True:
            while (host := session.take()) is not None:
                self._put(host.plan.number, host)
            status = session.take_status()
            if status is not None and not self._status.done():
                self._status.set_result(status)
            if session.ended:
                break
            await session.wait_async(None)
        self.end(_ended_with(session.error, session.how_process_ended if session.process_ended else None))

    def _put(self, number: int, answer: HostBatch | SessionEnd | None) -> None:
        result = self._result(number)
        if not result.done():
            result.set_result(answer)

    def _result(self, number: int) -> asyncio.Future[HostBatch | SessionEnd | None]:
        if number not in self._results:
            self._results[number] = asyncio.get_running_loop().create_future()
        return self._results[number]

    async def result(self, number: int) -> HostBatch | SessionEnd | None:
        """A batch, when it is made."""
        result = self._result(number)
        if self._over:
            self._put(number, self._end)
        answer = await result
        del self._results[number]
        return to_wire(answer) if isinstance(answer, HostBatch) else answer

    def admit(self, group: int, plans: Packed) -> None:
        """Send plans to the engine, after those of all groups before."""
        self._groups[group] = unpack_views(plans)
        self._admit_next()

    def _admit_next(self) -> None:
        while self._session is not None and self._next_group in self._groups:
            self._session.admit(self._groups.pop(self._next_group))
            self._next_group += 1

    def on_consumed(self, number: int) -> None:
        self._consumed = number
        if self._session is not None:
            self._session.on_consumed(number)

    def trace(self, on: bool) -> None:
        self._traced = on
        if self._session is not None:
            self._session.trace(on)

    async def status(self, number: int) -> str:
        if self._session is None:
            return f"batch {number} has not begun: the engine's process is being started"
        self._status = asyncio.get_running_loop().create_future()
        self._session.request_status(number)
        try:
            return await asyncio.wait_for(self._status, STATUS_TIMEOUT)
        except TimeoutError:
            return f"batch {number}: the engine's process does not answer"

    def end(self, end: SessionEnd | None) -> None:
        """Answer all plans that wait, and all that come, with the end of the session."""
        if self._over:
            return
        self._over, self._end = True, end
        if self._receiving is not None and end is None:
            self._receiving.cancel()
        if self._session is not None:
            self._session.close()
        for number in list(self._results):
            self._put(number, end)


def _ended_with(error: BaseException | None, death: str | None = None) -> SessionEnd:
    if error is None:
        return SessionEnd(None, death)
    traceback = format_error(error).rstrip()
    picklable = picklable_error(error)
    add_note(picklable, f"on node {ray.util.get_node_ip_address()}:\n{traceback}")
    return SessionEnd(picklable, death)
