"""Objects of a store as samples: one GET each, several for a large one."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import anyio.to_thread
import numpy as np
from obstore.store import HTTPStore

from headrace.datasets.base import face_loop
from headrace.datasets.cached import Cacheable, Extent
from headrace.datasets.labels import Labels, align_labels
from headrace.errors import EmptyListingError, StoreError, StoreUnreachableError
from headrace.io.checksums import check_form
from headrace.io.etags import Etags, strong
from headrace.io.reader import StoreReader
from headrace.io.urls import redact_url
from headrace.options import RetryPolicy, as_policy

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = ["ObjectDataset", "ObjectSample"]

_Listed = tuple[tuple[str, ...], "array[int] | None", "list[str | None] | None"]  # keys, sizes, entity tags


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


class ObjectDataset(Cacheable[ObjectSample]):
    """The objects under a URL, one sample each: `ObjectSample(key, data, label)`.

    The store is listed once, when the dataset is made; the keys are sorted, so an index means the same object every
    time. Since a listing tells the sizes, a sample is one GET of a known range, and an object of more than 16 MiB a few
    of them at once. Since it tells the entity tags, an object that is overwritten later is an error and not a mixture.

    What fails is tried again where that may help; docs/retries.md has the table.

    Making one waits for the listing; in an async program use ``await ObjectDataset.open(...)`` in its place.

    Args:
        url: where the objects are: ``s3://bucket/prefix``, ``gs://``, ``az://``, ``http(s)://``, ``file:///directory``.
        keys: the objects, relative to `url`, in this order; nothing is listed then. Needed for most HTTP servers.
        suffix: list only keys that end so, e.g. ``".jpg"`` or ``(".jpg", ".png")``.
        labels: what the label of a key is: a function of the key, a mapping from it, or a sequence in the order of
            `keys` (of the sorted listing, if there are none).
        checksums: what each object's bytes must be, as ``algorithm:hexadecimal`` (sha256, sha1, md5, crc32); given as
            `labels` are. None for an object that has none.
        store_options: for `obstore.store.from_url`: credentials, region, endpoint, `client_options`, `retry_config`;
            and ``"allow_redirects"``, whether the store may send its clients to another host (docs/datasets.md).
        store: a ready store of obstore's to use, for which `url` is no more than a name in messages. `memory://`
            needs it. Its own time-outs and retries stay as they are.
        timeout: seconds without a byte after which a request has failed, be it for a page of the listing or for an
            object; however long one takes in all, as long as it goes on. Options of the same meaning in
            `store_options` win.
        retry: how failed requests are tried again: a `RetryPolicy`, or the most attempts at one request. A loader's
            `retry` goes before it.
        if_match: whether a GET says which entity tag was listed, so that an object of the same length that was
            overwritten since is an error too. False saves some 50 µs of CPU time a sample.

    Raises:
        EmptyListingError: nothing was listed, or nothing that ends in `suffix`.
        StoreUnreachableError: no answer within `timeout`, on every attempt.
        StoreError: the store refused, or failed otherwise.
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
        checksums: Labels = None,
        store_options: Mapping[str, Any] | None = None,
        store: ObjectStore | None = None,
        timeout: float = 30.0,
        retry: RetryPolicy | int | None = None,
        if_match: bool = True,
    ) -> None:
        self._configure(url, keys, suffix, store_options, store, timeout, retry, if_match)
        listed = _given(keys) if keys is not None else face_loop().run(self._list(suffix))
        self._hold(listed, labels, checksums)

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        keys: Sequence[str] | None = None,
        suffix: str | tuple[str, ...] | None = None,
        labels: Labels = None,
        checksums: Labels = None,
        store_options: Mapping[str, Any] | None = None,
        store: ObjectStore | None = None,
        timeout: float = 30.0,
        retry: RetryPolicy | int | None = None,
        if_match: bool = True,
    ) -> Self:
        """Make a dataset without blocking the caller's loop, be it asyncio, uvloop or trio.

        Cancelling it ends the listing. Arguments and errors are those of the class.
        """
        dataset = cls.__new__(cls)
        dataset._configure(url, keys, suffix, store_options, store, timeout, retry, if_match)
        if keys is not None:
            listed = _given(keys)
        else:
            listing = face_loop().start(dataset._list(suffix))
            try:
                listed = await anyio.to_thread.run_sync(listing.result, abandon_on_cancel=True)
            finally:
                listing.cancel()
        dataset._hold(listed, labels, checksums)
        return dataset

    @property
    def keys(self) -> Sequence[str]:
        """The key of each sample, in the order of their indices."""
        return self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({redact_url(self._reader.url)!r}, {len(self)} keys)"

    async def aget(self, index: int) -> ObjectSample:
        """Fetch the object at `index`; as with a list, negative indices count from the end.

        Raises:
            IndexError: there is no such index.
            ObjectNotFoundError: the object is gone.
            ObjectChangedError: the object is not the one that was listed.
            DamagedObjectError: its bytes are not those of its checksum, on every attempt.
            StoreUnreachableError: no answer within the time-out, on every attempt.
            StoreError: the store refused or failed.
        """
        return self.sample_of(index, await self.read_bytes(index))

    def extent(self, index: int) -> Extent:
        """Which bytes the object at `index` is, for a cache; raises `IndexError` if there is none."""
        key = self._key(index)
        size = None if self._sizes is None else self._sizes[index]
        tag = None if self._tags is None else self._tags[index]
        checksum = None if self._checksums is None else self._checksums[index]
        return Extent(self._reader.identity, key, tag, 0, size, checksum)

    async def read_bytes(self, index: int) -> memoryview:
        """Fetch the bytes of the object at `index`; errors are those of `aget`."""
        key = self._key(index)
        checksum = None if self._checksums is None else self._checksums[index]
        if self._sizes is None:
            return await self._reader.read_all(key, index=index, checksum=checksum)
        size = self._sizes[index]
        tag = self._tags[index] if self._if_match and self._tags is not None else None
        return await self._reader.read(key, 0, size, index=index, size=size, etag=tag, checksum=checksum)

    def sample_of(self, index: int, data: memoryview) -> ObjectSample:
        """The sample at `index`, of its bytes."""
        return ObjectSample(self._keys[index], data, None if self._labels is None else self._labels[index])

    def sample_key(self, index: int) -> str:
        """The key at `index`."""
        return self._keys[index]

    def _key(self, index: int) -> str:
        try:
            return self._keys[index]
        except IndexError:
            raise IndexError(f"index {index} is out of range for {self!r}") from None

    def _configure(
        self,
        url: str,
        keys: Sequence[str] | None,
        suffix: str | tuple[str, ...] | None,
        store_options: Mapping[str, Any] | None,
        store: ObjectStore | None,
        timeout: float,
        retry: RetryPolicy | int | None,
        if_match: bool,
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
        policy = None if retry is None else as_policy(retry)
        self._reader = StoreReader(url, store_options or {}, store=store, timeout=timeout, retry=policy)
        self._if_match = if_match

    def _hold(self, listed: _Listed, labels: Labels, checksums: Labels) -> None:
        self._keys, self._sizes, tags = listed
        self._tags = Etags(tags) if tags is not None else None
        self._labels = align_labels(labels, self._keys)
        self._checksums = align_labels(checksums, self._keys)
        for checksum in self._checksums or ():
            if checksum is not None:
                check_form(checksum)

    async def _list(self, suffix: str | tuple[str, ...] | None) -> _Listed:
        found: dict[str, tuple[int, str | None]] = {}
        seen = 0
        failure: StoreError | None = None
        try:
            async for page in self._reader.list():
                seen += len(page)
                for entry in page:
                    if suffix is None or entry["path"].endswith(suffix):
                        found[entry["path"]] = entry["size"], strong(entry["e_tag"])
        except StoreUnreachableError:
            raise
        except StoreError as error:
            if not isinstance(self._reader.store, HTTPStore):
                raise
            failure = self._cannot_list(error)
        if failure is None and not found:
            failure = self._nothing_listed(suffix, seen)
        if failure is not None:
            raise failure
        keys = tuple(sorted(found))
        return keys, array("q", (found[key][0] for key in keys)), [found[key][1] for key in keys]

    def _cannot_list(self, error: StoreError) -> StoreError:
        message = f"this server cannot list, over HTTP that takes WebDAV; say which objects with keys=[...]: {error}"
        return StoreError(message, url=redact_url(self._reader.url), status=error.status)

    def _nothing_listed(self, suffix: str | tuple[str, ...] | None, seen: int) -> EmptyListingError:
        if suffix is None or not seen:
            message = "the listing is empty; a URL names a whole directory, not the beginning of a name"
        else:
            message = f"{seen} objects were listed, but no key ends in suffix={suffix!r}"
        return EmptyListingError(message, url=redact_url(self._reader.url))


def _given(keys: Sequence[str]) -> _Listed:
    return tuple(keys), None, None
