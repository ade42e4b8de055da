"""Requests to one store, whose results are complete or an error that says what was tried.

The store is opened once in a process; one policy retries, and one kind of error reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import obstore
from obstore import get_range_async

from headrace._core.retry_policy import RetryPolicy
from headrace._core.store.backoff import RetryGate, Tries, ask_retry_after
from headrace._core.store.errors import (
    NATIVE_ERRORS,
    Cause,
    RequestFailure,
    classify_error,
    connection_hint,
    describe_error,
    explain,
)
from headrace._core.store.head import Head, InitialRead, check_bytes, check_version, matches, strong
from headrace._core.store.open import open_store, store_id
from headrace._core.store.options import StoreTraits, traits_of
from headrace._core.store.ranges import run_all
from headrace._core.store.redaction import redact_text, redact_url, secrets_in
from headrace._core.store.request_stats import RequestStats, session_stats
from headrace.errors import ForkedError, NotPicklableError, StoreError

if TYPE_CHECKING:
    from obstore import GetResult, ObjectMeta
    from obstore.store import ObjectStore

T = TypeVar("T")

PAGE = 1000  # objects of a page of a listing: the maximum of S3, GCS and Azure, or nearly
LARGE = 16 * 2**20  # bytes, above which a range is read in parts; S3's and GCS's guides recommend 8 to 16 MiB a request
PART = 8 * 2**20
AT_ONCE = 8  # parts of one object in flight; 64 MiB in flight cover 10 Gbit/s at 50 ms
LARGEST_WHOLE = 64 * 2**20  # bytes of an object of which a store that ignores ranges sends all for a part
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


class _Range(NamedTuple):
    """Bytes to read, and what is known of their object; for the fields, see `read`, whose `index` is `sample` here."""

    key: str
    start: int
    stop: int
    sample: object
    size: int | None
    etag: str | None
    modified: str | None
    checksum: str | None


class StoreClient:
    """Reads and writes one store; what all datasets over stores have in common.

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
                raise ForkedError(what="obstore, which reads object stores,", made_in=forked_from, used_in=os.getpid())
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

    def tries(self, doing: str, key: str | None = None, index: object = None, began: float | None = None) -> Tries:
        """A count of attempts, by the loader's retry policy or else this store's; for the arguments see `Tries`."""
        return Tries(self.stats.retry or self._retry, doing, key, index, began)

    async def attempt(
        self,
        request: Callable[[ObjectStore], Awaitable[T | RequestFailure]],
        tries: Tries,
        failure: RequestFailure | None = None,
        error: BaseException | None = None,
    ) -> T:
        """Make a request, with retries.

        Args:
            request: makes it; may be called several times. Returns the result, or a `RequestFailure`.
            tries: the attempts that were made.
            failure: the failure of a first attempt that the caller has made.
            error: the exception of that attempt, if there was one.

        Raises:
            StoreError: the store refused or failed, on every attempt; a class of its own for many causes.
        """
        stats = self.stats
        if failure is None:
            await self._gate.wait_open(tries)
        while True:
            if failure is not None:
                await self.retry_or_raise(failure, error, tries)
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

    async def retry_or_raise(self, failure: RequestFailure, error: BaseException | None, tries: Tries) -> None:
        """Wait until a failed request may be made again, or raise its error; arguments are those of `attempt`."""
        tries.attempts += 1
        stats = self.stats
        if failure.cause in (Cause.THROTTLED, Cause.TIMED_OUT):
            stats.throttle_events += 1
            stats.throttled += failure.cause is Cause.THROTTLED
            stats.timed_out += failure.cause is Cause.TIMED_OUT
        now = time.monotonic()
        if failure.cause is Cause.EXPIRED and self.backend is None and now - self._last_renewal >= RENEWAL_INTERVAL:
            # Opened again, it asks its provider for credentials; once for all requests that need them.
            self._last_renewal = now
            self._store = None
        again = tries.attempts < tries.policy.max_attempts
        due = now - self._last_head >= HEAD_INTERVAL and now >= self._gate.not_before
        if again and due and failure.cause is Cause.THROTTLED and error is not None:
            self._last_head = now
            stats.requests += 1
            if seconds := await ask_retry_after(error):
                self._gate.hold_back(seconds)
        if not again or not await self._gate.may_try_again(failure, tries):
            raise self._error(failure, error, tries)
        stats.retries += 1

    def _error(self, failure: RequestFailure, error: BaseException | None, tries: Tries) -> StoreError:
        """The exception for the last failure of a request."""
        secrets, url, key, index = secrets_in(self._options), redact_url(self.url), tries.key, tries.index
        kind, message = explain(
            replace(failure, detail=redact_text(failure.detail, secrets)),
            tries.doing if index is None else f"{tries.doing} (index {index})",
            None if error is None else describe_error(error, secrets),
            url,
            connection_hint(self.url, self._options) if self.backend is None else "",
        )
        status, attempts = failure.status, tries.attempts
        return kind(message, url=url, key=key, index=index, attempts=attempts, elapsed=tries.elapsed, status=status)

    def read(
        self,
        key: str,
        start: int,
        stop: int,
        *,
        index: object = None,
        size: int | None = None,
        etag: str | None = None,
        modified: str | None = None,
        checksum: str | None = None,
    ) -> Awaitable[memoryview]:
        """Read the bytes of an object from `start` up to `stop`; more than 16 MiB as several ranges at once.

        Args:
            key: the object, relative to the store's URL.
            start: the first byte, from 0.
            stop: after the last byte; an empty range needs no request.
            index: the sample's index, for errors.
            size: the whole object's length in bytes, if known.
            etag: its version, if known.
            modified: the time of its last modification, as in `Head`, if known.
            checksum: ``algorithm:hexadecimal`` of the bytes that are asked for; None for any.

        Returns:
            A read-only view of the bytes.

        Raises:
            ObjectNotFoundError: there is no such object.
            ObjectChangedError: it has another version or size, or the bytes another length.
            ChecksumError: the bytes are not those of `checksum`, on every attempt.
            StoreUnreachableError: no answer, or no byte within the time-out, on every attempt.
            StoreError: the store refused or failed, or ignores ranges and the object is large.
        """
        # Not a coroutine: a frame more for each of a thousand samples in flight, to resume and to look at for garbage.
        if stop <= start:
            return _no_bytes()
        if not self.if_match:
            etag = size = modified = None
        wanted = _Range(key, start, stop, index, size, etag, modified, checksum)
        if stop - start > LARGE and not self.ranges_ignored:
            return self._read_parts(wanted)
        return self._read(wanted, None)

    async def _read(self, wanted: _Range, whole: Tries | None) -> memoryview:
        """Read a range by one request; `whole` has the deadline of the object of which it is a part."""
        store = self._store
        if store is None or forked_from is not None:
            store = self.store
        if self._gate.not_before:
            await self._gate.wait_open(whole or self.tries(""))
        stats = session_stats.get(self._own_stats)
        stats.requests += 1
        began = time.monotonic()
        key, start, stop, index, size, etag, modified, checksum = wanted
        error: BaseException | None = None
        answer: tuple[memoryview, ObjectMeta | None] | RequestFailure
        # The first attempt stands here in full: one frame and no closure for what nearly always succeeds.
        try:
            timed = stats.begin_timing()
            if etag is None and size is None and modified is None and not timed and not self.ranges_ignored:
                data = memoryview(await get_range_async(store, key, start=start, end=stop))
                answer = check_bytes(data, stop - start, checksum) or (data, None)
            else:
                answer = await self._get(wanted, timed, False, False, store)
        except NATIVE_ERRORS as caught:
            failure, error = failure_of(caught)
        else:
            if not isinstance(answer, RequestFailure):
                self._gate.successes += 1
                if whole is not None:
                    whole.progress()
                return answer[0]
            failure = answer
        ignored = failure.cause is Cause.RANGE_IGNORED
        doing = (
            f"reading object {key!r}" if (start, stop) == (0, size) else f"reading bytes {start} to {stop} of {key!r}"
        )
        tries = self.tries(doing, key, index, began) if whole is None else whole.sibling(doing)
        again = partial(self._get, wanted, False, ignored, False)
        data, _ = await self.attempt(again, tries, None if ignored else failure, error)
        return data

    async def _get(
        self, wanted: _Range, timed: bool, whole: bool, initial: bool, store: ObjectStore
    ) -> tuple[memoryview, ObjectMeta] | RequestFailure:
        """Read a range by one request, and return the object's metadata too.

        Args:
            wanted: the range.
            timed: whether the request's times are recorded.
            whole: read all of the object, and take the range out of it.
            initial: the size is unknown: a shorter object comes whole, and all of one of a store that ignores ranges;
                from a negative `start` on, the last bytes. The checksum is of the object.
            store: the store.
        """
        key, start, stop, _, size, etag, modified, checksum = wanted
        stats = self.stats
        began = time.perf_counter()
        whole = whole or self.ranges_ignored
        if whole:
            result = await obstore.get_async(store, key)
        else:
            options: dict[str, object] = {"range": (start, stop) if start >= 0 else {"suffix": -start}}
            if (tag := strong(etag)) is not None:
                options["if_match"] = tag
            try:
                result = await obstore.get_async(store, key, options=options)  # type: ignore[arg-type]
            except NATIVE_ERRORS as error:
                failure = classify_error(error)
                whole = failure.cause is Cause.RANGE_IGNORED
                # An empty object has no range that could be requested: stores refuse it in different ways, or send all.
                empty = failure.status == 416 or (failure.cause is Cause.OTHER and not self.traits.remote)
                if not whole and not (initial and empty):
                    raise
                stats.requests += 1
                result = await obstore.get_async(store, key)  # servers may not say it to a HEAD
                if not whole and result.meta["size"]:
                    raise
        meta = result.meta
        if meta["e_tag"] != etag or meta["size"] != size or modified is not None:
            changed = check_version(size, etag, modified, Head.of(key, meta))
            if changed is not None:
                return changed
        first_byte = time.perf_counter() - began
        length = min(stop - start, meta["size"]) if initial else stop - start
        if whole:
            taken = await self._take_whole(result)
            if isinstance(taken, RequestFailure):
                return taken
            data = taken if initial else taken[start:stop]
            length = meta["size"] if initial else length
        else:
            bodies = stats.bodies
            data = memoryview(await (result.bytes_async() if bodies is None else bodies.read(result, length)))
        if timed:
            stats.add_times(first_byte, time.perf_counter() - began)
        part = initial and length < meta["size"]
        return check_bytes(data, length, None if part else checksum) or (data, meta)

    async def _take_whole(self, answer: GetResult) -> memoryview | RequestFailure:
        size = answer.meta["size"]
        if size and not self.ranges_ignored:  # servers that do ranges may ignore those of an empty object
            self.ranges_ignored = True
            what = (
                f"{redact_url(self.url)} does not do ranges (python -m http.server does not, nginx does): "
                f"for a part of an object, all of it is sent."
            )
            with contextlib.suppress(Warning):  # as an error, by the user's filter: it must not cost the sample
                warnings.warn(what, stacklevel=2)
        if size > LARGEST_WHOLE:
            what = f"all {size} bytes come for a range of them, and at most {LARGEST_WHOLE >> 20} MiB are taken so"
            return RequestFailure(Cause.UNUSABLE, detail=what)
        data = memoryview(await answer.bytes_async())
        return check_bytes(data, size) or data

    async def _read_parts(self, wanted: _Range, first: memoryview | None = None) -> memoryview:
        """Read a long range in parallel parts: one connection rarely saturates a network. `first` is its start."""
        key, start, stop, index, size, etag, modified, checksum = wanted
        tries = self.tries(f"reading object {key!r}", key, index)
        if first is None and (size is None or (etag or modified) is None):  # what all parts must share is asked for
            found = await self.head(key, index=index)
            size, etag, modified = size or found.size, etag or found.etag, modified or found.modified
        view = memoryview(bytearray(stop - start))
        done = len(first or b"")
        view[:done] = first or b""
        offsets = iter(range(start + done, stop, PART))

        async def fill() -> None:
            for offset in offsets:
                end = min(offset + PART, stop)
                part = _Range(key, offset, end, index, size, etag, modified, None)
                view[offset - start : end - start] = await self._read(part, tries)

        await run_all(fill() for _ in range(AT_ONCE))
        data = view.toreadonly()
        if checksum is None or matches(data, checksum):
            return data
        # It came complete, by many requests. As many again would most likely give the same damaged bytes.
        raise self._error(RequestFailure(Cause.DAMAGED), None, tries)

    async def read_all(
        self, key: str, *, index: object = None, etag: str | None = None, checksum: str | None = None
    ) -> memoryview:
        """Read an object of unknown size: up to 16 MiB in one request, the rest of a larger one in parallel.

        All parts are of one version, also where no `etag` is given. Arguments and errors are those of `read`.
        """
        first = await self.read_start(key, LARGE, index=index, etag=etag, checksum=checksum)
        found = first.head
        if len(first.data) == found.size:
            return first.data
        wanted = _Range(key, 0, found.size, index, found.size, etag or found.etag, found.modified, checksum)
        return await self._read_parts(wanted, first.data)

    async def read_start(
        self, key: str, stop: int, *, index: object = None, etag: str | None = None, checksum: str | None = None
    ) -> InitialRead:
        """Read bytes up to `stop` of an object of unknown size, or all if the store ignores ranges.

        `checksum` is of the whole object; other arguments and errors are those of `read`.
        """
        wanted = _Range(key, 0, stop, index, None, etag, None, checksum)
        return await self._read_initial(wanted, f"reading object {key!r}")

    async def read_end(self, key: str, length: int, *, head: Head | None = None) -> InitialRead:
        """Read the last bytes of an object, or all of a shorter one, by one request unless it is empty.

        `head` is the object's metadata, if known. If the store ignores ranges, all bytes come. Errors are those of
        `read`.
        """
        if head is None and not self.traits.suffix_ranges:
            head = await self.head(key)
        if head is not None:
            start = max(0, head.size - length)
            data = await self.read(key, start, head.size, size=head.size, etag=head.etag, modified=head.modified)
            return InitialRead(data, head)
        wanted = _Range(key, -length, 0, None, None, None, None, None)
        return await self._read_initial(wanted, f"reading the end of {key!r}")

    async def _read_initial(self, wanted: _Range, doing: str) -> InitialRead:
        request = partial(self._get, wanted, self.stats.begin_timing(), False, True)
        data, meta = await self.attempt(request, self.tries(doing, wanted.key, wanted.sample))
        return InitialRead(data, Head.of(wanted.key, meta))

    async def pages(
        self, prefix: str | None = None, *, after: str | None = None
    ) -> AsyncGenerator[Sequence[ObjectMeta], None]:
        """List the store, a page at a time. A page that fails is requested again, after the last key of those before.

        An object may come twice where a listing had to begin again: keep them by their `path`.

        Raises:
            StoreUnreachableError: no page came within the time-out, on every attempt.
            StoreError: the store refused or failed.
        """
        tries = self.tries("listing")
        last = after
        while True:
            self.stats.requests += 1
            offset = last if self.traits.bucket else None
            pages = obstore.list(self.store, prefix, offset=offset, chunk_size=PAGE)
            error: BaseException | None = None
            while True:
                try:
                    async with asyncio.timeout(self.timeout):
                        page = await anext(pages, None)
                except TimeoutError:
                    failure = RequestFailure(Cause.TIMED_OUT, detail=f"no page came within {self.timeout} s")
                    break
                except NATIVE_ERRORS as caught:
                    failure, error = failure_of(caught)
                    break
                if page is None:
                    return
                self._gate.successes += 1
                tries.progress()
                tries.attempts = 0
                if page:
                    last = page[-1]["path"]
                    yield page
            await self.retry_or_raise(failure, error, tries)

    async def head(self, key: str, *, index: object = None) -> Head:
        """Request an object's size and version; `index` is the sample's, for errors; raises `StoreError`."""
        tries = self.tries(f"requesting the metadata of {key!r}", key, index)
        meta = await self.attempt(lambda store: obstore.head_async(store, key), tries)
        return Head.of(key, meta)

    async def put(self, key: str, data: bytes) -> None:
        """Store an object; raises `StoreError`."""
        await self.attempt(lambda store: obstore.put_async(store, key, data), self.tries(f"writing {key!r}", key))


def failure_of(error: BaseException) -> tuple[RequestFailure, BaseException]:
    """The failure that an error of obstore's means, and the error without its traceback.

    obstore keeps the future that holds the error until it is called next. With the frames of the traceback, that would
    keep the store alive, and its connections open.
    """
    return classify_error(error), error.with_traceback(None)


async def _no_bytes() -> memoryview:
    return memoryview(b"")
