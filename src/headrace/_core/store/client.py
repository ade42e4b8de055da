"""Reads and writes of one store, whose results are complete or an error that says what was tried."""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable
from dataclasses import replace
from typing import TYPE_CHECKING

import obstore
from obstore import get_range_async

from headrace._core.store import forks
from headrace._core.store.backoff import Tries
from headrace._core.store.checksums import matches
from headrace._core.store.errors import NATIVE_ERRORS, Cause, RangesIgnoredError, RequestFailure
from headrace._core.store.get import RangeRequest, get_start, get_version
from headrace._core.store.head import Head, InitialRead, check_bytes
from headrace._core.store.list_requests import ListRequests
from headrace._core.store.multipart import LARGE, ReadPart, read_parts
from headrace._core.store.request_stats import session_stats
from headrace._core.store.requests import failure_of
from headrace._core.store.whole_objects import WholeObjects, WholeStream
from headrace.errors import ObjectChangedError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

REPLACEMENTS = 3  # times that a large object of no given version is read again because it was overwritten meanwhile


class StoreClient(ListRequests):
    """Reads one store; what all datasets over stores have in common. Arguments are those of `StoreRequests`."""

    def _reset(self) -> None:
        super()._reset()
        self._whole = WholeObjects(self)

    def sibling(self, url: str, *, same_options: bool) -> StoreClient:
        """A client of another store, with this one's time-out and retries, and its options if they may go there."""
        return StoreClient(url, self._options if same_options else {}, timeout=self.timeout, retry=self._retry)

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
        whole: bool = True,
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
            whole: whether the whole object is read where the store ignores ranges.

        Returns:
            A read-only view of the bytes.

        Raises:
            ObjectNotFoundError: there is no such object.
            ObjectChangedError: it has another version or size, or the bytes another length.
            ChecksumError: the bytes are not those of `checksum`, on every attempt.
            StoreUnreachableError: no answer, or no byte within the time-out, on every attempt.
            StoreError: the store refused or failed.
            RangesIgnoredError: the store ignores ranges, and `whole` is false.
        """
        # Not a coroutine: a frame more for each of a thousand samples in flight, to resume and to look at for garbage.
        if stop <= start:
            return _no_bytes()
        if self.ranges_ignored:
            return self._read_whole(RangeRequest(key, start, stop, index, size, etag, modified, checksum, whole))
        if not self.if_match:
            etag = size = modified = None
        if stop - start > LARGE:
            return self._read_large(RangeRequest(key, start, stop, index, size, etag, modified, checksum, whole))
        return self._read(key, start, stop, index, size, etag, modified, checksum, whole, None)

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
        whole: bool,
        tries: Tries | None,
    ) -> memoryview:
        store = self._store
        if store is None or forks.forked_from is not None:
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
            if etag is None and size is None and modified is None and timed is None:
                answer: memoryview | RequestFailure = memoryview(
                    await get_range_async(store, key, start=start, end=stop)
                )
            else:
                answer = await get_version(store, key, start, stop, size, etag, modified, stats.bodies, timed)
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

        request = RangeRequest(key, start, stop, index, size, etag, modified, checksum, whole)
        tries = tries or self.tries(began)
        try:
            return await self.attempt(
                request.get, doing=request.doing, key=key, index=index, tries=tries, failure=failure, error=error
            )
        except RangesIgnoredError:
            return await self._read_whole(request)

    async def _read_large(self, request: RangeRequest) -> memoryview:
        key, index = request.key, request.index
        tries = self.tries()
        size, etag, modified = request.size, request.etag, request.modified
        if size is None or (etag or modified) is None:  # then what all parts must share is asked for
            found = await self.head(key, index=index)
            size, etag, modified = size or found.size, etag or found.etag, modified or found.modified
        version = Head(key, size, etag, modified)
        try:
            part = self._part_reader(version, index, tries)
            data = await read_parts(request.start, request.stop - request.start, part)
        except RangesIgnoredError:
            return await self._read_whole(request)
        return self._verified(data, request.checksum, key, index, tries)

    async def _read_whole(self, request: RangeRequest) -> memoryview:
        key, index, stop, size = request.key, request.index, request.stop, request.size
        etag, modified, checksum = request.etag, request.modified, request.checksum
        if not request.whole:
            raise RangesIgnoredError
        if request.is_complete:
            data, _ = await self._whole.get(
                key, size=size, etag=etag, modified=modified, checksum=checksum, index=index
            )
            return data
        data, _ = await self._whole.part(key, size=size, etag=etag, modified=modified, index=index)
        if len(data) < stop:
            failure = RequestFailure(Cause.WRONG_LENGTH, detail=f"it has {len(data)} bytes")
            raise self.error_of(failure, None, request.doing, key, index, self.tries())
        return self._verified(data[request.start : stop], checksum, key, index, self.tries())

    async def read_all(
        self, key: str, *, index: object = None, etag: str | None = None, checksum: str | None = None
    ) -> memoryview:
        """Read an object of unknown size: up to 16 MiB in one request, the rest of a larger one in parallel.

        All parts are of one version, also where no `etag` is given. Arguments and errors are those of `read`.
        """
        for left in reversed(range(REPLACEMENTS)):
            try:
                first = await self.read_start(key, LARGE, index=index, etag=etag, checksum=checksum, whole=False)
                size = first.head.size
                if len(first.data) == size:
                    return first.data
                tries = self.tries()
                part = self._part_reader(replace(first.head, etag=etag or first.head.etag), index, tries)
                data = await read_parts(0, size, part, first=first.data)
                return self._verified(data, checksum, key, index, tries)
            except ObjectChangedError:
                if etag is not None or not left:
                    raise  # else any version will do: the new one, whole
            except RangesIgnoredError:
                data, _ = await self._whole.get(
                    key, size=None, etag=etag, modified=None, checksum=checksum, index=index
                )
                return data
        raise AssertionError

    async def read_start(
        self,
        key: str,
        stop: int,
        *,
        index: object = None,
        etag: str | None = None,
        checksum: str | None = None,
        whole: bool = True,
    ) -> InitialRead:
        """Read up to `stop` bytes from the start of an object of unknown size; `checksum` is of the whole object.

        Arguments and errors are those of `read`.
        """
        doing = f"reading object {key!r}"
        if not self.ranges_ignored:
            try:
                return await self._initial_read(key, (0, stop), stop, etag, checksum, doing, index)
            except RangesIgnoredError:
                pass
        if not whole:
            raise RangesIgnoredError
        data, head = await self._whole.part(key, size=None, etag=etag, modified=None, index=index)
        return InitialRead(data[:stop], head)

    async def read_end(self, key: str, length: int, *, head: Head | None = None) -> InitialRead:
        """Read the last bytes of an object, by one request unless it is empty; all of a shorter one.

        Errors are those of `read`; `head` is the object's metadata, if known.
        """
        if head is None and not self.traits.suffix_ranges:
            head = await self.head(key)
        if head is not None:
            start = max(0, head.size - length)
            data = await self.read(key, start, head.size, size=head.size, etag=head.etag, modified=head.modified)
            return InitialRead(data, head)
        if not self.ranges_ignored:
            try:
                return await self._initial_read(
                    key, {"suffix": length}, length, None, None, f"reading the end of {key!r}", None
                )
            except RangesIgnoredError:
                pass
        data, head = await self._whole.part(key, size=None, etag=None, modified=None, index=None)
        return InitialRead(data[-length:], head)

    async def _initial_read(
        self,
        key: str,
        requested: tuple[int, int] | dict[str, int],
        length: int,
        etag: str | None,
        checksum: str | None,
        doing: str,
        index: object,
    ) -> InitialRead:
        request = functools.partial(get_start, self, key, requested, length, etag, checksum)
        return await self.attempt(request, doing=doing, key=key, index=index)

    def stream(self, key: str, chunk: int, *, head: Head | None, skip: int) -> WholeStream:
        """Read an object from its start to its end, without ranges; arguments are those of `WholeStream`."""
        return WholeStream(self, key, chunk, head=head, skip=skip)

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

    def _part_reader(self, version: Head, index: object, tries: Tries) -> ReadPart:
        key, size, etag, modified = version.key, version.size, version.etag, version.modified

        async def read_part(start: int, length: int) -> memoryview:
            stop = start + length
            return await self._read(key, start, stop, index, size, etag, modified, None, False, tries.sibling())

        return read_part

    def _verified(self, data: memoryview, checksum: str | None, key: str, index: object, tries: Tries) -> memoryview:
        if checksum is None or matches(data, checksum):
            return data
        # It came complete, by many requests. As many again would most likely give the same damaged bytes.
        raise self.error_of(RequestFailure(Cause.DAMAGED), None, f"reading object {key!r}", key, index, tries)


async def _no_bytes() -> memoryview:
    return memoryview(b"")
