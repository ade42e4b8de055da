"""An object store that a dataset of shards or files of tokens reads ranges from, each of a known version.

Beneath it is the `StoreReader` that all datasets over stores share, with its retries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import obstore
from obstore.store import AzureStore, HTTPStore

from headrace._core.store.errors import Cause, RequestFailure, classify_error
from headrace._core.store.etags import same_tag, strong
from headrace._core.store.open import NATIVE_ERRORS
from headrace._core.store.reader import StoreReader
from headrace._core.store.redaction import redact_url
from headrace._core.store.whole_objects import Head, WholeObjects, WholeStream
from headrace.errors import ObjectNotFoundError, StoreError, StoreUnreachableError

if TYPE_CHECKING:
    from obstore import GetResult
    from obstore.store import ObjectStore


@dataclass(frozen=True, slots=True)
class Read:
    """A range of an object, as it was read.

    Attributes:
        data: the bytes, a view of what the store's client received.
        head: the object they are of.
    """

    data: memoryview
    head: Head


class Source:
    """A store that ranges of objects of known versions are read from.

    Args:
        reader: of the store.
    """

    def __init__(self, reader: StoreReader) -> None:
        self._reader = reader
        self._restart()

    def _restart(self) -> None:
        self._wholes = WholeObjects(self._reader)

    def __getstate__(self) -> dict[str, Any]:
        return {"_reader": self._reader}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._restart()

    def name(self, key: str) -> str:
        """The URL of an object, without secrets."""
        return f"{redact_url(self._reader.url).rstrip('/')}/{key}"

    @property
    def identity(self) -> str | None:
        """What tells this store from others; see `headrace._core.store.store_id`."""
        return self._reader.identity

    async def head(self, key: str) -> Head:
        """Ask for an object's size and version.

        Raises:
            StoreError: the store refused or failed, or there is no such object.
        """

        async def request(store: ObjectStore) -> Head | RequestFailure:
            meta = await obstore.head_async(store, key)
            return Head.of(key, meta)

        return await self._reader.attempt(request, doing=f"asking for {key!r}", key=key)

    async def read(self, key: str, start: int, stop: int, *, head: Head | None = None, index: Any = None) -> Read:
        """Read the bytes from `start` up to `stop`, or up to the object's end; of a store without ranges, all of it.

        Args:
            key: the object.
            start: the first byte.
            stop: behind the last byte; more than `start`.
            head: what is known of the object. The bytes are of that version and length, or it is an error.
            index: the sample's index, for errors.

        Raises:
            StoreError: the store refused or failed, or the object has changed since `head` was asked for.
        """
        read = await self.range(key, start, stop, head=head, index=index)
        return read or await self._part(key, start, stop, head=head, index=index)

    async def range(
        self, key: str, start: int, stop: int, *, head: Head | None = None, index: Any = None
    ) -> Read | None:
        """As `read`, but None if the store does not support ranges: use `stream` then."""
        if self._reader.ranges_ignored:
            return None
        options: dict[str, Any] = {"range": (start, stop)}
        if head is not None and strong(head.etag) is not None:
            options["if_match"] = head.etag

        async def request(store: ObjectStore) -> Read | RequestFailure | None:
            answer = await _get_range(store, key, options)
            if answer is None:
                return None
            data = memoryview(await answer.bytes_async())
            found = Head.of(key, answer.meta)
            if head is not None and (found.size != head.size or not same_tag(head.etag, found.etag)):
                return RequestFailure(Cause.CHANGED)
            if len(data) != (expected := min(stop, found.size) - start):
                return RequestFailure(Cause.CUT, said=f"{len(data)} bytes came in place of {expected}")
            return Read(data, found)

        try:
            doing = f"reading bytes {start} to {stop} of {key!r}"
            return await self._reader.attempt(request, doing=doing, key=key, index=index)
        except StoreError as error:
            failure = error
        unreadable = isinstance(failure, ObjectNotFoundError | StoreUnreachableError)
        if head is None and start == 0 and not unreadable and (empty := await self._empty(key)) is not None:
            return Read(memoryview(b""), empty)
        raise failure

    def stream(self, key: str, piece: int, *, head: Head | None, done: int) -> WholeStream:
        """Read an object from its beginning to its end, without ranges; arguments as for `WholeStream`."""
        return WholeStream(self._reader, key, piece, head=head, done=done)

    async def _part(self, key: str, start: int, stop: int | None, *, head: Head | None, index: Any = None) -> Read:
        """A part of an object that is read whole; with a negative `start` and no `stop`, its end."""
        data, found = await self._wholes.get(key, head=head, index=index)
        return Read(data[start:stop], found)

    async def tail(self, key: str, length: int, *, head: Head | None = None) -> Read:
        """Read the last bytes of an object, by one request unless it is empty.

        Args:
            key: the object.
            length: how many; all of an object that has fewer.
            head: what is known of the object, as for `read`.

        Raises:
            StoreError: the store refused or failed, or the object has changed since `head` was asked for.
        """
        if head is None and isinstance(self._reader.store, AzureStore):
            head = await self.head(key)  # which has no ranges that count from the end
        if head is not None:
            if not head.size:
                return Read(memoryview(b""), head)
            return await self.read(key, max(0, head.size - length), head.size, head=head)

        async def request(store: ObjectStore) -> Read | RequestFailure | None:
            answer = await _get_range(store, key, {"range": {"suffix": length}})
            if answer is None:
                return None
            data = memoryview(await answer.bytes_async())
            found = Head.of(key, answer.meta)
            if len(data) != (expected := min(length, found.size)):
                return RequestFailure(Cause.CUT, said=f"{len(data)} bytes came in place of {expected}")
            return Read(data, found)

        try:
            read = None
            if not self._reader.ranges_ignored:
                read = await self._reader.attempt(request, doing=f"reading the end of {key!r}", key=key)
            return read or await self._part(key, -length, None, head=None)
        except StoreError as error:
            failure = error
        unreadable = isinstance(failure, ObjectNotFoundError | StoreUnreachableError)
        if not unreadable and (empty := await self._empty(key)) is not None:
            return Read(memoryview(b""), empty)
        raise failure

    async def put(self, key: str, data: bytes) -> None:
        """Store an object.

        Raises:
            StoreError: the store refused or failed.
        """

        async def request(store: ObjectStore) -> object:
            return await obstore.put_async(store, key, data)

        await self._reader.attempt(request, doing=f"writing {key!r}", key=key)

    async def list(self, prefix: str) -> list[Head]:
        """All objects whose keys begin with the path `prefix`, sorted by key.

        Raises:
            StoreUnreachableError: a page did not come within the time-out.
            StoreError: the store refused or failed, or cannot list.
        """
        found: dict[str, Head] = {}
        try:
            async for page in self._reader.list(prefix or None):
                found.update({entry["path"]: Head.of(entry["path"], entry) for entry in page})
        except StoreUnreachableError:
            raise
        except StoreError as error:
            if not isinstance(self._reader.store, HTTPStore):
                raise
            what = (
                f"this server cannot list (over HTTP that takes WebDAV): name each, as in '{{000..127}}.tar': {error}"
            )
            raise StoreError(what, url=redact_url(self._reader.url)) from error
        return sorted(found.values(), key=lambda head: head.key)

    def __repr__(self) -> str:
        return f"Source({redact_url(self._reader.url)!r})"

    async def _empty(self, key: str) -> Head | None:
        """An object that turns out to be empty: it has no range that could be asked for."""

        async def request(store: ObjectStore) -> Head | RequestFailure:
            # Not HEAD: to that, some servers do not tell an empty object's length.
            meta = (await obstore.get_async(store, key)).meta
            return Head.of(key, meta)

        try:
            head = await self._reader.attempt(request, doing=f"asking for {key!r}", key=key)
        except StoreError:  # what was asked for first has failed too, and that error says more
            return None
        return None if head.size else head


async def _get_range(store: ObjectStore, key: str, options: dict[str, Any]) -> GetResult | None:
    """Begin to read a range; None if the store does not support ranges. Other errors are obstore's."""
    try:
        return await obstore.get_async(store, key, options=options)  # type: ignore[arg-type]
    except NATIVE_ERRORS as error:
        if classify_error(error).cause is Cause.RANGE_IGNORED:
            return None
        raise
