"""State shared by all requests of a loader.

The state holds counters, the loader's retry policy, and the thread for small bodies. A loader's
session sets a `RequestStats` for all tasks of the session. Wrapped datasets need not pass the
`RequestStats` on. Two loaders that share a dataset have separate counters.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from contextvars import ContextVar
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from headrace._eventloop.blocking import Results
from headrace._records.batches import COUNTED, RequestCounts, counts_of
from headrace._store.retry_policy import RetryPolicy

if TYPE_CHECKING:
    from obstore import Bytes, GetResult

    _Body = asyncio.Future[Bytes | None]

# Bytes. A longer body would occupy the thread, and the second call is a small part of its work.
SMALL = 256 << 10
PATIENCE = 0.02  # seconds between two checks of the thread
# Bodies that a thread reads within `PATIENCE`, unless a body stalls or the thread waits for
# Python's lock. Some 500 are possible.
ENOUGH = 20


@dataclass(slots=True)
class RequestStats(RequestCounts):
    """Request counters of a loader since the last `take`."""

    # Policy of the loader; None for the policy of the store.
    retry: RetryPolicy | None = None
    bodies: BodyReader | None = None  # owned and closed by the running session
    throttle_events: int = 0  # throttled and timed out requests of the whole session

    def take(self) -> RequestCounts | None:
        """Return the counts since the last call, or None if all are 0."""
        counts = counts_of(self)
        if not any(counts):
            return None
        for name in COUNTED:
            setattr(self, name, 0)
        return RequestCounts(*counts)


session_stats: ContextVar[RequestStats] = ContextVar("headrace-session-stats")
"""Counters of the running session; unset outside of a session."""


def report_throttled() -> None:
    """Report a throttled request from inside `aget`.

    Call this function if the source refused a request because there are too many requests (HTTP 429
    or 503). With ``concurrency="auto"`` the loader then keeps fewer requests in flight.
    ``stats().requests.throttled`` counts the call. A `TimeoutError` from `aget` has the same
    effect. Outside a loader the call does nothing.

    Example:
        >>> report_throttled()
    """
    here = session_stats.get(None)
    if here is not None:
        here.throttled += 1
        here.throttle_events += 1


class BodyReader:
    """Reads small bodies in a thread, in the order of arrival.

    A conditional GET of obstore returns when the status has arrived. The bytes need a second
    asynchronous call, and the second call costs native threads about as much CPU time as the first.
    A blocking call costs a small part of this CPU time. The blocking call hardly waits, because a
    small body follows directly behind the status. But a connection may stall: a body that waits too
    long for the thread is read without the thread.

    The reader belongs to the running event loop. The thread starts with the first body. The creator
    of the reader calls `close`.
    """

    def __init__(self) -> None:
        # True if bodies are read without the thread: the reader is closed, or the thread is late.
        # The thread is late if, of the bodies that waited at the last check, the thread has read
        # neither all nor `ENOUGH`.
        self.late = False
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[tuple[_Body, GetResult] | None] = SimpleQueue()
        self._results = Results(self._loop)
        self._queued = 0  # bodies given to the thread so far, also bodies already read
        self._read = 0  # bodies that the thread has read so far
        self._due = 0  # value that `_read` must have reached at the next check
        # Timer of the next check, if bodies wait.
        self._timer: asyncio.TimerHandle | None = None
        self._thread: threading.Thread | None = None

    async def read(self, result: GetResult, length: int) -> Bytes:
        """Read the body of an answer of `length` bytes.

        Raises obstore's errors.
        """
        body = None if self.late or length > SMALL else await self._read_in_thread(result)
        return await result.bytes_async() if body is None else body

    def close(self) -> None:
        """End the thread.

        If a body stalls, the thread ends when the request times out. User code may outlast the
        session. Later, the requests of such code read bodies without the thread.
        """
        self.late = True
        if self._timer is not None:
            self._timer.cancel()  # a check would make the thread usable again
        if self._thread is not None:
            self._give_back()
            self._queue.put(None)
            self._thread.join(PATIENCE)

    def _read_in_thread(self, result: GetResult) -> _Body:
        """Return a future of the body.

        The future gives None if the thread is late: the caller then reads the body.
        """
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="headrace-bodies", daemon=True
            )
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
            if not future.cancelled():
                try:
                    self._results.add(future, result.bytes())
                except BaseException as error:  # raised where it is awaited
                    self._results.add(future, None, error)
            self._read += 1
            del entry, future, result  # release before the next entry arrives
            self._results.flush()

    def _check(self) -> None:
        self.late = self._read < self._due
        if self.late:
            self._give_back()
        self._due = min(self._queued, self._read + ENOUGH)
        self._timer = (
            self._loop.call_later(PATIENCE, self._check)
            if self._read < self._due
            else None
        )

    def _give_back(self) -> None:
        """Give up all bodies that wait for the thread."""
        with contextlib.suppress(Empty):
            while (entry := self._queue.get_nowait()) is not None:
                self._queued -= 1
                if not entry[0].cancelled():
                    entry[0].set_result(None)
