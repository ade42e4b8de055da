"""Retries of failed requests: backoff, retry budget, deadline.

Waits grow exponentially with full jitter. Full jitter spreads competing clients best (Marc Brooker,
"Exponential Backoff And Jitter", AWS Architecture Blog, 2015). All fetchers of a store share a
retry budget: a failing store must not receive many more requests than a healthy store. The budget
is a token bucket, as in gRPC's retry throttling and the AWS SDKs' standard mode. Unlike there, a
retry waits while the budget is empty; the retry does not fail.
"""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time

from headrace._store.errors import Cause, RequestFailure
from headrace._store.retry_policy import RetryPolicy
from headrace.errors import StoreUnreachableError

# A URL without any success yet is probably wrong. If a length or a checksum fails every time, the
# object in the store is probably wrong.
DOUBTFUL_ATTEMPTS = 3
_DOUBTFUL = (Cause.WRONG_LENGTH, Cause.DAMAGED, Cause.WRONG_RANGE)
# A private generator: transforms seed the module `random`, and two loaders with the same seed would
# retry in step.
_dice = random.Random()


class Tries:
    """The attempts at a request, with a description and a deadline.

    The parts of an object share the start and the deadline of `whole`, the attempts at the object.
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
        self._whole = whole or self
        self._progressed = self.began

    def progress(self) -> None:
        """Restart the deadline."""
        self._whole._progressed = time.monotonic()

    def within(self, seconds: float) -> bool:
        """Return whether the deadline allows an attempt after `seconds`."""
        return time.monotonic() + seconds - self._whole._progressed < self.policy.deadline


class RetryGate:
    """The retry budget of all requests to a service.

    Safe to use from several event loops and threads. The caller counts `successes`.
    """

    def __init__(self) -> None:
        self.successes = 0
        self._lock = threading.Lock()  # guards the budget, a token bucket
        self._tokens = math.inf  # lowered to `policy.burst` by the first `take_retry`
        self._at = 0.0
        self._seen = 0

    def take_retry(self, policy: RetryPolicy) -> float:
        """Take a retry from the budget, or return the waiting time.

        Returns:
            0 if a retry was taken. Otherwise the seconds until a retry is available without further
            successes.
        """
        with self._lock:
            now, successes = time.monotonic(), self.successes
            earned = (successes - self._seen) * policy.retry_ratio
            earned += (now - self._at) * policy.burst / 10  # a tenth of `burst` a second
            self._tokens = min(float(policy.burst), self._tokens + earned)
            self._at, self._seen = now, successes
            if self._tokens >= 1.0:
                self._tokens -= 1.0
                return 0.0
            return (1.0 - self._tokens) * 10 / policy.burst

    async def may_try_again(self, failure: RequestFailure, tries: Tries) -> bool:
        """Count a failed attempt, then wait for the next attempt.

        Returns:
            False if the request must be given up.
        """
        tries.attempts += 1
        cause, most = failure.cause, tries.policy.max_attempts
        renew = cause is Cause.EXPIRED and not tries.renewed
        never_answered = not self.successes and failure.status is None
        if cause in _DOUBTFUL or (
            never_answered and cause.error is StoreUnreachableError
        ):
            most = min(most, DOUBTFUL_ATTEMPTS)
        if tries.attempts >= most or not (cause.transient or renew):
            return False
        tries.renewed = tries.renewed or renew
        wait = (
            0.0
            if renew
            else _dice.random() * tries.policy.max_backoff_after(tries.attempts)
        )
        if not tries.within(wait):
            return False
        await asyncio.sleep(wait)
        while (turn := self.take_retry(tries.policy)) > 0:
            if not tries.within(turn):
                return False
            await asyncio.sleep(turn)
        return True
