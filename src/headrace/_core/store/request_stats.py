"""State shared by the requests of one loader: counters, its retry policy, and the thread that reads small bodies.

A loader's session sets one `RequestStats` for all tasks below it. Wrapped datasets need not pass it
on, and two loaders that share a dataset have one each.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from contextvars import ContextVar
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from headrace._core.batches import COUNTED, RequestCounts, counts_of
from headrace._core.retry_policy import RetryPolicy

if TYPE_CHECKING:
    from obstore import Bytes, GetResult

    _Body = asyncio.Future[Bytes | None]

SMALL = (
    256 << 10
)  # bytes; a longer body would keep the thread, and its second call is a small part of the work
PATIENCE = 0.02  # seconds between two checks of the thread
# bodies that it reads in that time if none has stalled and it gets Python's lock; some 500 are
# possible
ENOUGH = 20


@dataclass(slots=True)
class RequestStats(RequestCounts):
    """Counters of the requests of one loader, since the last `take`."""

    retry: RetryPolicy | None = None  # the loader's; None to use the store's
    bodies: BodyReader | None = None  # of the session that runs, which closes it
    throttle_events: int = 0  # requests that were throttled or timed out, over the whole session

    def take(self) -> RequestCounts | None:
        """The counts since the last call; None if all are 0."""
        counts = counts_of(self)
        if not any(counts):
            return None
        for name in COUNTED:
            setattr(self, name, 0)
        return RequestCounts(*counts)


session_stats: ContextVar[RequestStats] = ContextVar("headrace-session-stats")
"""The counters of the running session; unset outside of one."""


def report_throttled() -> None:
    """Report, inside `aget`, that the source refused a request because there are too many (HTTP 429 or 503).

    ``concurrency="auto"`` then has fewer in flight, and ``stats().requests.throttled`` counts it. A
    `TimeoutError` that leaves `aget` has the same effect. Outside a loader nothing happens.

    Example:
        >>> report_throttled()
    """
    here = session_stats.get(None)
    if here is not None:
        here.throttled += 1
        here.throttle_events += 1


class BodyReader:
    """Reads small bodies, one after the other, in a thread; those that wait too long there are read without it.

    A conditional GET of obstore's returns when the status has come; the bytes are a second
    asynchronous call, for which native threads take about as much CPU time as for the first. A
    blocking call takes a small part of that, and hardly waits, since a small body comes right
    behind its status; but a connection may stall.

    It belongs to the running event loop. Its maker calls `close`. The thread starts with the first
    body.
    """

    def __init__(self) -> None:
        # Whether bodies are read without the thread: of those that waited at one check, it had
        # neither read all nor `ENOUGH` at the next; or the reader is closed.
        self.late = False
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[tuple[_Body, GetResult] | None] = SimpleQueue()
        self._done: deque[tuple[_Body, Bytes | BaseException | None]] = deque()
        self._settling = False
        self._queued = 0  # bodies given to the thread, also those read since
        self._read = 0  # of these, bodies that it has read
        self._due = 0  # what `_read` must be at the next check
        self._timer: asyncio.TimerHandle | None = None  # of the next check, if bodies wait
        self._thread: threading.Thread | None = None

    async def read(self, result: GetResult, length: int) -> Bytes:
        """The bytes of an answer to a request of `length` bytes; raises obstore's errors."""
        body = None if self.late or length > SMALL else await self._read_in_thread(result)
        return await result.bytes_async() if body is None else body

    def close(self) -> None:
        """End the thread; one whose body has stalled ends when that request times out.

        Requests that are still open then, of user code that outlasts its session, read their bodies
        themselves.
        """
        self.late = True
        if self._timer is not None:
            self._timer.cancel()  # a check would make the thread usable again
        if self._thread is not None:
            self._give_back()
            self._queue.put(None)
            self._thread.join(PATIENCE)

    def _read_in_thread(self, result: GetResult) -> _Body:
        """The bytes; None if they are to be read otherwise, since another body keeps the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="headrace-bodies", daemon=True)
            self._thread.start()
        future: _Body = self._loop.create_future()
        self._queue.put((future, result))
        self._queued += 1
        if self._timer is None:
            self._timer = self._loop.call_later(PATIENCE, self._check)
        return future

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            future, result = entry
            body: Bytes | BaseException | None = None
            if not future.cancelled():
                try:
                    body = result.bytes()
                except BaseException as error:  # raised where it is awaited
                    body = error
            self._done.append((future, body))
            self._read += 1
            del entry, future, result, body  # not kept until the next
            if not self._settling:
                self._settling = True
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        self._settling = (
            False  # first: what is added from here on is settled here, or by another call
        )
        while self._done:
            future, body = self._done.popleft()
            if future.cancelled():
                continue
            if isinstance(body, BaseException):
                future.set_exception(body)
            else:
                future.set_result(body)

    def _check(self) -> None:
        self.late = self._read < self._due
        if self.late:
            self._give_back()
        self._due = min(self._queued, self._read + ENOUGH)
        self._timer = (
            self._loop.call_later(PATIENCE, self._check) if self._read < self._due else None
        )

    def _give_back(self) -> None:
        """Answer all that wait for the thread with None."""
        with contextlib.suppress(Empty):
            while (entry := self._queue.get_nowait()) is not None:
                self._queued -= 1
                if not entry[0].cancelled():
                    entry[0].set_result(None)
