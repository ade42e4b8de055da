"""What the requests of one loader share: its counts, and what the loader said about retries.

A loader's session sets one `Traffic` for all tasks below it, so that nothing has to be handed through datasets that are
wrapped in each other, and two loaders that share a dataset keep their own.
"""

from __future__ import annotations

from contextvars import ContextVar

from headrace.batches import RequestCounts
from headrace.options import RetryPolicy

__all__ = ["Traffic", "push_back", "second_attempt", "traffic"]


class Traffic:
    """The requests of one loader.

    Args:
        retry: what the loader was given; None leaves it to the dataset.

    Attributes:
        requests: how many were sent, retries included.
        retries: how many of them were retries.
        throttled: how often a store asked for fewer requests (429, 503).
        timed_out: how often no byte came within the time-out.
        hedges: how many fetches were begun a second time.
        hedges_won: how many of these came first.
        cache_hits: samples that a disk cache had.
        cache_misses: samples that were fetched for one.
        cache_waits: samples that waited for another fetch of the same bytes, here or in another process.
        cache_damaged: files of a cache that were damaged.
        cache_evicted: files that had to make room.
        pushed_back: how often fewer requests were asked for, or none was answered in time, over the whole session.
    """

    __slots__ = (
        "cache_damaged",
        "cache_evicted",
        "cache_hits",
        "cache_misses",
        "cache_waits",
        "hedges",
        "hedges_won",
        "pushed_back",
        "requests",
        "retries",
        "retry",
        "throttled",
        "timed_out",
    )

    def __init__(self, retry: RetryPolicy | None = None) -> None:
        self.retry = retry
        self.pushed_back = 0
        self._restart()

    def _restart(self) -> None:
        self.requests = self.retries = self.throttled = self.timed_out = self.hedges = self.hedges_won = 0
        self.cache_hits = self.cache_misses = self.cache_waits = self.cache_damaged = self.cache_evicted = 0

    def take(self) -> RequestCounts | None:
        """What has been counted since the last call; None if nothing."""
        counts = RequestCounts(
            self.requests,
            self.retries,
            self.throttled,
            self.timed_out,
            self.hedges,
            self.hedges_won,
            self.cache_hits,
            self.cache_misses,
            self.cache_waits,
            self.cache_damaged,
            self.cache_evicted,
        )
        if counts == _NONE:
            return None
        self._restart()
        return counts


_NONE = RequestCounts()


traffic: ContextVar[Traffic] = ContextVar("headrace-traffic")
"""The running session's; outside a session, whoever reads first sets one that nobody looks at."""

second_attempt: ContextVar[bool] = ContextVar("headrace-second-attempt", default=False)
"""Whether this task fetches what another does already, and must not wait for that."""


def push_back() -> None:
    """Say, inside `aget`, that the source asks for fewer requests: ``concurrency="auto"`` then has fewer in flight.

    A `TimeoutError` that leaves `aget` says the same. Outside a loader nothing happens.

    Example:
        >>> push_back()
    """
    here = traffic.get(None)
    if here is not None:
        here.pushed_back += 1
