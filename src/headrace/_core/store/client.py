"""Reads and writes of one store, whose results are complete or an error that says what was tried."""

from __future__ import annotations

import asyncio
import contextlib
import time
import warnings
from collections.abc import AsyncGenerator, Awaitable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import obstore
from obstore import get_range_async

from headrace._core.store import requests
from headrace._core.store.backoff import Tries
from headrace._core.store.errors import NATIVE_ERRORS, Cause, RequestFailure, classify_error
from headrace._core.store.head import Head, InitialRead, check_bytes, check_version, matches, strong
from headrace._core.store.ranges import run_all
from headrace._core.store.redaction import redact_url
from headrace._core.store.request_stats import RequestStats, session_stats
from headrace._core.store.requests import StoreRequests, failure_of
from headrace.errors import ObjectChangedError

if TYPE_CHECKING:
    from obstore import GetResult, ObjectMeta
    from obstore.store import ObjectStore

PAGE = 1000  # objects of a page of a listing: the maximum of S3, GCS and Azure, or nearly
LARGE = 16 * 2**20  # bytes, above which a range is read in parts; S3's and GCS's guides recommend 8 to 16 MiB a request
PART = 8 * 2**20
AT_ONCE = 8  # parts of one object in flight; 64 MiB in flight cover 10 Gbit/s at 50 ms
LARGEST_WHOLE = 64 * 2**20  # bytes of an object of which a store that ignores ranges sends all for a part
REPLACEMENTS = 3  # times that a large object of no given version is read again because it was overwritten meanwhile


