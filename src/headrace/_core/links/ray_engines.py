"""The Ray placement: engines in actors of the cluster that this process is connected to, and the links to them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import re
import time
from collections import deque
from concurrent.futures import Future
from typing import Any

import numpy as np
import ray
import ray.exceptions
import ray.util.client

from headrace._core.batches import BatchPlan, HostBatch, SessionStart
from headrace._core.engine.config import EngineConfig, name_unpicklable
from headrace._core.links.placement import Placement
from headrace._core.links.process import dump_request
from headrace._core.links.ray_actor import EngineActor
from headrace._core.links.ray_wire import (
    EnginePart,
    Packed,
    SessionRequest,
    pack,
    packed_message,
    unpack,
)
from headrace._core.links.session import Quorum, Session, session_of
from headrace._core.links.thread import Mailbox
from headrace._core.messages import Answer, Request, SessionEnd, Started, Status
from headrace._core.pool.settings import Settings
from headrace._core.pool.supervisor import WORK_DEADLINE
from headrace._core.ray_placement import RayPlacement
from headrace._core.transport.shared_pickle import SharedPickle
from headrace.errors import EngineDiedError

CLOSE_DEADLINE = 5.0 + WORK_DEADLINE  # seconds in which the actors end their engines, before they are killed
_CALLS = 10_000  # of an actor at once: one for each plan of the look-ahead

# The engine's process or node is lost, or what it has made: its batches can be made elsewhere.
_LOST = (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError, ray.exceptions.NodeDiedError)

_MOMENTS = ("admitted", "began", "fetched", "work_began", "work_ended", "assembled")  # of `StageTimes`
_IDENTITY = re.compile(r"\w+: \S+$")  # a line of an error of Ray's: class_name: EngineActor


class RayEngines(Placement):
    """The engines of a loader on a Ray cluster.

    Args:
        config: what to run.
        placement: the loader's argument.
        engines: their number; fewer than the placement's where one reads a stream.

    Raises:
        RuntimeError: this process is not connected to a cluster.
        NotPicklableError: the dataset cannot be pickled.
    """

    def __init__(self, config: EngineConfig, placement: RayPlacement, engines: int) -> None:
        _check_connected()
        super().__init__()
        self._placement = placement
        self._engines = engines
        packed = _packed(config, config.without_functions())
        self._connection = connection()
        self._config = ray.put(packed)
        self._work: tuple[int, Packed, Any] | None = None  # number, pickle and reference of the last functions
        self._numbers = itertools.count()
        self._works = itertools.count()
        self._settings = Settings.here()
        options = {
            "num_cpus": placement.cpus_per_engine,
            "scheduling_strategy": placement.scheduling_strategy,
            "resources": dict(placement.resources or {}),
            "runtime_env": None if placement.runtime_env is None else dict(placement.runtime_env),
            "max_concurrency": _CALLS,
            "enable_task_events": False,
            "max_restarts": 0,  # plans of an engine that is lost go to others, which Ray cannot know
            **placement.options,
        }
        self._actor_class = ray.remote(EngineActor).options(**options)
        self._links: dict[int, list[RayLink]] = {number: [] for number in range(engines)}
        self._actors = [self._start(number) for number in range(engines)]

    def _start(self, number: int) -> Any:
        return self._actor_class.remote(EnginePart(number, self._engines, self._settings))

    @property
    def alive(self) -> bool:
        return self._pid == os.getpid() and self._connection == connection()

    def _open(self, config: EngineConfig, work: SharedPickle | None, start: SessionStart) -> Session:
        functions = _packed(config, config.work())
        if self._work is None or not _same(self._work[1], functions):
            self._work = next(self._works), functions, ray.put(functions)
        number, _, reference = self._work
        request = SessionRequest(next(self._numbers), config.base_seed, start, number)

        def connect(engine: int) -> RayLink:
            links = self._links[engine]
            if any(link.lost for link in links):  # of any iterator
                _kill(self._actors[engine])
                links.clear()
                self._actors[engine] = self._start(engine)
            links[:] = [link for link in links if not link.closed]
            link = RayLink(engine, self._actors[engine], request, self._config, reference)
            links.append(link)
            return link

        asked = self._placement
        quorum = Quorum(min(asked.least, self._engines), asked.start_timeout, functools.partial(_shortage, asked))
        return session_of(config, connect, self._engines, first=start.batch, quorum=quorum)

    def _end(self) -> None:
        actors, self._actors = self._actors, []
        if self._connection != connection():
            return  # it has ended, and the actors with it
        stopping = [actor.stop.remote() for actor in actors]
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=CLOSE_DEADLINE, fetch_local=False)
        for actor in actors:
            _kill(actor)


class RayLink:
    """A link to an engine in an actor.

    Each plan is a call of the actor, whose result is a batch: one object of Ray's, released when it is copied.

    Args:
        engine: the engine's number.
        actor: the handle of its actor.
        request: the session to open.
        config: reference to the loader's configuration.
        work: reference to the functions of this session.

    Attributes:
        lost: whether the engine was found to be lost.
        closed: whether the link is closed.
    """

    def __init__(self, engine: int, actor: Any, request: SessionRequest, config: Any, work: Any) -> None:
        self._engine = engine
        self._actor = actor
        self._connection = connection()
        self._number = request.number
        self._mailbox: Mailbox[tuple[str, int, Future[Any]]] = Mailbox()
        self._arrived: deque[Answer] = deque()
        self._plans: dict[int, BatchPlan] = {}  # of the batches that have not arrived
        self._sequence = itertools.count()
        self._ahead = -math.inf  # seconds by which its clock is ahead of this one, at least
        self._place = "a node that Ray has not chosen yet"
        self._elsewhere = False  # on another node than this process
        self._over = False
        self.sources = (self._mailbox.source,)
        self.lost = False
        self.closed = False
        try:
            self._call("open", 0, actor.open, request, config, work)
        except BaseException:  # of Ray: it is raised at the iteration
            self._mailbox.close()
            raise

    def send(self, message: Request) -> None:
        packed = packed_message(dump_request(message))
        order = (next(self._sequence), packed)
        if not isinstance(message, list):
            self._call("send", 0, self._actor.send, self._number, *order)
            return
        self._plans.update((plan.number, plan) for plan in message)
        for position, plan in enumerate(message):
            plans = order if position == 0 else ()
            self._call("batch", plan.number, self._actor.batch, self._number, plan.number, *plans)

    def _call(self, what: str, number: int, method: Any, *arguments: object) -> None:
        if self._connected():
            future = method.remote(*arguments).future()
            future.add_done_callback(lambda done: self._mailbox.put((what, number, done)))  # on Ray's thread

    def _connected(self) -> bool:
        if connection() == self._connection:
            return True
        self._end(SessionEnd(EngineDiedError(why="the connection to its Ray cluster was closed, by ray.shutdown()")))
        return False

    def receive(self) -> deque[Answer]:
        answers = self._mailbox.messages
        while answers and not self._over:
            what, number, future = answers.popleft()
            error = future.exception()
            if isinstance(error, _LOST):
                self._lose(_reason(error))
            elif error is not None:
                self._end(SessionEnd(error))
            elif what == "open":
                node, address, pid = future.result()
                self._elsewhere = node != ray.get_runtime_context().get_node_id()
                self._place = f"node {address}, process {pid}"
                self._arrived.append(Started())
            elif (answer := future.result()) is None:
                continue
            elif what == "send":
                self._arrived.append(Status(f"{answer}, on {self._place}"))
            else:
                self._take_in(number, unpack(answer))
        return self._arrived

    def _take_in(self, number: int, answer: SessionEnd | tuple[Any, ...]) -> None:
        if not isinstance(answer, SessionEnd):
            host = HostBatch.from_flat(answer, self._plans.pop(number))
            self._arrived.append(self._translated(host) if self._elsewhere else host)
        elif answer.death is not None:
            self._lose(f"its process {answer.death}")
        else:
            self._end(answer)

    def _translated(self, host: HostBatch) -> HostBatch:
        """The batch of another node, its times by this process's clock, its processes with numbers that none has here.

        The batch that took the least time on its way bounds the difference of the clocks.
        """
        times, fetches, pids = host.times, host.fetches, (self._engine + 1) << 22  # the most of a Linux machine
        self._ahead = max(self._ahead, times.assembled - time.perf_counter())
        moments = {name: moment - self._ahead for name in _MOMENTS if (moment := getattr(times, name))}
        if times.worked_by is not None:
            pid, thread, worker = times.worked_by
            times = times._replace(worked_by=(pids + pid, thread, worker))
        if fetches is not None:
            rows = np.frombuffer(fetches.rows).reshape(-1, 4) - (0.0, 0.0, self._ahead, self._ahead)
            fetches = fetches._replace(pid=pids + fetches.pid, rows=rows.tobytes())
        return host._replace(times=times._replace(**moments), fetches=fetches)

    def _lose(self, reason: str) -> None:
        self.lost = True
        self._end(SessionEnd(None, f"(on {self._place}) was lost: {reason}"))

    def _end(self, end: SessionEnd) -> None:
        if not self._over:
            self._over = True
            self._arrived.append(end)

    def must_wait(self) -> bool:
        self._connected()
        return not self._arrived and self._mailbox.must_wait()

    def leave(self) -> None:
        self._over = True
        self._mailbox.wake()

    def close(self) -> None:
        if self.closed:
            return
        self.leave()
        self.closed = True
        self._mailbox.close()
        if connection() == self._connection:
            with contextlib.suppress(Exception):  # the actor is lost, or Ray is shutting down: so is the session
                self._actor.end_session.remote(self._number)


def connection() -> tuple[str, str] | None:
    """What identifies this process's connection to a cluster; None without one.

    It is compared before each call: one without a connection, or of an actor of an earlier one, would start Ray anew.
    """
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_worker_id()  # the latter follows from the number of the job


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


def _shortage(asked: RayPlacement) -> str:
    """What each engine asks for, and what the cluster has, in words."""
    wanted = {"CPU": asked.cpus_per_engine, **(asked.resources or {})}
    for option, resource in (("num_gpus", "GPU"), ("memory", "memory")):
        if asked.options.get(option):
            wanted[resource] = asked.options[option]

    def amounts(of: dict[str, Any]) -> str:
        return ", ".join(f"{of.get(name, 0):g} {name}" for name in wanted)

    text = f"each asks for {amounts(wanted)}"
    with contextlib.suppress(Exception):  # the cluster does not answer, which Ray reports by itself
        free, all_ = ray.available_resources(), ray.cluster_resources()
        nodes = sum(node["Alive"] for node in ray.nodes())
        text += f"; the cluster of {nodes} node{'s' if nodes != 1 else ''} has {amounts(all_)}, of which "
        text += f"{amounts(free)} are free"
    return text


def _kill(actor: Any) -> None:
    with contextlib.suppress(ray.exceptions.RayError, ValueError):  # it has ended
        ray.kill(actor)


def _packed(config: EngineConfig, obj: object) -> Packed:
    try:
        return pack(obj)
    except Exception as error:
        name_unpicklable(config, error)


def _same(one: Packed, other: Packed) -> bool:
    if isinstance(one, bytes) or isinstance(other, bytes):
        return one == other
    same = one[0] == other[0] and len(one[1]) == len(other[1])
    return same and all(map(np.array_equal, one[1], other[1]))


def _reason(error: BaseException) -> str:
    """How an engine was lost, from Ray's error; Ray prints its advice by itself."""
    lines = [line.strip() for line in str(error).splitlines()]
    sentences = " ".join(line for line in lines if line and not _IDENTITY.match(line))
    return sentences.partition(" Worker exit detail:")[0] or type(error).__name__
