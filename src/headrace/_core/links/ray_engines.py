"""The Ray placement: engines in actors of the cluster that this process is connected to, and the links to them."""

from __future__ import annotations

import itertools
import math
import os
import pickle
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import ray
import ray.exceptions
import ray.util.client

from headrace._core.batches import BatchPlan, HostBatch, SessionStart
from headrace._core.engine.config import EngineConfig, name_unpicklable
from headrace._core.links.group import EngineGroup
from headrace._core.links.placement import Placement
from headrace._core.links.process import dump_request
from headrace._core.links.ray_actor import EngineActor, Packed, pack, unpack
from headrace._core.links.session import Session
from headrace._core.links.thread import Mailbox
from headrace._core.messages import (
    Answer,
    Link,
    Request,
    SessionEnd,
    Started,
    Status,
    StatusRequest,
)
from headrace._core.pool.settings import Settings
from headrace._core.pool.supervisor import WORK_DEADLINE
from headrace._core.ray_placement import RayPlacement
from headrace._core.transport.pickling import dump_message
from headrace._core.transport.shared_pickle import SharedPickle
from headrace.errors import EngineDiedError

# seconds in which the actors end their engines, before they are killed
CLOSE_DEADLINE = 5.0 + WORK_DEADLINE
CALL = 0.001  # seconds: what a call costs, of CPU time 0.7 ms at either end
_CALLS = 10_000  # of an actor at once: one for each plan of the look-ahead

# The engine's process or node is lost, or what it has made: its batches can be made elsewhere.
_LOST = (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError, ray.exceptions.NodeDiedError)

# of `StageTimes`
_MOMENTS = ("admitted", "began", "fetched", "work_began", "work_ended", "assembled")


class RayEngines(Placement):
    """The engines of a loader on a Ray cluster."""

    name = "ray"

    def __init__(self, config: EngineConfig, placement: RayPlacement, engines: int) -> None:
        _check_connected()
        super().__init__()
        self._placement = placement
        self._engines = engines
        packed = _packed(config, config.without_functions())
        self._connection = connection()
        self._config = ray.put(packed)
        self._numbers = itertools.count()  # of sessions
        self._settings = Settings.here()
        options = {
            "num_cpus": placement.cpus_per_engine,
            "scheduling_strategy": "SPREAD",
            "max_concurrency": _CALLS,
            "enable_task_events": False,
            # plans of an engine that is lost go to others, which Ray cannot know
            "max_restarts": 0,
            **placement.options,
        }
        self._actor_class = ray.remote(EngineActor).options(**options)
        self._lost: list[Any] = []  # actors, as any iterator has found
        self._actors = [self._start(number) for number in range(engines)]

    def _start(self, number: int) -> Any:
        return self._actor_class.remote(number, self._engines, self._settings)

    @property
    def alive(self) -> bool:
        return self._pid == os.getpid() and self._connection == connection()

    def _open(
        self, config: EngineConfig, work: SharedPickle | None, start: SessionStart
    ) -> Session:
        functions = ray.put(_packed(config, config.work()))

        def connect(engine: int, first: int) -> RayLink:
            actor = self._actors[engine]
            if any(actor is lost for lost in self._lost):
                _kill(actor)
                actor = self._actors[engine] = self._start(engine)
            begin = start._replace(batch=first)
            opening = next(self._numbers), begin, self._config, functions
            return RayLink(engine, actor, opening, self._lost.append)

        return Session(
            EngineGroup(config, connect, self._engines, first=start.batch, cluster=self._placement)
        )

    def _end(self) -> None:
        actors, self._actors = self._actors, []
        if self._connection != connection():
            return  # it has ended, and the actors with it
        stopping = [actor.stop.remote() for actor in actors]
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=CLOSE_DEADLINE, fetch_local=False)
        for actor in actors:
            _kill(actor)


