"""The Ray actor of an engine.

The actor starts the engine's process on the actor's node, and passes messages on. The process is
the same as on the consumer's machine (see `headrace._core.links.sidecar`). So Ray's Python does not
slow the engine, and user code does not block Ray's event loop. A batch is copied once here, from a
slab to Ray's object store. Messages between consumer and actor are packed for Ray.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import warnings
from typing import Any

import numpy as np
import ray

from headrace._core.batches import BatchPlan, HostBatch, SessionStart
from headrace._core.engine.config import EngineConfig
from headrace._core.engine.worker_tasks import dump_batch
from headrace._core.links.process import ProcessLink, ProcessPlacement
from headrace._core.links.sidecar import portable_end
from headrace._core.messages import SessionEnd, Status, StatusRequest
from headrace._core.pool.settings import Settings
from headrace._core.transport.pickling import Message, copy_of, dump_message, load_message
from headrace._core.transport.shared_pickle import SharedPickle

# Bytes of buffers in an object. Smaller objects are sent as a single byte string. Below 100 KB, Ray
# sends the byte string inside the reply.
IN_BAND = 64 * 1024

Packed = bytes | tuple[bytes, list[np.ndarray[Any, Any]]]
"""An object as a single byte string, or as a pickle with arrays of bytes.

Ray keeps the arrays in the object store without a copy."""
_Answer = list[Packed] | Packed  # several small messages, or a single large message


def pack(message: Message) -> Packed:
    if sum(buffer.nbytes for buffer in message.buffers) <= IN_BAND:
        return pickle.dumps(
            (message.pickled, [bytes(buffer) for buffer in message.buffers]), protocol=5
        )
    empty: np.ndarray[Any, Any] = np.empty(0, dtype=np.uint8)
    return message.pickled, [
        np.frombuffer(each, np.uint8) if each.nbytes else empty for each in message.buffers
    ]


def unpack(packed: Packed) -> Any:
    """Return the object, with tensors and arrays in writable memory.

    Ray returns a read-only view of the object store, shared with other readers. This function makes
    the only copy in this process. Afterwards Ray can release the object in the store.
    """
    pickled, found = pickle.loads(packed) if isinstance(packed, bytes) else packed
    return load_message(pickled, [copy_of(buffer) for buffer in found])


def unpack_views(packed: Packed) -> Any:
    """Return the object, with tensors and arrays as read-only views."""
    parts: tuple[bytes, list[Any]] = pickle.loads(packed) if isinstance(packed, bytes) else packed
    with warnings.catch_warnings():
        # The warning is from torch.
        warnings.filterwarnings(
            "ignore", "The given (buffer|NumPy array) is not writable", UserWarning
        )
        return load_message(parts[0], [memoryview(buffer).cast("B") for buffer in parts[1]])


class EngineActor:
    """An engine of a loader, on a node chosen by Ray.

    `engine` is the number of the engine. The engine has the consumer's settings.
    """

    def __init__(self, engine: int, engines: int, settings: Settings) -> None:
        self._part = engine, engines
        self._settings = settings
        self._config: EngineConfig | None = None
        self._placement: ProcessPlacement | None = None
        self._work: SharedPickle | None = None
        self._sessions: dict[int, _Served | None] = {}  # None for ended sessions
        self._opening = asyncio.Lock()

    def __repr__(self) -> str:
        # Ray prints this text before each line of output from the actor.
        return f"headrace engine {self._part[0]}"

    async def open(
        self, session: int, start: SessionStart, config: Packed, work: Packed
    ) -> tuple[str, str, int]:
        """Start a session.

        Errors of the start become answers to the plans.

        Returns:
            The id of the node, the address of the node, and the process id.
        """
        if (served := self._served(session)) is not None:
            try:
                async with self._opening:
                    link = await asyncio.to_thread(self._connect, start, config, work)
            except BaseException as error:  # user code: imports of the user's modules, unpickling
                served.end(SessionEnd(error))
            else:
                served.begin(link)
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), os.getpid()

    def _connect(self, start: SessionStart, packed: Packed, work: Packed) -> ProcessLink:
        if self._config is None:
            self._settings.adopt()
            config: EngineConfig = unpack_views(packed)
            self._config = config.part(*self._part)._replace(in_order=False)
        self._work = SharedPickle.dumps(unpack_views(work), self._work)
        if self._placement is None or not self._placement.alive:
            if self._placement is not None:
                self._placement.close()
            self._placement = ProcessPlacement(self._config, self._work)
        return self._placement.connect(self._work, start, 0, start.batch)

    def _served(self, number: int) -> _Served | None:
        """Return a session, possibly not open yet; None after the end."""
        return self._sessions.setdefault(number, _Served())

    async def send(self, session: int, sequence: int, message: Packed) -> None:
        """Pass on a message.

        Messages are numbered, because Ray may start calls in another order.
        """
        if (served := self._served(session)) is not None:
            served.send(sequence, message)

    async def answer(self, session: int, sequence: int = -1, message: Packed = b"") -> Packed:
        """Return the next messages from the engine.

        The result is a large message, or a pickled list of small messages. The list is empty after
        the session.

        Args:
            session: The number of the session.
            sequence: The number of `message`; -1 without a message.
            message: A message to pass on first.
        """
        if (served := self._served(session)) is None:
            return pickle.dumps([])
        if sequence >= 0:
            served.send(sequence, message)
        answer = await served.answer()
        return pickle.dumps(answer, protocol=5) if isinstance(answer, list) else answer

    async def end_session(self, session: int) -> None:
        """Leave a session, because the consumer wants no more batches."""
        served, self._sessions[session] = self._sessions.get(session), None
        if served is not None:
            served.end(None)

    async def stop(self) -> None:
        for session in list(self._sessions):
            await self.end_session(session)
        if self._placement is not None:
            await asyncio.to_thread(self._placement.close)


class _Served:
    """A session in the actor.

    Messages wait until the consumer asks. A large message is sent singly, and small messages are
    sent together.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._link: ProcessLink | None = None
        self._plans: dict[int, BatchPlan] = {}  # plans without an arrived batch
        # Messages received before an earlier message, or before the session is open.
        self._unsent: dict[int, object] = {}
        self._next = 0
        self._answers: asyncio.Queue[_Answer] = asyncio.Queue()
        # The last list in the queue, unless the queue is empty. A large message closes the list.
        self._small: list[Packed] = []
        self._nbytes = 0  # bytes in `_small`
        self._last: list[Packed] | None = None  # the end of the session, which stays in the queue

    def begin(self, link: ProcessLink) -> None:
        """Run an open session, or close it if already left."""
        if self._last is not None:
            link.close()
            return
        self._link = link
        self._loop.add_reader(link.source, self._receive, link)
        self._send_next(link)

    def send(self, sequence: int, packed: Packed) -> None:
        message = self._unsent[sequence] = unpack(packed)
        if self._link is not None:
            self._send_next(self._link)
        elif isinstance(message, StatusRequest):
            self._unsent[sequence] = []  # answered below; send an empty list of plans instead
            text = f"batch {message.number} has not begun: the engine's process is being started"
            self._put(pack(dump_message(Status(text))))

    def _send_next(self, link: ProcessLink) -> None:
        while self._next in self._unsent:
            message: object = self._unsent.pop(self._next)
            self._next += 1
            if isinstance(message, list):
                self._plans.update((plan.number, plan) for plan in message)
            link.send(message)  # type: ignore[arg-type]

    def _receive(self, link: ProcessLink) -> None:
        link.receive()
        while link.messages and self._last is None:
            message = link.messages.popleft()
            if isinstance(message, SessionEnd):
                self.end(message)
            elif isinstance(message, HostBatch):
                self._put(pack(dump_batch(message, self._plans.pop(message.plan.number))))
            else:
                self._put(pack(dump_message(message)))

    def _put(self, packed: Packed) -> None:
        if not isinstance(packed, bytes):
            self._small = []
            self._answers.put_nowait(packed)
            return
        self._nbytes += len(packed)
        if not self._small or self._answers.empty() or self._nbytes > IN_BAND:
            self._small, self._nbytes = [], len(packed)
            self._answers.put_nowait(self._small)
        self._small.append(packed)

    async def answer(self) -> _Answer:
        answer = await self._answers.get()
        if answer is self._last:
            self._answers.put_nowait(answer)  # for all callers, waiting or later
        return answer

    def end(self, end: SessionEnd | None) -> None:
        if self._last is not None:
            return
        self._last = []
        if end is not None:
            end = portable_end(end, f"on node {ray.util.get_node_ip_address()}")
            self._last.append(pack(dump_message(end)))
        self._answers.put_nowait(self._last)
        if self._link is not None:
            self._loop.remove_reader(self._link.source)
            self._link.close()
