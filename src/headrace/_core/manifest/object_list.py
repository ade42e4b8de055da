"""The objects of a dataset: their keys, sizes, versions, checksums and labels, and the files that name them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Self, TypedDict, Unpack

import anyio.to_thread

from headrace._core.manifest.annotations import Column, Duplicates, Where, read_annotations
from headrace._core.manifest.csv_table import CsvTable
from headrace._core.manifest.labels import Labels, align_labels
from headrace._core.manifest.listing_cache import ListingCache
from headrace._core.manifest.parsing import ManifestFormat, Origin, format_of, parse_manifest
from headrace._core.manifest.serialization import serialize_manifest
from headrace._core.manifest.table_file import PathOrUrl, TableFile, find_table
from headrace._core.store.catalog import Catalog
from headrace._core.store.checksums import check_form
from headrace._core.store.redaction import redact_url
from headrace._core.store.store import StoreLike, as_store
from headrace._core.store.string_array import StringArray


class ObjectOptions(TypedDict, total=False):
    """Options of all constructors of `ObjectDataset`."""

    checksums: Labels


class ObjectList:
    """Objects of one store, in an order; the base of `ObjectDataset`, which reads them."""

    @property
    def keys(self) -> Sequence[str]:
        """The key of each sample, in the order of their indices."""
        return self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({redact_url(self._client.url)!r}, {len(self)} keys)"

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
            >>> from headrace import ObjectDataset
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
            TypeError: a label is neither a number nor text, nor a list or a mapping of them; or, for Parquet, the
                labels do not fit one column: they are of several types, or an integer has more than 64 bits.
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
