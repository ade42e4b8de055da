"""Objects of a store as samples: one GET each."""

from __future__ import annotations

import asyncio
import pickle
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import anyio.to_thread
import numpy as np
import obstore
from obstore import get_range_async
from obstore.store import HTTPStore, MemoryStore

from headrace.datasets.base import AsyncDataset, face_loop
from headrace.datasets.labels import Labels, align_labels
from headrace.errors import EmptyListingError, NotPicklableError, StoreError, StoreUnreachableError
from headrace.io import forks
from headrace.io.stores import NATIVE_ERRORS, describe_error, open_store, store_error
from headrace.io.urls import redact_url, secrets_in

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = ["ObjectDataset", "ObjectSample"]

Listing = tuple[tuple[str, ...], "array[int] | None"]

PAGE = 1000  # objects to a page of a listing: what S3, GCS and Azure give at most, or nearly


class ObjectSample(NamedTuple):
    """An object: its key, its bytes, and its label.

    Attributes:
        key: relative to the dataset's URL.
        data: a read-only view of the bytes as the store's client received them, without a copy. Most decoders take
            it as it is (`io.BytesIO`, `numpy.frombuffer`, `PIL`); write ``bytes(sample.data)`` where `bytes` are
            needed.
        label: as `labels=` said, or None.
    """

    key: str
    data: memoryview
    label: Any

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # A memoryview cannot be pickled; from protocol 5 on its bytes go out of band, without a copy. The array in
        # between is for CPython 3.11, which crashes where the collector clears a memoryview under a PickleBuffer of it.
        array: Any = np.frombuffer(self.data, dtype=np.uint8) if self.data.nbytes else b""
        data = pickle.PickleBuffer(array) if protocol >= 5 else bytes(array)
        return _restore_sample, (self.key, data, self.label)


def _restore_sample(key: str, data: Any, label: Any) -> ObjectSample:
    return ObjectSample(key, memoryview(data).toreadonly(), label)