class RayLink(Link):
    """A link to an engine in an actor.

    Answers are the results of calls of the actor. A large batch is that of one call, and one object
    of Ray's, released when it is copied; small ones come together, as many as are ready. A call for
    each plan is under way, or only one if batches are small and the consumer computes for less than
    `CALL` between them: plans then wait until it has to wait. The first argument that opens the
    session is its number; `on_lost` is called with the actor if that is lost.
    """

    def __init__(
        self, engine: int, actor: Any, opening: tuple[Any, ...], on_lost: Callable[[Any], object]
    ) -> None:
        self._engine = engine
        self._actor = actor
        self._on_lost = on_lost
        self._connection = connection()
        self._number = opening[0]
        self._mailbox = Mailbox()  # of futures
        # that were sent, of the batches that have not arrived
        self._plans: dict[int, BatchPlan] = {}
        self._unsent: list[BatchPlan] = []
        self._asked = 0  # calls under way that return messages, one at least
        self._small = False  # whether the last answer was of small ones
        self._left = 0.0  # when the consumer had sent its last plans; 0.0 if it has come back since
        self._hurries = False  # whether it came back within `CALL`
        self._sequence = itertools.count()
        self._ahead = -math.inf  # seconds by which its clock is ahead of this one, at least
        self._place = "a node that Ray has not chosen yet"
        self._elsewhere = False  # on another node than this process
        self._over = self._closed = False
        self.messages: deque[Answer] = deque()
        self.source = self._mailbox.source
        try:
            self._call(actor.open, *opening)
        except BaseException:  # of Ray: it is raised at the iteration
            self._mailbox.close()
            raise

    def send(self, message: Request) -> None:
        if isinstance(message, list):
            self._unsent += message
            self._send_plans(now=False)
            self._left = time.perf_counter()
        else:
            self._send_plans()
            self._send(message, answered=isinstance(message, StatusRequest))

    def _send_plans(self, *, now: bool = True) -> None:
        """Send plans and ask for batches: `now`, where waiting saves no calls, and if the engine has few plans left."""
        plans, few = self._unsent, self._small and self._hurries
        if few and not now and len(plans) < len(self._plans):
            return
        if plans:
            self._unsent = []
            self._plans.update((plan.number, plan) for plan in plans)
            self._send(plans, answered=not (few and self._asked))
        while self._asked < min(len(self._plans), 1 if few else _CALLS):
            self._send(None, answered=True)

    def _send(self, message: Request | None, *, answered: bool) -> None:
        order = () if message is None else (next(self._sequence), pack(dump_request(message)))
        self._asked += answered
        self._call(self._actor.answer if answered else self._actor.send, self._number, *order)

    def _call(self, method: Any, *arguments: object) -> None:
        if self._connected():
            method.remote(*arguments).future().add_done_callback(
                self._mailbox.put
            )  # on Ray's thread

    def _connected(self) -> bool:
        if connection() == self._connection:
            return True
        self._end(
            SessionEnd(
                EngineDiedError(
                    why="the connection to its Ray cluster was closed, by ray.shutdown()"
                )
            )
        )
        return False

    def receive(self) -> None:
        if self._left:
            self._hurries, self._left = time.perf_counter() - self._left < CALL, 0.0
        answers: deque[Any] = self._mailbox.messages
        while answers and not self._over:
            future = answers.popleft()
            error = future.exception()
            if isinstance(error, _LOST):
                self._lose(" ".join(f"{type(error).__name__}: {error}".split()))
            elif error is not None:
                self._end(SessionEnd(error))
            elif (answer := future.result()) is not None:
                self._take_in(answer)
        if not self._over:
            self._send_plans(now=False)

    def _take_in(self, answer: tuple[str, str, int] | Packed) -> None:
        if len(answer) == 3 and isinstance(answer, tuple):  # it is open
            node, address, pid = answer
            self._elsewhere = node != ray.get_runtime_context().get_node_id()
            self._place = f"node {address}, process {pid}"
            self.messages.append(Started())
            return
        self._asked -= 1
        self._small = isinstance(answer, bytes)
        for message in map(unpack, pickle.loads(answer) if isinstance(answer, bytes) else [answer]):
            if isinstance(message, Status):
                self.messages.append(Status(f"{message.text}, on {self._place}"))
            elif not isinstance(message, SessionEnd):
                host = HostBatch.from_flat(message, self._plans.pop(message[0]))
                self.messages.append(self._translated(host) if self._elsewhere else host)
            elif message.death is not None:
                self._lose(f"its process {message.death}")
            else:
                self._end(message)

    def _translated(self, host: HostBatch) -> HostBatch:
        """The batch of another node, its times by this process's clock, its processes with numbers that none has here.

        The batch that took the least time on its way bounds the difference of the clocks.
        """
        # the most of a Linux machine
        times, fetches, pids = (host.times, host.fetches, (self._engine + 1) << 22)
        self._ahead = max(self._ahead, times.assembled - time.perf_counter())
        moments = {
            name: moment - self._ahead for name in _MOMENTS if (moment := getattr(times, name))
        }
        if times.worked_by is not None:
            pid, thread, worker = times.worked_by
            times = times._replace(worked_by=(pids + pid, thread, worker))
        if fetches is not None:
            rows = np.frombuffer(fetches.rows).reshape(-1, 4) - (0.0, 0.0, self._ahead, self._ahead)
            fetches = fetches._replace(pid=pids + fetches.pid, rows=rows.tobytes())
        return host._replace(times=times._replace(**moments), fetches=fetches)

    def _lose(self, reason: str) -> None:
        self._on_lost(self._actor)
        self._end(SessionEnd(None, f"(on {self._place}) was lost: {reason}"))

    def _end(self, end: SessionEnd) -> None:
        if not self._over:
            self._over = True
            self.messages.append(end)

    def must_wait(self) -> bool:
        if self._connected() and not self.messages and not self._mailbox.messages:
            self._send_plans()
        return not self.messages and self._mailbox.must_wait()

    def leave(self) -> None:
        self._over = True
        self._mailbox.wake()

    def close(self) -> None:
        if self._closed:
            return
        self.leave()
        self._closed = True
        self._mailbox.close()
        if connection() == self._connection:
            # the actor is lost, or Ray is shutting down: so is the session
            with suppress(Exception):
                self._actor.end_session.remote(self._number)


def connection() -> tuple[str, str] | None:
    """What identifies this process's connection to a cluster; None without one.

    It is compared before each call: one without a connection, or of an actor of an earlier one,
    would start Ray anew.
    """
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    # the latter follows from the number of the job
    return (context.get_node_id(), context.get_worker_id())


def _check_connected() -> None:
    if ray.util.client.ray.is_connected():
        raise RuntimeError(
            "placement=RayPlacement(...) needs a process of the cluster: Ray Client (ray://) has no object store here. "
            "Start the program with `ray job submit`, or on a node of the cluster with ray.init(address='auto')."
        )
    if not ray.is_initialized():
        raise RuntimeError(
            "placement=RayPlacement(...) needs a connection to a Ray cluster, which headrace does not open by itself: "
            "call ray.init(address='auto') on a node of the cluster, or ray.init() for one on this machine."
        )


def _kill(actor: Any) -> None:
    with suppress(ray.exceptions.RayError, ValueError):  # it has ended
        ray.kill(actor)


def _packed(config: EngineConfig, obj: object) -> Packed:
    try:
        return pack(dump_message(obj))
    except Exception as error:
        name_unpicklable(config, error)
