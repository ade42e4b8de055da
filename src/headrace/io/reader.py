"""Reading objects of one store so that what comes back is whole, or an error that says what was tried."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import obstore
from obstore import get_range_async
from obstore.store import AzureStore, GCSStore, LocalStore, MemoryStore, S3Store

from headrace.errors import NotPicklableError, ObjectChangedError
from headrace.io import forks
from headrace.io.beginning import Beginning, begin
from headrace.io.checksums import matches
from headrace.io.etags import same_tag, strong
from headrace.io.identity import store_identity
from headrace.io.parts import LARGE, ReadPart, read_parts
from headrace.io.redirects import fenced
from headrace.io.retry import RetryBudget, Tries
from headrace.io.retry_after import ask_retry_after, refused_url
from headrace.io.stores import NATIVE_ERRORS, describe_error, open_store, store_error
from headrace.io.traffic import Traffic, traffic
from headrace.io.urls import redact_url, secrets_in
from headrace.io.verdicts import Cause, Verdict, judge
from headrace.options import RetryPolicy

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

__all__ = ["StoreReader"]

T = TypeVar("T")

PAGE = 1000  # objects to a page of a listing: what S3, GCS and Azure give at most, or nearly
BETWEEN_RENEWALS = 5.0  # seconds; fetches that began with the old credentials fail within a few
BETWEEN_QUESTIONS = 1.0  # seconds between two requests that only ask how long to wait
REPLACEMENTS = 3  # times that a large object of no given version is begun, where it is overwritten while it is read


class StoreReader:
    """Reads one store with retries, checks and parallel ranges; what datasets over object stores have in common.

    It may be used from several event loops and threads, and be pickled; each process opens the store anew.

    Args:
        url: where the objects are.
        options: for `obstore.store.from_url`.
        store: a ready store of obstore's, for which `url` is a name only.
        timeout: seconds without a byte after which a request has failed. Bytes that come extend it.
        retry: how failures are tried again, where the loader does not say.

    Raises:
        ValueError: `options` name a header that a redirect could take to another host.
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
            fenced(url, options)  # so that what is wrong with them is said now, and not for every sample
        self.url = url
        self._options = dict(options)
        self._given = store
        self._timeout = timeout
        self._retry = retry or RetryPolicy()
        self._restart()

    def _restart(self) -> None:
        self._store: ObjectStore | None = None
        self._identity: str | None = None
        self._budget = RetryBudget()
        self._successes = 0
        self._not_before = 0.0
        self._asked = -BETWEEN_QUESTIONS
        self._renewed = -BETWEEN_RENEWALS
        self._ranges_ignored = False
        self._alone = Traffic()

    def __getstate__(self) -> dict[str, Any]:
        if isinstance(self._given, MemoryStore):
            raise NotPicklableError(
                what=repr(self),
                reason="its store is the memory of this process",
                remedy="Use a file:// URL or another store to take a dataset to other processes.",
            )
        return {name: self.__dict__[name] for name in ("url", "_options", "_given", "_timeout", "_retry")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._restart()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({redact_url(self.url)!r})"

    def sibling(self, url: str, *, same_options: bool) -> StoreReader:
        """A reader of another store, with the time-out and the retries of this one.

        Args:
            url: of the other.
            same_options: whether it is opened with the options of this one, credentials and all.
        """
        return StoreReader(url, self._options if same_options else {}, timeout=self._timeout, retry=self._retry)

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
        """What tells this store from others; see `headrace.io.identity`."""
        if self._identity is None:
            self._identity = store_identity(self.url, self._options, self._given)
        return self._identity

    @property
    def secrets(self) -> tuple[str, ...]:
        """What must be masked in whatever is said about this store."""
        return secrets_in(self._options)

    async def read(
        self,
        key: str,
        start: int,
        length: int,
        *,
        index: Any = None,
        size: int | None = None,
        etag: str | None = None,
        checksum: str | None = None,
    ) -> memoryview:
        """Read `length` bytes of an object from `start` on; more than 16 MiB as several ranges at once.

        Args:
            key: the object, relative to the store's URL.
            start: the first byte, from 0.
            length: how many bytes; 0 needs no request.
            index: the sample's index, for errors.
            size: the whole object's length in bytes, where it is known.
            etag: what its entity tag must be; None for any.
            checksum: ``algorithm:hexadecimal`` of the bytes that are asked for; None for any.

        Returns:
            A read-only view of the bytes.

        Raises:
            ObjectNotFoundError: there is no such object.
            ObjectChangedError: it is not the object of that `etag`, or not of that length.
            DamagedObjectError: the bytes are not those of `checksum`, on every attempt.
            StoreUnreachableError: no answer, or no byte within the time-out, on every attempt.
            StoreError: the store refused or failed.
        """
        if not length:
            return _NOTHING
        if length > LARGE and not self._ranges_ignored:
            tries = Tries(self._policy())
            read_part = self._part_reader(key, index, size, tries)
            data = await read_parts(start, length, etag or await self._etag_of(key, index), read_part)
            return self._summed(data, checksum, f"reading object {key!r}", key, index, tries)
        return await self._read(key, start, length, index, size, etag, checksum, None)

    async def read_all(
        self, key: str, *, index: Any = None, etag: str | None = None, checksum: str | None = None
    ) -> memoryview:
        """Read an object whose size is not known: up to 16 MiB in one request, the rest of a larger one in parallel.

        All parts are of one version, also where no `etag` is given. Arguments and errors are those of `read`.
        """
        doing = f"reading object {key!r}"

        async def request(store: ObjectStore) -> Beginning | Verdict:
            ranged = not self._ranges_ignored and not isinstance(store, LocalStore | MemoryStore)
            try:
                begun = await begin(store, key, etag, LARGE if ranged else None)
            except NATIVE_ERRORS as error:
                verdict, _ = _heard(error)
                ignored = verdict.cause is Cause.RANGE_IGNORED
                if not ranged or not (ignored or verdict.status == 416):
                    raise
                ranged = False
                traffic.get(self._alone).requests += 1
                begun = await begin(store, key, etag, None)
                # An empty object has no range: some say so, others send all of it, as those do that know no ranges.
                self._ranges_ignored = self._ranges_ignored or (ignored and begun.size > 0)
            if not same_tag(etag, begun.etag):
                return Verdict(Cause.CHANGED)
            expected = min(LARGE, begun.size) if ranged else begun.size
            checked = self._checked(begun.data, expected, checksum if expected == begun.size else None)
            return checked if isinstance(checked, Verdict) else begun

        for left in reversed(range(REPLACEMENTS)):
            begun = await self.attempt(request, doing=doing, key=key, index=index)
            if len(begun.data) == begun.size:
                return begun.data
            tries = Tries(self._policy())
            read_part = self._part_reader(key, index, begun.size, tries)
            try:
                data = await read_parts(0, begun.size, etag or strong(begun.etag), read_part, begun=begun.data)
            except ObjectChangedError:
                if etag is not None or not left:
                    raise
                continue  # nobody said which version it is to be: the new one, whole
            return self._summed(data, checksum, doing, key, index, tries)
        raise AssertionError

    def _part_reader(self, key: str, index: Any, size: int | None, tries: Tries) -> ReadPart:
        async def read_part(start: int, length: int, etag: str | None) -> memoryview:
            return await self._read(key, start, length, index, size, etag, None, tries.sibling())

        return read_part

    def _summed(
        self, data: memoryview, checksum: str | None, doing: str, key: str, index: Any, tries: Tries
    ) -> memoryview:
        if checksum is None or matches(data, checksum):
            return data
        # It came whole, by many requests; once more from the start would be as many, for what is likely damaged.
        raise self._failure(Verdict(Cause.DAMAGED), None, doing, key, index, tries)

    async def _read(
        self,
        key: str,
        start: int,
        length: int,
        index: Any,
        size: int | None,
        etag: str | None,
        checksum: str | None,
        tries: Tries | None,
    ) -> memoryview:
        store = self._store
        if store is None or forks.forked_from is not None:
            store = self.store
        verdict: Verdict | None = None
        failed: BaseException | None = None
        if self._not_before or self._ranges_ignored:
            await self._let_in()
        traffic.get(self._alone).requests += 1
        began = time.monotonic()
        # The first attempt stands here in full: one frame and no closure for what nearly always succeeds.
        try:
            if etag is None and not self._ranges_ignored:
                answer: memoryview | Verdict = memoryview(await get_range_async(store, key, start=start, length=length))
            else:
                answer = await self._request(store, key, start, length, size, etag)
        except NATIVE_ERRORS as error:
            verdict, failed = _heard(error)
        else:
            checked = self._checked(answer, length, checksum)
            if not isinstance(checked, Verdict):
                self._successes += 1
                if tries is not None:
                    tries.progress()
                return checked
            verdict = checked

        request = functools.partial(self._ask, key, start, length, size, etag, checksum)
        doing = f"reading object {key!r}"
        return await self._again(request, verdict, failed, tries or Tries(self._policy(), began), doing, key, index)

    # A method, not a function within `_read`: that would hold what it takes from outside in a cell for each, seven for
    # a sample, which the garbage collector counts and visits while a thousand samples are in flight.
    async def _ask(
        self,
        key: str,
        start: int,
        length: int,
        size: int | None,
        etag: str | None,
        checksum: str | None,
        store: ObjectStore,
    ) -> memoryview | Verdict:
        data = await self._request(store, key, start, length, size, etag)
        return self._checked(data, length, checksum)

    async def _request(
        self, store: ObjectStore, key: str, start: int, length: int, size: int | None, etag: str | None
    ) -> memoryview | Verdict:
        if self._ranges_ignored:
            result = await obstore.get_async(store, key, options={"if_match": etag} if etag else {})
            data = memoryview(await result.bytes_async())
            if not same_tag(etag, result.meta["e_tag"]):
                return Verdict(Cause.CHANGED)
            if size is not None and len(data) != size:
                return data[:0]
            return data[start : start + length]
        if etag is None:
            return memoryview(await get_range_async(store, key, start=start, length=length))
        result = await obstore.get_async(store, key, options={"range": (start, start + length), "if_match": etag})
        data = memoryview(await result.bytes_async())
        return data if same_tag(etag, result.meta["e_tag"]) else Verdict(Cause.CHANGED)

    async def attempt(
        self,
        request: Callable[[ObjectStore], Awaitable[T | Verdict]],
        *,
        doing: str,
        key: str | None = None,
        index: Any = None,
    ) -> T:
        """Make a request of one's own, with this reader's retries.

        Args:
            request: makes it; may be called several times. It returns what it got, or the `Verdict` on it.
            doing: what it does, for errors, e.g. ``"reading the footer of 'a.parquet'"``.
            key: the object it is about, for errors.
            index: the sample it is about, for errors.

        Raises:
            StoreError: the store refused or failed, on every attempt; its classes as in `read`.
        """
        tries = Tries(self._policy())
        verdict: Verdict | None = None
        failed: BaseException | None = None
        await self._let_in()
        traffic.get(self._alone).requests += 1
        try:
            answer = await request(self.store)
        except NATIVE_ERRORS as error:
            verdict, failed = _heard(error)
        else:
            if not isinstance(answer, Verdict):
                self._successes += 1
                return answer
            verdict = answer
        return await self._again(request, verdict, failed, tries, doing, key, index)

    async def _again(
        self,
        request: Callable[[ObjectStore], Awaitable[T | Verdict]],
        verdict: Verdict,
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
                verdict, failed = _heard(error)
            else:
                if not isinstance(answer, Verdict):
                    self._successes += 1
                    tries.progress()
                    return answer
                verdict = answer
        raise self._failure(verdict, failed, doing, key, index, tries)

    async def _may_try_again(self, verdict: Verdict, failed: BaseException | None, tries: Tries) -> bool:
        here = traffic.get(self._alone)
        if verdict.cause is Cause.THROTTLED:
            here.throttled += 1
            here.pushed_back += 1
        elif verdict.cause is Cause.TIMED_OUT:
            here.timed_out += 1
            here.pushed_back += 1
        elif verdict.cause is Cause.RANGE_IGNORED:
            self._ranges_ignored = True  # from now on objects are read whole, which is not a retry
            return tries.attempts == 1
        elif verdict.cause is Cause.EXPIRED and self._given is None:
            self._renew()
        if tries.attempts >= tries.policy.attempts:
            return False
        if verdict.cause is Cause.THROTTLED and failed is not None:
            await self._ask_how_long(failed, tries)
        wait = tries.wait(verdict, answered=self._successes > 0 or verdict.status is not None)
        if wait is None:
            return False
        await asyncio.sleep(wait)
        while (turn := self._budget.take(tries.policy, self._successes)) > 0:
            if not tries.within(turn):
                return False
            await asyncio.sleep(turn)
        if not tries.within(self._not_before - time.monotonic()):
            return False
        await self._let_in()
        return True

    def _renew(self) -> None:
        """Open the store anew, so that it asks its provider for credentials; once for all who find them expired."""
        now = time.monotonic()
        if now - self._renewed >= BETWEEN_RENEWALS:
            self._renewed = now
            self._store = None

    async def _ask_how_long(self, failed: BaseException, tries: Tries) -> None:
        url = refused_url(failed)
        now = time.monotonic()
        if url is None or now - self._asked < BETWEEN_QUESTIONS or now < self._not_before:
            return
        self._asked = now
        traffic.get(self._alone).requests += 1
        seconds = await ask_retry_after(url)
        if seconds:
            self._not_before = max(self._not_before, time.monotonic() + seconds)

    async def _let_in(self) -> None:
        """Wait until the store takes requests, where it has said when."""
        while self._not_before:
            left = self._not_before - time.monotonic()
            if left <= 0:
                self._not_before = 0.0
                return
            await asyncio.sleep(left)

    @property
    def lists_in_order(self) -> bool:
        """Whether its listings come sorted by key, and can begin behind any key at no more than the cost of a page.

        Azure's begin at their first page whatever is asked for, and S3's directory buckets have no order.
        """
        return isinstance(self.store, S3Store | GCSStore) and "--x-s3" not in self.url

    async def directories(self, path: str) -> list[str]:
        """The directories right under a path, sorted, by one attempt; of a store that says no, none.

        For who wants to know where a long listing may be split, and can do without.

        Args:
            path: the directory; empty for the topmost.
        """
        traffic.get(self._alone).requests += 1
        try:
            level = await obstore.list_with_delimiter_async(self.store, path or None)
        except NATIVE_ERRORS:
            return []
        return sorted(level["common_prefixes"])

    async def list(
        self, prefix: str | None = None, *, after: str | None = None
    ) -> AsyncGenerator[Sequence[ObjectMeta], None]:
        """List the store, a page at a time; a page that fails is asked for again, behind what came before it.

        An object may come twice where a listing had to begin anew: keep them by their `path`.

        Args:
            prefix: the path that the keys begin with; None for all.
            after: only keys behind this one, where the store lists in order.

        Raises:
            StoreUnreachableError: no page came within the time-out, on every attempt.
            StoreError: the store refused or failed.
        """
        tries = Tries(self._policy())
        last = after
        while True:
            verdict: Verdict | None = None
            failed: BaseException | None = None
            here = traffic.get(self._alone)
            here.requests += 1
            # Where keys come in order, go on behind the last; else all over again.
            resumable = isinstance(self.store, S3Store | GCSStore | AzureStore)
            pages = obstore.list(self.store, prefix, offset=last if resumable else None, chunk_size=PAGE)
            while True:
                try:
                    async with asyncio.timeout(self._timeout):
                        page = await anext(pages, None)
                except TimeoutError:
                    verdict = Verdict(Cause.TIMED_OUT, said=f"no page came within {self._timeout} s")
                    break
                except NATIVE_ERRORS as error:
                    verdict, failed = _heard(error)
                    break
                if page is None:
                    return
                self._successes += 1
                tries.progress()
                tries.attempts = 0
                if page:
                    last = page[-1]["path"]
                    yield page
            tries.attempts += 1
            if not await self._may_try_again(verdict, failed, tries):
                raise self._failure(verdict, failed, "listing", None, None, tries)
            here.retries += 1

    def _checked(self, data: memoryview | Verdict, length: int, checksum: str | None) -> memoryview | Verdict:
        if isinstance(data, Verdict):
            return data
        if len(data) != length:
            return Verdict(Cause.WRONG_LENGTH, said=f"{len(data)} bytes came, and {length} were expected")
        if checksum is not None and not matches(data, checksum):
            return Verdict(Cause.DAMAGED)
        return data

    async def _etag_of(self, key: str, index: Any) -> str | None:
        """The tag that the parts of one object must share."""

        async def request(store: ObjectStore) -> str | Verdict | None:
            return strong((await obstore.head_async(store, key))["e_tag"])

        return await self.attempt(request, doing=f"asking for the entity tag of {key!r}", key=key, index=index)

    def _policy(self) -> RetryPolicy:
        return traffic.get(self._alone).retry or self._retry

    def _failure(
        self,
        verdict: Verdict,
        failed: BaseException | None,
        doing: str,
        key: str | None,
        index: Any,
        tries: Tries,
    ) -> Exception:
        detail = None if failed is None else describe_error(failed, self.secrets)
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
        )


def _heard(error: BaseException) -> tuple[Verdict, BaseException]:
    """What an error of obstore's means, and the error.

    Without its traceback: obstore lets go of the future that holds the error when it is called next, and with the
    frames in the traceback that would keep this reader alive, and its connections open.
    """
    return judge(error), error.with_traceback(None)


_NOTHING = memoryview(b"")
