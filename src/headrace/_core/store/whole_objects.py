"""Objects of stores without ranges: streamed from the start, or read whole and kept for later reads."""

from __future__ import annotations

import asyncio
import contextlib
import warnings
from collections import OrderedDict
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import obstore

from headrace._core.store.errors import Cause, RequestFailure
from headrace._core.store.head import Head, check_bytes, check_version
from headrace._core.store.redaction import redact_url

if TYPE_CHECKING:
    from obstore import BytesStream, GetResult
    from obstore.store import ObjectStore

    from headrace._core.store.requests import StoreRequests

CAPACITY = 256 << 20  # bytes of objects that are kept; the last one in any case


async def _get(
    requests: StoreRequests, store: ObjectStore, key: str, size: int | None, etag: str | None, modified: str | None
) -> tuple[GetResult, Head] | RequestFailure:
    """Request an object; its bytes have not been read yet."""
    answer = await obstore.get_async(store, key)
    head = Head.of(key, answer.meta)
    failure = check_version(size, etag, modified, head)
    if failure is not None:
        return failure
    if head.size:  # servers that do ranges may answer a range of an empty object as if they did not
        requests.ranges_ignored = True
    return answer, head


class WholeStream:
    """An object from its start to its end, by one request; after a failure by another, skipping bytes already read.

    With `head`, the object must be of that version. Chunks have at least `chunk` bytes, except for the last.
    """

    def __init__(self, requests: StoreRequests, key: str, chunk: int, *, head: Head | None, skip: int) -> None:
        self._requests = requests
        self._key = key
        self._chunk = chunk
        self._head = head
        self._done = skip
        self._position = 0
        self._chunks: BytesStream | None = None

    @property
    def head(self) -> Head | None:
        """The object's metadata; None before the first response, if they were not given."""
        return self._head

    async def read(self) -> memoryview | None:
        """The next bytes; None after the last.

        Raises:
            StoreError: the store refused or failed, on every attempt, or the object has changed meanwhile.
        """
        doing = f"reading {self._key!r}"
        data = await self._requests.attempt(self._next, doing=doing, key=self._key)
        self._done += len(data)
        return data if len(data) else None

    async def _next(self, store: ObjectStore) -> memoryview | RequestFailure:
        chunks, self._chunks = self._chunks, None  # after a failure below, a new request is made
        if chunks is None:
            head = self._head
            size, etag, modified = (None, None, None) if head is None else (head.size, head.etag, head.modified)
            begun = await _get(self._requests, store, self._key, size, etag, modified)
            if isinstance(begun, RequestFailure):
                return begun
            answer, self._head = begun
            self._position = 0
            chunks = aiter(answer.stream(min_chunk_size=self._chunk))
        assert self._head is not None
        async for chunk in chunks:
            data = memoryview(chunk)[max(0, self._done - self._position) :]
            self._position += len(memoryview(chunk))
            if len(data):
                self._chunks = chunks
                return data
        if self._position != self._head.size:
            return RequestFailure(Cause.CUT, detail=f"{self._position} bytes came in place of {self._head.size}")
        return memoryview(b"")


class WholeObjects:
    """Whole objects of one store. Those that were read for a part of them are kept, the most recent ones.

    Parts of one object that are read at the same time, on one event loop, share a request.
    """

    def __init__(self, requests: StoreRequests) -> None:
        self._requests = requests
        self._kept: OrderedDict[str, tuple[memoryview, Head]] = OrderedDict()
        self._locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
        self._warned = False

    async def part(
        self, key: str, *, size: int | None, etag: str | None, modified: str | None, index: object
    ) -> tuple[memoryview, Head]:
        """An object's bytes and metadata, for a part of it; arguments and errors are those of `get`."""
        async with self._locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            kept = self._kept.get(key)
            if kept is not None and check_version(size, etag, modified, kept[1]) is None:
                return kept
            read = await self.get(key, size=size, etag=etag, modified=modified, checksum=None, index=index)
            if read[1].size:
                self._warn()
                self._keep(key, read)
            return read

    async def get(
        self,
        key: str,
        *,
        size: int | None,
        etag: str | None,
        modified: str | None,
        checksum: str | None,
        index: object,
    ) -> tuple[memoryview, Head]:
        """An object's bytes and metadata, of the given size, version and checksum if there are any.

        Raises:
            StoreError: the store refused or failed, on every attempt, or the object has changed.
        """

        async def request(store: ObjectStore) -> tuple[memoryview, Head] | RequestFailure:
            begun = await _get(self._requests, store, key, size, etag, modified)
            if isinstance(begun, RequestFailure):
                return begun
            answer, head = begun
            data = check_bytes(memoryview(await answer.bytes_async()), head.size, checksum)
            return data if isinstance(data, RequestFailure) else (data, head)

        return await self._requests.attempt(request, doing=f"reading object {key!r}", key=key, index=index)

    def _keep(self, key: str, read: tuple[memoryview, Head]) -> None:
        self._kept[key] = read
        self._kept.move_to_end(key)
        while len(self._kept) > 1 and sum(len(data) for data, _ in self._kept.values()) > CAPACITY:
            self._kept.popitem(last=False)

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            what = (
                f"{redact_url(self._requests.url)} does not do ranges (python -m http.server does not, nginx does): "
                f"a part of an object takes all of it. The last {CAPACITY >> 20} MiB of objects are kept in memory."
            )
            with contextlib.suppress(Warning):  # as an error, by the user's filter: it must not cost the sample
                warnings.warn(what, stacklevel=2)
