"""Parquet files in a store: footers by one ranged read, row groups by the ranges of the requested columns, in order."""

from __future__ import annotations

import asyncio
import io
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from headrace._core.failure import as_exception
from headrace._core.shards.discovery import Shard, list_inside, shard_errors
from headrace._core.shards.positions import PartPosition
from headrace._core.shards.reading import Block, BlockReader, PartReader
from headrace._core.shards.tables import Selection, TableFile
from headrace._core.store.ranges import LARGEST_SPAN, Ranges, map_all, plan_spans
from headrace.errors import ObjectNotFoundError, ShardError, TruncatedShardError

if TYPE_CHECKING:
    from typing_extensions import Buffer

SUFFIXES = (".parquet", ".pq", ".parq")

# Bytes of the first read. A footer takes about 100 bytes for a column of a row group, so this covers some 600 of them;
# a larger one takes a second read.
TAIL = 64 << 10
_MAGIC = b"PAR1"

# Rows that become Python objects at once. This holds the interpreter lock, so it is done for a few milliseconds at a
# time.
_ROWS_AT_ONCE = 1024

# Bytes of tables that are decoded at once: about a millisecond, against 0.1 ms for the way to a thread and back. Tables
# of 256 rows of 32 bytes, one at a time, took 6 times the CPU of decoding them (benchmarks/parquet.py).
_TABLE_BYTES_AT_ONCE = 1 << 20

# Tables that are decoded as one and then cut, if they are small: 18 µs for each of these tables, against 25.
_TABLES_AT_ONCE = 32
_COPIED_AT_ONCE = 1 << 16  # bytes

Pieces = list[tuple[int, memoryview]]
"""Parts of a file, each with its offset; in order, not overlapping."""


