"""What the requests of one loader share: its counts, its pace, and what the loader said about retries.

A loader's session sets one `Traffic` for all tasks below it, so that nothing has to be handed through datasets that are
wrapped in each other, and two loaders that share a dataset keep their own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar

from headrace.options import RetryPolicy

__all__ = ["Traffic", "report_throttled", "traffic"]


class Traffic:
    """The requests of one loader.

    Args:
        retry: what the loader was given; None leaves it to the dataset.

    Attributes:
        requests: how many were sent, retries included.
        retries: how many of them were retries.
        throttled: how often a store asked for fewer requests (429, 503).
        timed_out: how often no byte came within the time-out.
        pace: awaited before a retry is sent, where requests are paced.
    """

    __slots__ = ("pace", "requests", "retries", "retry", "throttled", "timed_out")

    def __init__(self, retry: RetryPolicy | None = None) -> None:
        self.retry = retry
        self.requests = 0
        self.retries = 0
        self.throttled = 0
        self.timed_out = 0
        self.pace: Callable[[], Awaitable[None]] | None = None


traffic: ContextVar[Traffic] = ContextVar("headrace-traffic")
"""The running session's; outside a session, whoever reads first sets one that nobody looks at."""


def report_throttled() -> None:
    """Tell the loader that a store asked for fewer requests, so that ``concurrency="auto"`` goes down.

    For an `aget` with a client of its own. headrace's datasets do so themselves. Outside a loader nothing happens.

    Example:
        >>> report_throttled()
    """
    here = traffic.get(None)
    if here is not None:
        here.throttled += 1
