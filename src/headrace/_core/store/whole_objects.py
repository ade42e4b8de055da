"""Objects of stores without ranges: streamed from the beginning, or read whole and kept for later reads."""

from __future__ import annotations

import asyncio
import contextlib
import warnings
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import obstore

from headrace._core.store.errors import Cause, RequestFailure
from headrace._core.store.etags import same_tag
from headrace._core.store.redaction import redact_url

if TYPE_CHECKING:
    from obstore import GetResult, ObjectMeta
    from obstore.store import ObjectStore

    from headrace._core.store.client import StoreClient

KEPT = 256 << 20  # bytes of objects that were read whole; the last one is kept in any case


@dataclass(frozen=True, slots=True)
class Head:
    """A store's metadata of an object.

    Attributes:
        key: the object's.
        size: in bytes.
        etag: its version; None if the store gives none.
        modified: the time of its last modification, as ISO 8601; None if unknown.
    """

    key: str
    size: int
    etag: str | None
    modified: str | None = field(default=None, compare=False)

    @classmethod
    def of(cls, key: str, meta: ObjectMeta) -> Head:
        """From obstore's metadata."""
        when = meta["last_modified"]
        # A server that does not say has modified everything in 1970.
        return cls(key, meta["size"], meta["e_tag"], when.isoformat() if when.timestamp() > 0 else None)


async def _get(
    client: StoreClient, store: ObjectStore, key: str, head: Head | None
) -> tuple[GetResult, Head] | RequestFailure:
    """Begin to read an object; returns a verdict if it has changed since `head`."""
    answer = await obstore.get_async(store, key)
    found = Head.of(key, answer.meta)
    if found.size:  # to a range of an empty object, servers that do ranges may answer as if they did not
        client.ranges_ignored = True
    if head is not None and (found.size != head.size or not same_tag(head.etag, found.etag)):
        return RequestFailure(Cause.CHANGED)
    return answer, found


class WholeStream:
    """An object from its beginning to its end, by one request; after a failure by another, skipping bytes already read.

    Args:
        client: of its store.
        key: the object.
        piece: the minimum size of a piece in bytes, except for the last.
        head: the metadata of the object, which must not have changed.
        done: the number of bytes to skip.
    """

    def __init__(self, client: StoreClient, key: str, piece: int, *, head: Head | None, done: int) -> None:
        self._client = client
        self._key = key
        self._piece = piece
        self._head = head
        self._done = done
        self._modified: Any = None
        self._at = 0
        self._pieces: AsyncIterator[Any] | None = None

    async def read(self) -> memoryview | None:
        """The next bytes; None after the last.

        Raises:
            StoreError: the store refused or failed, on every attempt, or the object has changed meanwhile.
        """
        doing = f"reading {self._key!r}"
        data = await self._client.attempt(self._next, doing=doing, key=self._key)
        self._done += len(data)
        return data if len(data) else None

    async def _next(self, store: ObjectStore) -> memoryview | RequestFailure:
        pieces, self._pieces = self._pieces, None  # after a failure below, a new request is made
        if pieces is None:
            begun = await _get(self._client, store, self._key, self._head)
            if isinstance(begun, RequestFailure):
                return begun
            answer, self._head = begun
            if self._modified not in (None, answer.meta["last_modified"]):
                return RequestFailure(Cause.CHANGED)
            self._modified = answer.meta["last_modified"]
            self._at = 0
            pieces = aiter(answer.stream(min_chunk_size=self._piece))
        assert self._head is not None
        async for piece in pieces:
            data = memoryview(piece)[max(0, self._done - self._at) :]
            self._at += len(memoryview(piece))
            if len(data):
                self._pieces = pieces
                return data
        if self._at != self._head.size:
            return RequestFailure(Cause.CUT, said=f"{self._at} bytes came in place of {self._head.size}")
        return memoryview(b"")


class WholeObjects:
    """The objects of one store that were read whole; the most recent are kept.

    Objects are read one after the other on each event loop, so that readers of different parts of one share a request.

    Args:
        client: of the store.
    """

    def __init__(self, client: StoreClient) -> None:
        self._client = client
        self._kept: OrderedDict[str, tuple[memoryview, Head]] = OrderedDict()
        self._locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()
        self._warned = False

    async def get(self, key: str, *, head: Head | None, index: Any) -> tuple[memoryview, Head]:
        """An object's bytes and metadata.

        Args:
            key: the object.
            head: the metadata of it, which must not have changed.
            index: the sample's index, for errors.

        Raises:
            StoreError: the store refused or failed, on every attempt, or the object has changed.
        """
        async with self._locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            kept = self._kept.get(key)
            if kept is not None and (head is None or kept[1] == head):
                return kept

            async def request(store: ObjectStore) -> tuple[memoryview, Head] | RequestFailure:
                begun = await _get(self._client, store, key, head)
                if isinstance(begun, RequestFailure):
                    return begun
                answer, found = begun
                data = memoryview(await answer.bytes_async())
                if len(data) != found.size:
                    return RequestFailure(Cause.CUT, said=f"{len(data)} bytes came in place of {found.size}")
                return data, found

            read = await self._client.attempt(request, doing=f"reading {key!r}", key=key, index=index)
            if read[1].size:
                self._warn()
                self._keep(key, read)
            return read

    def _keep(self, key: str, read: tuple[memoryview, Head]) -> None:
        self._kept[key] = read
        self._kept.move_to_end(key)
        while len(self._kept) > 1 and sum(len(data) for data, _ in self._kept.values()) > KEPT:
            self._kept.popitem(last=False)

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            what = (
                f"{redact_url(self._client.url)} does not do ranges (python -m http.server does not, nginx does): for "
                f"a part of an object all of it is read. The last {KEPT >> 20} MiB of objects are kept in memory."
            )
            with contextlib.suppress(Warning):  # as an error, by the user's filter: it must not cost the sample
                warnings.warn(what, stacklevel=2)
