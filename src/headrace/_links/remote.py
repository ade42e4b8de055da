"""Engines on other machines, and links to the engines.

An engine's process connects to the consumer for each session, and sends batches over TCP. A thread
receives batches while the trainer computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import math
import os
import secrets
import socket
import time

import numpy as np

from headrace._base.remote_placement import EngineHost, RemotePlacement
from headrace._engine.config import EngineConfig, pickled_config
from headrace._eventloop.loop_thread import LoopThread
from headrace._links.group import EngineGroup
from headrace._links.hosted import EngineSetup
from headrace._links.placement import CLOSE_DEADLINE, Placement
from headrace._links.process import dump_request
from headrace._links.session import Session
from headrace._links.sidecar import StartSession
from headrace._links.thread import Mailbox
from headrace._pool.settings import Settings
from headrace._records.batches import BatchPlan, HostBatch, SessionStart
from headrace._records.messages import (
    EngineRequest,
    SessionEnd,
    SessionStarted,
    Status,
    StatusRequest,
)
from headrace._transport.channel import Connection, EngineChannel
from headrace._transport.pickling import Message, dump_message
from headrace._transport.shared_pickle import SharedPickle
from headrace.errors import EngineDiedError

TOKEN_TIMEOUT = 10.0  # seconds for the first bytes of a connection
SILENCE = 25_000  # milliseconds until a machine that does not answer is lost
END_TIMEOUT = 5.0  # seconds for the answer how an engine's process has ended

# Names of moments in `StageTimes`.
_MOMENTS = ("admitted", "began", "fetched", "work_began", "work_ended", "assembled")


class RemoteEngines(Placement):
    """The engines of a loader on other machines."""

    def __init__(
        self, config: EngineConfig, placement: RemotePlacement, engines: int
    ) -> None:
        super().__init__()
        self.name = placement.name
        self._placement = placement
        pickled = pickled_config(config, portable=True)
        setup = EngineSetup(pickled, config.rank, engines, Settings.here())
        self._hosts = placement.hosts(setup, engines)
        try:
            self._loop = LoopThread("headrace-remote")
        except BaseException:  # no thread could be started, or Ctrl-C
            self._end_hosts()
            raise

    @property
    def alive(self) -> bool:
        return (
            self._pid == os.getpid()
            and self._loop.alive
            and all(host.alive for host in self._hosts)
        )

    def _open(
        self, config: EngineConfig, work: SharedPickle | None, start: SessionStart
    ) -> Session:
        assert work is not None
        connect = functools.partial(self._connect, work, start)
        return Session(
            EngineGroup(
                config,
                connect,
                len(self._hosts),
                first=start.batch,
                cluster=self._placement,
            )
        )

    def _connect(
        self, work: SharedPickle, start: SessionStart, engine: int, first: int
    ) -> RemoteLink:
        opening = StartSession(work, start._replace(batch=first))
        return RemoteLink(engine, self._hosts[engine], self._loop, opening)

    def _end(self) -> None:
        self._end_hosts()
        self._loop.close(CLOSE_DEADLINE)

    def _end_hosts(self) -> None:
        for host in self._hosts:
            host.close()
        for host in self._hosts:
            host.join()


class RemoteLink(Mailbox):
    """A link to an engine on another machine.

    Until the engine has connected, messages wait here.
    """

    def __init__(
        self, engine: int, host: EngineHost, loop: LoopThread, opening: StartSession
    ) -> None:
        dumped = dump_message(opening)
        super().__init__(loop)
        self._engine = engine
        self._host = host
        self._place = "a machine that has not been found yet"
        self._plans: dict[int, BatchPlan] = {}  # plans without an arrived batch
        self._unsent: list[Message] = []
        self._over = False  # nothing more is read
        self._channel: EngineChannel | None = None
        # Lower limit of the difference between the engine's clock and this clock, in seconds.
        # None if the engine is on this machine.
        self._ahead: float | None = None
        self._serving = loop.start(self._serve(dumped))

    def send(self, message: EngineRequest) -> None:
        dumped = dump_request(message)
        with contextlib.suppress(EngineDiedError):  # a `SessionEnd` has the reason
            self._loop.call_soon(self._send, message, dumped)

    def leave(self) -> None:
        with contextlib.suppress(EngineDiedError):
            self._loop.call_soon(self._leave)
        super().leave()

    # The next methods run on the loop.

    def _send(self, message: EngineRequest, dumped: Message) -> None:
        if isinstance(message, list):
            self._plans.update((plan.number, plan) for plan in message)
        if self._channel is not None:
            self._channel.send(dumped)
        elif isinstance(message, StatusRequest):
            text = f"batch {message.number} has not begun: the engine's process is being started"
            self.put(Status(text))
        else:
            self._unsent.append(dumped)

    def _leave(self) -> None:
        self._over = True
        self._serving.cancel()
        if self._channel is not None:
            self._channel.close()

    async def _serve(self, opening: Message) -> None:
        try:
            await self._exchange(opening)
        except OSError as error:
            why = (
                "its process did not connect"
                if isinstance(error, TimeoutError)
                else error
            )
            self._end(SessionEnd(None, f"was lost: {why}"))
        except Exception as error:
            self._end(SessionEnd(error))

    async def _exchange(self, opening: Message) -> None:
        """Open the session, and wait for the end of the connection."""
        connected = await self._connected()
        address = connected.getpeername()[0]
        self._place = f"node {address}"
        if address != connected.getsockname()[0]:
            self._ahead = -math.inf
        # Plans without an answer of the other machine.
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE)
        over = asyncio.Event()
        try:
            connection = Connection.between_machines(connected)
        except OSError:  # no descriptor is left
            connected.close()
            raise
        self._channel = EngineChannel(connection, self._on_object, over.set)
        for message in (opening, *self._unsent):
            self._channel.send(message)
        self.put(SessionStarted())
        await over.wait()
        if self._over:
            return
        how = None
        with contextlib.suppress(Exception):  # the machine is lost too
            how = await asyncio.wait_for(self._host.how_it_ended(), END_TIMEOUT)
        raise ConnectionError(
            "its connection has ended" if how is None else f"its process {how}"
        )

    async def _connected(self) -> socket.socket:
        """Return a connection to the engine's process."""
        token = secrets.token_bytes(32)
        with socket.create_server(("", 0), backlog=8) as listener:
            listener.setblocking(False)
            port = listener.getsockname()[1]
            accepted = asyncio.ensure_future(_accept(listener, token))
            try:
                await self._host.connect(port, token)
                # The token has been sent. A connection lost since would never arrive.
                return await asyncio.wait_for(asyncio.shield(accepted), TOKEN_TIMEOUT)
            except BaseException:
                accepted.cancel()
                await asyncio.wait([accepted])
                if not accepted.cancelled() and accepted.exception() is None:
                    accepted.result().close()
                raise

    def _on_object(self, message: object) -> None:
        if type(message) is tuple:
            host = HostBatch.from_flat(message, self._plans.pop(message[0]))
            self.put(host if self._ahead is None else self._translated(host, self._ahead))
        elif isinstance(message, BaseException):  # of unpickling
            self._end(SessionEnd(message))
        elif isinstance(message, SessionEnd):
            # Without an error, the process ends, because its owner has ended. The connection ends
            # next.
            if message.error is not None:
                self._end(message)
        else:
            self.put(message)

    def _end(self, end: SessionEnd) -> None:
        self.put(
            end
            if end.death is None
            else end._replace(death=f"(on {self._place}) {end.death}")
        )
        self._leave()

    def _translated(self, host: HostBatch, ahead: float) -> HostBatch:
        """Translate a batch from another machine.

        Times become times of this process's clock. Processes get numbers that no process has on
        this machine. The batch with the shortest way limits the difference of the clocks.
        """
        # Process ids of Linux are below 1 << 22.
        times, fetches, pids = host.times, host.fetches, (self._engine + 1) << 22
        ahead = self._ahead = max(ahead, times.assembled - time.perf_counter())
        moments = {
            name: moment - ahead for name in _MOMENTS if (moment := getattr(times, name))
        }
        if times.worked_by is not None:
            pid, thread, worker = times.worked_by
            times = times._replace(worked_by=(pids + pid, thread, worker))
        if fetches is not None:
            rows = np.frombuffer(fetches.rows).reshape(-1, 4) - (0.0, 0.0, ahead, ahead)
            fetches = fetches._replace(pid=pids + fetches.pid, rows=rows.tobytes())
        return host._replace(times=times._replace(**moments), fetches=fetches)


async def _accept(listener: socket.socket, token: bytes) -> socket.socket:
    """Return the next connection that begins with `token`, and close others."""
    loop = asyncio.get_running_loop()
    while True:
        connected, _ = await loop.sock_accept(listener)
        try:
            connected.setblocking(False)
            async with asyncio.timeout(TOKEN_TIMEOUT):
                received = await loop.sock_recv(connected, len(token))
                while received and len(received) < len(token):
                    more = await loop.sock_recv(connected, len(token) - len(received))
                    received = received + more if more else b""
            if hmac.compare_digest(received, token):
                return connected
        except OSError:
            # A stranger, silent or gone: the next connection may be the engine's.
            pass
        except BaseException:  # the link is left
            connected.close()
            raise
        connected.close()
