"""Retries of failed requests: backoff, retry budget, deadline.

Waits grow exponentially with full jitter, the way that spreads competing clients best (Marc Brooker, "Exponential
Backoff And Jitter", AWS Architecture Blog, 2015). All fetchers of a store share one budget of retries, so that a store
in trouble is not asked many times more often than a healthy one (the token bucket of gRPC's retry throttling and of the
AWS SDKs' standard mode). Here retries wait while the budget is empty; they do not fail.
"""

from __future__ import annotations

import asyncio
import random
import re
import threading
import time
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

from headrace._core.retry_policy import RetryPolicy
from headrace._core.store.errors import Cause, RequestFailure
from headrace._core.store.request_stats import RequestStats

# Before the first success the URL is probably wrong: fail fast.
FIRST_CONTACT_ATTEMPTS = 3
# A length or a checksum that is wrong each time is wrong in the store.
DAMAGE_ATTEMPTS = 3

HEAD_INTERVAL = 1.0  # seconds between two requests that only ask for `Retry-After`
HEAD_TIMEOUT = 2.0  # seconds for the answer that only gives `Retry-After`; without it the backoff decides

_REFUSED = re.compile(r"performing [A-Z]+ (https?://\S+) in ")
# Not the module's functions: transforms seed those, and two loaders with one seed would then retry in step.
_dice = random.Random()


class Tries:
    """The attempts at one request, what it is about, for errors, and its deadline.

    All parts of an object share the beginning and the deadline of `whole`, the attempts at the object.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        doing: str = "",
        key: str | None = None,
        index: object = None,
        *,
        began: float | None = None,
        whole: Tries | None = None,
    ) -> None:
        self.policy, self.doing, self.key, self.index = policy, doing, key, index
        self.attempts = 0
        self.began: float = whole.began if whole is not None else began or time.monotonic()
        self.renewed = False  # whether the credentials were renewed for this request
        self._progressed: list[float] = [self.began] if whole is None else whole._progressed

    def progress(self) -> None:
        """Restart the deadline."""
        self._progressed[0] = time.monotonic()

    def within(self, seconds: float) -> bool:
        """Whether the deadline allows an attempt in so many seconds."""
        return time.monotonic() + seconds - self._progressed[0] < self.policy.deadline


class RetryGate:
    """State shared by all requests to one service: the retry budget, and the time before which none is sent.

    Safe to use from several event loops and threads. The caller counts `successes`.
    """

    def __init__(self) -> None:
        self.successes = 0
        self.not_before = 0.0  # time before which no request is sent, by `Retry-After`; 0 for none
        self._last_head = -HEAD_INTERVAL
        self._lock = threading.Lock()  # of the budget, a token bucket
        self._tokens: float | None = None
        self._at = 0.0
        self._seen = 0

    def take_retry(self, policy: RetryPolicy) -> float:
        """Take one retry and return 0, or return the seconds until one is available without further successes."""
        with self._lock:
            now, successes = time.monotonic(), self.successes
            if self._tokens is None:
                self._tokens = float(policy.burst)
            earned = (successes - self._seen) * policy.retry_ratio + (now - self._at) * policy.burst / 10
            self._tokens = min(float(policy.burst), self._tokens + earned)
            self._at, self._seen = now, successes
            if self._tokens >= 1.0:
                self._tokens -= 1.0
                return 0.0
            return (1.0 - self._tokens) * 10 / policy.burst

    async def wait_open(self, tries: Tries) -> None:
        """Wait until the time given by the service's last `Retry-After`.

        If the deadline of `tries` is before that, the attempt is made at once, and either succeeds or raises the error.
        """
        while self.not_before:
            left = self.not_before - time.monotonic()
            if left <= 0:
                self.not_before = 0.0
            elif not tries.within(left):
                return
            else:
                await asyncio.sleep(left)

    async def may_try_again(self, failure: RequestFailure, tries: Tries, stats: RequestStats) -> bool:
        """Count a failed attempt, and wait until the next may be made; return False if it is to be given up."""
        tries.attempts += 1
        cause, most = failure.cause, tries.policy.max_attempts
        renew = cause is Cause.EXPIRED and not tries.renewed
        if cause in (Cause.WRONG_LENGTH, Cause.DAMAGED, Cause.WRONG_RANGE):
            most = min(most, DAMAGE_ATTEMPTS)
        elif cause in (Cause.UNREACHABLE, Cause.UNRESOLVED, Cause.TIMED_OUT):
            answered = self.successes > 0 or failure.status is not None
            most = most if answered else min(most, FIRST_CONTACT_ATTEMPTS)
        if tries.attempts >= most or not (cause.transient or renew):
            return False
        tries.renewed = tries.renewed or renew
        now = time.monotonic()
        if cause is Cause.THROTTLED and now - self._last_head >= HEAD_INTERVAL and now >= self.not_before:
            self._last_head = now
            stats.requests += 1
            if seconds := await ask_retry_after(failure.error):
                self.not_before = max(self.not_before, time.monotonic() + seconds)
        wait = 0.0 if renew else _dice.random() * tries.policy.max_backoff_after(tries.attempts)
        if not tries.within(wait):
            return False
        await asyncio.sleep(wait)
        while (turn := self.take_retry(tries.policy)) > 0:
            if not tries.within(turn):
                return False
            await asyncio.sleep(turn)
        if not tries.within(self.not_before - time.monotonic()):
            return False
        await self.wait_open(tries)
        return True


async def ask_retry_after(error: BaseException | None) -> float | None:
    """The seconds of `Retry-After` (RFC 9110, section 10.2.3) of a store that throttles; None if it gives none.

    obstore gives no headers of a refusal, so this sends one HEAD of the same URL, which is in the error, without
    credentials and without following redirects.
    """
    found = _REFUSED.search(str(error))
    if found is None:
        return None
    parts = urlsplit(found[1])
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        target = f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
        request = f"HEAD {target} HTTP/1.1\r\nHost: {parts.netloc.rpartition('@')[2]}\r\nConnection: close\r\n\r\n"
        async with asyncio.timeout(HEAD_TIMEOUT):
            reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=parts.scheme == "https" or None)
            try:
                writer.write(request.encode("ascii"))
                answer = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            finally:
                writer.transport.abort()
        status, value = answer.split(" ")[1], re.search(r"^retry-after:[ \t]*(.*?)\s*$", answer, re.I | re.M)
        if status not in ("429", "503") or value is None:
            return None
        if value[1].isdecimal():
            return float(value[1])
        return max(0.0, parsedate_to_datetime(value[1]).timestamp() - time.time())
    except (OSError, TimeoutError, ValueError, EOFError, LookupError, asyncio.LimitOverrunError):
        return None  # the request itself is retried, and reports what is wrong
