"""What the requests of one loader share: its counts, and what the loader said about retries.

A loader's session sets one `Traffic` for all tasks below it, so that nothing has to be handed through datasets that are
wrapped in each other, and two loaders that share a dataset keep their own.
"""

from __future__ import annotations

from contextvars import ContextVar

from headrace.batches import RequestCounts
from headrace.options import RetryPolicy

__all__ = ["Traffic", "push_back", "traffic"]


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
        pushed_back: how often fewer requests were asked for, or none was answered in time, over the whole session.
    """

    __slots__ = ("hedges", "hedges_won", "pushed_back", "requests", "retries", "retry", "throttled", "timed_out")

    def __init__(self, retry: RetryPolicy | None = None) -> None:
        self.retry = retry
        self.requests = 0
        self.retries = 0
        self.throttled = 0
        self.timed_out = 0
        self.hedges = 0
        self.hedges_won = 0
        self.pushed_back = 0

    def take(self) -> RequestCounts | None:
        """What has been counted since the last call; None if nothing."""
        counts = RequestCounts(
            self.requests, self.retries, self.throttled, self.timed_out, self.hedges, self.hedges_won
        )
        if counts == _NONE:
            return None
        self.requests = self.retries = self.throttled = self.timed_out = self.hedges = self.hedges_won = 0
        return counts


_NONE = RequestCounts()


traffic: ContextVar[Traffic] = ContextVar("headrace-traffic")
"""The running session's; outside a session, whoever reads first sets one that nobody looks at."""


def push_back() -> None:
    """Say, inside `aget`, that the source asks for fewer requests: ``concurrency="auto"`` then has fewer in flight.

    A `TimeoutError` that leaves `aget` says the same. Outside a loader nothing happens.

    Example:
        >>> push_back()
    """
    here = traffic.get(None)
    if here is not None:
        here.pushed_back += 1
