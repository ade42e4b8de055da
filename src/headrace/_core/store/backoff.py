"""Retries of failed requests: backoff, retry budget, deadline.

Waits grow exponentially with full jitter, the way that spreads competing clients best (Marc
Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015). All fetchers of a store
share one budget of retries, so that a store in trouble is not asked many times more often than a
healthy one (the token bucket of gRPC's retry throttling and of the AWS SDKs' standard mode). Here
retries wait while the budget is empty; they do not fail.
"""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time

from headrace._core.retry_policy import RetryPolicy
from headrace._core.store.errors import Cause, RequestFailure
from headrace.errors import StoreUnreachableError

# Before the first success the URL is probably wrong.
# A length or a checksum that is wrong each time is wrong in the store.
DOUBTFUL_ATTEMPTS = 3
_DOUBTFUL = (Cause.WRONG_LENGTH, Cause.DAMAGED, Cause.WRONG_RANGE)
# Not the module's functions: transforms seed those, and two loaders with one seed would then retry
# in step.
_dice = random.Random()


class Tries:
    """The attempts at one request, what it is about, for errors, and its deadline.

    All parts of an object share the beginning and the deadline of `whole`, the attempts at the
    object.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        doing: str = "",
        key: str | None = None,
        index: object = None,
        *,
        whole: Tries | None = None,
    ) -> None:
        self.policy, self.doing, self.key, self.index = policy, doing, key, index
        self.attempts = 0
        self.began: float = time.monotonic() if whole is None else whole.began
        self.renewed = False  # whether the credentials were renewed for this request
        self._progressed: list[float] = [self.began] if whole is None else whole._progressed

    def progress(self) -> None:
        """Restart the deadline."""
        self._progressed[0] = time.monotonic()

    def within(self, seconds: float) -> bool:
        """Whether the deadline allows an attempt in so many seconds."""
        return time.monotonic() + seconds - self._progressed[0] < self.policy.deadline


class RetryGate:
    """The retry budget that all requests to one service share.

    Safe to use from several event loops and threads. The caller counts `successes`.
    """

    def __init__(self) -> None:
        self.successes = 0
        self._lock = threading.Lock()  # of the budget, a token bucket
        self._tokens = math.inf  # `burst` of the first policy
        self._at = 0.0
        self._seen = 0

    def take_retry(self, policy: RetryPolicy) -> float:
        """Take one retry and return 0, or return the seconds until one is available without further successes."""
        with self._lock:
            now, successes = time.monotonic(), self.successes
            earned = (successes - self._seen) * policy.retry_ratio + (
                now - self._at
            ) * policy.burst / 10
            self._tokens = min(float(policy.burst), self._tokens + earned)
            self._at, self._seen = now, successes
            if self._tokens >= 1.0:
                self._tokens -= 1.0
                return 0.0
            return (1.0 - self._tokens) * 10 / policy.burst

    async def may_try_again(self, failure: RequestFailure, tries: Tries) -> bool:
        """Count a failed attempt, and wait until the next may be made; return False if it is to be given up."""
        tries.attempts += 1
        cause, most = failure.cause, tries.policy.max_attempts
        renew = cause is Cause.EXPIRED and not tries.renewed
        never_answered = not self.successes and failure.status is None
        if cause in _DOUBTFUL or (never_answered and cause.error is StoreUnreachableError):
            most = min(most, DOUBTFUL_ATTEMPTS)
        if tries.attempts >= most or not (cause.transient or renew):
            return False
        tries.renewed = tries.renewed or renew
        wait = 0.0 if renew else _dice.random() * tries.policy.max_backoff_after(tries.attempts)
        if not tries.within(wait):
            return False
        await asyncio.sleep(wait)
        while (turn := self.take_retry(tries.policy)) > 0:
            if not tries.within(turn):
                return False
            await asyncio.sleep(turn)
        return True
