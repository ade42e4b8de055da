"""An engine's process for a consumer on another machine."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import NamedTuple

from headrace._links.process import SidecarProcess, end_of
from headrace._links.sidecar import SidecarTask
from headrace._pool.settings import Settings
from headrace._ranks.rankinfo import RankInfo
from headrace._transport.channel import Connection
from headrace._transport.shared_pickle import SharedPickle

CONNECT_TIMEOUT = 30.0  # seconds


class EngineSetup(NamedTuple):
    """What all engines of a placement have in common."""

    config: SharedPickle  # the configuration without functions
    rank: RankInfo  # the rank of the consumer's process
    engines: int
    settings: Settings


class HostedEngine:
    """The process of an engine on this machine.

    The consumer is on another machine. Each session has a TCP connection to the consumer. The
    process has the connection, so batches do not pass through this object. An owner on this
    machine, such as an actor of a cluster, calls the methods, from any thread.
    """

    def __init__(self, setup: EngineSetup, engine: int) -> None:
        setup.settings.adopt()
        self._task = SidecarTask(setup.config, setup.rank, engine, setup.engines)
        self._modules = setup.config.modules
        self._lock = threading.Lock()
        self._process: SidecarProcess | None = None

    def connect(self, address: str, port: int, token: bytes) -> None:
        """Open a session over a new connection to the consumer."""
        with (
            socket.create_connection((address, port), CONNECT_TIMEOUT) as connected,
            contextlib.closing(Connection.between_machines(connected)) as connection,
        ):
            connected.sendall(token)
            with self._lock:
                self._running().hand_over(connection)

    def _running(self) -> SidecarProcess:
        if self._process is not None and self._process.process.ended():
            self._process.close()
            self._process.join()
            self._process = None
        if self._process is None:
            self._process = SidecarProcess(self._task, self._modules)
        return self._process

    def how_it_ended(self) -> str | None:
        with self._lock:
            return None if self._process is None else end_of(self._process.process)[1]

    def close(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.close()
                self._process.join()