class ObjectDataset(AsyncDataset[ObjectSample]):
    """The objects under a URL, one sample each: `ObjectSample(key, data, label)`.

    The store is listed once, when the dataset is made; the keys are sorted, so an index means the same object every
    time. Since a listing tells the sizes, a sample is one GET of a known range, the cheapest request there is.

    Making one waits for the listing; in an async program use ``await ObjectDataset.open(...)`` in its place.

    Args:
        url: where the objects are: ``s3://bucket/prefix``, ``gs://``, ``az://``, ``http(s)://``, ``file:///directory``.
        keys: the objects, relative to `url`, in this order; nothing is listed then. Needed for most HTTP servers.
        suffix: list only keys that end so, e.g. ``".jpg"`` or ``(".jpg", ".png")``.
        labels: what the label of a key is: a function of the key, a mapping from it, or a sequence in the order of
            `keys` (of the sorted listing, if there are none).
        store_options: for `obstore.store.from_url`: credentials, region, endpoint, `client_options`, `retry_config`.
        store: a ready store of obstore's to use, for which `url` is no more than a name in messages. `memory://`
            needs it.
        timeout: seconds that the listing may take in all, and that one GET may; a GET that failed is tried again only
            within them. Options of the same meaning in `store_options` win.

    Raises:
        EmptyListingError: nothing was listed, or nothing that ends in `suffix`.
        StoreUnreachableError: no answer within `timeout`.
        StoreError: the store refused, or failed otherwise; so does a sample whose object changed since it was listed.
        ForkedError: this process is a fork of one that had used a store.
        ValueError: an argument makes no sense.

    Example:
        >>> import pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "7.bin").write_bytes(b"seven")
        >>> dataset = ObjectDataset(folder.as_uri(), labels=lambda key: int(key[0]))
        >>> key, data, label = dataset[0]
        >>> key, bytes(data), label
        ('7.bin', b'seven', 7)
    """

    def __init__(
        self,
        url: str,
        *,
        keys: Sequence[str] | None = None,
        suffix: str | tuple[str, ...] | None = None,
        labels: Labels = None,
        store_options: Mapping[str, Any] | None = None,
        store: ObjectStore | None = None,
        timeout: float = 30.0,
    ) -> None:
        self._configure(url, keys, suffix, store_options, store, timeout)
        listed = (tuple(keys), None) if keys is not None else face_loop().run(self._list(suffix))
        self._hold(listed, labels)

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        keys: Sequence[str] | None = None,
        suffix: str | tuple[str, ...] | None = None,
        labels: Labels = None,
        store_options: Mapping[str, Any] | None = None,
        store: ObjectStore | None = None,
        timeout: float = 30.0,
    ) -> Self:
        """Make a dataset without blocking the caller's loop, be it asyncio, uvloop or trio.

        Cancelling it ends the listing. Arguments and errors are those of the class.
        """
        dataset = cls.__new__(cls)
        dataset._configure(url, keys, suffix, store_options, store, timeout)
        listed: Listing
        if keys is not None:
            listed = tuple(keys), None
        else:
            listing = face_loop().start(dataset._list(suffix))
            try:
                listed = await anyio.to_thread.run_sync(listing.result, abandon_on_cancel=True)
            finally:
                listing.cancel()
        dataset._hold(listed, labels)
        return dataset

    @property
    def keys(self) -> Sequence[str]:
        """The key of each sample, in the order of their indices."""
        return self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({redact_url(self._url)!r}, {len(self)} keys)"

    async def aget(self, index: int) -> ObjectSample:
        """Fetch the object at `index`; as with a list, negative indices count from the end.

        Raises:
            IndexError: there is no such index.
            ObjectNotFoundError: the object is gone.
            StoreUnreachableError: no answer within the time-out.
            StoreError: the store refused or failed, or the object is not of the length that was listed.
        """
        store = self._store
        if store is None or forks.forked_from is not None:
            store = self._connect()
        try:
            key = self._keys[index]
        except IndexError:
            raise IndexError(f"index {index} is out of range for {self!r}") from None
        label = None if self._labels is None else self._labels[index]
        size = None if self._sizes is None else self._sizes[index]
        try:
            if size:
                data = memoryview(await get_range_async(store, key, start=0, length=size))
            elif size is None:
                data = memoryview(await (await obstore.get_async(store, key)).bytes_async())
            else:
                data = _NOTHING  # an empty range cannot be asked for
        except NATIVE_ERRORS as error:
            failure = self._error(error, f"reading object {key!r} (index {index})")
        else:
            if size is None or len(data) == size:
                return ObjectSample(key, data, label)
            failure = self._changed(index, size, len(data))
        raise failure  # outside the handler, so that obstore's error, which may name secrets, is not its context

    def sample_key(self, index: int) -> str:
        """The key at `index`."""
        return self._keys[index]

    def __getstate__(self) -> dict[str, Any]:
        if isinstance(self._given, MemoryStore):
            raise NotPicklableError(
                what=repr(self),
                reason="its store is the memory of this process",
                remedy="Use a file:// URL or another store to take a dataset to other processes.",
            )
        return {**self.__dict__, "_store": None}

    def _configure(
        self,
        url: str,
        keys: Sequence[str] | None,
        suffix: str | tuple[str, ...] | None,
        store_options: Mapping[str, Any] | None,
        store: ObjectStore | None,
        timeout: float,
    ) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout={timeout!r} must be more than zero seconds")
        if store is not None and store_options is not None:
            raise ValueError("store= is ready for use; store_options= would be ignored. Give one of the two")
        if store is None and url.startswith("memory:"):
            raise ValueError("a memory:// URL names no store that exists: give the MemoryStore itself as store=")
        if isinstance(keys, str):
            raise TypeError("keys= must be a sequence of keys, not one str")
        if keys is not None and suffix is not None:
            raise ValueError("suffix= filters a listing, and with keys= nothing is listed. Give one of the two")
        if keys is not None and len(keys) == 0:
            raise ValueError("keys= is empty: a dataset needs at least one key")
        self._url = url
        self._options = dict(store_options or {})
        self._given = store
        self._timeout = timeout
        self._store: ObjectStore | None = None

    def _hold(self, listed: Listing, labels: Labels) -> None:
        self._keys, self._sizes = listed
        self._labels = align_labels(labels, self._keys)

    def _connect(self) -> ObjectStore:
        """The store, opened at the first use in this process."""
        forks.note_store_io()
        store = self._given
        if store is None:
            store = open_store(self._url, self._options, timeout=self._timeout)
        self._store = store
        return store

    async def _list(self, suffix: str | tuple[str, ...] | None) -> Listing:
        store = self._connect()
        keys: list[str] = []
        sizes = array("q")
        seen = 0
        try:
            async with asyncio.timeout(self._timeout):
                async for page in obstore.list(store, chunk_size=PAGE):
                    seen += len(page)
                    for entry in page:
                        if suffix is None or entry["path"].endswith(suffix):
                            keys.append(entry["path"])
                            sizes.append(entry["size"])
        except TimeoutError:
            failure: StoreError | None = StoreUnreachableError(
                f"listing was not done within {self._timeout} s, {seen} objects were seen; raise timeout= if that is "
                f"too short for this store",
                url=redact_url(self._url),
            )
        except NATIVE_ERRORS as error:
            failure = self._listing_error(error, store)
        else:
            failure = None if keys else self._nothing_listed(suffix, seen)
        if failure is not None:
            raise failure  # outside the handlers, as in `aget`
        order = sorted(range(len(keys)), key=keys.__getitem__)
        return tuple(keys[i] for i in order), array("q", (sizes[i] for i in order))

    def _listing_error(self, error: BaseException, store: ObjectStore) -> StoreError:
        failure = self._error(error, "listing")
        if isinstance(store, HTTPStore) and not isinstance(failure, StoreUnreachableError):
            cause = describe_error(error, secrets_in(self._options))
            message = (
                f"this server cannot list, over HTTP that takes WebDAV; say which objects with keys=[...]: {cause}"
            )
            return StoreError(message, url=redact_url(self._url))
        return failure

    def _nothing_listed(self, suffix: str | tuple[str, ...] | None, seen: int) -> EmptyListingError:
        if suffix is None or not seen:
            message = "the listing is empty; a URL names a whole directory, not the beginning of a name"
        else:
            message = f"{seen} objects were listed, but no key ends in suffix={suffix!r}"
        return EmptyListingError(message, url=redact_url(self._url))

    def _changed(self, index: int, listed: int, received: int) -> StoreError:
        message = (
            f"object {self._keys[index]!r} (index {index}) gave {received} bytes, and {listed} were listed: "
            f"it changed since. Make the dataset anew"
        )
        return StoreError(message, url=redact_url(self._url))

    def _error(self, error: BaseException, doing: str) -> StoreError:
        return store_error(error, doing=doing, url=self._url, secrets=secrets_in(self._options))


_NOTHING = memoryview(b"")
