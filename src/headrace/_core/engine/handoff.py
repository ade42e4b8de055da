"""The bridge from the engine's thread to the consumer, blocking or async, without polling.

The engine puts batches into a deque and, only if the consumer waits, writes a byte to a socket pair. A blocking
consumer waits for that byte with `poll`, which a signal ends too; an async one with `anyio.wait_readable`, on any loop.
Both are one mechanism. The bridge is bounded by what it carries: no more batches exist than plans are outstanding.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable

import anyio

from headrace._core.batches import HostBatch
from headrace._core.eventloop.waiting import CloseGuard, wait_readable
from headrace.errors import LoaderClosedError


class Handoff:
    """Carries `HostBatch`es of one epoch. The consumer's iterator owns it, and calls `close`."""

    def __init__(self) -> None:
        self._ready: deque[HostBatch] = deque()
        # Reentrant: the garbage collector may run an abandoned iterator's `close` inside `put`, on the engine's thread.
        self._lock = threading.RLock()
        self._waiting = False
        self._closed = False
        self.ended = False
        """Whether the last batch was put."""
        self.error: BaseException | None = None
        """The error that ended the epoch."""
        self._status: str | None = None
        self._calls: deque[Callable[[], None]] = deque()
        self._sender, self._receiver = socket.socketpair()
        self._sender.setblocking(False)
        self._receiver.setblocking(False)
        self._guard = CloseGuard(self._wake, self._close_sockets)

    # The engine's side, from any thread.

    def put(self, host: HostBatch) -> None:
        """Hand a batch to the consumer."""
        with self._lock:
            self._ready.append(host)
            self._ring()

    def end(self, error: BaseException | None = None) -> None:
        """End the epoch; the first call counts."""
        with self._lock:
            if not self.ended:
                self.ended = True
                self.error = error
                self._ring()

    def put_status(self, status: str) -> None:
        """Pass the requested status to the consumer."""
        with self._lock:
            self._status = status
            self._ring()

    def call(self, function: Callable[[], None]) -> None:
        """Have the consumer's thread call a function the next time it waits for a batch."""
        with self._lock:
            if not self._closed:
                self._calls.append(function)
                self._ring()

    def _ring(self) -> None:
        if self._waiting and not self._closed:
            self._waiting = False
            self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full of bytes, which wake the consumer as well; or closed
            self._sender.send(b"\0")

    # The consumer's side, from its thread.

    def take(self) -> HostBatch | None:
        """The next batch, None if none is ready."""
        try:
            return self._ready.popleft()
        except IndexError:
            return None

    def next_call(self) -> Callable[[], None] | None:
        """The oldest queued function; it stays queued until `forget_call`."""
        try:
            return self._calls[0]
        except IndexError:
            return None

    def forget_call(self) -> None:
        """Remove the oldest queued function."""
        with contextlib.suppress(IndexError):  # another thread has closed the handoff
            self._calls.popleft()

    def take_status(self) -> str | None:
        """The requested status, if it has arrived."""
        status, self._status = self._status, None
        return status

    def ready(self) -> int:
        """The number of batches that are ready."""
        return len(self._ready)

    def certain(self) -> int:
        """The number of batches that are ready, and not empty."""
        with self._lock:
            return sum(not host.empty for host in self._ready)

    def wait(self, timeout: float | None) -> bool:
        """Block until there is a batch, a status, a function, or the end; False after `timeout` seconds."""
        with self._guard.acquire() as entered:
            if not (entered and self._must_wait()):
                return True
            return wait_readable(self._receiver, timeout=timeout)

    async def wait_async(self, timeout: float | None) -> bool:
        """As `wait`, on the caller's event loop."""
        with self._guard.acquire() as entered:
            if not (entered and self._must_wait()):
                return True
            with anyio.move_on_after(timeout) as scope:
                await anyio.wait_readable(self._receiver)
            return not scope.cancelled_caught

    def _must_wait(self) -> bool:
        with self._lock:
            if self._ready or self._calls or self.ended or self._status is not None:
                return False
            with contextlib.suppress(BlockingIOError):  # bytes of earlier waits
                self._receiver.recv(4096)
            self._waiting = True
            return True

    def close(self) -> None:
        """Drop the remaining batches, wake the consumer, and close the socket pair."""
        with self._lock:
            self._closed = True
            if not self.ended:
                self.ended = True
                self.error = LoaderClosedError()
            self._ready.clear()
            self._calls.clear()
        self._guard.close()

    def _close_sockets(self) -> None:
        self._sender.close()
        self._receiver.close()
