"""Requests to one store: opened once in a process, tried again by one policy, and reported by one kind of error."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from obstore.store import MemoryStore

from headrace._core.store import forks
from headrace._core.store.errors import Cause, RequestFailure, classify_error
from headrace._core.store.open import (
    NATIVE_ERRORS,
    check_options,
    connection_hint,
    describe_error,
    open_store,
    store_error,
)
from headrace._core.store.redaction import redact_text, redact_url, secrets_in
from headrace._core.store.request_stats import RequestStats, traffic
from headrace._core.store.retry import RetryGate, Tries, count_refusal
from headrace._core.store.retry_after import ask_retry_after, refused_url
from headrace._core.store.store_id import store_identity
from headrace.errors import NotPicklableError
from headrace.options import RetryPolicy

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")

BETWEEN_RENEWALS = 5.0  # seconds; fetches that began with the old credentials fail within a few
BETWEEN_QUESTIONS = 1.0  # seconds between two requests that only ask how long to wait


class StoreClient:
    """What is common to all requests of one store: its opening, retries, pushback, credentials and errors.

    It may be used from several event loops and threads, and be pickled; each process opens the store anew.

    Args:
        url: where the objects are.
        options: for `obstore.store.from_url`.
        store: a ready store of obstore's, for which `url` is a name only.
        timeout: seconds without a byte after which a request has failed. Bytes that come extend it.
        retry: how failures are tried again, where the loader does not say.

    Raises:
        ValueError: `options` name a header that a redirect could take to another host, or credentials twice.
    """

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any],
        *,
        store: ObjectStore | None = None,
        timeout: float = 30.0,
        retry: RetryPolicy | None = None,
    ) -> None:
        if store is None:
            check_options(url, options)  # so that an error in them is raised now, and not for every sample
        self.url = url
        self._options = dict(options)
        self._given = store
        self._timeout = timeout
        self._retry = retry or RetryPolicy()
        self._restart()

    def _restart(self) -> None:
        self._store: ObjectStore | None = None
        self._identity: str | None = None
        self._gate = RetryGate()
        self._asked = -BETWEEN_QUESTIONS
        self._renewed = -BETWEEN_RENEWALS
        self.ranges_ignored = False  # whether the store is known to send whole objects where a range is asked for
        self._alone = RequestStats()

    def __getstate__(self) -> dict[str, Any]:
        if isinstance(self._given, MemoryStore):
            raise NotPicklableError(
                what=repr(self),
                reason="its store is the memory of this process",
                remedy="Use a directory or another store to take a dataset to other processes.",
            )
        return {name: self.__dict__[name] for name in ("url", "_options", "_given", "_timeout", "_retry")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._restart()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({redact_url(self.url)!r})"

    @property
    def given(self) -> bool:
        """Whether the store was given ready."""
        return self._given is not None

    @property
    def store(self) -> ObjectStore:
        """The store, opened at its first use in this process.

        Raises:
            ForkedError: this process is a fork of one that had used a store.
        """
        if self._store is None or forks.forked_from is not None:
            forks.note_store_io()
            given = self._given
            self._store = open_store(self.url, self._options, timeout=self._timeout) if given is None else given
        return self._store

    @property
    def identity(self) -> str | None:
        """What tells this store from others; see `headrace._core.store.store_id`."""
        if self._identity is None:
            self._identity = store_identity(self.url, self._options, self._given)
        return self._identity

    @property
    def secrets(self) -> tuple[str, ...]:
        """What must be masked in whatever is said about this store."""
        return secrets_in(self._options)

    async def attempt(
        self,
        request: Callable[[ObjectStore], Awaitable[T | RequestFailure]],
        *,
        doing: str,
        key: str | None = None,
        index: Any = None,
    ) -> T:
        """Make a request of one's own, with this reader's retries.

        Args:
            request: makes it; may be called several times. It returns what it got, or the `RequestFailure` on it.
            doing: what it does, for errors, e.g. ``"reading the footer of 'a.parquet'"``.
            key: the object it is about, for errors.
            index: the sample it is about, for errors.

        Raises:
            StoreError: the store refused or failed, on every attempt; its classes as in `read`.
        """
        tries = Tries(self._policy())
        verdict: RequestFailure | None = None
        failed: BaseException | None = None
        await self._gate.let_in(tries)
        traffic.get(self._alone).requests += 1
        try:
            answer = await request(self.store)
        except NATIVE_ERRORS as error:
            verdict, failed = heard(error)
        else:
            if not isinstance(answer, RequestFailure):
                self._gate.successes += 1
                return answer
            verdict = answer
        return await self._again(request, verdict, failed, tries, doing, key, index)

    async def _again(
        self,
        request: Callable[[ObjectStore], Awaitable[T | RequestFailure]],
        verdict: RequestFailure,
        failed: BaseException | None,
        tries: Tries,
        doing: str,
        key: str | None,
        index: Any,
    ) -> T:
        """Go on behind a first attempt that failed."""
        here = traffic.get(self._alone)
        while True:
            tries.attempts += 1
            if not await self._may_try_again(verdict, failed, tries):
                break
            here.requests += 1
            here.retries += 1
            failed = None
            try:
                answer = await request(self.store)
            except NATIVE_ERRORS as error:
                verdict, failed = heard(error)
            else:
                if not isinstance(answer, RequestFailure):
                    self._gate.successes += 1
                    tries.progress()
                    return answer
                verdict = answer
        raise self._failure(verdict, failed, doing, key, index, tries)

    async def _may_try_again(self, verdict: RequestFailure, failed: BaseException | None, tries: Tries) -> bool:
        count_refusal(verdict, traffic.get(self._alone))
        if verdict.cause is Cause.RANGE_IGNORED:
            self.ranges_ignored = True  # from now on objects are read whole, which is not a retry
            return tries.attempts == 1
        elif verdict.cause is Cause.EXPIRED and self._given is None:
            self._renew()
        if tries.attempts >= tries.policy.max_attempts:
            return False
        if verdict.cause is Cause.THROTTLED and failed is not None:
            await self._ask_how_long(failed, tries)
        return await self._gate.may_try_again(verdict, tries)

    def _renew(self) -> None:
        """Open the store anew, so that it asks its provider for credentials; once for all who find them expired."""
        now = time.monotonic()
        if now - self._renewed >= BETWEEN_RENEWALS:
            self._renewed = now
            self._store = None

    async def _ask_how_long(self, failed: BaseException, tries: Tries) -> None:
        url = refused_url(failed)
        now = time.monotonic()
        if url is None or now - self._asked < BETWEEN_QUESTIONS or now < self._gate.not_before:
            return
        self._asked = now
        traffic.get(self._alone).requests += 1
        seconds = await ask_retry_after(url)
        if seconds:
            self._gate.hold_back(seconds)

    def _policy(self) -> RetryPolicy:
        return traffic.get(self._alone).retry or self._retry

    def _failure(
        self,
        verdict: RequestFailure,
        failed: BaseException | None,
        doing: str,
        key: str | None,
        index: Any,
        tries: Tries,
    ) -> Exception:
        detail = None if failed is None else describe_error(failed, self.secrets)
        verdict = replace(verdict, said=redact_text(verdict.said, self.secrets))
        where = doing if index is None else f"{doing} (index {index})"
        return store_error(
            verdict,
            doing=where,
            detail=detail,
            url=redact_url(self.url),
            key=key,
            index=index,
            attempts=tries.attempts,
            elapsed=tries.elapsed,
            hint=connection_hint(self.url, self._options) if self._given is None else "",
        )


def heard(error: BaseException) -> tuple[RequestFailure, BaseException]:
    """What an error of obstore's means, and the error.

    Without its traceback: obstore lets go of the future that holds the error when it is called next, and with the
    frames in the traceback that would keep this reader alive, and its connections open.
    """
    return classify_error(error), error.with_traceback(None)
