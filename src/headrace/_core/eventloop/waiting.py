"""Waiting for a descriptor, so that Ctrl-C always interrupts it, and closing one that may be waited for."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any

from headrace._core.descriptors import explained

Readable = int | socket.socket


def wait_readable(*sources: Readable, timeout: float | None) -> bool:
    """Block until one of `sources` is readable, or a signal has come; False after `timeout` seconds, None for ever.

    A signal that arrives just before a blocking call begins does not interrupt it: Python notes it, and would handle it
    when the call returns, which may be never. So on the main thread signals write to a socket that is waited for too.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    with _signals() as noted:
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if _aside is None:
                return bool(_poll([*sources, *noted], left))
            descriptor, handle = _aside
            if not _poll([*sources, *noted, descriptor], left):
                return False
            handle()
            if _poll([*sources, *noted], 0):
                return True


_aside: tuple[int, Callable[[], None]] | None = None


def handle_while_waiting(descriptor: int, handle: Callable[[], None]) -> None:
    """Call `handle` during waits of this process when `descriptor` is readable; one handler for a process.

    Args:
        descriptor: no longer readable once `handle` has returned, unless another thread is at it.
        handle: called on a thread that waits.
    """
    global _aside
    _aside = descriptor, handle


def forget_while_waiting() -> None:
    """Undo `handle_while_waiting`."""
    global _aside
    _aside = None


def wait_done(future: Future[Any]) -> None:
    """Block until `future` is done; what a signal's handler raises ends the wait.

    Waiting for its lock, as `future.result()` does, is a blocking call that a signal may come just before.
    """
    if threading.current_thread() is not threading.main_thread():
        wait((future,))
        return
    _pair()
    future.add_done_callback(_look_again)
    while not future.done():
        wait_readable(timeout=None)


def _look_again(_: Future[Any]) -> None:
    """Wake the main thread as a signal does; zero is no signal's number, as event loops that read them know."""
    pair = _signal_pair
    if pair is not None:
        with contextlib.suppress(OSError):  # full, so that it wakes anyway; or closed, at exit
            pair[0].send(b"\0")


class CloseGuard:
    """Closes something that may be waited for: at once, or when the last who waits has left.

    A descriptor that is closed under a waiter wakes nobody, and may be another file's when the waiter comes back.

    Args:
        wake: makes whoever waits come back; called by `shut`.
        close: closes the descriptors; called once.
    """

    def __init__(self, wake: Callable[[], None], close: Callable[[], None]) -> None:
        self._wake = wake
        self._close = close
        # Reentrant: the garbage collector may shut it on a thread that is just entering.
        self._lock = threading.RLock()
        self._waiting = 0
        self._shut = False
        self._closed = False

    @contextlib.contextmanager
    def acquire(self) -> Iterator[bool]:
        """For the time of a wait; False if it is shut, and nothing may be waited for."""
        with self._lock:
            open_ = not self._shut
            self._waiting += open_
        try:
            yield open_
        finally:
            with self._lock:
                self._waiting -= open_
                self._close_behind_the_last()

    def close(self) -> None:
        """Let nobody in, and those inside out; from any thread, any number of times."""
        with self._lock:
            if not self._shut:
                self._shut = True
                if self._waiting:
                    self._wake()
            self._close_behind_the_last()

    def _close_behind_the_last(self) -> None:
        if self._shut and not self._waiting and not self._closed:
            self._closed = True
            self._close()


@contextlib.contextmanager
def _signals() -> Iterator[list[socket.socket]]:
    """A socket that becomes readable with a signal, for as long as this lasts; none off the main thread."""
    wake, woken = _pair()
    try:
        before = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    except ValueError:  # not the main thread, and so not the one that handles signals
        yield []
        return
    if before == wake.fileno():  # a handler raised as the last wait was ending, and left it there
        before = -1
    try:
        yield [woken]
    finally:
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)
        with contextlib.suppress(BlockingIOError):  # no signal came; or that loop's is full, which wakes it anyway
            numbers = woken.recv(4096)
            if before != -1:  # an event loop that blocks in this very call learns of its signals there
                os.write(before, numbers)


def _poll(sources: list[Readable], timeout: float | None) -> bool:
    if not hasattr(select, "poll"):  # Windows
        return bool(select.select(sources, [], [], timeout)[0])
    poller = select.poll()
    for source in sources:
        poller.register(source, select.POLLIN)
    return bool(poller.poll(None if timeout is None else timeout * 1000))


# One pair for the process: only its main thread uses it, one wait at a time. Closed at exit.
_signal_pair: tuple[socket.socket, socket.socket] | None = None


def _pair() -> tuple[socket.socket, socket.socket]:
    global _signal_pair
    if _signal_pair is None:
        with explained("wait for a batch"):
            _signal_pair = socket.socketpair()
        for end in _signal_pair:
            end.setblocking(False)
    return _signal_pair


def _close_pair() -> None:
    """At exit; and in a fork, which would share it with its parent and take the parent's signals for its own."""
    global _signal_pair
    for end in _signal_pair or ():
        end.close()
    _signal_pair = None


atexit.register(_close_pair)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_pair)
