"""Manifests as Parquet; pyarrow is imported on first use."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

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
        except (pyarrow.ArrowException, OSError, ValueError) as error:  # also invalid UTF-8
            raise ManifestError(f"corrupt: {error}", source=name, line=number + 1) from None

    return origin, rows()


def parquet_bytes(columns: Mapping[str, Callable[[int], object]], count: int, origin: object) -> bytes:
    """A Parquet file of `count` rows; `origin` is JSON.

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
    table = table.replace_schema_metadata({_METADATA_KEY: json.dumps(origin).encode()})
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(table, sink, compression="zstd", write_page_checksum=True)
    return bytes(sink.getvalue())
