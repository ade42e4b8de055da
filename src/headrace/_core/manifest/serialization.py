"""Serialization of manifests, each format in the way that other programs read it too."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain

from headrace._core.manifest.csv_table import delimiter_of
from headrace._core.manifest.parquet import parquet_bytes
from headrace._core.manifest.parsing import ManifestFormat, Origin
from headrace._core.shards.compression import compress
from headrace._core.store.catalog import UNKNOWN, Catalog

Columns = Mapping[str, Callable[[int], object]]
"""Functions from a position to the value of a column there, None if it is unknown."""


def serialize_manifest(catalog: Catalog, name: str, format: ManifestFormat, origin: Origin) -> bytes:
    """A manifest as `parse_manifest` reads it, compressed by the suffix of `name`.

    The origin is in a comment above a CSV, in a field ``manifest`` of the first line of JSON, and in the metadata of
    Parquet.

    Raises:
        TypeError: a label is neither a number nor text, nor a list or a mapping of them, or the labels do not fit one
            column of Parquet.
        MissingExtraError: the format or the compression needs a package that is not installed.
    """
    columns, count = _columns(catalog), len(catalog.keys)
    origin = replace(origin, objects=count)
    if format == "parquet":
        return parquet_bytes(columns, count, origin.to_json())
    lines = _csv(columns, count, origin, delimiter_of(name)) if format == "csv" else _json(columns, count, origin)
    return compress(name, "".join(lines).encode("utf-8", "surrogatepass"))


def _columns(catalog: Catalog) -> dict[str, Callable[[int], object]]:
    columns: dict[str, Callable[[int], object]] = {"key": catalog.keys.__getitem__}
    sizes, etags, checksums, labels = catalog.sizes, catalog.etags, catalog.checksums, catalog.labels
    if sizes is not None:
        columns["size"] = lambda position: None if sizes[position] == UNKNOWN else sizes[position]
    if etags is not None:
        columns["etag"] = lambda position: etags[position] or None
    if checksums is not None:
        columns["checksum"] = lambda position: checksums[position] or None
    if labels is not None:
        columns["label"] = lambda position: _plain(labels[position], catalog.keys[position])
    return columns


def _plain(label: object, key: str) -> object:
    """A label as JSON has it, with numbers of NumPy and torch as Python's."""
    plain = label.item() if hasattr(label, "item") and getattr(label, "ndim", None) == 0 else label
    try:
        json.dumps(plain, allow_nan=True)
    except (TypeError, ValueError):
        what = f"the label of {key!r} is a {type(label).__name__}"
        raise TypeError(f"{what}; a manifest has numbers, text, and lists and mappings of them") from None
    if not _has_text_keys(plain):
        raise TypeError(f"the label of {key!r} has a mapping with keys that are not text, as those of JSON are")
    return plain


def _has_text_keys(label: object) -> bool:
    """Whether all mappings in a label have keys of text. Of 1, JSON makes ``"1"``, which may be a key too."""
    if isinstance(label, Mapping):
        return all(isinstance(name, str) and _has_text_keys(value) for name, value in label.items())
    return not isinstance(label, list | tuple) or all(map(_has_text_keys, label))


def _json(columns: Columns, count: int, origin: Origin) -> Iterator[str]:
    first: dict[str, object] = {"manifest": origin.to_json()}
    for position in range(count):
        values = ((name, get(position)) for name, get in columns.items())
        record = {name: value for name, value in values if value is not None}
        yield json.dumps(record | first, ensure_ascii=False) + "\n"
        first = {}


def _csv(columns: Columns, count: int, origin: Origin, delimiter: str) -> Iterator[str]:
    columns, labels = dict(columns), columns.get("label")
    types = {type(labels(position)) for position in range(count)} if labels is not None else {str}
    label_type = next(iter(types)).__name__ if len(types) == 1 and types <= {int, float, str} else "json"
    if label_type == "json" and labels is not None:
        columns["label"] = lambda position: json.dumps(labels(position))
    yield f"# {json.dumps(replace(origin, labels=label_type).to_json())}\n"
    line = io.StringIO()
    # Fields with characters of the line's end are quoted, which a lone carriage return needs too.
    writer = csv.writer(line, delimiter=delimiter, lineterminator="\r\n")
    header: list[object] = [*columns]
    rows = ([get(position) for get in columns.values()] for position in range(count))
    for row in chain([header], rows):
        writer.writerow(row)
        yield line.getvalue().removesuffix("\r\n") + "\n"
        line.seek(0)
        line.truncate()
