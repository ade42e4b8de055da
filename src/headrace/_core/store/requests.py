"""Requests to one store: opened once in a process, retried by one policy, and reported by one kind of error."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from headrace._core.retry_policy import RetryPolicy
from headrace._core.store.backoff import RetryGate, Tries, ask_retry_after, count_refusal
from headrace._core.store.errors import (
    NATIVE_ERRORS,
    Cause,
    RequestFailure,
    classify_error,
    connection_hint,
    describe_error,
    store_error,
)
from headrace._core.store.open import open_store, store_id
from headrace._core.store.options import StoreTraits, traits_of
from headrace._core.store.redaction import redact_text, redact_url, secrets_in
from headrace._core.store.request_stats import RequestStats, session_stats
from headrace.errors import ForkedError, NotPicklableError, StoreError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")

RENEWAL_INTERVAL = 5.0  # seconds; requests that began with the old credentials fail within a few
HEAD_INTERVAL = 1.0  # seconds between two requests that only ask for `Retry-After`

forked_from: int | None = None
"""The ancestor that used a store before it forked this process; None if there is none.

obstore's I/O runs on threads of a native runtime. A fork has none of them, and even a new store in it waits for them
for ever; so the child raises an error where it would hang.
"""
_used_in: int | None = None


def _after_fork_in_child() -> None:
    global forked_from
    if forked_from is None:
        forked_from = _used_in


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


class StoreRequests:
    """Opening, retries, throttling, credentials and errors of all requests to one store.

    It may be used from several event loops and threads, and be pickled; each process opens the store again.

    Args:
        url: where the objects are.
        options: for `obstore.store.from_url`.
        backend: a ready store of obstore's, for which `url` is a name only.
        timeout: seconds without a byte after which a request has failed.
        retry: the policy where the loader has none.
        if_match: whether reads are conditional on a known version.
        list_concurrency: the maximum number of requests of one listing.
    """

    def __init__(
        self,
        url: str,
        options: Mapping[str, object],
        *,
        backend: ObjectStore | None = None,
        timeout: float = 30.0,
        retry: RetryPolicy | None = None,
        if_match: bool = True,
        list_concurrency: int = 16,
    ) -> None:
        self.url = url
        self.backend = backend
        self.timeout = timeout
        self.if_match = if_match
        self.list_concurrency = list_concurrency
        self._options = dict(options)
        self._retry = retry or RetryPolicy()
        self._reset()

    def _reset(self) -> None:
        self.traits: StoreTraits = traits_of(self.url, self.backend)
        self.ranges_ignored = False  # whether the store is known to send whole objects where a range is asked for
        self._store: ObjectStore | None = None
        self._store_id: str | None = None
        self._gate = RetryGate()
        self._last_head = -HEAD_INTERVAL
        self._last_renewal = -RENEWAL_INTERVAL
        self._own_stats = RequestStats()

    def __getstate__(self) -> dict[str, object]:
        if not self.traits.shared:
            raise NotPicklableError(
                what=repr(self),
                reason="its store is the memory of this process",
                remedy="Use a directory or another store to take a dataset to other processes.",
            )
        names = ("url", "backend", "timeout", "if_match", "list_concurrency", "_options", "_retry")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._reset()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({redact_url(self.url)!r})"

    def name(self, key: str) -> str:
        """The URL of an object, without secrets."""
        return f"{redact_url(self.url).rstrip('/')}/{key}"

    @property
    def store(self) -> ObjectStore:
        """The store, opened at its first use in this process.

        Raises:
            ForkedError: this process is a fork of one that had used a store.
        """
        global _used_in
        if self._store is None or forked_from is not None:
            if forked_from is not None:
                raise ForkedError("obstore, which reads object stores,", made_in=forked_from, used_in=os.getpid())
            _used_in = os.getpid()
            given = self.backend
            self._store = open_store(self.url, self._options, timeout=self.timeout) if given is None else given
        return self._store

    @property
    def store_id(self) -> str | None:
        """A text that is the same for the same store in every process; see `headrace._core.store.open.store_id`."""
        if self._store_id is None:
            self._store_id = store_id(self.url, self._options, self.backend)
        return self._store_id

    @property
    def stats(self) -> RequestStats:
        """The counters of the running loader, or of this store outside of one."""
        return session_stats.get(self._own_stats)

    def tries(self, began: float | None = None) -> Tries:
        """A count of attempts, by the loader's retry policy or else this store's."""
        return Tries(self.stats.retry or self._retry, began)

    async def attempt(
        self,
        request: Callable[[ObjectStore], Awaitable[T | RequestFailure]],
        *,
        doing: str,
        key: str | None = None,
        index: object = None,
        tries: Tries | None = None,
        failure: RequestFailure | None = None,
        error: BaseException | None = None,
    ) -> T:
        """Make a request, with retries.

        Args:
            request: makes it; may be called several times. Returns the result, or a `RequestFailure`.
            doing: the operation, for errors, e.g. ``"reading the footer of 'a.parquet'"``.
            key: the object it is about, for errors.
            index: the sample it is about, for errors.
            tries: the attempts that were made.
            failure: the failure of a first attempt that the caller has made.
            error: the exception of that attempt, if there was one.

        Raises:
            StoreError: the store refused or failed, on every attempt; a class of its own for many causes.
        """
        tries = tries or self.tries()
        stats = self.stats
        if failure is None:
            await self._gate.wait_open(tries)
        while True:
            if failure is not None:
                await self.retry_or_raise(failure, error, tries, doing, key, index)
            stats.requests += 1
            error = None
            try:
                answer = await request(self.store)
            except NATIVE_ERRORS as caught:
                failure, error = failure_of(caught)
            else:
                if not isinstance(answer, RequestFailure):
                    self._gate.successes += 1
                    tries.progress()
                    return answer
                failure = answer

    async def retry_or_raise(
        self,
        failure: RequestFailure,
        error: BaseException | None,
        tries: Tries,
        doing: str,
        key: str | None = None,
        index: object = None,
    ) -> None:
        """Wait until a failed request may be made again, or raise its error; arguments are those of `attempt`."""
        tries.attempts += 1
        stats = self.stats
        count_refusal(failure, stats)
        if failure.cause is Cause.EXPIRED and self.backend is None:
            self._renew_credentials()
        again = tries.attempts < tries.policy.max_attempts
        if again and failure.cause is Cause.THROTTLED and error is not None:
            await self._ask_retry_after(error)
        if not again or not await self._gate.may_try_again(failure, tries):
            raise self.error_of(failure, error, doing, key, index, tries)
        stats.retries += 1

    def _renew_credentials(self) -> None:
        """Open the store again, so that it asks its provider for credentials; once for all requests that need it."""
        now = time.monotonic()
        if now - self._last_renewal >= RENEWAL_INTERVAL:
            self._last_renewal = now
            self._store = None

    async def _ask_retry_after(self, error: BaseException) -> None:
        now = time.monotonic()
        if now - self._last_head < HEAD_INTERVAL or now < self._gate.not_before:
            return
        self._last_head = now
        self.stats.requests += 1
        seconds = await ask_retry_after(error)
        if seconds:
            self._gate.hold_back(seconds)

    def error_of(
        self,
        failure: RequestFailure,
        error: BaseException | None,
        doing: str,
        key: str | None,
        index: object,
        tries: Tries,
    ) -> StoreError:
        """The exception for the last failure of a request."""
        secrets = secrets_in(self._options)
        return store_error(
            replace(failure, detail=redact_text(failure.detail, secrets)),
            doing=doing if index is None else f"{doing} (index {index})",
            detail=None if error is None else describe_error(error, secrets),
            url=redact_url(self.url),
            key=key,
            index=index,
            attempts=tries.attempts,
            elapsed=tries.elapsed,
            hint=connection_hint(self.url, self._options) if self.backend is None else "",
        )


def failure_of(error: BaseException) -> tuple[RequestFailure, BaseException]:
    """The failure that an error of obstore's means, and the error without its traceback.

    obstore keeps the future that holds the error until it is called next. With the frames of the traceback, that would
    keep the store alive, and its connections open.
    """
    return classify_error(error), error.with_traceback(None)
