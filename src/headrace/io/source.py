"""An object store that a dataset reads ranges from: opened at first use, the same in every process, safe in errors.

Every read of shards and files of tokens goes through `Source.read`, so that what reading means (retries, hedging,
limits) can be changed in one place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import obstore
from obstore.exceptions import PreconditionError
from obstore.store import HTTPStore, MemoryStore

from headrace.errors import NotPicklableError, ObjectNotFoundError, StoreError, StoreUnreachableError
from headrace.io import forks
from headrace.io.stores import NATIVE_ERRORS, describe_error, open_store, store_error
from headrace.io.urls import redact_url, secrets_in

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = ["Head", "Read", "Source"]

_GONE = (ObjectNotFoundError, StoreUnreachableError)
PAGE = 1000  # objects to a page of a listing: what S3, GCS and Azure give at most, or nearly


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
        timeout: seconds for one request.
    """

    def __init__(self, url: str, options: Mapping[str, Any], store: ObjectStore | None, timeout: float) -> None:
        self._url = url
        self._options = dict(options)
        self._given = store
        self._timeout = timeout
        self._store: ObjectStore | None = None

    def name(self, key: str) -> str:
        """The URL of an object, without secrets."""
        return f"{redact_url(self._url).rstrip('/')}/{key}"

    async def head(self, key: str) -> Head:
        """Ask for an object's size and version.

        Raises:
            StoreError: the store refused or failed, or there is no such object.
        """
        try:
            meta = await obstore.head_async(self._connected(), key)
        except NATIVE_ERRORS as error:
            failure = self._error(error, f"asking for {key!r}")
        else:
            return Head(key, meta["size"], meta["e_tag"])
        raise failure  # outside the handler, so that obstore's error, which may name secrets, is not its context

    async def read(self, key: str, start: int, stop: int, *, head: Head | None = None) -> Read:
        """Read the bytes from `start` up to `stop`, or up to the object's end.

        Args:
            key: the object.
            start: the first byte.
            stop: behind the last byte; more than `start`.
            head: what is known of the object. The bytes are of that version and length, or it is an error.

        Raises:
            StoreError: the store refused or failed, or the object has changed since `head` was asked for.
        """
        options: dict[str, Any] = {"range": (start, stop)}
        if head is not None and head.etag is not None:
            options["if_match"] = head.etag
        store = self._connected()
        doing = f"reading bytes {start} to {stop} of {key!r}"
        try:
            answer = await obstore.get_async(store, key, options=options)  # type: ignore[arg-type]
            data = memoryview(await answer.bytes_async())
        except PreconditionError:
            failure, may_be_empty = self._changed(key, doing), False
        except NATIVE_ERRORS as error:
            failure = self._error(error, doing)
            may_be_empty = head is None and start == 0 and not isinstance(failure, _GONE)
        else:
            may_be_empty = False
            found = Head(key, answer.meta["size"], answer.meta["e_tag"])
            if head is not None and (found.size != head.size or (head.etag and found.etag and head.etag != found.etag)):
                failure = self._changed(key, doing)
            elif len(data) != min(stop, found.size) - start:
                what = f"{doing}: {len(data)} bytes came in place of {min(stop, found.size) - start}"
                failure = StoreError(what, url=redact_url(self._url))
            else:
                return Read(data, found)
        if may_be_empty and (empty := await self._empty(key)) is not None:
            return Read(memoryview(b""), empty)
        raise failure

    async def put(self, key: str, data: bytes) -> None:
        """Store an object.

        Raises:
            StoreError: the store refused or failed.
        """
        try:
            await obstore.put_async(self._connected(), key, data)
        except NATIVE_ERRORS as error:
            failure = self._error(error, f"writing {key!r}")
        else:
            return
        raise failure

    async def list(self, prefix: str) -> list[Head]:
        """All objects whose keys begin with the path `prefix`, sorted by key.

        Raises:
            StoreUnreachableError: the listing took longer than the time-out.
            StoreError: the store refused or failed, or cannot list.
        """
        store = self._connected()
        found: list[Head] = []
        try:
            async with asyncio.timeout(self._timeout):
                async for page in obstore.list(store, prefix or None, chunk_size=PAGE):
                    found.extend(Head(entry["path"], entry["size"], entry["e_tag"]) for entry in page)
        except TimeoutError:
            what = f"listing was not done within {self._timeout} s, {len(found)} objects were seen; raise timeout="
            failure: StoreError = StoreUnreachableError(what, url=redact_url(self._url))
        except NATIVE_ERRORS as error:
            failure = self._error(error, "listing")
            if isinstance(store, HTTPStore) and not isinstance(failure, StoreUnreachableError):
                cause = describe_error(error, secrets_in(self._options))
                what = f"this server cannot list, over HTTP that takes WebDAV; name each object: {cause}"
                failure = StoreError(what, url=redact_url(self._url))
        else:
            return sorted(found, key=lambda head: head.key)
        raise failure

    def __getstate__(self) -> dict[str, Any]:
        if isinstance(self._given, MemoryStore):
            raise NotPicklableError(
                what=f"a dataset in {redact_url(self._url)!r}",
                reason="its store is the memory of this process",
                remedy="Use a file:// URL or another store to take a dataset to other processes.",
            )
        return {**self.__dict__, "_store": None}

    def __repr__(self) -> str:
        return f"Source({redact_url(self._url)!r})"

    def _connected(self) -> ObjectStore:
        if self._store is not None and forks.forked_from is None:
            return self._store
        forks.note_store_io()
        store = self._given
        if store is None:
            store = open_store(self._url, self._options, timeout=self._timeout)
        self._store = store
        return store

    async def _empty(self, key: str) -> Head | None:
        """An object that turns out to be empty: it has no range that could be asked for."""
        try:
            # Not HEAD: to that, some servers do not tell an empty object's length.
            meta = (await obstore.get_async(self._connected(), key)).meta
        except NATIVE_ERRORS:
            return None
        return None if meta["size"] else Head(key, 0, meta["e_tag"])

    def _changed(self, key: str, doing: str) -> StoreError:
        what = f"{doing}: the object has changed since it was opened, or listed. Make the dataset anew"
        return StoreError(what, url=redact_url(self._url))

    def _error(self, error: BaseException, doing: str) -> StoreError:
        return store_error(error, doing=doing, url=self._url, secrets=secrets_in(self._options))