class StoreClient(StoreRequests):
    """Reads one store; what all datasets over stores have in common. Arguments are those of `StoreRequests`."""

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
        if stop - start > LARGE and not self.ranges_ignored:
            return self._read_large(key, start, stop, index, size, etag, modified, checksum)
        return self._read(key, start, stop, index, size, etag, modified, checksum, None)

    async def _read(
        self,
        key: str,
        start: int,
        stop: int,
        index: object,
        size: int | None,
        etag: str | None,
        modified: str | None,
        checksum: str | None,
        tries: Tries | None,
    ) -> memoryview:
        store = self._store
        if store is None or requests.forked_from is not None:
            store = self.store
        if self._gate.not_before:
            await self._gate.wait_open(tries or self.tries())
        stats = session_stats.get(self._own_stats)
        stats.requests += 1
        began = time.monotonic()
        error: BaseException | None = None
        # The first attempt stands here in full: one frame and no closure for what nearly always succeeds.
        try:
            timed = stats if stats.begin_timing() else None
            if etag is None and size is None and modified is None and timed is None and not self.ranges_ignored:
                answer: memoryview | RequestFailure = memoryview(
                    await get_range_async(store, key, start=start, end=stop)
                )
            else:
                answer = await self._get_range(key, start, stop, size, etag, modified, stats, timed, store)
        except NATIVE_ERRORS as caught:
            failure, error = failure_of(caught)
        else:
            checked = check_bytes(answer, stop - start, checksum)
            if not isinstance(checked, RequestFailure):
                self._gate.successes += 1
                if tries is not None:
                    tries.progress()
                return checked
            failure = checked
        ignored = failure.cause is Cause.RANGE_IGNORED
        complete = start == 0 and stop == size
        return await self.attempt(
            partial(self._get_again, key, start, stop, size, etag, modified, checksum, ignored),
            doing=f"reading object {key!r}" if complete else f"reading bytes {start} to {stop} of {key!r}",
            key=key,
            index=index,
            tries=tries or self.tries(began),
            failure=None if ignored else failure,
            error=error,
        )

    async def _get_range(
        self,
        key: str,
        start: int,
        stop: int,
        size: int | None,
        etag: str | None,
        modified: str | None,
        stats: RequestStats,
        timed: RequestStats | None,
        store: ObjectStore,
    ) -> memoryview | RequestFailure:
        """Read a range of an object of known version by one request, whose times are recorded in `timed`."""
        if self.ranges_ignored:
            return await self._get_slice(key, start, stop, size, etag, modified, store)
        began = 0.0 if timed is None else time.perf_counter()
        result = await obstore.get_async(store, key, options=_options((start, stop), etag))  # type: ignore[arg-type]
        meta = result.meta
        if meta["e_tag"] != etag or meta["size"] != size or modified is not None:
            failure = check_version(size, etag, modified, Head.of(key, meta))
            if failure is not None:
                return failure
        first_byte = 0.0 if timed is None else time.perf_counter() - began
        bodies = stats.bodies
        data = memoryview(await (result.bytes_async() if bodies is None else bodies.read(result, stop - start)))
        if timed is not None:
            timed.add_times(first_byte, time.perf_counter() - began)
        return data

    async def _get_again(
        self,
        key: str,
        start: int,
        stop: int,
        size: int | None,
        etag: str | None,
        modified: str | None,
        checksum: str | None,
        ignored: bool,
        store: ObjectStore,
    ) -> memoryview | RequestFailure:
        stats = self.stats
        try:
            if ignored:
                answer = await self._get_slice(key, start, stop, size, etag, modified, store)
            else:
                answer = await self._get_range(key, start, stop, size, etag, modified, stats, None, store)
        except NATIVE_ERRORS as error:
            if classify_error(error).cause is not Cause.RANGE_IGNORED:
                raise
            stats.requests += 1
            answer = await self._get_slice(key, start, stop, size, etag, modified, store)
        return check_bytes(answer, stop - start, checksum)

    async def _get_slice(
        self,
        key: str,
        start: int,
        stop: int,
        size: int | None,
        etag: str | None,
        modified: str | None,
        store: ObjectStore,
    ) -> memoryview | RequestFailure:
        """Read all of an object of a store that ignores ranges, and take a range of it."""
        answer = await obstore.get_async(store, key)
        head = Head.of(key, answer.meta)
        data = check_version(size, etag, modified, head) or await self._take_whole(answer, head)
        return data if isinstance(data, RequestFailure) else data[start:stop]

    async def _take_whole(self, answer: GetResult, head: Head) -> memoryview | RequestFailure:
        if head.size and not self.ranges_ignored:  # servers that do ranges may ignore those of an empty object
            self.ranges_ignored = True
            what = (
                f"{redact_url(self.url)} does not do ranges (python -m http.server does not, nginx does): "
                f"for a part of an object, all of it is sent."
            )
            with contextlib.suppress(Warning):  # as an error, by the user's filter: it must not cost the sample
                warnings.warn(what, stacklevel=2)
        if head.size > LARGEST_WHOLE:
            what = f"all {head.size} bytes come for a range of them, and at most {LARGEST_WHOLE >> 20} MiB are taken so"
            return RequestFailure(Cause.UNUSABLE, detail=what)
        return check_bytes(memoryview(await answer.bytes_async()), head.size)

    async def _read_large(
        self,
        key: str,
        start: int,
        stop: int,
        index: object,
        size: int | None,
        etag: str | None,
        modified: str | None,
        checksum: str | None,
    ) -> memoryview:
        tries = self.tries()
        if size is None or (etag or modified) is None:  # then what all parts must share is asked for
            found = await self.head(key, index=index)
            size, etag, modified = size or found.size, etag or found.etag, modified or found.modified
        return await self._read_parts(Head(key, size, etag, modified), start, stop, index, checksum, tries)

    async def _read_parts(
        self,
        head: Head,
        start: int,
        stop: int,
        index: object,
        checksum: str | None,
        tries: Tries,
        first: memoryview = memoryview(b""),  # noqa: B008
    ) -> memoryview:
        """Read a long range in parallel parts: one connection rarely saturates a network. `first` is its start."""
        view = memoryview(bytearray(stop - start))
        view[: len(first)] = first
        offsets = iter(range(start + len(first), stop, PART))

        async def fill() -> None:
            for offset in offsets:
                end = min(offset + PART, stop)
                view[offset - start : end - start] = await self._read(
                    head.key, offset, end, index, head.size, head.etag, head.modified, None, tries.sibling()
                )

        await run_all(fill() for _ in range(AT_ONCE))
        data = view.toreadonly()
        if checksum is None or matches(data, checksum):
            return data
        # It came complete, by many requests. As many again would most likely give the same damaged bytes.
        doing = f"reading object {head.key!r}"
        raise self.error_of(RequestFailure(Cause.DAMAGED), None, doing, head.key, index, tries)

    async def read_all(
        self, key: str, *, index: object = None, etag: str | None = None, checksum: str | None = None
    ) -> memoryview:
        """Read an object of unknown size: up to 16 MiB in one request, the rest of a larger one in parallel.

        All parts are of one version, also where no `etag` is given. Arguments and errors are those of `read`.
        """
        for left in reversed(range(REPLACEMENTS)):
            try:
                first = await self.read_start(key, LARGE, index=index, etag=etag, checksum=checksum)
                head = replace(first.head, etag=etag or first.head.etag)
                if len(first.data) == head.size:
                    return first.data
                return await self._read_parts(head, 0, head.size, index, checksum, self.tries(), first.data)
            except ObjectChangedError:
                if etag is not None or not left:
                    raise  # else any version will do: the new one, whole
        raise AssertionError

    async def read_start(
        self, key: str, stop: int, *, index: object = None, etag: str | None = None, checksum: str | None = None
    ) -> InitialRead:
        """Read bytes up to `stop` of an object of unknown size, or all if the store ignores ranges.

        `checksum` is of the whole object; other arguments and errors are those of `read`.
        """
        request = partial(self._get_initial, key, (0, stop), stop, etag, checksum)
        return await self.attempt(request, doing=f"reading object {key!r}", key=key, index=index)

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
        request = partial(self._get_initial, key, {"suffix": length}, length, None, None)
        return await self.attempt(request, doing=f"reading the end of {key!r}", key=key)

    async def _get_initial(
        self,
        key: str,
        requested: tuple[int, int] | dict[str, int],
        length: int,
        etag: str | None,
        checksum: str | None,
        store: ObjectStore,
    ) -> InitialRead | RequestFailure:
        """Read the first or the last bytes of an object of unknown size, with its metadata; `checksum` is of all."""
        stats = self.stats
        timed = stats.begin_timing()
        began = time.perf_counter()
        whole = self.ranges_ignored
        try:
            options = {} if whole else _options(requested, etag)
            result = await obstore.get_async(store, key, options=options)  # type: ignore[arg-type]
        except NATIVE_ERRORS as error:
            failure = classify_error(error)
            whole = failure.cause is Cause.RANGE_IGNORED
            # An empty object has no range that could be requested: stores refuse it in different ways, or send all.
            empty = failure.status == 416 or (failure.cause is Cause.OTHER and not self.traits.remote)
            if not whole and not empty:
                raise
            stats.requests += 1
            result = await obstore.get_async(store, key)  # servers may not say it to a HEAD
            if not whole and result.meta["size"]:
                raise
        head = Head.of(key, result.meta)
        changed = check_version(None, etag, None, head)
        if changed is not None:
            return changed
        first_byte = time.perf_counter() - began
        data = await self._take_whole(result, head) if whole else memoryview(await result.bytes_async())
        if timed:
            stats.add_times(first_byte, time.perf_counter() - began)
        expected = head.size if whole else min(length, head.size)
        checked = check_bytes(data, expected, checksum if expected == head.size else None)
        return checked if isinstance(checked, RequestFailure) else InitialRead(checked, head)

    async def pages(
        self, prefix: str | None = None, *, after: str | None = None
    ) -> AsyncGenerator[Sequence[ObjectMeta], None]:
        """List the store, a page at a time. A page that fails is requested again, after the last key of those before.

        An object may come twice where a listing had to begin again: keep them by their `path`.

        Raises:
            StoreUnreachableError: no page came within the time-out, on every attempt.
            StoreError: the store refused or failed.
        """
        tries = self.tries()
        last = after
        while True:
            self.stats.requests += 1
            offset = last if self.traits.list_resumes else None
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
            await self.retry_or_raise(failure, error, tries, "listing")

    async def head(self, key: str, *, index: object = None) -> Head:
        """Request an object's size and version; `index` is the sample's, for errors; raises `StoreError`."""

        async def request(store: ObjectStore) -> Head | RequestFailure:
            return Head.of(key, await obstore.head_async(store, key))

        return await self.attempt(request, doing=f"requesting the metadata of {key!r}", key=key, index=index)

    async def put(self, key: str, data: bytes) -> None:
        """Store an object; raises `StoreError`."""

        async def request(store: ObjectStore) -> object:
            return await obstore.put_async(store, key, data)

        await self.attempt(request, doing=f"writing {key!r}", key=key)


async def _no_bytes() -> memoryview:
    return memoryview(b"")


def _options(requested: tuple[int, int] | dict[str, int], etag: str | None) -> dict[str, object]:
    tag = strong(etag)
    return {"range": requested} if tag is None else {"range": requested, "if_match": tag}
