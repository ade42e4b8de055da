"""What a job sends to `headrace top`: one thread of the process looks for it, and sends snapshots while it listens.

The thread runs while loaders have an engine or an iteration, from the first iteration on. It wakes once a second: if
there is no `headrace top`, that is a few system calls.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
from typing import Any, Protocol

from headrace._version import __version__
from headrace.telemetry.live_socket import LISTENER, PROTOCOL, connect, is_supported, requests_for, runtime_folder

__all__ = ["LiveServer", "LiveSource", "forget", "show"]

TICK = 1.0  # seconds between looks for `headrace top`, and between snapshots
JOIN = 1.0  # seconds that `forget` waits for the thread
_log = logging.getLogger("headrace")
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)  # programs that restore SIGPIPE's default would die of it


class LiveSource(Protocol):
    """A loader that `headrace top` shows."""

    def snapshot(self) -> dict[str, Any] | None:
        """Its state now, of values of JSON; None if it no longer exists. Called on another thread."""


class _Client:
    """The connection to one `headrace top`; the thread owns it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._unsent = memoryview(b"")

    def offer(self, line: bytes) -> bool:
        """Send a line, or the rest of an earlier one that was not read yet; False if the other end has gone."""
        if not self._unsent:
            self._unsent = memoryview(line)
        try:
            self._unsent = self._unsent[self._connection.send(self._unsent, _NO_SIGNAL) :]
        except BlockingIOError:  # stopped with Ctrl-Z, perhaps
            pass
        except OSError:  # `top` has ended
            self.close()
            return False
        return True

    def close(self) -> None:
        self._connection.close()


class LiveServer:
    """The thread, which runs while there are sources. The last source that leaves ends it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # reentrant: the garbage collector may drop a loader in any thread
        self._sources: list[LiveSource] = []
        self._thread: threading.Thread | None = None
        self._clients: list[_Client] = []

    def show(self, source: LiveSource) -> None:
        """Show a source from now on; does nothing where it is shown already."""
        with self._changed:
            if not any(each is source for each in self._sources):
                self._sources.append(source)
            if self._thread is not None:
                return
            thread = self._thread = threading.Thread(target=self._run, name=f"{LISTENER}{PROTOCOL}", daemon=True)
        # Without the lock: the garbage collector may run in the new thread before `start` returns, and drop a loader.
        try:
            thread.start()
        except RuntimeError:  # no more threads are allowed: the job runs on, and cannot be shown
            _log.debug("the thread for headrace top could not be started", exc_info=True)
            with self._changed:
                if self._thread is thread:
                    self._thread = None
            return
        if self._thread is not thread:  # the source was dropped meanwhile: the thread ends at once
            thread.join(JOIN)

    def forget(self, source: LiveSource | None) -> None:
        """Show a source no longer, or none at all. The thread has ended on return if that was the last one."""
        with self._changed:
            self._sources = [each for each in self._sources if source is not None and each is not source]
            if self._sources or self._thread is None:
                return
            thread, self._thread = self._thread, None
            self._changed.notify()
        if thread is not threading.current_thread() and thread.is_alive():
            thread.join(JOIN)  # it may wait for a lock of user code that this thread holds

    def drop_connections(self) -> None:
        """Close a fork's copies of the connections, which would keep them open after this process has ended."""
        for client in self._clients:
            client.close()

    def _run(self) -> None:
        _set_system_name(threading.current_thread().name)
        clients: list[_Client] = []
        self._clients = clients
        while self._wait():
            try:
                self._serve(clients)
            except Exception:  # what is shown of a job must not end the showing
                _log.debug("the snapshot for headrace top failed", exc_info=True)
        for client in clients:
            client.close()

    def _wait(self) -> bool:
        """Wait for the next look; False once this thread is no longer needed."""
        with self._changed:
            if self._thread is threading.current_thread():
                self._changed.wait(TICK)
            return self._thread is threading.current_thread()

    def _serve(self, clients: list[_Client]) -> None:
        for path in requests_for(os.getpid(), runtime_folder(os.environ)):
            if (connection := connect(path)) is not None:
                with contextlib.suppress(OSError):  # this `top` needs no more of it
                    os.unlink(path)
                clients.append(_Client(connection))
        if clients:
            line = json.dumps(self._snapshot(), default=str).encode() + b"\n"
            clients[:] = [client for client in clients if client.offer(line)]

    def _snapshot(self) -> dict[str, Any]:
        with self._changed:
            sources = list(self._sources)
        loaders = []
        for source in sources:
            try:
                shown = source.snapshot()
            except Exception as error:  # of one loader; the others are shown
                shown = {"error": f"{type(error).__name__}: {error}"}
                _log.debug("the snapshot of a loader failed", exc_info=True)
            if shown is not None:
                loaders.append(shown)
        return {
            "protocol": PROTOCOL,
            "headrace": __version__,
            "python": sys.version.split()[0],
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "time": time.time(),
            "loaders": loaders,
        }


def _set_system_name(name: str) -> None:
    """Name the current thread for other processes: by this name `headrace top` finds jobs. On Linux only."""
    # Elsewhere there is no such file.
    with contextlib.suppress(OSError), open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as file:
        file.write(name)


_server = LiveServer()


def show(source: LiveSource) -> None:
    """Show a loader to `headrace top` from now on; where the system lacks Unix sockets, do nothing."""
    if is_supported():
        _server.show(source)


def forget(source: LiveSource) -> None:
    """Show it no longer; from any thread, any number of times."""
    _server.forget(source)


def _close() -> None:
    _server.forget(None)


def _reset() -> None:
    """A fork has no such thread, and its lock may be held by a thread that it lacks."""
    global _server
    _server.drop_connections()
    _server = LiveServer()


atexit.register(_close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset)
