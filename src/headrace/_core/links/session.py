"""The consumer's side of an epoch: plans go out over a link, and batches come in."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from headrace._core.batches import GROWING, NO_TIMES, BatchPlan, HostBatch
from headrace._core.eventloop.waiting import CloseGuard, Readable
from headrace._core.links.comparison import Comparison
from headrace._core.links.inline import WorkOnConsumersThread
from headrace._core.messages import (
    Call,
    Link,
    Request,
    SessionEnd,
    Status,
    TraceRequest,
    Twin,
    TwinRequest,
    check_not_forked,
)
from headrace._core.streams.resumable import State
from headrace.errors import LoaderClosedError


class Session:
    """An epoch as its consumer sees it: plans go out, batches come in."""

    def __init__(
        self,
        link: Link,  # to the engine, or to several; owned from here on
        *,
        work: WorkOnConsumersThread | None = None,
        is_current: Callable[[], bool] = lambda: False,  # whether the caller is on the engine's own thread
        on_close: Callable[[], None] | None = None,  # called once, after the session is closed
        inline_state: Callable[[], State | None] | None = None,  # of a dataset that is read when a batch is taken
    ) -> None:
        self.inline_state = inline_state
        self.sent_before: dict[int, BatchPlan] = {}  # plans, by their numbers, that `send` leaves out
        self.ended = False
        self.error: BaseException | None = None
        self.comparison: Comparison | None = None  # of a batch that a worker makes too
        self._link = link
        self._work = work
        self._is_current = is_current
        self._on_close = on_close
        self._pid = os.getpid()
        self._ready: deque[HostBatch] = deque()
        self._calls: deque[Call] = deque()
        self._status: str | None = None
        self._guard = CloseGuard(lambda: None, link.close)

    def _check_process(self) -> None:
        if self._link.source is not None:  # otherwise it uses nothing of another thread or process
            check_not_forked(self._pid)

    @property
    def is_current(self) -> bool:
        self._check_process()
        return self._is_current()

    def compare(self, comparison: Comparison) -> None:
        """Compare a batch that a worker makes too."""
        self.comparison = comparison

    def send(self, message: Request) -> None:
        self._check_process()
        if self.ended:
            return
        if self.sent_before and isinstance(message, list):
            message = [plan for plan in message if not plan.same_as(self.sent_before.pop(plan.number, None))]
        if not self._link.guarded:  # which costs a microsecond, as much as the rest
            self._link.send(message)
            return
        with self._guard as entered:
            if entered:
                self._link.send(message)

    def take(self) -> HostBatch | None:
        self._receive()  # also where some are ready: an engine that has died is replaced at once
        while self._calls and not self._ready:
            assert self._work is not None
            self._work.call(self._calls[0].function)  # after Ctrl-C it is called again
            with contextlib.suppress(IndexError):  # another thread has closed the session
                self._calls.popleft()
            self._receive()
        try:
            if self._work is None and self.comparison is None:
                return self._ready.popleft()
            host = self._ready[0] if self._work is None else self._work.finish(self._ready[0])
            if self.comparison is not None and self.comparison.on_batch(host):
                self.send(TwinRequest())
        except IndexError:
            return None
        with contextlib.suppress(IndexError):
            self._ready.popleft()
        return host

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
        return sum(1 for _ in itertools.takewhile(lambda host: not host.empty, self._ready))

    def waits(self, timeout: float | None) -> Iterator[tuple[Readable, float | None]]:
        """The waits for a message, or the end, in so many seconds: each for a descriptor, and how long at most.

        The caller waits, and goes on with this iterator.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._guard as entered:
            while entered and self.must_wait() and (deadline is None or time.monotonic() < deadline):
                assert self._link.source is not None
                ends = [end for end in (deadline, self._link.look_by) if end is not None]
                yield self._link.source, max(0.0, min(ends) - time.monotonic()) if ends else None
                self._receive()

    def must_wait(self) -> bool:
        """Whether there is neither a message nor the end."""
        if self._ready or self._calls or self.ended or self._status is not None:
            return False
        return self._link.must_wait()

    def close(self) -> None:
        """End the session without waiting, from any thread; idempotent."""
        if self._pid == os.getpid():  # in a fork, the engines are the parent's, and its locks may be held
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
        elif link.receives:
            link.receive()
        messages = link.messages
        while messages and not self.ended:
            message = messages.popleft()
            if isinstance(message, HostBatch):
                self._ready.append(message)
            elif isinstance(message, SessionEnd):
                self.error, self.ended = message.error, True
            elif isinstance(message, Status):
                self._status = message.text
            elif isinstance(message, Call):
                self._calls.append(message)
            elif isinstance(message, Twin) and self.comparison is not None:
                self.comparison.on_twin(message)


class ChangingSession:
    """A session in whose place another one makes the rest of the epoch's batches; owns both.

    In all else it is the session that makes them now.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._later: Session | None = None  # that takes over once the batches of all plans before it were taken
        self._plans: list[BatchPlan] = []  # for that one, so that not more is fetched and held than one may
        self._outstanding = 0
        self._last = NO_TIMES  # of the last batch
        # What the sums in times are to be raised by, so that they go on; None until this session's first batch.
        self._before: dict[str, float] | None = {}
        self._closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    @property
    def changes(self) -> bool:
        """Whether another session waits for the last batches of this one."""
        return self._later is not None

    def change_to(self, later: Session) -> None:
        """Have another session, unless one waits, make the batches of the plans that are sent from now on."""
        self._later = later
        if self._closed:  # by another thread
            later.close()
        elif not self._outstanding:
            self._take_over(later)

    def send(self, message: Request) -> None:
        if isinstance(message, TraceRequest) and self._later is not None:
            self._later.send(message)
        if not isinstance(message, list):
            self._session.send(message)
        elif self._later is not None:
            self._plans += message
        else:
            self._outstanding += len(message)
            self._session.send(message)

    def take(self) -> HostBatch | None:
        host = self._session.take()
        if host is None:
            return None
        self._outstanding -= 1
        times = host.times
        if self._before is None:
            self._before = {name: getattr(self._last, name) - getattr(times, name) for name in GROWING}
        times = times._replace(**{name: getattr(times, name) + more for name, more in self._before.items()})
        self._last = times
        if self._later is not None and not self._outstanding:
            self._take_over(self._later)
        return host._replace(times=times)

    def close(self) -> None:
        self._closed = True
        for session in (self._session, self._later):
            if session is not None:
                session.close()

    def _take_over(self, later: Session) -> None:
        ended, self._session, self._later, self._before = self._session, later, None, None
        ended.close()
        if self._closed:
            later.close()
        plans, self._plans = self._plans, []
        self.send(plans)
