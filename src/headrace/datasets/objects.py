"""Objects of a store as samples.

A sample is one GET, or several for a large object.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Sequence
from typing import Any, NamedTuple

from headrace._base.text import check_names, sample_repr
from headrace._store.head import Head, check_form, strong
from headrace._store.listing import (
    UNKNOWN,
    Catalog,
    KeyedSamples,
    Labels,
    StringArray,
    list_objects,
)
from headrace._store.store import Store, StoreLike, as_store
from headrace._streams.blocking import background_loop
from headrace._transport.pickling import out_of_band
from headrace.datasets.cached import Cacheable, Extent


class ObjectSample(NamedTuple):
    """An object: the key, the bytes and the label.

    Attributes:
        key: relative to the dataset's URL.
        data: a read-only view of the bytes as received by the store's client, without a copy. Most
            decoders accept the view (`io.BytesIO`, `numpy.frombuffer`, `PIL`). Write
            ``bytes(sample.data)`` where `bytes` are needed, ``bytearray(sample.data)`` where the
            data must be writable, as for `torch.frombuffer`.
        label: from `labels=`, or None.
    """

    key: str
    data: memoryview
    label: Any

    def __repr__(self) -> str:
        return sample_repr(self)

    def __reduce_ex__(self, protocol: Any) -> tuple[object, ...]:
        data: Any = self.data
        if not isinstance(data, memoryview):  # a batch has a list of views
            return ObjectSample, (*self,)
        # A memoryview cannot be pickled. From protocol 5 on, the bytes go out of band, without a
        # copy.
        data = out_of_band(data) if protocol >= 5 else bytes(data)
        return _restore_sample, (self.key, data, self.label)


def _restore_sample(key: str, data: bytes | memoryview, label: object) -> ObjectSample:
    return ObjectSample(key, memoryview(data).toreadonly(), label)


class ObjectDataset(KeyedSamples, Cacheable[ObjectSample]):
    """The objects under a URL, one sample each.

    A sample is an `ObjectSample(key, data, label)`. The store is listed once, when the dataset is
    made (a pickled dataset has the listing). The keys are sorted, so an index
    means the same object every time.

    The listing has the sizes, so a sample is one GET of a known range. An object of more than 16
    MiB is a few GETs at once. The listing also has the entity tags, so an object overwritten later
    is an error and not a mixture.

    Empty objects standing for a folder, as made by S3's console, are left out. An empty object `a`
    counts as a folder if other keys begin with `a/`.

    The constructor waits for the listing. In an async program, call the constructor in a thread:
    ``await asyncio.to_thread(ObjectDataset, ...)``.

    Args:
        store: location of the objects: a URL (``s3://bucket/prefix``, ``gs://``, ``az://``,
            ``http(s)://``, ``file:///directory``), a directory's path, or a `headrace.Store` with
            options, time-out and retries.
        keys: keys of the objects, in this order: relative to the store's URL, or full URLs under
            the store's URL. With `keys` nothing is listed. A key may occur several times: each
            occurrence is a sample. Most HTTP servers cannot list objects and need `keys`. An object
            of unknown size is read by one GET of the first 16 MiB; the response has the size.
        sizes: size of each object of `keys` in bytes; None or NaN if unknown. With the size alone,
            an object that has grown since is cut off at the size. An object that has shrunk is an
            error.
        etags: entity tag of each object of `keys`; None if unknown. The object must be the tagged
            version.
        checksums: expected checksum of each object of `keys`, as ``algorithm:hexadecimal`` (sha256,
            sha1, md5, crc32); None if unknown.
        suffix: list only keys with this ending, e.g. ``".jpg"`` or ``(".jpg", ".png")``.
        labels: the label of each key. ``"folder"`` gives the number, in `classes`, of the first
            folder of the key. Or a function of the key, a mapping from the key, or a sequence in
            the order of `keys` (of the sorted listing, if there are no `keys`).
        classes: names of the folders in the order of the numbers. By default all folders found,
            sorted. Give the validation set ``classes=train.classes``: otherwise a class without a
            file there would renumber the other classes.

    Raises:
        EmptyListingError: nothing was listed, or no key ends in `suffix`.
        StoreError: the store refused, failed or did not respond (`StoreUnreachableError`), on every
            attempt.
        ForkedError: this process is a fork of a process that had used a store.
        TypeError: a key is not text.
        ValueError: an argument makes no sense, or a value is not a key under the store's URL, a
            size or a checksum.

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
        sizes: Sequence[Any] | None = None,
        etags: Sequence[Any] | None = None,
        checksums: Sequence[Any] | None = None,
        suffix: str | tuple[str, ...] | None = None,
        labels: Labels = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        check_names("keys", keys)
        self._store = as_store(store)
        columns = {"sizes": sizes, "etags": etags, "checksums": checksums}
        if keys is None:
            if any(column is not None for column in columns.values()):
                raise ValueError(
                    "sizes=, etags= and checksums= need keys=, in the same order"
                )
            self._catalog = background_loop().run(list_objects(self._store, suffix))
        else:
            if suffix is not None:
                raise ValueError(
                    "suffix= is about a listing, and with keys= nothing is listed"
                )
            if len(keys) == 0:
                raise ValueError("keys= is empty: a dataset needs at least one key")
            for name, column in columns.items():
                if column is not None and len(column) != len(keys):
                    raise ValueError(f"{len(column)} {name}= for {len(keys)} keys=")
            self._catalog = Catalog(
                StringArray(
                    _key(self._store, row, value) for row, value in enumerate(keys)
                ),
                None if sizes is None else array("q", map(_size, sizes)),
                None if etags is None else StringArray(map(_etag, etags)),
                None if checksums is None else StringArray(map(_checksum, checksums)),
            )
        self._keys = self._catalog.keys
        self._set_labels(labels, classes)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._store.url!r}, {len(self)} keys)"

    def extent(self, index: int) -> Extent:
        """Describe the bytes of the object at `index`, for a cache.

        Raises:
            IndexError: `index` is out of range.
        """
        key, catalog = self._keys[index], self._catalog
        size = UNKNOWN if catalog.sizes is None else catalog.sizes[index]
        return Extent(
            store=self._store.store_id,
            key=key,
            version=None if catalog.etags is None else catalog.etags[index] or None,
            start=0,
            length=None if size == UNKNOWN else size,
            checksum=None
            if catalog.checksums is None
            else catalog.checksums[index] or None,
        )

    def read_bytes(self, index: int) -> Awaitable[memoryview]:
        """Fetch the bytes of an object; errors as of `aget`."""
        found = self.extent(index)
        key, size, checksum = found.key, found.length, found.checksum
        if size is None:
            return self._store.read_all(
                key, index=index, etag=found.version, checksum=checksum
            )
        head = Head(key, size, found.version)
        return self._store.read(key, 0, size, index=index, head=head, checksum=checksum)

    def sample_of(self, index: int, data: memoryview) -> ObjectSample:
        """Make the sample at `index` from the object's bytes."""
        return ObjectSample(
            self._keys[index], data, None if self._labels is None else self._labels[index]
        )


def _key(store: Store, row: int, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"row {row}: a key must be text, but got {value!r}")
    return store.key_of(value)


def _size(value: Any) -> int:
    if value is None or value != value:  # NaN is pandas's missing value
        return UNKNOWN
    if value < 0 or int(value) != value:
        raise ValueError(f"{value!r} is not a number of bytes")
    return int(value)


def _etag(value: object) -> str:
    return (strong(value) or "") if isinstance(value, str) else ""


def _checksum(value: object) -> str:
    return check_form(value) if isinstance(value, str) else ""
