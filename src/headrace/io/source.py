"""An object store that a dataset of shards or files of tokens reads ranges from, each of a known version.

Beneath it is the `StoreReader` that all datasets over stores share, with its retries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import obstore
from obstore.store import AzureStore, HTTPStore

from headrace.errors import ObjectNotFoundError, StoreError, StoreUnreachableError
from headrace.io.etags import same_tag, strong
from headrace.io.reader import StoreReader
from headrace.io.urls import redact_url
from headrace.io.verdicts import Cause, Verdict

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = ["Head", "Read", "Source"]


@dataclass(frozen=True, slots=True)
class Head:
    """What a store says of an object.

    Attributes:
        key: the object's.
        size: in bytes.
        etag: which version it is; None where the store does not say.
    """

    key: str
    size: int
    etag: str | None


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
    """A store, by its URL.

    Args:
        url: of the store: a bucket, or a directory of a server or of this machine.
        options: for `obstore.store.from_url`.
        store: a ready one to use, for which `url` is a name in messages.
        timeout: seconds without a byte after which a request has failed.
    """

    def __init__(self, url: str, options: Mapping[str, Any], store: ObjectStore | None, timeout: float) -> None:
        self._reader = StoreReader(url, options, store=store, timeout=timeout)

    def name(self, key: str) -> str:
        """The URL of an object, without secrets."""
        return f"{redact_url(self._reader.url).rstrip('/')}/{key}"

    @property
    def identity(self) -> str | None:
        """What tells this store from others; see `headrace.io.identity`."""
        return self._reader.identity

    async def head(self, key: str) -> Head:
        """Ask for an object's size and version.

        Raises:
            StoreError: the store refused or failed, or there is no such object.
        """

        async def request(store: ObjectStore) -> Head | Verdict:
            meta = await obstore.head_async(store, key)
            return Head(key, meta["size"], meta["e_tag"])

        return await self._reader.attempt(request, doing=f"asking for {key!r}", key=key)

    async def read(self, key: str, start: int, stop: int, *, head: Head | None = None, index: Any = None) -> Read:
        """Read the bytes from `start` up to `stop`, or up to the object's end.

        Args:
            key: the object.
            start: the first byte.
            stop: behind the last byte; more than `start`.
            head: what is known of the object. The bytes are of that version and length, or it is an error.
            index: the sample's index, for errors.

        Raises:
            StoreError: the store refused or failed, or the object has changed since `head` was asked for.
        """
        options: dict[str, Any] = {"range": (start, stop)}
        if head is not None and strong(head.etag) is not None:
            options["if_match"] = head.etag

        async def request(store: ObjectStore) -> Read | Verdict:
            answer = await obstore.get_async(store, key, options=options)  # type: ignore[arg-type]
            data = memoryview(await answer.bytes_async())
            found = Head(key, answer.meta["size"], answer.meta["e_tag"])
            if head is not None and (found.size != head.size or not same_tag(head.etag, found.etag)):
                return Verdict(Cause.CHANGED)
            if len(data) != (expected := min(stop, found.size) - start):
                return Verdict(Cause.CUT, said=f"{len(data)} bytes came in place of {expected}")
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

        async def request(store: ObjectStore) -> Read | Verdict:
            answer = await obstore.get_async(store, key, options={"range": {"suffix": length}})
            data = memoryview(await answer.bytes_async())
            found = Head(key, answer.meta["size"], answer.meta["e_tag"])
            if len(data) != (expected := min(length, found.size)):
                return Verdict(Cause.CUT, said=f"{len(data)} bytes came in place of {expected}")
            return Read(data, found)

        try:
            return await self._reader.attempt(request, doing=f"reading the end of {key!r}", key=key)
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
                found.update({entry["path"]: Head(entry["path"], entry["size"], entry["e_tag"]) for entry in page})
        except StoreUnreachableError:
            raise
        except StoreError as error:
            if not isinstance(self._reader.store, HTTPStore):
                raise
            what = f"this server cannot list, over HTTP that takes WebDAV; name each object: {error}"
            raise StoreError(what, url=redact_url(self._reader.url)) from error
        return sorted(found.values(), key=lambda head: head.key)

    def __repr__(self) -> str:
        return f"Source({redact_url(self._reader.url)!r})"

    async def _empty(self, key: str) -> Head | None:
        """An object that turns out to be empty: it has no range that could be asked for."""

        async def request(store: ObjectStore) -> Head | Verdict:
            # Not HEAD: to that, some servers do not tell an empty object's length.
            meta = (await obstore.get_async(store, key)).meta
            return Head(key, meta["size"], meta["e_tag"])

        try:
            head = await self._reader.attempt(request, doing=f"asking for {key!r}", key=key)
        except StoreError:  # what was asked for first has failed too, and that error says more
            return None
        return None if head.size else head
