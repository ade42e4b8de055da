"""The consumer's end of a session in an engine on a Ray cluster."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import ray
import ray.exceptions

from headrace._core.batches import BatchPlan, HostBatch
from headrace._core.runtime.process_session import dump_plans
from headrace._core.runtime.ray.clocks import RemoteClock, distinct_pid
from headrace._core.runtime.ray.cluster import connection
from headrace._core.runtime.ray.messages import OpenSession, SessionEnd
from headrace._core.runtime.ray.wire import Packed, packed_message, unpack
from headrace.errors import EngineDiedError, LoaderClosedError

# The engine's process or node is lost, or what it has made: its batches can be made elsewhere.
_LOST = (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError, ray.exceptions.NodeDiedError)


_IDENTITY = re.compile(r"\w+: \S+$")  # a line of an error of Ray's: class_name: EngineActor


class RaySession:
    """A session in the actor of one engine; a member of a `GroupSession`.

    Each plan is a call of the actor, whose result is a batch: one object of Ray's, released when it is copied.

    Args:
        engine: the engine's number.
        actor: the handle of its actor.
        request: the session to open.
        config: reference to the loader's configuration.
        work: reference to the functions of this session.
    """

    def __init__(self, engine: int, actor: Any, request: OpenSession, config: Any, work: Any) -> None:
        self._engine = engine
        self._actor = actor
        self._connection = connection()
        self._number = request.number
        self._pid = os.getpid()
        self._signal = _Signal()
        self._arrived: deque[tuple[str, float, Future[Any]]] = deque()
        self._ready: deque[HostBatch] = deque()
        self._groups = 0
        self._clock = RemoteClock()
        self._status: str | None = None
        self._place = "a node that Ray has not chosen yet"
        self._elsewhere = False  # on another node than this process
        self._death: str | None = None
        self.started = False
        self.ended = False
        self.error: BaseException | None = None
        try:
            self._call("open", actor.open, request, config, work)
        except BaseException:  # of Ray: it is raised at the iteration
            self._signal.close()
            raise

    @property
    def sources(self) -> tuple[socket.socket]:
        """A socket that is readable when an answer has arrived."""
        return (self._signal.woken,)

    @property
    def lost(self) -> bool:
        """Whether this session has noticed that the engine is lost."""
        return self._death is not None

    @property
    def process_ended(self) -> bool:
        """Whether the engine is lost, with its process or its node."""
        self._receive()
        return self._connected() and self.lost

    @property
    def how_process_ended(self) -> str:
        """How the engine was lost, in words."""
        return f"(on {self._place}) was lost: {self._death}"

    def admit(self, plans: Sequence[BatchPlan]) -> None:
        packed = packed_message(dump_plans(plans))
        for position, plan in enumerate(plans):
            group = (self._groups, packed) if position == 0 else ()
            self._call("batch", self._actor.batch, self._number, plan.number, *group)
        self._groups += 1

    def on_consumed(self, number: int) -> None:
        self._call("", self._actor.consumed, self._number, number)

    def request_status(self, number: int) -> None:
        self._call("status", self._actor.status, self._number, number)

    def trace(self, on: bool) -> None:
        self._call("", self._actor.trace, self._number, on)

    def take_status(self) -> str | None:
        self._receive()
        status, self._status = self._status, None
        return status

    def take(self) -> HostBatch | None:
        if not self._ready:
            self._receive()
        return self._ready.popleft() if self._ready else None

    def _call(self, what: str, method: Any, *arguments: object) -> None:
        if not self._connected():
            return
        future = method.remote(*arguments).future()
        future.add_done_callback(functools.partial(self._on_answer, what, time.perf_counter()))

    def _connected(self) -> bool:
        if connection() == self._connection:
            return True
        if not self.ended:
            self._end(EngineDiedError(why="the connection to its Ray cluster was closed, by ray.shutdown()"))
        return False

    def _on_answer(self, what: str, sent: float, future: Future[Any]) -> None:
        """Note an answer; on Ray's thread."""
        self._arrived.append((what, sent, future))
        self._signal.set()

    def _receive(self) -> None:
        if self.ended:
            return
        self._signal.clear()
        while self._arrived and not self.ended:
            what, sent, future = self._arrived.popleft()
            error = future.exception()
            if isinstance(error, _LOST):
                self._lose(_reason(error))
            elif error is not None:
                self._end(error)
            elif what == "open":
                node, address, pid = future.result()
                self._elsewhere = node != ray.get_runtime_context().get_node_id()
                self._place, self.started = f"node {address}, process {pid}", True
            elif what == "status":
                self._status = f"{future.result() or 'the session has ended there'}, on {self._place}"
            elif what == "batch" and (packed := future.result()) is not None:
                self._take_in(packed, sent)

    def _take_in(self, packed: Packed, sent: float) -> None:
        answer = unpack(packed)
        if isinstance(answer, SessionEnd):
            if answer.death is not None:
                self._lose(f"its process {answer.death}")
            else:
                self._end(answer.error)
            return
        self._ready.append(self._translated(answer, sent))

    def _translated(self, host: HostBatch, sent: float) -> HostBatch:
        """The batch, its times by this process's clock, its processes with numbers that none has here."""
        self._clock.bound(host.times, sent, time.perf_counter())
        times, fetches = self._clock.stages(host.times), self._clock.fetches(host.fetches)
        if self._elsewhere:
            if times.worked_by is not None:
                pid, thread, worker = times.worked_by
                times = times._replace(worked_by=(distinct_pid(pid, self._engine), thread, worker))
            if fetches is not None:
                fetches = fetches._replace(pid=distinct_pid(fetches.pid, self._engine))
        return host._replace(times=times, fetches=fetches)

    def _lose(self, reason: str) -> None:
        self._death = reason
        self._end(None)

    def _end(self, error: BaseException | None) -> None:
        self.ended = True
        self.error = error

    def abandon(self) -> None:
        if not self.ended:
            self._end(LoaderClosedError())
        self._ready.clear()

    def wake(self) -> None:
        self._signal.set()

    def close(self) -> None:
        """Leave the session, without waiting; idempotent."""
        if self._pid != os.getpid():
            return
        self.abandon()
        self._arrived.clear()
        if self._signal.close() and connection() == self._connection:
            with contextlib.suppress(Exception):  # the actor is lost, or Ray is shutting down: so is the session
                self._actor.end_session.remote(self._number)


class _Signal:
    """A socket that another thread makes readable."""

    def __init__(self) -> None:
        self._wake, self.woken = socket.socketpair()
        for end in (self._wake, self.woken):
            end.setblocking(False)
        self._lock = threading.Lock()
        self._closed = False

    def set(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):  # full: it is readable
            if not self._closed:
                self._wake.send(b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self.woken.recv(4096)

    def close(self) -> bool:
        """Close it; returns whether it was open."""
        with self._lock:
            before, self._closed = self._closed, True
            if not before:
                self._wake.close()
                self.woken.close()
        return not before


def _reason(error: BaseException) -> str:
    """How an engine was lost, from Ray's error; Ray prints its advice by itself."""
    lines = [line.strip() for line in str(error).splitlines()]
    sentences = " ".join(line for line in lines if line and not _IDENTITY.match(line))
    return sentences.partition(" Worker exit detail:")[0] or type(error).__name__
