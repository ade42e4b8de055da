"""Engines in actors of a Ray cluster.

The cluster is the cluster of this process's Ray connection.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import ray
import ray.exceptions
import ray.util.client

from headrace._base.remote_placement import EngineHost
from headrace._links.hosted import EngineSetup, HostedEngine
from headrace._pool.supervisor import WORK_DEADLINE
from headrace.errors import EngineDiedError

# Seconds for the actors to end the engines, before the actors are killed.
CLOSE_DEADLINE = 5.0 + WORK_DEADLINE
_CALLS = 8  # threads of an actor: sessions that are opened at once

# After one of these errors, the actor or the actor's node is lost. Another actor can be started.
_LOST = (ray.exceptions.RayActorError, ray.exceptions.NodeDiedError)


def ray_hosts(setup: EngineSetup, engines: int, options: dict[str, Any]) -> list[RayHost]:
    """Return the places of some engines, each an actor with some options of Ray."""
    _check_connected()
    own = {
        "scheduling_strategy": "SPREAD",
        "max_concurrency": _CALLS,
        "enable_task_events": False,
        # Ray must not restart an actor: the plans of a lost engine go to other engines.
        "max_restarts": 0,
    }
    actor_class = ray.remote(HostedEngine).options(**(own | options))
    shared = ray.put(setup)
    return [RayHost(actor_class, shared, engine) for engine in range(engines)]


class RayHost(EngineHost):
    """An actor with the process of an engine. A lost actor is replaced."""

    def __init__(self, actor_class: Any, setup: Any, engine: int) -> None:
        self._connection = connection()
        self._actor_class = actor_class
        self._arguments = setup, engine
        self._actor = self._start()
        self._closing: Any = None

    def _start(self) -> Any:
        return self._actor_class.remote(*self._arguments)

    @property
    def alive(self) -> bool:  # type: ignore[override]
        return self._connection == connection()

    async def connect(self, port: int, token: bytes) -> None:
        for is_last in (False, True):
            self._check()
            address = ray.util.get_node_ip_address()
            try:
                await _result(self._actor.connect.remote(address, port, token))
                return
            except _LOST as error:
                _kill(self._actor)
                self._actor = self._start()
                if is_last:
                    reason = " ".join(f"{type(error).__name__}: {error}".split())
                    raise ConnectionError(reason) from error

    async def how_it_ended(self) -> str | None:
        self._check()
        ended: str | None = await _result(self._actor.how_it_ended.remote())
        return ended

    def _check(self) -> None:
        if not self.alive:
            raise EngineDiedError(
                why="the connection to its Ray cluster was closed, by ray.shutdown()"
            )

    def close(self) -> None:
        if self.alive:  # otherwise the actor has ended with the connection
            self._closing = self._actor.close.remote()

    def join(self) -> None:
        if self._closing is not None:
            ray.wait([self._closing], timeout=CLOSE_DEADLINE, fetch_local=False)
            _kill(self._actor)
            self._closing = None


async def _result(reference: Any) -> Any:
    return await asyncio.wrap_future(reference.future())


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
    if ray.util.client.ray.is_connected() or not ray.is_initialized():
        raise RuntimeError(
            "placement=RayPlacement(...) needs a process of a Ray cluster: call "
            "ray.init(address='auto') on a node of the cluster, or ray.init() for one on this "
            "machine. With Ray Client (ray://), engines cannot connect to this process: start the "
            "program with `ray job submit`."
        )


def _kill(actor: Any) -> None:
    with suppress(ray.exceptions.RayError, ValueError):  # the actor has ended
        ray.kill(actor)
