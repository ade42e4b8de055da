"""Writing manifests as bytes, each format in the way that other programs read it too."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from headrace._core.manifest.annotations import delimiter_of
from headrace._core.manifest.parquet import parquet_of
from headrace._core.manifest.parsing import ManifestFormat, Origin, columns_of
from headrace._core.shards.compression import pack
from headrace._core.store.catalog import Catalog

Columns = Mapping[str, Callable[[int], Any]]


def serialize_manifest(catalog: Catalog, name: str, format: ManifestFormat, origin: Origin) -> bytes:
    """A manifest, as `headrace._core.manifest.parsing.parse_manifest` reads it.

    Which listing it is of stands in a comment above a CSV, in a field ``manifest`` of the first line of JSON, and in
    the metadata of Parquet.

    Args:
        catalog: the objects.
        name: the file's, which says how it is packed.
        format: its format.
        origin: which listing it is of.

    Raises:
        TypeError: a label is neither a number nor text, nor a list or a mapping of them.
        MissingExtraError: the format or the packing needs a package that is not installed.
    """
    columns, count = columns_of(catalog), len(catalog.keys)
    origin = replace(origin, objects=count)
    if format == "parquet":
        return parquet_of(columns, count, origin.as_json())
    lines = _csv(columns, count, origin, delimiter_of(name)) if format == "csv" else _json(columns, count, origin)
    return pack(name, "".join(lines).encode("utf-8", "surrogatepass"))


def _json(columns: Columns, count: int, origin: Origin) -> Iterator[str]:
    more: dict[str, Any] = {"manifest": origin.as_json()}
    for position in range(count):
        told = ((name, get(position)) for name, get in columns.items())
        record = {name: value for name, value in told if value is not None}
        yield json.dumps(record | more, ensure_ascii=False) + "\n"
        more = {}


def _csv(columns: Columns, count: int, origin: Origin, delimiter: str) -> Iterator[str]:
    columns, labels = dict(columns), columns.get("label")
    kinds = {type(labels(position)) for position in range(count)} if labels is not None else {str}
    written = next(iter(kinds)).__name__ if len(kinds) == 1 and kinds <= {int, float, str} else "json"
    if written == "json" and labels is not None:
        columns["label"] = lambda position: json.dumps(labels(position))
    yield f"# {json.dumps(replace(origin, labels=written).as_json())}\n"
    line = io.StringIO()
    writer = csv.writer(line, delimiter=delimiter, lineterminator="\n")
    writer.writerow(columns)
    for position in range(count):
        writer.writerow(get(position) for get in columns.values())
        yield line.getvalue()
        line.seek(0)
        line.truncate()
