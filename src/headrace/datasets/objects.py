"""Objects of a store as samples: one GET each, several for a large one."""

from __future__ import annotations

import functools
import operator
import pickle
from collections.abc import Awaitable, Sequence
from typing import Any, NamedTuple, Self, SupportsIndex, TypedDict, Unpack

import anyio.to_thread
import numpy as np

from headrace._core.interface.background_loop import background_loop
from headrace._core.interface.reprs import sample_repr
from headrace._core.manifest.annotations import Column, Duplicates, Where, read_annotations
from headrace._core.manifest.csv_table import CsvTable
from headrace._core.manifest.labels import Labels, align_labels
from headrace._core.manifest.listing_cache import ListingCache
from headrace._core.manifest.parsing import ManifestFormat, Origin, format_of, parse_manifest
from headrace._core.manifest.serialization import serialize_manifest
from headrace._core.manifest.table_file import PathOrUrl, TableFile, find_table
from headrace._core.store.catalog import Catalog
from headrace._core.store.checksums import check_form
from headrace._core.store.listing import list_objects
from headrace._core.store.redaction import redact_url
from headrace._core.store.store import StoreLike, as_store
from headrace._core.store.string_array import StringArray
from headrace.datasets.cached import Cacheable, Extent

__all__ = ["ObjectDataset", "ObjectOptions", "ObjectSample"]


class ObjectOptions(TypedDict, total=False):
    """Options of all constructors of `ObjectDataset`."""

    checksums: Labels


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
        # A memoryview cannot be pickled; from protocol 5 on its bytes go out of band, without a copy. The array in
        # between is for CPython 3.11, which crashes where the collector clears a memoryview under a PickleBuffer of it.
        array: Any = np.frombuffer(self.data, dtype=np.uint8) if self.data.nbytes else b""
        data = pickle.PickleBuffer(array) if operator.index(protocol) >= 5 else bytes(array)
        return _restore_sample, (self.key, data, self.label)


def _restore_sample(key: str, data: bytes | memoryview, label: object) -> ObjectSample:
    return ObjectSample(key, memoryview(data).toreadonly(), label)


