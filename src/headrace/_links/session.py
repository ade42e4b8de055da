"""The consumer's side of a session: a link for plans and batches."""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress

from headrace._eventloop.waiting import CloseGuard, Readable
from headrace._links.inline import WorkOnConsumersThread
from headrace._records.batches import HostBatch
from headrace._records.messages import (
    Call,
    EngineRequest,
    Link,
    SessionEnd,
    Status,
    check_not_forked,
)
from headrace._streams.resumable import State
from headrace.errors import LoaderClosedError


class Session:
    """One epoch on the engines: sends plans, receives batches."""

    def __init__(
        self,
        link: Link,  # to the engine, or to several; owned from here on
        *,
        work: WorkOnConsumersThread | None = None,
        # Called once, after the session is closed.
        on_close: Callable[[], None] | None = None,
        inline_state: Callable[[], State | None]
        | None = None,  # of a dataset that is read when a batch is taken
    ) -> None:
        self.inline_state = inline_state
        self.ended = False
        self.error: BaseException | None = None
        self._link = link
        self._work = work
        self._on_close = on_close
        self._pid = os.getpid()
        self._ready: deque[HostBatch] = deque()
        self._calls: deque[Call] = deque()
        self._status: str | None = None
        self._guard = CloseGuard(lambda: None, link.close)

    def _check_process(self) -> None:
        if self._link.source is not None:
            # Otherwise no other thread or process is involved.
            check_not_forked(self._pid)

    @property
    def is_current(self) -> bool:
        self._check_process()
        return self._link.is_current

    def send(self, message: EngineRequest) -> None:
        self._check_process()
        if self.ended:
            return
        if not self._link.guarded:  # the guard costs a microsecond, as much as the rest
            self._link.send(message)
            return
        with self._guard as entered:
            if entered:
                self._link.send(message)

    def take(self) -> HostBatch | None:
        """Return the oldest arrived batch, or None. The batch stays here until `release`."""
        self._receive()  # even with ready batches: a dead engine is replaced at once
        while self._calls and not self._ready:
            function = self._calls[0].function  # called again after Ctrl-C
            function() if self._work is None else self._work.call(function)
            with suppress(IndexError):  # another thread has closed the session
                self._calls.popleft()
            self._receive()
        try:
            host = self._ready[0]
        except IndexError:
            return None
        return host if self._work is None else self._work.finish(host)

    def release(self) -> None:
        """Remove the batch returned by `take`."""
        with suppress(IndexError):  # another thread has closed the session
            self._ready.popleft()

    def take_status(self) -> str | None:
        self._receive()
        status, self._status = self._status, None
        return status

    def ready(self) -> int:
        return len(self._ready)

    def certain(self) -> int:
        self._receive()
        if self._work is not None and self._work.skips:
            return 0
        return sum(
            1 for _ in itertools.takewhile(lambda host: not host.empty, self._ready)
        )

    def waits(self, timeout: float | None) -> Iterator[tuple[Readable, float | None]]:
        """Yield waits until there is a message, the end, or a time-out.

        A wait is a descriptor and the most seconds to wait. The caller waits, then asks for the
        next wait.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._guard as entered:
            while (
                entered
                and self.must_wait()
                and (deadline is None or time.monotonic() < deadline)
            ):
                ends = [end for end in (deadline, self._link.look_by) if end is not None]
                yield (
                    self._link.source,
                    max(0.0, min(ends) - time.monotonic()) if ends else None,
                )
                self._receive()

    def must_wait(self) -> bool:
        """Whether there is neither a message nor the end."""
        if self._ready or self._calls or self.ended or self._status is not None:
            return False
        return self._link.must_wait()

    def close(self) -> None:
        """End the session without waiting, from any thread; idempotent."""
        # in a fork, the parent owns the engines, and may hold locks
        if self._pid == os.getpid():
            if not self.ended:
                self.error, self.ended = LoaderClosedError(), True
            self._ready.clear()
            self._calls.clear()
            self._link.leave()
            self._guard.close()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    def _receive(self) -> None:
        if self.ended:
            return
        link = self._link
        if link.guarded:
            with self._guard as entered:
                if entered:
                    link.receive()
        else:
            link.receive()
        messages = link.messages
        while messages and not self.ended:
            message = messages[0]  # Ctrl-C may come before the message is removed
            if isinstance(message, HostBatch):
                if not self._ready or self._ready[-1] is not message:
                    self._ready.append(message)
            elif isinstance(message, SessionEnd):
                self.error, self.ended = message.error, True
            elif isinstance(message, Status):
                self._status = message.text
            elif isinstance(message, Call) and message not in self._calls:
                self._calls.append(message)
            with suppress(IndexError):  # another thread has closed the session
                messages.popleft()
