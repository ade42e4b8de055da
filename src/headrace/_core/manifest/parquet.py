"""Manifests as Parquet: pyarrow is imported here only, and only where such a file is read or written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace._core.shards.parquet.file import require_pyarrow
from headrace.errors import ManifestError

if TYPE_CHECKING:
    from typing_extensions import Buffer

_NAME = b"headrace.manifest"
_ROWS = 65536  # at a time as Python objects: some 30 MB


def parquet_rows(
    data: Buffer, name: str, columns: Sequence[str]
) -> tuple[Any, Iterator[tuple[int, Mapping[str, Any]]]]:
    """What a file says of its origin, None where it says nothing; and its rows, numbered from 1.

    Args:
        data: the file.
        name: what errors call it.
        columns: which to read, as far as it has them; the first it must have.

    Raises:
        ManifestError: it is damaged, or lacks the first of `columns`; also while rows are read.
        MissingExtraError: pyarrow is not installed.
    """
    parquet = require_pyarrow()
    import pyarrow

    try:
        source = pyarrow.BufferReader(pyarrow.py_buffer(data))
        file = parquet.ParquetFile(source, page_checksum_verification=True)
        schema = file.schema_arrow
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise ManifestError(f"this is not Parquet, or damaged: {error}", source=name) from None
    if columns[0] not in schema.names:
        there = ", ".join(map(repr, schema.names))
        raise ManifestError(f"a manifest needs a column {columns[0]!r}, and has {there}", source=name)
    try:
        told = json.loads((schema.metadata or {}).get(_NAME, b"null"))
    except ValueError:
        told = None

    def rows() -> Iterator[tuple[int, Mapping[str, Any]]]:
        number = 0
        try:
            for batch in file.iter_batches(_ROWS, columns=[column for column in columns if column in schema.names]):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
        except (pyarrow.ArrowException, OSError, ValueError) as error:  # of UTF-8, too
            raise ManifestError(f"it is damaged: {error}", source=name, line=number + 1) from None

    return told, rows()


def parquet_of(columns: Mapping[str, Callable[[int], Any]], count: int, origin: Any) -> bytes:
    """A table as the bytes of a Parquet file.

    Args:
        columns: their names, and what is in them at each position.
        count: how many rows there are.
        origin: what the file says of its origin, plain enough for JSON.

    Raises:
        TypeError: the labels are not of one type.
        MissingExtraError: pyarrow is not installed.
    """
    parquet = require_pyarrow()
    import pyarrow

    known = {"key": pyarrow.string(), "size": pyarrow.int64(), "etag": pyarrow.string(), "checksum": pyarrow.string()}
    arrays = []
    for name, get in columns.items():
        values = [get(position) for position in range(count)]
        try:
            arrays.append(pyarrow.array(values, known.get(name)))
        except (pyarrow.ArrowException, TypeError, ValueError) as error:
            raise TypeError(f"the {name}s do not fit one column of Parquet; write JSON lines: {error}") from None
    table = pyarrow.table(arrays, names=list(columns))
    table = table.replace_schema_metadata({_NAME: json.dumps(origin).encode()})
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(table, sink, compression="zstd", write_page_checksum=True)
    return bytes(sink.getvalue())
