"""Interruptible waits for descriptors, and closing descriptors that may be waited for."""

from __future__ import annotations

import atexit
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import TypeVar

from headrace._core.descriptors import explained

T = TypeVar("T")
Readable = int | socket.socket


class Waker:
    """A socket pair. `source` becomes readable by `wake`, which any thread may call."""

    def __init__(self) -> None:
        self.sender, self.source = socket.socketpair()
        for end in (self.sender, self.source):
            end.setblocking(False)

    def wake(self) -> None:
        with suppress(OSError):  # full of bytes, which wake as well; or closed
            self.sender.send(b"\0")

    def drain(self) -> None:
        """Take the bytes of earlier calls of `wake`."""
        with suppress(BlockingIOError):
            self.source.recv(4096)

    def close(self) -> None:
        self.sender.close()
        self.source.close()


def wait_readable(*sources: Readable, timeout: float | None) -> bool:
    """Block until one of `sources` is readable, or a signal arrives; False after `timeout` seconds (None: no limit).

    True may come early: a future that `wait_done` has waited for may wake the main thread just
    after, in its next wait. A signal that arrives just before a blocking call does not interrupt
    it: Python notes it, and handles it when the call returns, which may be never. So on the main
    thread signals write to a socket that is waited for too.
    """
    with _signals() as noted:
        poller = select.poll()
        for source in (*sources, *noted):
            poller.register(source, select.POLLIN)
        return bool(poller.poll(None if timeout is None else timeout * 1000))


def wait_writable(destination: socket.socket) -> None:
    """Block until a socket takes bytes, or its other end is closed."""
    poller = select.poll()
    poller.register(destination, select.POLLOUT)
    poller.poll()


def wait_done(future: Future[T]) -> None:
    """Block until `future` is done; an exception of a signal handler ends the wait.

    `future.result()` waits for a lock, a blocking call that a signal may arrive just before.
    """
    if threading.current_thread() is not threading.main_thread():
        wait((future,))
        return
    _pair()
    future.add_done_callback(_wake_main_thread)
    while not future.done():
        wait_readable(timeout=None)


def _wake_main_thread(_: object) -> None:
    """Wake the main thread as a signal does; zero is no signal's number, and event loops ignore it."""
    if (pair := _signal_pair) is not None:
        pair.wake()


class CloseGuard:
    """Closes descriptors that may be waited for: at once, or when the last waiter has returned.

    A descriptor that is closed under a waiter wakes no waiter, and its number may be another file's
    by then. So `close` wakes waiters first.
    """

    def __init__(self, wake: Callable[[], None], close: Callable[[], None]) -> None:
        self._wake = wake
        self._close = close
        # Reentrant: the garbage collector may close it on a thread that is acquiring it.
        self._lock = threading.RLock()
        self._held = 0
        self._closing = False

    def __enter__(self) -> bool:
        """Hold the descriptors open inside the block; False if they are closed."""
        with self._lock:
            self._held += 1
            return not self._closing

    def __exit__(self, *exc_info: object) -> None:
        with self._lock:
            self._held -= 1
            if self._closing:
                self._close_if_unused()

    def close(self) -> None:
        """Reject new waiters and wake current ones. Thread-safe, idempotent."""
        with self._lock:
            if not self._closing:
                self._closing = True
                if self._held:
                    self._wake()
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if not self._held:
            close = self._close
            self._wake = self._close = lambda: (
                None
            )  # these hold the owner, which would wait for the garbage collector
            close()


@contextmanager
def _signals() -> Iterator[list[socket.socket]]:
    """A socket that becomes readable with a signal, inside the block; none off the main thread."""
    pair = _pair()
    wake = pair.sender.fileno()
    try:
        before = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    except ValueError:  # not the main thread, and so not the one that handles signals
        yield []
        return
    if before == wake:  # a handler raised while the last wait ended, and left it set
        before = -1
    try:
        yield [pair.source]
    finally:
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)
        with suppress(
            BlockingIOError
        ):  # no signal; or that loop's pipe is full, which wakes it anyway
            numbers = pair.source.recv(4096)
            if before != -1:  # the event loop that is blocked in this call reads its signals there
                os.write(before, numbers)


# One pair for the process: only its main thread uses it, one wait at a time. Closed at exit.
_signal_pair: Waker | None = None


def _pair() -> Waker:
    global _signal_pair
    if _signal_pair is None:
        with explained("wait for a batch"):
            _signal_pair = Waker()
    return _signal_pair


def _close_pair() -> None:
    """At exit; and in a fork, which would share the pair with its parent and read the parent's signals."""
    global _signal_pair
    if _signal_pair is not None:
        _signal_pair.close()
    _signal_pair = None


atexit.register(_close_pair)
os.register_at_fork(after_in_child=_close_pair)
