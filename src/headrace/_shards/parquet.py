"""Parquet files in a store.

A footer is read by a ranged request, and a row group by the ranges of the requested columns.
"""

from __future__ import annotations

import asyncio
import io
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Any, ClassVar

from headrace._shards.discovery import Shard, list_inside, shard_errors
from headrace._shards.tables import Selection, TableFile
from headrace._store.ranges import LARGEST_SPAN, Ranges, map_all, plan_spans
from headrace.errors import ObjectNotFoundError, ShardError, TruncatedShardError

if TYPE_CHECKING:
    from typing_extensions import Buffer

SUFFIXES = (".parquet", ".pq", ".parq")

# Bytes of the first read. A footer takes about 100 bytes for a column of a row group. So the first
# read covers about 600 columns of row groups. A larger footer takes a second read.
TAIL = 64 << 10
_MAGIC = b"PAR1"

Pieces = list[tuple[int, memoryview]]
"""Parts of a file, each with an offset; in order, not overlapping."""


class Footer(TableFile):
    """Footer of a file, with the eight bytes after the footer.

    `shard` is the file in the version of the footer. A footer is pickled as bytes, so that no other
    process reads the footer again.
    """

    def __init__(self, shard: Shard, data: bytes) -> None:
        import pyarrow.parquet

        self.shard, self._data = shard, data
        with shard_errors("corrupt footer", shard.name, shard.size - len(data)):
            self.metadata = pyarrow.parquet.read_metadata(
                pyarrow.BufferReader(_MAGIC + self._data)
            )
            self.schema = self.metadata.schema.to_arrow_schema()
            self.rows = tuple(
                self.metadata.row_group(group).num_rows
                for group in range(self.metadata.num_row_groups)
            )
            any(self.schema.names)  # decodes the names
        if sum(self.rows) != self.metadata.num_rows or min(self.rows, default=0) < 0:
            raise shard.error(
                f"corrupt footer: {self.metadata.num_rows} rows, but row groups of {self.rows}"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return Footer, (self.shard, self._data)

    def selected(self, columns: Sequence[str]) -> Any:
        """Return the schema of `columns`; see `TableFile.selected`."""
        import pyarrow.parquet

        source = pyarrow.BufferReader(_MAGIC + self._data)
        file = pyarrow.parquet.ParquetFile(source, metadata=self.metadata)
        # For "a", pyarrow also reads "a.b". "a.b" may be another column.
        read = file.read_row_groups([], columns=[*columns]).schema
        given = [
            field
            for field in read
            if any(f"{column}.".startswith(f"{field.name}.") for column in columns)
        ]
        for column in columns:
            if not any(f"{column}.".startswith(f"{field.name}.") for field in given):
                raise KeyError(column)
        return pyarrow.schema(given)

    def row_groups(self, selection: Selection, filters: Any = None) -> list[RowGroup]:
        """Return the row groups with rows.

        With `filters`, row groups are left out if the statistics exclude all rows.
        """
        import pyarrow.dataset
        from pyarrow.compute import field, scalar

        numbers: Iterable[int] = range(len(self.rows))
        if filters is not None:
            added = selection.added.items()
            values = (
                field(name) == value if value.is_valid else field(name).is_null()
                for name, value in added
            )
            fragment = pyarrow.dataset.ParquetFileFormat().make_fragment(
                pyarrow.BufferReader(_MAGIC + self._data),
                partition_expression=reduce(and_, values, scalar(True)),
            )
            schema = pyarrow.schema(
                [
                    *self.schema,
                    *(pyarrow.field(name, value.type) for name, value in added),
                ]
            )
            numbers = [
                group.id for group in fragment.subset(filters, schema=schema).row_groups
            ]
        return [
            RowGroup(self, number, selection) for number in numbers if self.rows[number]
        ]

    def leaves(self, columns: Sequence[str] | None) -> list[int]:
        """Return the numbers of the stored columns of `columns`.

        A nested column has several stored columns.
        """
        schema = self.metadata.schema
        return [
            number
            for number in range(self.metadata.num_columns)
            if columns is None
            or any(
                f"{schema.column(number).path}.".startswith(f"{each}.")
                for each in columns
            )
        ]


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Row group of a file."""

    kind: ClassVar[str] = "row group"

    footer: Any  # `Footer` of the file, or in a subclass another `TableFile`
    number: int  # number of the row group in the file
    selection: Selection

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self.footer.rows[self.number])

    @property
    def nbytes(self) -> int:
        """Unpacked bytes. Columns with a dictionary count as encoded."""
        stored = self.footer.metadata.row_group(self.number)
        leaves = self.footer.leaves(self.selection.columns)
        return sum(stored.column(leaf).total_uncompressed_size for leaf in leaves)

    async def load(self) -> Any:
        """Read and decode the rows, as a `pyarrow.Table`.

        Neighbouring ranges are read by a single request, large chunks by several requests.

        Raises:
            ShardError: the rows are corrupt.
        """
        bounds = [
            (start, min(start + LARGEST_SPAN, span.stop))
            for span in plan_spans(self._ranges())
            for start in range(span.start, span.stop, LARGEST_SPAN)
        ]
        parts = await map_all(lambda bound: self.footer.shard.read(*bound), bounds)
        pieces = [(start, part) for (start, _), part in zip(bounds, parts, strict=True)]
        return await asyncio.to_thread(self._decode, pieces)

    def _decode(self, pieces: Pieces) -> Any:
        import pyarrow

        try:
            table = self._table(pieces)
            if table.num_rows == self.rows:
                return self.selection.apply(table)
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise self.error(f"cannot decode: {' '.join(str(error).split())}") from None
        raise self.error(
            f"cannot decode: {self.rows - table.num_rows} of {self.rows} rows are missing"
        )

    def _table(self, pieces: Pieces) -> Any:
        import pyarrow.parquet

        source = pyarrow.PythonFile(SparseFile(pieces, self.footer.shard.size), mode="r")
        # The bytes are in memory already, so pre-buffering would only copy the bytes. Checksums
        # exist only if the writer was asked for checksums.
        file = pyarrow.parquet.ParquetFile(
            source,
            metadata=self.footer.metadata,
            pre_buffer=False,
            page_checksum_verification=True,
        )
        columns = None if self.selection.columns is None else list(self.selection.columns)
        return file.read_row_group(self.number, columns=columns, use_threads=False)

    def error(self, what: str) -> ShardError:
        return ShardError(
            what, shard=self.footer.shard.name, member=f"{self.kind} {self.number}"
        )

    def _ranges(self) -> Ranges:
        """Return the byte ranges of the columns.

        Raises:
            ShardError: a range lies outside the file.
        """
        metadata, size = self.footer.metadata, self.footer.shard.size
        stored = metadata.row_group(self.number)
        ranges = []
        for leaf in self.footer.leaves(self.selection.columns):
            chunk = stored.column(leaf)
            length = chunk.total_compressed_size
            start = min(
                chunk.dictionary_page_offset or chunk.data_page_offset,
                chunk.data_page_offset,
            )
            if start < 0 or length < 0 or start + length > size:
                raise self.error(
                    f"corrupt footer: bytes {start} to {start + length} lie outside a file "
                    f"of {size}"
                )
            ranges.append((start, start + length))
        return Ranges.of(ranges)


async def read_footer_or_list(shard: Shard) -> Sequence[Footer | Shard]:
    """Read the footer of a file, or list the files in a directory.

    The directory is listed if there is no file with the name.
    """
    try:
        return [await read_footer(shard)]
    except ObjectNotFoundError:
        if shard.store.traits.web_server or not (
            inside := await list_inside(shard.store, shard.key, SUFFIXES)
        ):
            raise
    return inside


async def read_footer(shard: Footer | Shard) -> Footer:
    """Read the footer of a file.

    A footer of more than 64 KiB takes two requests.
    """
    if isinstance(shard, Footer):
        return shard
    shard, data = await shard.read_end(TAIL)
    size, tail = shard.size, bytes(data)
    if tail[-4:] != _MAGIC or size < 12:
        what = (
            f"not a Parquet file, or truncated or encrypted: it ends in {tail[-4:]!r} instead of "
            f"{_MAGIC!r}"
        )
        raise TruncatedShardError(what, shard=shard.name, offset=size)
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if length + len(_MAGIC) > size:
        raise shard.error(
            f"corrupt footer: a length of {length - 8} bytes in a file of {size}",
            size - 8,
        )
    if length > len(tail):
        rest = await shard.read(size - length, size - len(tail))
        tail = bytes(rest) + tail
    return Footer(shard, tail[len(tail) - length :])


class SparseFile(io.RawIOBase):
    """File with some parts present.

    The reader of the file seeks as in the whole file.
    """

    def __init__(self, pieces: Pieces, size: int) -> None:
        self._pieces = pieces
        self._starts = [start for start, _ in pieces]
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = (
            offset
            + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        )
        return self._at

    def read(self, size: int = -1) -> bytes:
        return bytes(self.read_buffer(size))

    def read_buffer(self, size: int = -1) -> Buffer:
        """Read without a copy if the bytes are in a single piece.

        pyarrow prefers `read_buffer` to `read`.
        """
        stop = self._size if size < 0 else min(self._at + size, self._size)
        parts = []
        while self._at < stop:
            number = bisect_right(self._starts, self._at) - 1
            start, data = self._pieces[number] if number >= 0 else (0, memoryview(b""))
            part = data[self._at - start : stop - start]
            if not part:
                raise OSError(f"bytes {self._at} to {stop} belong to none of its columns")
            parts.append(part)
            self._at += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)
