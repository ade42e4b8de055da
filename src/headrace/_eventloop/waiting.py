"""Interruptible waits for descriptors, and closing of descriptors with waiters."""

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

from headrace._base.descriptors import explained

T = TypeVar("T")
Readable = int | socket.socket


class Waker:
    """Socket pair: `source` becomes readable after `wake`.

    Any thread may call `wake`.
    """

    def __init__(self) -> None:
        self.sender, self.source = socket.socketpair()
        for end in (self.sender, self.source):
            end.setblocking(False)

    def wake(self) -> None:
        with suppress(OSError):  # the socket is full, and so readable; or closed
            self.sender.send(b"\0")

    def drain(self) -> None:
        """Take the bytes of earlier calls of `wake`."""
        with suppress(BlockingIOError):
            self.source.recv(4096)

    def close(self) -> None:
        self.sender.close()
        self.source.close()


def wait_readable(*sources: Readable, timeout: float | None) -> bool:
    """Block until a source is readable or a signal arrives.

    The result is False after `timeout` seconds (None: no limit).

    The result may be True too early: a future of `wait_done` may wake the main thread after the end
    of `wait_done`, in the main thread's next wait.

    A signal that arrives just before a blocking call does not interrupt the call. Python notes the
    signal, and handles the signal when the call returns, possibly never. So on the main thread,
    signals write to a socket, and the wait includes the socket.
    """
    with _signals() as noted:
        poller = select.poll()
        for source in (*sources, *noted):
            poller.register(source, select.POLLIN)
        return bool(poller.poll(None if timeout is None else timeout * 1000))


def wait_writable(destination: socket.socket) -> None:
    """Block until a socket takes bytes or the peer has closed."""
    poller = select.poll()
    poller.register(destination, select.POLLOUT)
    poller.poll()


def wait_done(future: Future[T]) -> None:
    """Block until `future` is done or a signal handler raises.

    `future.result()` waits for a lock in a blocking call. A signal just before the call would not
    interrupt the wait.
    """
    if threading.current_thread() is not threading.main_thread():
        wait((future,))
        return
    _pair()
    future.add_done_callback(_wake_main_thread)
    while not future.done():
        wait_readable(timeout=None)


def _wake_main_thread(_: object) -> None:
    """Wake the main thread as a signal does.

    The byte is zero. No signal has the number zero, and event loops ignore zero.
    """
    if (pair := _signal_pair) is not None:
        pair.wake()


class CloseGuard:
    """Closes descriptors at once, or after the last waiter.

    Closing a descriptor under a waiter does not wake the waiter. By then, the descriptor's number
    may belong to another file. So `close` wakes waiters first.
    """

    def __init__(self, wake: Callable[[], None], close: Callable[[], None]) -> None:
        self._wake = wake
        self._close = close
        # Reentrant: the garbage collector may call `close` on a thread that is acquiring the lock.
        self._lock = threading.RLock()
        self._held = 0
        self._closing = False

    def __enter__(self) -> bool:
        """Hold the descriptors open inside the block.

        The result is False if the descriptors are closed.
        """
        with self._lock:
            self._held += 1
            return not self._closing

    def __exit__(self, *exc_info: object) -> None:
        with self._lock:
            self._held -= 1
            if self._closing:
                self._close_if_unused()

    def close(self) -> None:
        """Reject new waiters and wake current waiters. Thread-safe, idempotent."""
        with self._lock:
            if not self._closing:
                self._closing = True
                if self._held:
                    self._wake()
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if not self._held:
            close = self._close
            # The functions hold the owner. Otherwise the owner would wait for the garbage
            # collector.
            self._wake = self._close = lambda: None
            close()


@contextmanager
def _signals() -> Iterator[list[socket.socket]]:
    """Give a socket that becomes readable with a signal inside the block.

    Off the main thread, there is no socket.
    """
    pair = _pair()
    wake = pair.sender.fileno()
    try:
        before = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    except ValueError:  # not the main thread, the only thread that handles signals
        yield []
        return
    # A handler raised at the end of the last wait, and left the descriptor set.
    if before == wake:
        before = -1
    try:
        yield [pair.source]
    finally:
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)
        # BlockingIOError: no signal, or the loop's pipe is full, and a full pipe wakes the loop.
        with suppress(BlockingIOError):
            numbers = pair.source.recv(4096)
            # An event loop blocked in this call reads signals from `before`.
            if before != -1:
                os.write(before, numbers)


# A single pair for the process: only the main thread uses the pair, for a wait at a time. Closed at
# exit.
_signal_pair: Waker | None = None


def _pair() -> Waker:
    global _signal_pair
    if _signal_pair is None:
        with explained("wait for a batch"):
            _signal_pair = Waker()
    return _signal_pair


def _close_pair() -> None:
    """Close the pair at exit and in a fork.

    A fork would share the pair with the parent, and read the parent's signals.
    """
    global _signal_pair
    if _signal_pair is not None:
        _signal_pair.close()
    _signal_pair = None


atexit.register(_close_pair)
os.register_at_fork(after_in_child=_close_pair)
