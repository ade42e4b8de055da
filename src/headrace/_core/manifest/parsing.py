"""Manifests: what is known of a dataset's objects, in a file, so that nothing has to be listed again."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from headrace._core.manifest.annotations import COMMENT, CsvTable, refuse_repeated
from headrace._core.manifest.index_file import text_lines
from headrace._core.manifest.key_validation import KeyValidator
from headrace._core.manifest.labels import compact
from headrace._core.manifest.parquet import parquet_rows
from headrace._core.shards.compression import codec_for
from headrace._core.store.catalog import UNKNOWN, Catalog, CatalogBuilder
from headrace._core.store.checksums import check_form
from headrace._core.store.etags import strong
from headrace._core.store.string_array import StringArrayBuilder
from headrace.errors import ManifestError

if TYPE_CHECKING:
    from typing_extensions import Buffer

ManifestFormat = Literal["csv", "jsonl", "parquet"]
COLUMNS = ("key", "size", "etag", "checksum", "label")

_SUFFIXES: dict[ManifestFormat, tuple[str, ...]] = {
    "csv": (".csv", ".tsv"),
    "jsonl": (".jsonl", ".ndjson"),
    "parquet": (".parquet", ".pq"),
}
_PACKED = re.compile(r"\.(?:gz|zst|zstd)$")
_BARE_MD5 = re.compile(r"[0-9a-f]{32}(?:-\d+)?")  # as inventories have S3's tags; what is asked for has quotes
_READ_LABEL: dict[str, Callable[[str], Any]] = {"str": str, "int": int, "float": float, "json": json.loads}


@dataclass(frozen=True, slots=True)
class Origin:
    """Which listing a manifest is of.

    Attributes:
        url: the dataset's, without secrets.
        suffix: how all keys end; None where they may end anyhow.
        labels: how the labels of a CSV are written: ``str``, ``int``, ``float`` or ``json``.
        objects: how many it lists, so that one that is cut short is noticed; None where it does not say.
    """

    url: str
    suffix: tuple[str, ...] | None
    labels: str = "str"
    objects: int | None = None

    @classmethod
    def of(cls, url: str, suffix: str | tuple[str, ...] | None) -> Origin:
        """That of a listing."""
        return cls(url.rstrip("/"), (suffix,) if isinstance(suffix, str) else suffix)

    @classmethod
    def parsed(cls, told: Any) -> Origin | None:
        """What `as_json` has become; None where it is something else."""
        if not isinstance(told, dict) or not isinstance(told.get("url"), str):
            return None
        suffix, labels = told.get("suffix"), told.get("labels", "str")
        is_list = isinstance(suffix, list) and all(isinstance(one, str) for one in suffix)
        if not (suffix is None or is_list) or labels not in _READ_LABEL:
            return None
        objects = told.get("objects") if type(told.get("objects")) is int else None
        return cls(told["url"], None if suffix is None else tuple(suffix), labels, objects)

    def as_json(self) -> dict[str, Any]:
        """For `json.dumps`."""
        suffix = None if self.suffix is None else list(self.suffix)
        return {"url": self.url, "suffix": suffix, "labels": self.labels, "objects": self.objects}

    def check(self, found: Origin | None, source: str) -> None:
        """Refuse a manifest of another listing.

        Args:
            found: what the manifest says; None where it says nothing.
            source: what errors call it.

        Raises:
            ManifestError: it is not of this one.
        """
        if found is None:
            what = "it does not say which listing it is of: read it with ObjectDataset.from_manifest"
        elif found.url != self.url:
            what = f"it is of the listing of {found.url}, and not of {self.url}"
        elif found.suffix != self.suffix:
            what = f"it is of the listing with suffix={found.suffix}, and not with suffix={self.suffix}"
        else:
            return
        raise ManifestError(f"{what}; or delete it, and the store is listed anew", source=source)


def format_of(name: str, format: str | None) -> ManifestFormat:
    """The format of a manifest, as its name says unless it is given.

    Raises:
        ValueError: it is none that is known, or the name does not say.

    Example:
        >>> format_of("train.csv.gz", None), format_of("train", "jsonl")
        ('csv', 'jsonl')
    """
    known: tuple[ManifestFormat, ...] = get_args(ManifestFormat)
    for one in known:
        if format == one or (format is None and _PACKED.sub("", name.lower()).endswith(_SUFFIXES[one])):
            return one
    if format is not None:
        raise ValueError(f"format={format!r} must be one of {', '.join(map(repr, known))}")
    endings = ", ".join(ending for endings in _SUFFIXES.values() for ending in endings)
    raise ValueError(f"what format is {name}? Names end in {endings}; or give format=")


def parse_manifest(data: Buffer, name: str, format: ManifestFormat, url: str) -> tuple[Catalog, Origin | None]:
    """The objects that a manifest lists, in its order, and which listing it says it is of.

    Args:
        data: the file.
        name: what errors call it.
        format: its format.
        url: the dataset's.

    Raises:
        ManifestError: it is damaged, or names an object twice, none, or one that is not under `url`.
        MissingExtraError: it is Parquet, and pyarrow is not installed.
    """
    if format == "parquet":
        if codec_for(name).__name__ != "Plain":
            raise ManifestError("Parquet is packed within; a packed file of it cannot be read", source=name)
        told, rows = parquet_rows(data, name, COLUMNS)
        origin = Origin.parsed(told)
    elif format == "csv":
        origin, rows = _csv_rows(data, name)
    else:
        origin, rows = _json_rows(data, name)
    catalog = _catalog(rows, name, KeyValidator(url))
    if origin is not None and origin.objects not in (None, len(catalog.keys)):
        what = f"it lists {len(catalog.keys)} objects and was written with {origin.objects}: it is cut short"
        raise ManifestError(f"{what}; or correct the number, if that was meant", source=name)
    return catalog, origin


Rows = Iterator[tuple[int, Mapping[str, Any]]]
"""Lines and rows, by the names of the columns; None for what is not there."""


def _catalog(rows: Rows, name: str, rules: KeyValidator) -> Catalog:
    builder, checksums, labels, lines = CatalogBuilder(), StringArrayBuilder(), [], array("q")
    labelled = False
    for line, row in rows:
        column = "key"
        try:
            key = rules.key(_text(row.get("key"), "key"))
            column = "size"
            size = _size(row.get("size"))
            column = "etag"
            etag = _etag(row.get("etag"))
            column = "checksum"
            checksum = row.get("checksum")
            if checksum:
                check_form(_text(checksum, "checksum"))
        except ValueError as error:
            raise ManifestError(str(error), source=name, line=line, column=column) from None
        builder.append(key, size, etag)
        checksums.append(checksum or "")
        labelled = labelled or "label" in row
        labels.append(row.get("label"))
        lines.append(line)
    if not lines:
        raise ManifestError("it lists no object", source=name)
    found = builder.catalog()
    refuse_repeated(found.keys, name, lines.__getitem__, "key")
    summed = checksums.build()
    return Catalog(
        found.keys, found.sizes, found.etags, compact(labels) if labelled else None, summed if any(summed) else None
    )


def _text(said: Any, column: str) -> str:
    if not isinstance(said, str):
        raise ValueError(f"there is no {column}" if said is None else f"{said!r} is not text")
    return said


def _size(said: Any) -> int:
    if said is None or said == "":
        return UNKNOWN
    try:
        size = int(said)
    except (TypeError, ValueError, OverflowError):
        size = UNKNOWN
    if not 0 <= size < 2**63 or isinstance(said, bool) or (isinstance(said, float) and said != size):
        raise ValueError(f"{said!r} is not a number of bytes")
    return size


def _etag(said: Any) -> str | None:
    if said is None or said == "":
        return None
    tag = _text(said, "etag")
    return f'"{tag}"' if _BARE_MD5.fullmatch(tag) else strong(tag)


def _csv_rows(data: Buffer, name: str) -> tuple[Origin | None, Rows]:
    table = CsvTable(name, data)
    first = next(text_lines(data, name, table.encoding), "")
    origin = Origin.parsed(_json_or_none(first[1:])) if first.startswith(COMMENT) else None
    names, rows = table.rows()
    assert names is not None
    _need_key(names, name)
    places = [(column, names.index(column)) for column in COLUMNS if column in names]
    read_label = _READ_LABEL[origin.labels if origin is not None else "str"]

    def told() -> Iterator[tuple[int, dict[str, Any]]]:
        for line, row in rows:
            record: dict[str, Any] = {column: row[place] for column, place in places}
            if "label" in record:
                try:
                    record["label"] = read_label(record["label"])
                except ValueError as error:
                    raise ManifestError(str(error), source=name, line=line, column="label") from None
            yield line, record

    return origin, told()


def _json_rows(data: Buffer, name: str) -> tuple[Origin | None, Rows]:
    first = _json_or_none(next(text_lines(data, name, "utf-8-sig"), ""))
    origin = Origin.parsed(first.get("manifest")) if isinstance(first, dict) else None

    def told() -> Iterator[tuple[int, dict[str, Any]]]:
        for line, text in enumerate(text_lines(data, name, "utf-8-sig"), start=1):
            if not text.strip():
                continue
            try:
                record = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ManifestError(f"this is not valid JSON: {error}", source=name, line=line) from None
            if not isinstance(record, dict):
                raise ManifestError("a line must be an object of JSON, {…}", source=name, line=line)
            _need_key(record, name, line)
            yield line, record

    return origin, told()


def _need_key(columns: Iterable[str], name: str, line: int | None = None) -> None:
    columns = list(columns)
    if "key" not in columns:
        there = ", ".join(map(repr, columns))
        raise ManifestError(f"a manifest needs a column 'key', and has {there}", source=name, line=line)


def _json_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # an ordinary line, which says nothing of the listing's origin
        return None


def columns_of(catalog: Catalog) -> dict[str, Callable[[int], Any]]:
    """A catalog as a table: what is in each column at a position; None for what is not known of an object."""
    told: dict[str, Callable[[int], Any]] = {"key": catalog.keys.__getitem__}
    sizes, etags, checksums, labels = catalog.sizes, catalog.etags, catalog.checksums, catalog.labels
    if sizes is not None:
        told["size"] = lambda position: None if sizes[position] == UNKNOWN else sizes[position]
    if etags is not None:
        told["etag"] = lambda position: etags[position] or None
    if checksums is not None:
        told["checksum"] = lambda position: checksums[position] or None
    if labels is not None:
        told["label"] = lambda position: _plain(labels[position], catalog.keys[position])
    return told


def _plain(label: Any, key: str) -> Any:
    """A label as JSON has it; numbers of NumPy and torch as Python's."""
    plain = label.item() if hasattr(label, "item") and getattr(label, "ndim", None) == 0 else label
    try:
        json.dumps(plain, allow_nan=True)
    except (TypeError, ValueError):
        what = f"the label of {key!r} is a {type(label).__name__}"
        raise TypeError(f"{what}; a manifest has numbers, text, and lists and mappings of them") from None
    return plain
