"""The Ray placement: engines in actors of the cluster that this process is connected to."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from typing import Any

import numpy as np
import ray
import ray.exceptions

from headrace._core.batches import SessionStart
from headrace._core.engine.config import EngineConfig, name_unpicklable
from headrace._core.pool.settings import Settings
from headrace._core.pool.supervisor import WORK_DEADLINE
from headrace._core.ray_placement import RayPlacement
from headrace._core.runtime.dataset_copy import DatasetCopy
from headrace._core.runtime.engine_session import Quorum
from headrace._core.runtime.exit_hooks import close_at_exit
from headrace._core.runtime.group_session import GroupSession
from headrace._core.runtime.ray.actor import EngineActor
from headrace._core.runtime.ray.cluster import check_connected, connection, shortage
from headrace._core.runtime.ray.messages import EnginePart, OpenSession
from headrace._core.runtime.ray.session import RaySession
from headrace._core.runtime.ray.wire import Packed, pack

CLOSE_DEADLINE = 5.0 + WORK_DEADLINE  # seconds in which the actors end their engines, before they are killed
_CALLS = 10_000  # of an actor at once: one for each plan of the look-ahead


class RayEngines:
    """The engines of a loader on a Ray cluster. The loader owns it.

    Args:
        config: what to run.
        placement: the loader's argument.
        engines: their number; fewer than the placement's where one reads a stream.

    Raises:
        RuntimeError: this process is not connected to a cluster.
        NotPicklableError: the dataset cannot be pickled.
    """

    is_current = False

    def __init__(self, config: EngineConfig, placement: RayPlacement, engines: int) -> None:
        check_connected()
        self._placement = placement
        self._engines = engines
        self._copy = DatasetCopy(config)
        packed = _packed(config, config.without_functions())
        self.dataset_bytes = size_of(packed)
        """The size of the copied dataset, in bytes."""
        self._connection = connection()
        self._pid = os.getpid()
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
        self._sessions: dict[int, list[RaySession]] = {number: [] for number in range(engines)}
        self._actors = [self._start(number) for number in range(engines)]
        close_at_exit(self)

    def _start(self, number: int) -> Any:
        return self._actor_class.remote(EnginePart(number, self._engines, self._settings))

    def serves(self, config: EngineConfig, work: object = None) -> bool:
        """Whether the engines are of this connection to a cluster, and do what `config` asks for."""
        alive = self._pid == os.getpid() and self._connection == connection()
        return alive and self._copy.serves(config)

    def set_epoch(self, epoch: int) -> None:
        """Call the dataset's `set_epoch` here. Its copies get the epoch with the next session."""
        self._copy.set_epoch(epoch)

    def open(
        self, config: EngineConfig, work: object, epoch: int, *, set_epoch: bool, start: SessionStart
    ) -> GroupSession:
        """Start a session, without waiting for the engines."""
        number = self._functions(config)
        request = OpenSession(next(self._numbers), epoch, set_epoch, config.base_seed, start, number)
        asked = self._placement
        quorum = Quorum(min(asked.least, self._engines), asked.start_timeout, functools.partial(shortage, asked))
        open_at = functools.partial(self._open_at, request)
        return GroupSession.of_loader(config, open_at, self._engines, first=start.batch, quorum=quorum)

    def _functions(self, config: EngineConfig) -> int:
        """Put the current functions into Ray's store, unless they are there; returns their number."""
        packed = _packed(config, config.work())
        if self._work is None or not _same(self._work[1], packed):
            self._work = next(self._works), packed, ray.put(packed)
        return self._work[0]

    def _open_at(self, request: OpenSession, number: int) -> RaySession:
        """Start one engine's part of a session; an engine that was lost is replaced."""
        assert self._work is not None
        sessions = self._sessions[number]
        if any(session.lost for session in sessions):  # of any iterator
            _kill(self._actors[number])
            sessions.clear()
            self._actors[number] = self._start(number)
        sessions[:] = [session for session in sessions if not session.ended]
        session = RaySession(number, self._actors[number], request, self._config, self._work[2])
        sessions.append(session)
        return session

    @property
    def idle(self) -> bool:
        """Whether none of its sessions is open."""
        return all(session.ended for sessions in self._sessions.values() for session in sessions)

    def close(self) -> None:
        """End all sessions and engines; idempotent."""
        actors, self._actors = self._actors, []
        if self._pid != os.getpid() or self._connection != connection():
            return  # a fork; or the connection has ended, and the actors with it
        for session in itertools.chain.from_iterable(self._sessions.values()):
            session.close()
        stopping = [actor.stop.remote() for actor in actors]
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=CLOSE_DEADLINE, fetch_local=False)
        for actor in actors:
            _kill(actor)


def _kill(actor: Any) -> None:
    with contextlib.suppress(ray.exceptions.RayError, ValueError):  # it has ended
        ray.kill(actor)


def _packed(config: EngineConfig, obj: object) -> Packed:
    try:
        return pack(obj)
    except Exception as error:
        name_unpicklable(config, error)


def size_of(packed: Packed) -> int:
    """The size of a packed object, in bytes."""
    return len(packed) if isinstance(packed, bytes) else len(packed[0]) + sum(part.nbytes for part in packed[1])


def _same(one: Packed, other: Packed) -> bool:
    if isinstance(one, bytes) or isinstance(other, bytes):
        return one == other
    same = one[0] == other[0] and len(one[1]) == len(other[1])
    return same and all(map(np.array_equal, one[1], other[1]))
