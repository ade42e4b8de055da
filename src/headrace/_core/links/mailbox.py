"""Messages from another thread to the consumer, blocking or async, without polling.

A message is appended to a deque; only if the consumer waits, a byte is written to a socket pair. A blocking consumer
waits for that byte with `poll`, which a signal ends too; an async one on its loop. It is bounded by what it carries: no
more batches exist than plans are outstanding.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Messages for one consumer, which owns it and calls `close`.

    Attributes:
        messages: those that have arrived, the oldest first; the consumer removes them.
        source: readable when a message arrives after `must_wait`, or after `wake`.
    """

    def __init__(self) -> None:
        self.messages: deque[T] = deque()
        # Reentrant: the garbage collector may close an abandoned iterator inside `put`, on the engine's thread.
        self._lock = threading.RLock()
        self._waiting = False
        self._closed = False
        self._sender, self.source = socket.socketpair()
        for end in (self._sender, self.source):
            end.setblocking(False)

    def put(self, message: T) -> None:
        """Hand over a message, from any thread; it is dropped if the consumer has left."""
        with self._lock:
            if not self._closed:
                self.messages.append(message)
                if self._waiting:
                    self.wake()

    def wake(self) -> None:
        """Make `source` readable; from any thread."""
        with self._lock, contextlib.suppress(OSError):  # full of bytes, which wake the consumer as well
            self._waiting = False
            if not self._closed:
                self._sender.send(b"\0")

    def must_wait(self) -> bool:
        """Whether there is no message; the next one makes `source` readable."""
        with self._lock:
            if self.messages or self._closed:
                return False
            with contextlib.suppress(BlockingIOError):  # bytes of earlier waits
                self.source.recv(4096)
            self._waiting = True
            return True

    def close(self) -> None:
        """Drop the messages and close the socket pair; idempotent."""
        with self._lock:
            self._closed = True
            self.messages.clear()
            self._sender.close()
            self.source.close()
