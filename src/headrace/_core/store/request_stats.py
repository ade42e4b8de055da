"""State shared by the requests of one loader: counters, its retry policy, and the thread that reads small bodies.

A loader's session sets one `RequestStats` for all tasks below it. Wrapped datasets need not pass it on, and two loaders
that share a dataset have one each.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from headrace._core.batches import COUNTED, RequestCounts, counts_of
from headrace._core.retry_policy import RetryPolicy
from headrace._core.store.bodies import BodyReader


@dataclass(slots=True, eq=False)
class RequestStats:
    """Counters of the requests of one loader; see `RequestCounts` for each.

    Attributes:
        retry: the loader's policy; None to use the store's.
        bodies: reads small bodies; of the session that runs, which closes it.
        throttle_events: requests that were throttled or timed out, over the whole session.
        wants_times: whether the next request of one object or range is to be timed: one for each batch.
    """

    retry: RetryPolicy | None = None
    bodies: BodyReader | None = None
    throttle_events: int = 0
    requests: int = 0
    retries: int = 0
    throttled: int = 0
    timed_out: int = 0
    hedges: int = 0
    hedges_won: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    cache_waits: int = 0
    cache_damaged: int = 0
    cache_evicted: int = 0
    wants_times: bool = True
    _times: tuple[float, float] = (0.0, 0.0)

    def begin_timing(self) -> bool:
        """Whether this request is to be timed; the next ones, also while it runs, are not until `take_times`."""
        wanted, self.wants_times = self.wants_times, False
        return wanted

    def add_times(self, first_byte: float, whole: float) -> None:
        """Record how long a request took, to its first byte and in all, in seconds."""
        self._times = first_byte, whole

    def take_times(self) -> tuple[float, float]:
        """The times of the request that was timed since the last call; 0.0 if none was."""
        times, self._times, self.wants_times = self._times, (0.0, 0.0), True
        return times

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

second_attempt: ContextVar[bool] = ContextVar("headrace-second-attempt", default=False)
"""Whether this task is the second attempt of a hedged fetch, which must not wait for the first."""


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
