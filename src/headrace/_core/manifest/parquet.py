"""Manifests as Parquet; pyarrow is imported on first use."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any

from headrace._core.shards.parquet.file import require_pyarrow
from headrace.errors import ManifestError

if TYPE_CHECKING:
    from typing_extensions import Buffer

_METADATA_KEY = b"headrace.manifest"
_ROWS_AT_ONCE = 65536  # as Python objects: about 30 MB


def parquet_rows(
    data: Buffer, name: str, columns: Sequence[str]
) -> tuple[object, Iterator[tuple[int, Mapping[str, object]]]]:
    """The origin in a file's metadata, None if absent; and its rows, numbered from 1.

    Raises:
        ManifestError: the file is corrupt, or lacks the first of `columns`; also from the iterator.
        MissingExtraError: pyarrow is not installed.
    """
    parquet = require_pyarrow()
    import pyarrow

    try:
        source = pyarrow.BufferReader(pyarrow.py_buffer(data))
        file = parquet.ParquetFile(source, page_checksum_verification=True)
        schema = file.schema_arrow
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise ManifestError(f"not Parquet, or corrupt: {error}", source=name) from None
    if columns[0] not in schema.names:
        there = ", ".join(map(repr, schema.names))
        raise ManifestError(f"a manifest needs a column {columns[0]!r}, and has {there}", source=name)
    try:
        origin = json.loads((schema.metadata or {}).get(_METADATA_KEY, b"null"))
    except ValueError:
        origin = None

    def rows() -> Iterator[tuple[int, Mapping[str, object]]]:
        number = 0
        there = [column for column in columns if column in schema.names]
        try:
            for batch in file.iter_batches(_ROWS_AT_ONCE, columns=there):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:  # also invalid UTF-8
            raise ManifestError(f"corrupt: {error}", source=name, line=number + 1) from None

    return origin, rows()


def parquet_bytes(columns: Mapping[str, Callable[[int], object]], count: int, origin: object) -> bytes:
    """A Parquet file of `count` rows; `origin` is JSON.

    Raises:
        TypeError: the labels do not fit one column: they are of several types, or an integer has more than 64 bits.
        MissingExtraError: pyarrow is not installed.
    """
    parquet = require_pyarrow()
    import pyarrow

    known = {"key": pyarrow.string(), "size": pyarrow.int64(), "etag": pyarrow.string(), "checksum": pyarrow.string()}
    arrays = []
    for name, get in columns.items():
        values = [get(position) for position in range(count)]
        arrays.append(_array(name, values, known.get(name)))
    table = pyarrow.table(arrays, names=list(columns))
    table = table.replace_schema_metadata({_METADATA_KEY: json.dumps(origin).encode()})
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(table, sink, compression="zstd", write_page_checksum=True)
    return bytes(sink.getvalue())


def _array(name: str, values: list[object], type: object) -> object:
    """The values of a column as an Arrow array, from which the same values are read.

    Raises:
        TypeError: there is no such array.
    """
    import pyarrow

    def fits(count: int) -> bool:
        try:
            pyarrow.array(values[:count], type)
        except refusals:
            return False
        return True

    refusals = (pyarrow.ArrowException, TypeError, ValueError, OverflowError)
    try:
        array = pyarrow.array(values, type)
    except refusals as error:
        row, why = bisect_left(range(len(values)), True, key=lambda row: not fits(row + 1)), str(error)
    else:
        changed = _first_changed(values, array)
        if changed is None:
            return array
        row, why = changed
    what = f"the {name}s do not fit one column of Parquet; write JSON lines or CSV"
    raise TypeError(f"{what} (row {row + 1}, {name} {values[row]!r}: {why})") from None


def _first_changed(values: Sequence[object], array: Any) -> tuple[int, str] | None:
    """The number of the first value that is read from `array` as another one, such as 1 as 1.0, and what is read."""
    kinds = set(map(type, values)) - {NoneType}
    if len(kinds) < 2 and not kinds & {list, tuple, dict}:
        return None
    for row, (value, read) in enumerate(zip(values, array.to_pylist(), strict=True)):
        if json.dumps(value, sort_keys=True) != json.dumps(read, sort_keys=True):
            return row, f"it would be read as {read!r}"
    return None
