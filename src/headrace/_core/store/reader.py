"""Reading objects of one store so that what comes back is whole, or an error that says what was tried."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import TYPE_CHECKING, Any

import obstore
from obstore import get_range_async
from obstore.store import AzureStore, GCSStore, LocalStore, MemoryStore, S3Store

from headrace._core.store import forks
from headrace._core.store.checksums import matches
from headrace._core.store.client import StoreClient, heard
from headrace._core.store.errors import Cause, RequestFailure
from headrace._core.store.etags import same_tag, strong
from headrace._core.store.initial_read import InitialRead, begin
from headrace._core.store.multipart import LARGE, ReadPart, read_parts
from headrace._core.store.open import NATIVE_ERRORS
from headrace._core.store.request_stats import traffic
from headrace._core.store.retry import Tries
from headrace.errors import ObjectChangedError

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

PAGE = 1000  # objects to a page of a listing: what S3, GCS and Azure give at most, or nearly
REPLACEMENTS = 3  # times that a large object of no given version is begun, where it is overwritten while it is read


class StoreReader(StoreClient):
    """Reads one store with retries, checks and parallel ranges; what datasets over object stores have in common.

    Arguments and errors are those of `StoreClient`.
    """

    def sibling(self, url: str, *, same_options: bool) -> StoreReader:
        """A reader of another store, with the time-out and the retries of this one.

        Args:
            url: of the other.
            same_options: whether it is opened with the options of this one, credentials and all.
        """
        return StoreReader(url, self._options if same_options else {}, timeout=self._timeout, retry=self._retry)

    def read(
        self,
        key: str,
        start: int,
        length: int,
        *,
        index: Any = None,
        size: int | None = None,
        etag: str | None = None,
        checksum: str | None = None,
    ) -> Awaitable[memoryview]:
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
            ChecksumError: the bytes are not those of `checksum`, on every attempt.
            StoreUnreachableError: no answer, or no byte within the time-out, on every attempt.
            StoreError: the store refused or failed.
        """
        # Not a coroutine: a frame more for each of a thousand samples in flight, to resume and to look at for garbage.
        if not length:
            return _nothing()
        if length > LARGE and not self.ranges_ignored:
            return self._read_large(key, start, length, index, size, etag, checksum)
        return self._read(key, start, length, index, size, etag, checksum, None)

    async def read_all(
        self, key: str, *, index: Any = None, etag: str | None = None, checksum: str | None = None
    ) -> memoryview:
        """Read an object whose size is not known: up to 16 MiB in one request, the rest of a larger one in parallel.

        All parts are of one version, also where no `etag` is given. Arguments and errors are those of `read`.
        """
        doing = f"reading object {key!r}"

        async def request(store: ObjectStore) -> InitialRead | RequestFailure:
            ranged = not self.ranges_ignored and not isinstance(store, LocalStore | MemoryStore)
            try:
                begun = await begin(store, key, etag, LARGE if ranged else None)
            except NATIVE_ERRORS as error:
                verdict, _ = heard(error)
                ignored = verdict.cause is Cause.RANGE_IGNORED
                if not ranged or not (ignored or verdict.status == 416):
                    raise
                ranged = False
                traffic.get(self._alone).requests += 1
                begun = await begin(store, key, etag, None)
                # An empty object has no range: some say so, others send all of it, as those do that know no ranges.
                self.ranges_ignored = self.ranges_ignored or (ignored and begun.size > 0)
            if not same_tag(etag, begun.etag):
                return RequestFailure(Cause.CHANGED)
            expected = min(LARGE, begun.size) if ranged else begun.size
            checked = self._checked(begun.data, expected, checksum if expected == begun.size else None)
            return checked if isinstance(checked, RequestFailure) else begun

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

    async def _read_large(
        self,
        key: str,
        start: int,
        length: int,
        index: Any,
        size: int | None,
        etag: str | None,
        checksum: str | None,
    ) -> memoryview:
        tries = Tries(self._policy())
        read_part = self._part_reader(key, index, size, tries)
        data = await read_parts(start, length, etag or await self._etag_of(key, index), read_part)
        return self._summed(data, checksum, f"reading object {key!r}", key, index, tries)

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
        raise self._failure(RequestFailure(Cause.DAMAGED), None, doing, key, index, tries)

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
        verdict: RequestFailure | None = None
        failed: BaseException | None = None
        if self._gate.not_before or self.ranges_ignored:
            await self._gate.let_in(tries or Tries(self._policy()))
        traffic.get(self._alone).requests += 1
        began = time.monotonic()
        # The first attempt stands here in full: one frame and no closure for what nearly always succeeds.
        try:
            if etag is None and not self.ranges_ignored:
                answer: memoryview | RequestFailure = memoryview(
                    await get_range_async(store, key, start=start, length=length)
                )
            else:
                answer = await self._request(store, key, start, length, size, etag)
        except NATIVE_ERRORS as error:
            verdict, failed = heard(error)
        else:
            checked = self._checked(answer, length, checksum)
            if not isinstance(checked, RequestFailure):
                self._gate.successes += 1
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
    ) -> memoryview | RequestFailure:
        data = await self._request(store, key, start, length, size, etag)
        return self._checked(data, length, checksum)

    async def _request(
        self, store: ObjectStore, key: str, start: int, length: int, size: int | None, etag: str | None
    ) -> memoryview | RequestFailure:
        if self.ranges_ignored:
            result = await obstore.get_async(store, key, options={"if_match": etag} if etag else {})
            data = memoryview(await result.bytes_async())
            if not same_tag(etag, result.meta["e_tag"]):
                return RequestFailure(Cause.CHANGED)
            if size is not None and len(data) != size:
                return data[:0]
            return data[start : start + length]
        if etag is None:
            return memoryview(await get_range_async(store, key, start=start, length=length))
        result = await obstore.get_async(store, key, options={"range": (start, start + length), "if_match": etag})
        data = memoryview(await result.bytes_async())
        return data if same_tag(etag, result.meta["e_tag"]) else RequestFailure(Cause.CHANGED)

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
        except NATIVE_ERRORS:  # listing itself, with its retries, says what is wrong with the store
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
            verdict: RequestFailure | None = None
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
                    verdict = RequestFailure(Cause.TIMED_OUT, said=f"no page came within {self._timeout} s")
                    break
                except NATIVE_ERRORS as error:
                    verdict, failed = heard(error)
                    break
                if page is None:
                    return
                self._gate.successes += 1
                tries.progress()
                tries.attempts = 0
                if page:
                    last = page[-1]["path"]
                    yield page
            tries.attempts += 1
            if not await self._may_try_again(verdict, failed, tries):
                raise self._failure(verdict, failed, "listing", None, None, tries)
            here.retries += 1

    def _checked(
        self, data: memoryview | RequestFailure, length: int, checksum: str | None
    ) -> memoryview | RequestFailure:
        if isinstance(data, RequestFailure):
            return data
        if len(data) != length:
            return RequestFailure(Cause.WRONG_LENGTH, said=f"{len(data)} bytes came, and {length} were expected")
        if checksum is not None and not matches(data, checksum):
            return RequestFailure(Cause.DAMAGED)
        return data

    async def _etag_of(self, key: str, index: Any) -> str | None:
        """The tag that the parts of one object must share."""

        async def request(store: ObjectStore) -> str | RequestFailure | None:
            return strong((await obstore.head_async(store, key))["e_tag"])

        return await self.attempt(request, doing=f"asking for the entity tag of {key!r}", key=key, index=index)


async def _nothing() -> memoryview:
    return memoryview(b"")