class ObjectDataset(Cacheable[ObjectSample]):
    """The objects under a URL, one sample each: `ObjectSample(key, data, label)`.

    The store is listed once, when the dataset is made; the keys are sorted, so an index means the same object every
    time. Since a listing tells the sizes, a sample is one GET of a known range, and an object of more than 16 MiB a few
    of them at once. Since it tells the entity tags, an object that is overwritten later is an error and not a mixture.

    What fails is tried again where that may help; docs/retries.md has the table.

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

    @classmethod
    def from_csv(
        cls,
        store: StoreLike,
        annotations: PathOrUrl,
        *,
        key: Column = "key",
        label: Column | Sequence[str | int] | None = "label",
        prefix: str = "",
        suffix: str = "",
        where: Where = None,
        duplicates: Duplicates = "error",
        header: bool = True,
        delimiter: str | None = None,
        quotechar: str = '"',
        encoding: str = "utf-8-sig",
        **options: Unpack[ObjectOptions],
    ) -> Self:
        r"""Make a dataset of the objects that a CSV names, in its order, with their labels. Nothing is listed.

        It waits for the file; in an async program use ``await ObjectDataset.afrom_csv(...)``.

        Args:
            store: where the objects are.
            annotations: the CSV, a path or a URL; ``.gz`` and ``.zst`` are unpacked. It is read with the options of
                `store` where it is on the same host, or in the same kind of bucket.
            key: the column of the keys, by its name or number; or a function of the row, which is a dict (without a
                header a list) of strings. Full URLs under the store's are keys too.
            label: the column of the labels, which are strings then; several for a tuple; a function of the row for
                anything else, ``lambda row: int(row["label"])``; None for no labels.
            prefix: prepended to each key.
            suffix: appended to each key, e.g. ``".jpg"``.
            where: which rows: ``{"split": "train"}``, or ``{"split": ["train", "extra"]}``, for columns that have to
                have a value or one of several; or a function of the row. None for all.
            duplicates: the treatment of a key that is repeated: ``"error"``; or ``"keep"``, where several rows are
                about one object, such as one for each box in an image: each of them is a sample.
            header: whether the first row has the names of the columns.
            delimiter: between fields; by default a tab in ``.tsv``, a comma elsewhere.
            quotechar: around fields with delimiters or ends of lines in them.
            encoding: of the text; a byte order mark is passed over by default.
            options: as for the class.

        Raises:
            ManifestError: the CSV is damaged, lacks a column, or has a key that is empty, there already, or not under
                the store's URL; with the line.
            FileNotFoundError: there is no such file; in a store an `ObjectNotFoundError`.
            StoreError: the file could not be read from a store.

        Example:
            >>> import pathlib, tempfile
            >>> folder = pathlib.Path(tempfile.mkdtemp())
            >>> _ = (folder / "img_7.jpg").write_bytes(b"seven")
            >>> _ = (folder / "labels.csv").write_text("id,class\nimg_7,cat\n")
            >>> data = ObjectDataset.from_csv(
            ...     folder, folder / "labels.csv", key="id", label="class", suffix=".jpg"
            ... )
            >>> data[0].key, data[0].label
            ('img_7.jpg', 'cat')
        """
        dataset, checksums = cls._of(store, options)
        file = dataset._index(annotations)
        table = CsvTable(file.name, file.read(), header, delimiter, quotechar, encoding)
        catalog = read_annotations(
            table,
            dataset._client.url,
            key=key,
            label=label,
            prefix=prefix,
            suffix=suffix,
            where=where,
            duplicates=duplicates,
        )
        dataset._hold(catalog, None, checksums)
        return dataset

    @classmethod
    async def afrom_csv(cls, store: StoreLike, annotations: PathOrUrl, **options: Any) -> Self:
        """As `from_csv`, without blocking the caller's loop; functions among the arguments are called in a thread."""
        make = functools.partial(cls.from_csv, store, annotations, **options)
        return await anyio.to_thread.run_sync(make, abandon_on_cancel=True)

    @classmethod
    def from_manifest(
        cls,
        store: StoreLike,
        manifest: PathOrUrl,
        *,
        labels: Labels = None,
        format: ManifestFormat | None = None,
        **options: Unpack[ObjectOptions],
    ) -> Self:
        """Make a dataset of the objects that a manifest lists, in its order. Nothing is listed.

        A manifest has a column ``key``, and may have ``size``, ``etag``, ``checksum`` and ``label``. With the size an
        object is one GET of a known range, or several of a large one; with the entity tag it must be that version (of a
        size alone, an object that has grown since comes cut off there; one that has shrunk is an error).
        `write_manifest` writes one. It waits for the file; in an async program use ``await
        ObjectDataset.afrom_manifest(...)``.

        Args:
            store: where the objects are.
            manifest: a path or a URL. CSV and JSON lines may be packed, ``.gz`` or ``.zst``; Parquet needs
                ``headrace[parquet]``.
            labels: as for the class, in place of those of the manifest.
            format: ``"csv"``, ``"jsonl"`` or ``"parquet"``, where the name does not say.
            options: as for the class.

        Raises:
            ManifestError: the manifest is damaged, or has a key that is empty, there already, or not under the store's
                URL.
            FileNotFoundError: there is no such file; in a store an `ObjectNotFoundError`.
            MissingExtraError: the format needs a package that is not installed.
            StoreError: the file could not be read from a store.
        """
        dataset, checksums = cls._of(store, options)
        file = dataset._index(manifest)
        kind = format_of(file.name, format)
        catalog, _ = parse_manifest(file.read(), file.name, kind, dataset._client.url)
        dataset._hold(catalog, labels, checksums)
        return dataset

    @classmethod
    async def afrom_manifest(
        cls,
        store: StoreLike,
        manifest: PathOrUrl,
        *,
        labels: Labels = None,
        format: ManifestFormat | None = None,
        **options: Unpack[ObjectOptions],
    ) -> Self:
        """As `from_manifest`, without blocking the caller's loop; a function of labels is called in a thread."""
        make = functools.partial(cls.from_manifest, store, manifest, labels=labels, format=format, **options)
        return await anyio.to_thread.run_sync(make, abandon_on_cancel=True)

    def write_manifest(self, manifest: PathOrUrl, *, format: ManifestFormat | None = None) -> None:
        """Write what is known of the objects, for `from_manifest`: keys, and sizes, entity tags, checksums, labels.

        It waits until that is done; in an async program use ``await dataset.awrite_manifest(...)``.

        Args:
            manifest: a path or a URL. A file that is there is replaced at once, whole.
            format: ``"csv"``, ``"jsonl"`` or ``"parquet"``, where the name does not say.

        Raises:
            TypeError: a label is neither a number nor text, nor a list or a mapping of them.
            MissingExtraError: the format needs a package that is not installed.
            OSError: it cannot be written; in a store a `StoreError`.
        """
        file = self._index(manifest)
        kind = format_of(file.name, format)
        catalog = Catalog(self._keys, self._sizes, self._etags, self._labels, self._checksums)
        origin = Origin.of(redact_url(self._client.url), self._suffix)
        file.write(serialize_manifest(catalog, file.name, kind, origin))

    async def awrite_manifest(self, manifest: PathOrUrl, *, format: ManifestFormat | None = None) -> None:
        """As `write_manifest`, without blocking the caller's loop. Cancelled, it still ends when all is written."""
        await anyio.to_thread.run_sync(functools.partial(self.write_manifest, manifest, format=format))

    @property
    def keys(self) -> Sequence[str]:
        """The key of each sample, in the order of their indices."""
        return self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({redact_url(self._client.url)!r}, {len(self)} keys)"

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

    def sample_key(self, index: int) -> str:
        """The key at `index`."""
        return self._keys[index]

    def _key(self, index: int) -> str:
        try:
            return self._keys[index]
        except IndexError:
            raise IndexError(f"index {index} is out of range for {self!r}") from None

    def _size(self, index: int) -> int:
        return -1 if self._sizes is None else self._sizes[index]

    def _checksum(self, index: int) -> str | None:
        return None if self._checksums is None else self._checksums[index] or None

    def _configure(
        self,
        store: StoreLike,
        keys: Sequence[str] | None = None,
        suffix: str | tuple[str, ...] | None = None,
        manifest: PathOrUrl | None = None,
    ) -> tuple[Catalog | None, ListingCache | None]:
        """Check the arguments and hold them; returns the objects where they were given, and what keeps a listing."""
        if isinstance(keys, str):
            raise TypeError("keys= must be a sequence of keys, not one str")
        if keys is not None and suffix is not None:
            raise ValueError("suffix= filters a listing, and with keys= nothing is listed. Give one of the two")
        if keys is not None and manifest is not None:
            raise ValueError("manifest= keeps a listing, and with keys= nothing is listed. Give one of the two")
        if keys is not None and len(keys) == 0:
            raise ValueError("keys= is empty: a dataset needs at least one key")
        self._client = as_store(store)._client
        self._suffix = suffix
        given = None if keys is None else Catalog(_given(keys))
        return given, None if manifest is None else ListingCache(manifest, self._client, suffix)

    @classmethod
    def _of(cls, store: StoreLike, options: ObjectOptions) -> tuple[Self, Labels]:
        """A dataset that has no objects yet; and its checksums."""
        unknown = options.keys() - ObjectOptions.__annotations__.keys()
        if unknown:
            raise TypeError(f"{cls.__name__} has no argument {min(unknown)!r} here")
        dataset = cls.__new__(cls)
        dataset._configure(store)
        return dataset, options.get("checksums")

    def _index(self, place: PathOrUrl) -> TableFile:
        return find_table(place, self._client)

    def _hold(self, catalog: Catalog, labels: Labels, checksums: Labels) -> None:
        self._keys, self._sizes, self._etags = catalog.keys, catalog.sizes, catalog.etags
        self._labels = catalog.labels if labels is None else align_labels(labels, self._keys)
        self._checksums = catalog.checksums
        if checksums is not None:
            given = align_labels(checksums, self._keys) or ()
            for checksum in given:
                if checksum is not None:
                    check_form(checksum)
            self._checksums = StringArray(checksum or "" for checksum in given)


def _given(keys: Sequence[str]) -> StringArray:
    try:
        return StringArray(keys)
    except TypeError as error:
        raise TypeError(f"keys= must be a sequence of str: {error}") from None
