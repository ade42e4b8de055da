"""Objects of a store as samples: one GET each, several for a large one."""

from __future__ import annotations

import operator
from collections.abc import Awaitable, Sequence
from typing import Any, NamedTuple, Self, SupportsIndex

import anyio.to_thread

from headrace._core.interface.background_loop import background_loop
from headrace._core.interface.reprs import sample_repr
from headrace._core.manifest.labels import Labels
from headrace._core.manifest.object_list import ObjectList, ObjectOptions
from headrace._core.manifest.table_file import PathOrUrl
from headrace._core.store.listing import list_objects
from headrace._core.store.store import StoreLike
from headrace._core.transport.pickling import out_of_band
from headrace.datasets.cached import Cacheable, Extent

__all__ = ["ObjectDataset", "ObjectOptions", "ObjectSample"]


class ObjectSample(NamedTuple):
    """An object: its key, its bytes, and its label.

    Attributes:
        key: relative to the dataset's URL.
        data: a read-only view of the bytes as the store's client received them, without a copy. Most decoders take
            it as it is (`io.BytesIO`, `numpy.frombuffer`, `PIL`); write ``bytes(sample.data)`` where `bytes` are
            needed.
        label: from `labels=`, or None.
    """

    key: str
    data: memoryview
    label: Any

    def __repr__(self) -> str:
        return sample_repr(self)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        # A memoryview cannot be pickled; from protocol 5 on its bytes go out of band, without a copy.
        data = out_of_band(self.data) if operator.index(protocol) >= 5 else bytes(self.data)
        return _restore_sample, (self.key, data, self.label)


def _restore_sample(key: str, data: bytes | memoryview, label: object) -> ObjectSample:
    return ObjectSample(key, memoryview(data).toreadonly(), label)


class ObjectDataset(ObjectList, Cacheable[ObjectSample]):
    """The objects under a URL, one sample each: `ObjectSample(key, data, label)`.

    The store is listed once, when the dataset is made; the keys are sorted, so an index means the same object every
    time. Since a listing tells the sizes, a sample is one GET of a known range, and an object of more than 16 MiB a few
    of them at once. Since it tells the entity tags, an object that is overwritten later is an error and not a mixture.

    What fails is tried again where that may help; docs/retries.md has the table.

    Empty objects that stand for a folder, as S3's console makes them, are left out: an empty object `a` is taken for
    one if there are others whose keys begin with `a/`.

    Making one waits for the listing; in an async program use ``await ObjectDataset.open(...)`` in its place.

    Args:
        store: where the objects are: a URL (``s3://bucket/prefix``, ``gs://``, ``az://``, ``http(s)://``,
            ``file:///directory``), a directory's path, or a `headrace.Store` with options, time-out and retries.
        keys: the objects, relative to the store's URL, in this order; nothing is listed then. Needed for most HTTP
            servers.
        suffix: list only keys that end so, e.g. ``".jpg"`` or ``(".jpg", ".png")``.
        labels: what the label of a key is: a function of the key, a mapping from it, or a sequence in the order of
            `keys` (of the sorted listing, if there are none).
        checksums: what each object's bytes must be, as ``algorithm:hexadecimal`` (sha256, sha1, md5, crc32); given as
            `labels` are. None for an object that has none.
        manifest: a file that keeps the listing, a path or a URL: where it is there, it is read and nothing is listed;
            where not, it is written after the listing. It must be of this store and `suffix`. Its name says which
            format it is, as for `from_manifest`.

    Raises:
        EmptyListingError: nothing was listed, or nothing that ends in `suffix`.
        StoreUnreachableError: no answer within `timeout`, on every attempt.
        StoreError: the store refused, or failed otherwise.
        ForkedError: this process is a fork of one that had used a store.
        ManifestError: `manifest` is of another listing, or damaged.
        ValueError: an argument makes no sense.

    Example:
        >>> import pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "7.bin").write_bytes(b"seven")
        >>> dataset = ObjectDataset(folder, labels=lambda key: int(key[0]))
        >>> key, data, label = dataset[0]
        >>> key, bytes(data), label
        ('7.bin', b'seven', 7)
    """

    def __init__(
        self,
        store: StoreLike,
        *,
        keys: Sequence[str] | None = None,
        suffix: str | tuple[str, ...] | None = None,
        labels: Labels = None,
        checksums: Labels = None,
        manifest: PathOrUrl | None = None,
    ) -> None:
        catalog, cache = self._configure(store, keys, suffix, manifest)
        if catalog is None and cache is not None:
            catalog = cache.read()
        if catalog is None:
            catalog = background_loop().run(list_objects(self._client, suffix))
            if cache is not None:
                cache.write(catalog)
        self._hold(catalog, labels, checksums)

    @classmethod
    async def open(
        cls,
        store: StoreLike,
        *,
        keys: Sequence[str] | None = None,
        suffix: str | tuple[str, ...] | None = None,
        labels: Labels = None,
        checksums: Labels = None,
        manifest: PathOrUrl | None = None,
    ) -> Self:
        """Make a dataset without blocking the caller's loop, be it asyncio, uvloop or trio.

        Cancelling it ends the listing. Arguments and errors are those of the class.
        """
        dataset = cls.__new__(cls)
        catalog, cache = dataset._configure(store, keys, suffix, manifest)
        if catalog is None and cache is not None:
            catalog = await anyio.to_thread.run_sync(cache.read, abandon_on_cancel=True)
        if catalog is None:
            listing = background_loop().start(list_objects(dataset._client, suffix))
            try:
                catalog = await anyio.to_thread.run_sync(listing.result, abandon_on_cancel=True)
            finally:
                listing.cancel()
            if cache is not None:
                await anyio.to_thread.run_sync(cache.write, catalog)
        dataset._hold(catalog, labels, checksums)
        return dataset

    async def aget(self, index: int) -> ObjectSample:
        """Fetch the object at `index`; as with a list, negative indices count from the end.

        Raises:
            IndexError: there is no such index.
            ObjectNotFoundError: the object is gone.
            ObjectChangedError: the object is not the one that was listed.
            ChecksumError: its bytes are not those of its checksum, on every attempt.
            StoreUnreachableError: no answer within the time-out, on every attempt.
            StoreError: the store refused or failed.
        """
        return self.sample_of(index, await self.read_bytes(index))

    def extent(self, index: int) -> Extent:
        """Which bytes the object at `index` is, for a cache; raises `IndexError` if there is none."""
        key = self._key(index)
        etag = None if self._etags is None else self._etags[index]
        size = self._size(index)
        return Extent(self._client.store_id, key, etag, 0, None if size < 0 else size, self._checksum(index))

    def read_bytes(self, index: int) -> Awaitable[memoryview]:
        """Fetch the bytes of the object at `index`; errors are those of `aget`."""
        key = self._key(index)
        etag = None if self._etags is None else self._etags[index]
        size, checksum = self._size(index), self._checksum(index)
        if size < 0:
            return self._client.read_all(key, index=index, etag=etag, checksum=checksum)
        return self._client.read(key, 0, size, index=index, size=size, etag=etag, checksum=checksum)

    def sample_of(self, index: int, data: memoryview) -> ObjectSample:
        """The sample at `index`, of its bytes."""
        return ObjectSample(self._keys[index], data, None if self._labels is None else self._labels[index])
