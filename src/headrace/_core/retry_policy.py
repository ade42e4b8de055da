"""How failed requests to a store are tried again, as the user chooses it."""

from __future__ import annotations

from dataclasses import dataclass

from headrace._core.text import check_number, whole_number


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How failed requests to a store are tried again. What is tried again at all: docs/stores.md.

    Attributes:
        max_attempts: the most times that one request is sent; 1 for no retries.
        initial_backoff: seconds; the wait before attempt n + 1 is random, up to ``initial_backoff *
            2 ** (n - 1)``.
        max_backoff: seconds; the upper end of that growth.
        deadline: seconds without progress after which no attempt is begun. A part of an object that
            has come in is progress.
        retry_ratio: how many retries each request that succeeds earns, for all fetchers together.
        burst: how many retries may be made before any is earned; a tenth of it is earned each
            second.

    Raises:
        TypeError: `max_attempts` or `burst` is not a whole number.
        ValueError: a number is out of its range.

    Example:
        >>> RetryPolicy(max_attempts=3)
        RetryPolicy(max_attempts=3, initial_backoff=0.1, max_backoff=5.0, deadline=60.0,
        retry_ratio=0.2, burst=100)
    """

    max_attempts: int = 10
    initial_backoff: float = 0.1
    max_backoff: float = 5.0
    deadline: float = 60.0
    retry_ratio: float = 0.2
    burst: int = 100

    def __post_init__(self) -> None:
        for name in ("max_attempts", "burst"):
            whole_number(f"RetryPolicy: {name}", getattr(self, name), 1)
        for name in ("initial_backoff", "max_backoff", "deadline", "retry_ratio"):
            check_number(f"RetryPolicy: {name}", getattr(self, name), 0)

    def max_backoff_after(self, attempt: int) -> float:
        """The upper end, in seconds, of the random wait after failed attempt `attempt`, counted from 1.

        Example:
            >>> [RetryPolicy().max_backoff_after(n) for n in (1, 2, 3, 50)]
            [0.1, 0.2, 0.4, 5.0]
        """
        return min(self.max_backoff, self.initial_backoff * 2.0 ** min(attempt - 1, 60))


def as_policy(retry: RetryPolicy | int) -> RetryPolicy:
    """The policy that a `retry=` argument means: itself, or so many attempts."""
    if isinstance(retry, RetryPolicy):
        return retry
    if isinstance(retry, bool) or not isinstance(retry, int):
        raise TypeError(f"retry must be a RetryPolicy or a number of attempts, but got {retry!r}")
    return RetryPolicy(max_attempts=retry)