class Footer(TableFile):
    """A file's footer, with the eight bytes after it; pickled as its bytes, so that no other process reads it again.

    Its shard is the file in the version of the footer.
    """

    def __init__(self, shard: Shard, data: bytes) -> None:
        import pyarrow.parquet

        self.shard, self._data = shard, data
        with shard_errors("corrupt footer", shard.name, shard.size - len(data)):
            self.metadata = pyarrow.parquet.read_metadata(pyarrow.BufferReader(_MAGIC + self._data))
            self.schema = self.metadata.schema.to_arrow_schema()
            self.rows = tuple(self.metadata.row_group(group).num_rows for group in range(self.metadata.num_row_groups))
            any(self.schema.names)  # decodes them
        if sum(self.rows) != self.metadata.num_rows or min(self.rows, default=0) < 0:
            raise shard.error(f"corrupt footer: {self.metadata.num_rows} rows, but row groups of {self.rows}")

    def __reduce__(self) -> tuple[Any, ...]:
        return Footer, (self.shard, self._data)

    def selected(self, columns: Sequence[str]) -> Any:
        import pyarrow.parquet

        source = pyarrow.BufferReader(_MAGIC + self._data)
        file = pyarrow.parquet.ParquetFile(source, metadata=self.metadata)
        # Pyarrow reads "a.b" for "a", which may be another column.
        read = file.read_row_groups([], columns=[*columns]).schema
        given = [field for field in read if any(f"{column}.".startswith(f"{field.name}.") for column in columns)]
        for column in columns:
            if not any(f"{column}.".startswith(f"{field.name}.") for field in given):
                raise KeyError(column)
        return pyarrow.schema(given)

    def row_groups(self, selection: Selection) -> list[RowGroup]:
        """The row groups that have rows, and of which statistics do not show that no row passes the filter."""
        import pyarrow.dataset
        from pyarrow.compute import field

        numbers: Iterable[int] = range(len(self.rows))
        if selection.filters is not None:
            added = selection.added.items()
            values = (field(name) == value if value.is_valid else field(name).is_null() for name, value in added)
            fragment = pyarrow.dataset.ParquetFileFormat().make_fragment(
                pyarrow.BufferReader(_MAGIC + self._data), partition_expression=reduce(and_, values) if added else None
            )
            schema = pyarrow.schema([*self.schema, *(pyarrow.field(name, value.type) for name, value in added)])
            numbers = [group.id for group in fragment.subset(selection.filters, schema=schema).row_groups]
        return [RowGroup(self, number, selection) for number in numbers if self.rows[number]]

    def leaves(self, columns: Sequence[str] | None) -> list[int]:
        """Numbers of the stored columns of `columns`; a nested column has several."""
        paths = [self.metadata.schema.column(number).path for number in range(self.metadata.num_columns)]
        if columns is None:
            return list(range(len(paths)))
        return [n for n, path in enumerate(paths) if any(path == c or path.startswith(f"{c}.") for c in columns)]


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A row group of a file."""

    kind: ClassVar[str] = "row group"

    footer: Any  # `Footer` of the file, or in a subclass another `TableFile`
    number: int  # number of the row group in the file
    selection: Selection

    @property
    def rows(self) -> int:
        return int(self.footer.rows[self.number])

    @property
    def sizes(self) -> tuple[int, int]:
        """Compressed and unpacked bytes; of columns with a dictionary as they are encoded."""
        stored = self.footer.metadata.row_group(self.number)
        columns = [stored.column(leaf) for leaf in self.footer.leaves(self.selection.columns)]
        return sum(each.total_compressed_size for each in columns), sum(
            each.total_uncompressed_size for each in columns
        )

    async def fetch(self) -> Pieces:
        """Read the bytes of the columns: neighbours by one request, large chunks by several."""
        bounds = [
            (start, min(start + LARGEST_SPAN, span.stop))
            for span in plan_spans(self._ranges())
            for start in range(span.start, span.stop, LARGEST_SPAN)
        ]
        parts = await map_all(lambda bound: self.footer.shard.read(*bound), bounds)
        return [(start, part) for (start, _), part in zip(bounds, parts, strict=True)]

    def decode(self, pieces: Pieces, rows: int) -> Iterator[Any]:
        """Decode tables of `rows` rows before the filter; the last may be shorter."""
        import pyarrow

        left = self.rows
        try:
            for batch in self._batches(pieces, rows):
                left -= batch.num_rows
                yield self.selection.apply(batch)
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise self.error(f"cannot decode: {' '.join(str(error).split())}") from None
        if left:
            raise self.error(f"cannot decode: {left} of {self.rows} rows are missing")

    def _batches(self, pieces: Pieces, rows: int) -> Iterator[Any]:
        import pyarrow.parquet

        source = pyarrow.PythonFile(SparseFile(pieces, self.footer.shard.size), mode="r")
        # The bytes are in memory already, so pre-buffering would only copy. Checksums exist if the writer was asked for
        # them.
        file = pyarrow.parquet.ParquetFile(
            source, metadata=self.footer.metadata, pre_buffer=False, page_checksum_verification=True
        )
        columns = None if self.selection.columns is None else list(self.selection.columns)
        yield from file.iter_batches(rows, row_groups=[self.number], columns=columns, use_threads=False)

    def error(self, what: str) -> ShardError:
        return ShardError(what, shard=self.footer.shard.name, member=f"{self.kind} {self.number}")

    def _ranges(self) -> Ranges:
        """The byte ranges of the columns; raises `ShardError` if they lie outside the file."""
        metadata, size = self.footer.metadata, self.footer.shard.size
        stored = metadata.row_group(self.number)
        ranges = []
        for leaf in self.footer.leaves(self.selection.columns):
            chunk = stored.column(leaf)
            start, length = chunk.dictionary_page_offset or chunk.data_page_offset, chunk.total_compressed_size
            start = min(start, chunk.data_page_offset)
            if start < 0 or length < 0 or start + length > size:
                raise self.error(f"corrupt footer: bytes {start} to {start + length} lie outside a file of {size}")
            ranges.append((start, start + length))
        return Ranges.of(ranges)


async def read_footer_or_list(shard: Shard) -> Sequence[Footer | Shard]:
    """The footer of a file; if there is none, the files in a directory of that name."""
    try:
        return [await read_footer(shard)]
    except ObjectNotFoundError:
        if shard.store.traits.web_server or not (inside := await list_inside(shard.store, shard.key, SUFFIXES)):
            raise
    return inside


async def read_footer(shard: Footer | Shard) -> Footer:
    """Read the footer of a file by one request, or by two if it is larger than 64 KiB."""
    if isinstance(shard, Footer):
        return shard
    data, head = await shard.read_end(TAIL)
    shard, size, tail = replace(shard, head=head), head.size, bytes(data)
    if tail[-4:] != _MAGIC or size < 12:
        what = f"not a Parquet file, or truncated or encrypted: it ends in {tail[-4:]!r} instead of {_MAGIC!r}"
        raise TruncatedShardError(what, shard=shard.name, offset=size)
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if length + len(_MAGIC) > size:
        raise shard.error(f"corrupt footer: a length of {length - 8} bytes in a file of {size}", size - 8)
    if length > len(tail):
        rest = await shard.read(size - length, size - len(tail))
        tail = bytes(rest) + tail
    return Footer(shard, tail[len(tail) - length :])


class SparseFile(io.RawIOBase):
    """A file of which some parts are present, for a reader that seeks in the whole."""

    def __init__(self, pieces: Pieces, size: int) -> None:
        self._pieces = pieces
        self._starts = [start for start, _ in pieces]
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        return bytes(self.read_buffer(size))

    def read_buffer(self, size: int = -1) -> Buffer:
        """As `read`, without a copy where the bytes are in one piece; pyarrow prefers it."""
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


class TableReading(NamedTuple):
    """How row groups are read ahead, and what their samples are."""

    rows: int | None  # of a table; None for those of a row group
    as_rows: bool  # whether samples are rows, and not tables
    row_groups: int  # the most that are read at once
    bytes: int  # the most compressed bytes of these


class _RowGroupReader(BlockReader):
    """Reads one row group and decodes it one block ahead of the consumer.

    Decoding is done in threads: pyarrow releases the interpreter lock, and for workers the bytes would be copied.
    """

    def __init__(
        self, group: RowGroup, reading: TableReading, position: PartPosition, on_fetched: Callable[[], None]
    ) -> None:
        self._group = group
        self.size, decoded_bytes = group.sizes
        self.fetched = False  # whether its bytes are there
        self._on_fetched = on_fetched
        self._table_rows = reading.rows or group.rows
        self._as_rows = reading.as_rows
        if self._as_rows:
            self._rows, self._bytes_at_once = _ROWS_AT_ONCE, 0
        else:
            table_bytes = max(1, decoded_bytes * self._table_rows // group.rows)
            tables = max(1, min(_TABLES_AT_ONCE, _TABLE_BYTES_AT_ONCE // table_bytes))
            self._rows, self._bytes_at_once = self._table_rows * tables, _TABLE_BYTES_AT_ONCE
        self._undecoded = group.rows
        self._drop = position.drop
        self._decoded = position  # after the last block that was produced
        self._batches: Iterator[Any] = iter(())
        super().__init__(position, group.footer.shard.head)

    async def _next_block(self) -> Block:
        try:
            if not self.fetched:
                self._batches = self._group.decode(await self._group.fetch(), self._rows)
                self.fetched = True
                self._on_fetched()
        except Exception as error:
            return Block(deque(), error=as_exception(error))
        block = await asyncio.to_thread(self._decode)
        self._decoded = self._decoded.after(len(block.samples))
        return block if block.after is None else block._replace(after=self._decoded)

    def _decode(self) -> Block:
        """The next samples; with the last of them the end, where the iterator checks that no row is missing."""
        samples: deque[object] = deque()
        size = 0
        try:
            for batch in self._batches:
                samples.extend(self._samples_of(batch))
                size += batch.nbytes
                self._undecoded -= self._rows
                if samples and size >= self._bytes_at_once and self._undecoded > 0:
                    return Block(samples, self._decoded)
        except Exception as error:
            return Block(samples, error=as_exception(error))
        return Block(samples)

    def _samples_of(self, batch: Any) -> Sequence[object]:
        if self._as_rows:
            dropped = min(self._drop, batch.num_rows)
            try:
                samples: list[object] = batch.slice(dropped).to_pylist()
            except Exception as error:  # OverflowError, UnicodeDecodeError and others
                cause = f"{type(error).__name__}: {error}"
                what = f"some of its rows cannot be converted to Python objects; read it with format='arrow': {cause}"
                raise self._group.error(what) from None
        else:
            tables = _tables(batch, self._table_rows) if batch.num_rows else []
            dropped = min(self._drop, len(tables))
            samples = tables[dropped:]
        self._drop -= dropped
        return samples


def _tables(whole: Any, rows: int) -> list[object]:
    """A table as tables of `rows` rows, each with memory of its own.

    A slice would keep the whole batch alive, and be sent to another process with it. Arrow's stream format copies.
    """
    import pyarrow

    if whole.num_rows <= rows:
        return [whole]
    written = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(written, whole.schema) as stream:
        stream.write_table(whole, rows)
    copied = pyarrow.input_stream(written.getvalue(), buffer_size=_COPIED_AT_ONCE)
    with pyarrow.ipc.open_stream(copied) as stream:
        return [pyarrow.Table.from_batches([part]) for part in stream.read_all().to_batches()]


class RowGroupStream(PartReader[_RowGroupReader]):
    """The samples of row groups in order, the next groups prefetched.

    Its position is the number of samples that were given out of the current row group; that is read again. The next
    groups are read ahead of the current one as soon as its bytes are there; at least one is read whatever its size.
    """

    def __init__(self, groups: Sequence[RowGroup], parts: Sequence[int], reading: TableReading) -> None:
        super().__init__(parts, [group.footer.shard for group in groups], self._open_group)
        self._groups = groups
        self._reading = reading

    def _open_group(self, position: PartPosition, _shard: Shard, _standby: bool) -> _RowGroupReader:
        return _RowGroupReader(self._groups[position.part], self._reading, position, self._prefetch)

    async def _fill(self, reader: _RowGroupReader) -> None:
        self._prefetch()
        await reader.fill()

    def _prefetch(self) -> None:
        """Read further groups ahead of the first one, which counts until its bytes are there."""
        while self._open and len(self._ahead) + (not self._open[0].fetched) < self._reading.row_groups:
            position, size = self._peek(), sum(reader.size for reader in (*self._open, *self._ahead))
            if position is None or size + self._groups[position.part].sizes[0] > self._reading.bytes:
                return
            if (reader := self._open_next()) is not None:
                self._ahead.append(reader)
