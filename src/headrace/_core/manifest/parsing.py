"""Parsing of manifests: keys, sizes, entity tags, checksums and labels of a dataset's objects, in a file."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from headrace._core.manifest.annotations import refuse_repeated
from headrace._core.manifest.csv_table import COMMENT, CsvTable
from headrace._core.manifest.key_validation import KeyValidator
from headrace._core.manifest.labels import compact
from headrace._core.manifest.parquet import parquet_rows
from headrace._core.manifest.table_file import text_lines
from headrace._core.shards.compression import Plain, codec_for, without_suffix
from headrace._core.store.catalog import UNKNOWN, Catalog, CatalogBuilder
from headrace._core.store.checksums import check_form
from headrace._core.store.etags import strong
from headrace._core.store.string_array import StringArrayBuilder
from headrace.errors import ManifestError

if TYPE_CHECKING:
    from typing_extensions import Buffer

ManifestFormat = Literal["csv", "jsonl", "parquet"]
COLUMNS = ("key", "size", "etag", "checksum", "label")

Rows = Iterator[tuple[int, Mapping[str, object]]]
"""Line numbers and rows, by the names of the columns; None for an absent value."""

_SUFFIXES: dict[ManifestFormat, tuple[str, ...]] = {
    "csv": (".csv", ".tsv"),
    "jsonl": (".jsonl", ".ndjson"),
    "parquet": (".parquet", ".pq"),
}
_BARE_MD5 = re.compile(r"[0-9a-f]{32}(?:-\d+)?")  # S3's tags in inventories; in responses they are quoted
_PARSE_LABEL: dict[str, Callable[[str], object]] = {"str": str, "int": int, "float": float, "json": json.loads}


@dataclass(frozen=True, slots=True)
class Origin:
    """The listing that a manifest was written from.

    Attributes:
        url: URL of the dataset, without secrets.
        suffix: endings of the keys; None if they were not filtered.
        labels: type of the labels in a CSV: ``str``, ``int``, ``float`` or ``json``.
        objects: number of objects, to detect truncation; None if unknown.
    """

    url: str
    suffix: tuple[str, ...] | None
    labels: str = "str"
    objects: int | None = None

    @classmethod
    def of(cls, url: str, suffix: str | tuple[str, ...] | None) -> Origin:
        return cls(url.rstrip("/"), (suffix,) if isinstance(suffix, str) else suffix)

    @classmethod
    def from_json(cls, record: object) -> Origin | None:
        """The inverse of `to_json`; None for anything else."""
        if not isinstance(record, dict) or not isinstance(record.get("url"), str):
            return None
        suffix, labels = record.get("suffix"), record.get("labels", "str")
        is_list = isinstance(suffix, list) and all(isinstance(one, str) for one in suffix)
        if not (suffix is None or is_list) or labels not in _PARSE_LABEL:
            return None
        objects = record.get("objects") if type(record.get("objects")) is int else None
        return cls(record["url"], None if suffix is None else tuple(suffix), labels, objects)

    def to_json(self) -> dict[str, object]:
        suffix = None if self.suffix is None else list(self.suffix)
        return {"url": self.url, "suffix": suffix, "labels": self.labels, "objects": self.objects}

    def check(self, found: Origin | None, source: str) -> None:
        """Raise `ManifestError` if `found`, the origin of the manifest `source`, is another listing."""
        if found is None:
            what = "the manifest does not name its listing: read it with ObjectDataset.from_manifest"
        elif found.url != self.url:
            what = f"the manifest is of the listing of {found.url}, not of {self.url}"
        elif found.suffix != self.suffix:
            what = f"the manifest is of the listing with suffix={found.suffix}, not with suffix={self.suffix}"
        else:
            return
        raise ManifestError(f"{what}; or delete it to list the store again", source=source)


def format_of(name: str, format: str | None) -> ManifestFormat:
    """The format of a manifest: as given, or by the suffix of its name.

    Raises:
        ValueError: an unknown format or suffix.

    Example:
        >>> format_of("train.csv.gz", None), format_of("train", "jsonl")
        ('csv', 'jsonl')
    """
    known: tuple[ManifestFormat, ...] = get_args(ManifestFormat)
    for one in known:
        if format == one or (format is None and without_suffix(name.lower()).endswith(_SUFFIXES[one])):
            return one
    if format is not None:
        raise ValueError(f"format={format!r} must be one of {', '.join(map(repr, known))}")
    endings = ", ".join(ending for endings in _SUFFIXES.values() for ending in endings)
    raise ValueError(f"unknown format of {name}: names end in {endings}; or give format=")


def parse_manifest(data: Buffer, name: str, format: ManifestFormat, url: str) -> tuple[Catalog, Origin | None]:
    """The objects of a manifest, in its order, and the listing it was written from, if it names one.

    Raises:
        ManifestError: the file is corrupt, or names no object, one twice, or one outside `url`.
        MissingExtraError: it is Parquet, and pyarrow is not installed.
    """
    if format == "parquet":
        if codec_for(name) is not Plain:
            raise ManifestError("Parquet is compressed internally; a compressed file is not supported", source=name)
        record, rows = parquet_rows(data, name, COLUMNS)
        origin = Origin.from_json(record)
    elif format == "csv":
        origin, rows = _csv_rows(data, name)
    else:
        origin, rows = _json_rows(data, name)
    catalog = _catalog(rows, name, KeyValidator(url))
    if origin is not None and origin.objects not in (None, len(catalog.keys)):
        what = f"truncated: {len(catalog.keys)} objects, but it was written with {origin.objects}"
        raise ManifestError(f"{what}; or correct the number, if this is intended", source=name)
    return catalog, origin


def _catalog(rows: Rows, name: str, validator: KeyValidator) -> Catalog:
    builder, checksums, labels, lines = CatalogBuilder(), StringArrayBuilder(), [], array("q")
    has_labels = False
    for line, row in rows:
        column = "key"
        try:
            key = validator.key(_text(row.get("key"), "key"))
            column = "size"
            size = _size(row.get("size"))
            column = "etag"
            etag = _etag(row.get("etag"))
            column = "checksum"
            checksum = _text(row.get("checksum") or "", "checksum")
            if checksum:
                check_form(checksum)
        except ValueError as error:
            raise ManifestError(str(error), source=name, line=line, column=column) from None
        builder.append(key, size, etag)
        checksums.append(checksum)
        has_labels = has_labels or "label" in row
        labels.append(row.get("label"))
        lines.append(line)
    if not lines:
        raise ManifestError("the manifest lists no object", source=name)
    found = builder.catalog()
    refuse_repeated(found.keys, name, lines.__getitem__, "key")
    packed = checksums.build()
    return Catalog(
        found.keys, found.sizes, found.etags, compact(labels) if has_labels else None, packed if any(packed) else None
    )


def _text(value: object, column: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"there is no {column}" if value is None else f"{value!r} is not text")
    return value


def _size(value: object) -> int:
    if value is None or value == "":
        return UNKNOWN
    try:
        size: int = int(value)  # type: ignore[call-overload]  # a TypeError says so
    except (TypeError, ValueError, OverflowError):
        size = UNKNOWN
    if not 0 <= size < 2**63 or isinstance(value, bool) or (isinstance(value, float) and value != size):
        raise ValueError(f"{value!r} is not a number of bytes")
    return size


def _etag(value: object) -> str | None:
    if value is None or value == "":
        return None
    tag = _text(value, "etag")
    return f'"{tag}"' if _BARE_MD5.fullmatch(tag) else strong(tag)


def _csv_rows(data: Buffer, name: str) -> tuple[Origin | None, Rows]:
    table = CsvTable(name, data)
    first = next(text_lines(data, name, table.encoding), "")
    origin = Origin.from_json(_json_or_none(first[1:])) if first.startswith(COMMENT) else None
    names, rows = table.rows()
    assert names is not None
    _require_key(names, name)
    positions = [(column, names.index(column)) for column in COLUMNS if column in names]
    parse_label = _PARSE_LABEL[origin.labels if origin is not None else "str"]

    def records() -> Rows:
        for line, row in rows:
            record: dict[str, object] = {column: row[position] for column, position in positions}
            if "label" in record:
                try:
                    record["label"] = parse_label(str(record["label"]))
                except ValueError as error:
                    raise ManifestError(str(error), source=name, line=line, column="label") from None
            yield line, record

    return origin, records()


def _json_rows(data: Buffer, name: str) -> tuple[Origin | None, Rows]:
    first = _json_or_none(next(text_lines(data, name, "utf-8-sig"), ""))
    origin = Origin.from_json(first.get("manifest")) if isinstance(first, dict) else None

    def records() -> Rows:
        for line, text in enumerate(text_lines(data, name, "utf-8-sig"), start=1):
            if not text.strip():
                continue
            try:
                record = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ManifestError(f"not valid JSON: {error}", source=name, line=line) from None
            if not isinstance(record, dict):
                raise ManifestError("a line must be a JSON object, {…}", source=name, line=line)
            _require_key(record, name, line)
            yield line, record

    return origin, records()


def _require_key(columns: Iterable[str], name: str, line: int | None = None) -> None:
    columns = list(columns)
    if "key" not in columns:
        there = ", ".join(map(repr, columns))
        raise ManifestError(f"a manifest needs a column 'key', and has {there}", source=name, line=line)


def _json_or_none(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # an ordinary line, without an origin
        return None
