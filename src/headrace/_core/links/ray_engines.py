"""The Ray placement: engines in actors, and links to the engines.

The cluster is the cluster of this process's Ray connection.
"""

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

# Seconds for the actors to end the engines, before the actors are killed.
CLOSE_DEADLINE = 5.0 + WORK_DEADLINE
CALL = 0.001  # cost of a call in seconds; 0.7 ms of CPU time at either end
_CALLS = 10_000  # maximum number of calls to an actor at once; a call for each plan

# After one of these errors, the engine's process, the node or a result is lost. Other engines can
# make the batches.
_LOST = (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError, ray.exceptions.NodeDiedError)

# Names of moments in `StageTimes`.
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
        self._numbers = itertools.count()  # numbers of sessions
        self._settings = Settings.here()
        options = {
            "num_cpus": placement.cpus_per_engine,
            "scheduling_strategy": "SPREAD",
            "max_concurrency": _CALLS,
            "enable_task_events": False,
            # Ray must not restart an actor: the plans of a lost engine go to other engines.
            "max_restarts": 0,
            **placement.options,
        }
        self._actor_class = ray.remote(EngineActor).options(**options)
        self._lost: list[Any] = []  # lost actors, as found by any iterator
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
            return  # the connection has ended, and so have the actors
        stopping = [actor.stop.remote() for actor in actors]
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=CLOSE_DEADLINE, fetch_local=False)
        for actor in actors:
            _kill(actor)


class RayLink(Link):
    """A link to an engine in an actor.

    Answers are the results of calls of the actor. A call returns either a large batch or all ready
    small messages. A large batch is a single object of Ray, released after the copy.

    Usually a call is under way for each plan. Only a single call is under way if batches are small
    and the consumer computes for less than `CALL` between batches. Plans are then held until the
    consumer has to wait.

    Args:
        engine: The number of the engine.
        actor: The actor.
        opening: The arguments of `EngineActor.open`. The first argument is the session's number.
        on_lost: Called with the actor when the actor is lost.
    """

    def __init__(
        self, engine: int, actor: Any, opening: tuple[Any, ...], on_lost: Callable[[Any], object]
    ) -> None:
        self._engine = engine
        self._actor = actor
        self._on_lost = on_lost
        self._connection = connection()
        self._number = opening[0]
        self._mailbox = Mailbox()  # a mailbox for futures
        # Plans sent, without an arrived batch.
        self._plans: dict[int, BatchPlan] = {}
        self._unsent: list[BatchPlan] = []
        self._asked = 0  # number of calls under way that return messages
        self._small = False  # whether the last answer was a list of small messages
        # When the consumer last sent plans; 0.0 if the consumer has come back since.
        self._left = 0.0
        self._hurries = False  # whether the consumer came back within `CALL`
        self._sequence = itertools.count()
        # Lower limit of the difference between the node's clock and this clock, in seconds.
        self._ahead = -math.inf
        self._place = "a node that Ray has not chosen yet"
        self._elsewhere = False  # whether the engine is on another node
        self._over = self._closed = False
        self.messages: deque[Answer] = deque()
        self.source = self._mailbox.source
        try:
            self._call(actor.open, *opening)
        except BaseException:  # an error of Ray, raised by the iteration
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
        """Send plans and ask for batches.

        Without `now`, plans may be held to save calls while the engine has enough plans.
        """
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
            # The callback runs on a thread of Ray.
            method.remote(*arguments).future().add_done_callback(self._mailbox.put)

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
        if len(answer) == 3 and isinstance(answer, tuple):  # the result of `open`
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
        """Translate a batch from another node.

        Times become times of this process's clock. Processes get numbers that no process has on
        this machine. The batch with the shortest way limits the difference of the clocks.
        """
        # Process ids of Linux are below 1 << 22.
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
            # If the actor is lost or Ray shuts down, the session is over too.
            with suppress(Exception):
                self._actor.end_session.remote(self._number)


def connection() -> tuple[str, str] | None:
    """Return the identity of this process's connection to a cluster, or None.

    Compare the identity before each call of Ray. Without a connection, or with an actor of an
    earlier connection, a call would start Ray anew.
    """
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    # The worker's id follows from the number of the job.
    return (context.get_node_id(), context.get_worker_id())


def _check_connected() -> None:
    if ray.util.client.ray.is_connected():
        raise RuntimeError(
            "placement=RayPlacement(...) needs a process of the cluster: Ray Client (ray://) has "
            "no object store here. Start the program with `ray job submit`, or on a node of the "
            "cluster with ray.init(address='auto')."
        )
    if not ray.is_initialized():
        raise RuntimeError(
            "placement=RayPlacement(...) needs a connection to a Ray cluster, which headrace does "
            "not open by itself: call ray.init(address='auto') on a node of the cluster, or "
            "ray.init() for one on this machine."
        )


def _kill(actor: Any) -> None:
    with suppress(ray.exceptions.RayError, ValueError):  # the actor has ended
        ray.kill(actor)


def _packed(config: EngineConfig, obj: object) -> Packed:
    try:
        return pack(dump_message(obj))
    except Exception as error:
        name_unpicklable(config, error)
