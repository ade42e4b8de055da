"""Policy for retries of failed store requests."""

from __future__ import annotations

from dataclasses import dataclass

from headrace._base.text import check_number, whole_number


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Policy for retries of failed requests to a store.

    docs/stores.md lists the errors to retry.

    Attributes:
        max_attempts: largest number of attempts for a request; 1 for no retries.
        initial_backoff: upper bound of the first wait, in seconds. The wait before attempt n + 1 is
            random, up to ``initial_backoff * 2 ** (n - 1)``.
        max_backoff: largest upper bound of a wait, in seconds.
        deadline: seconds without progress after which no further attempt begins. Each received part
            of an object is progress.
        retry_ratio: number of retries earned by each successful request, for all fetchers together.
        burst: number of retries allowed before any retry is earned. A tenth of `burst` is earned
            each second.

    Raises:
        TypeError: `max_attempts` or `burst` is not a whole number.
        ValueError: a number is out of range.

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
            whole_number(f"retry: RetryPolicy.{name}", getattr(self, name), 1)
        for name in ("initial_backoff", "max_backoff", "deadline", "retry_ratio"):
            check_number(f"retry: RetryPolicy.{name}", getattr(self, name), 0)

    def max_backoff_after(self, attempt: int) -> float:
        """Return the upper bound of the wait after a failed attempt.

        Args:
            attempt: number of the failed attempt, from 1.

        Returns:
            Seconds.

        Example:
            >>> [RetryPolicy().max_backoff_after(n) for n in (1, 2, 3, 50)]
            [0.1, 0.2, 0.4, 5.0]
        """
        return min(self.max_backoff, self.initial_backoff * 2.0 ** min(attempt - 1, 60))


def as_policy(retry: RetryPolicy | int) -> RetryPolicy:
    """Return the policy for a `retry=` argument.

    A number is the largest number of attempts.

    Raises:
        TypeError: `retry` is neither a policy nor a number.
    """
    return retry if isinstance(retry, RetryPolicy) else RetryPolicy(max_attempts=retry)
