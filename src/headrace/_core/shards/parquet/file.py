"""Parquet files in a store: footers by one ranged read, row groups by the ranges of the requested columns."""

from __future__ import annotations

import asyncio
import io
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from headrace._core.interface.block_reader import end_all
from headrace._core.shards.discovery import Shard
from headrace._core.store.head import Head
from headrace._core.store.ranges import LARGEST_SPAN, Ranges, plan_spans
from headrace.errors import MissingExtraError, ShardError, TruncatedShardError

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Bytes of the first read. A footer takes about 100 bytes for a column of a row group, so this covers some 600 of them;
# a larger one takes a second read.
TAIL = 64 << 10
_PARALLEL_FOOTERS = 32
_MAGIC, _ENCRYPTED = b"PAR1", b"PARE"
_PADDING = 100  # bytes that old writers leave out of a chunk's length (PARQUET-816); other readers also add them

Pieces = list[tuple[int, memoryview]]
"""Parts of a file, each with its offset; in order, not overlapping."""


def require_pyarrow() -> Any:
    """Pyarrow's Parquet module; raises `MissingExtraError` if it is not installed."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise MissingExtraError(what="reading Parquet", package="pyarrow", extra="parquet") from None
    return pyarrow.parquet


class Footer:
    """A file's footer; pickled as its bytes, so that no other process reads it again.

    Args:
        shard: the file.
        head: its size and version.
        data: the footer with the eight bytes after it.

    Raises:
        ShardError: `data` is no valid footer.
    """

    def __init__(self, shard: Shard, head: Head, data: bytes) -> None:
        self.__setstate__((shard, head, data))

    def __getstate__(self) -> tuple[Shard, Head, bytes]:
        return self.shard, self.head, self._data

    def __setstate__(self, state: tuple[Shard, Head, bytes]) -> None:
        import pyarrow

        self.shard, self.head, self._data = state
        try:
            self.metadata = require_pyarrow().read_metadata(pyarrow.BufferReader(_MAGIC + self._data))
            self.schema = self.metadata.schema.to_arrow_schema()
            self.rows = tuple(self.metadata.row_group(group).num_rows for group in range(self.metadata.num_row_groups))
        except (pyarrow.ArrowException, OSError) as error:
            offset = self.head.size - len(self._data)
            raise ShardError(f"corrupt footer: {_line(error)}", shard=self.shard.name, offset=offset) from None
        if sum(self.rows) != self.metadata.num_rows or min(self.rows, default=0) < 0:
            what = f"corrupt footer: {self.metadata.num_rows} rows, but row groups of {self.rows}"
            raise ShardError(what, shard=self.shard.name)

    def leaves(self, columns: Sequence[str] | None) -> list[int]:
        """Numbers of the stored columns of `columns`; a nested column has several."""
        paths = [self.metadata.schema.column(number).path for number in range(self.metadata.num_columns)]
        if columns is None:
            return list(range(len(paths)))
        return [n for n, path in enumerate(paths) if any(path == c or path.startswith(f"{c}.") for c in columns)]

    def decoded_bytes(self, group: int, columns: Sequence[str] | None) -> int:
        """The size of `columns` of a row group, unpacked; of columns with a dictionary as they are encoded."""
        stored = self.metadata.row_group(group)
        return sum(int(stored.column(number).total_uncompressed_size) for number in self.leaves(columns))

    def ranges(self, group: int, columns: Sequence[str] | None) -> Ranges:
        """The byte ranges of `columns` of a row group.

        Raises:
            ShardError: they lie outside the file.
        """
        stored = self.metadata.row_group(group)
        padding = _PADDING if str(self.metadata.created_by or "").startswith("parquet-mr") else 0
        ranges = []
        for number in self.leaves(columns):
            chunk = stored.column(number)
            starts = [chunk.data_page_offset]
            if chunk.dictionary_page_offset:
                starts.append(chunk.dictionary_page_offset)
            start, length = min(starts), chunk.total_compressed_size
            if start < 0 or length < 0 or start + length > self.head.size:
                what = f"corrupt footer: bytes {start} to {start + length} lie outside a file of {self.head.size}"
                raise ShardError(what, shard=self.shard.name, member=member_name(group, chunk.path_in_schema))
            ranges.append((start, min(start + length + padding, self.head.size)))
        return Ranges.of(ranges)


def member_name(group: int, column: str | None = None) -> str:
    """The name of a row group, or of a column of it, in errors."""
    return f"row group {group}" + ("" if column is None else f", column {column}")


async def read_footers(shards: Sequence[Shard]) -> list[Footer]:
    """Read the footers of files, each by one request, or by two if it is larger than 64 KiB.

    Raises:
        ShardError: a file is not Parquet, corrupt or encrypted.
        StoreError: a request failed.
    """
    limit = asyncio.Semaphore(_PARALLEL_FOOTERS)

    async def one(shard: Shard) -> Footer:
        async with limit:
            return await _read_footer(shard)

    tasks = [asyncio.ensure_future(one(shard)) for shard in shards]
    try:
        return list(await asyncio.gather(*tasks))
    finally:  # an error or a cancellation ends the others
        await end_all(tasks)


async def _read_footer(shard: Shard) -> Footer:
    read = await shard.read_end(TAIL)
    head, tail = read.head, bytes(read.data)
    ending = tail[-4:]
    if ending == _ENCRYPTED:
        raise ShardError("the footer is encrypted, and headrace has no key; decrypt the file first", shard=shard.name)
    if ending != _MAGIC or head.size < 12:
        what = f"not a Parquet file, or truncated: it ends in {ending!r} instead of {_MAGIC!r}"
        raise TruncatedShardError(what, shard=shard.name, offset=head.size)
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if length + len(_MAGIC) > head.size:
        what = f"corrupt footer: a length of {length - 8} bytes in a file of {head.size}"
        raise ShardError(what, shard=shard.name, offset=head.size - 8)
    if length > len(tail):
        rest = await replace(shard, head=head).read(head.size - length, head.size - len(tail))
        tail = bytes(rest) + tail
    return Footer(shard, head, tail[len(tail) - length :])


async def fetch_row_group(footer: Footer, group: int, columns: Sequence[str] | None) -> Pieces:
    """Read the bytes of `columns` of a row group: neighbours by one request, large chunks by several.

    Raises:
        ShardError: the footer is corrupt.
        StoreError: a request failed, or the file has changed.
    """
    shard = replace(footer.shard, head=footer.head)
    bounds = [
        (start, min(start + LARGEST_SPAN, span.stop))
        for span in plan_spans(footer.ranges(group, columns))
        for start in range(span.start, span.stop, LARGEST_SPAN)
    ]
    reads = [asyncio.ensure_future(shard.read(*bound)) for bound in bounds]
    try:
        parts = await asyncio.gather(*reads)
    finally:
        await end_all(reads)
    return [(start, part) for (start, _), part in zip(bounds, parts, strict=True)]


class SparseFile(io.RawIOBase):
    """A file of which some parts are present, for a reader that seeks in the whole.

    Example:
        >>> file = SparseFile([(4, memoryview(b"ab")), (6, memoryview(b"cd"))], 100)
        >>> file.seek(5), bytes(file.read(2))
        (5, b'bc')
    """

    def __init__(self, pieces: Pieces, size: int) -> None:
        self._pieces = pieces
        self._starts = [start for start, _ in pieces]
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def size(self) -> int:
        return self._size

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


def decode_row_group(
    footer: Footer, group: int, columns: Sequence[str] | None, pieces: Pieces, rows: int
) -> Iterator[Any]:
    """Decode a row group as record batches of `rows` rows; the last may be shorter.

    Raises:
        ShardError: a page is corrupt or rows are missing; the error names the column.
    """
    import pyarrow

    left = footer.rows[group]
    try:
        for batch in _open(footer, pieces).iter_batches(
            rows, row_groups=[group], columns=None if columns is None else list(columns), use_threads=False
        ):
            left -= batch.num_rows
            yield batch
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        cause: Exception = error
    else:
        if not left:
            return
        cause = ValueError(f"{left} of {footer.rows[group]} rows are missing")
    raise _decoding_error(footer, group, columns, pieces, cause) from None


def rows_of(batch: Any, footer: Footer, group: int, first: int) -> Iterable[dict[str, Any]]:
    """Convert a record batch of a row group to dicts of Python objects; its first row has number `first` in the group.

    Raises:
        ShardError: a value has no such object, such as a date after the year 9999. It is raised by the iterator, after
            the rows before, and names the column.
    """
    try:
        return cast("list[dict[str, Any]]", batch.to_pylist())
    except Exception:  # OverflowError, UnicodeDecodeError and others; the row that raises it is found one by one
        return _rows_one_by_one(batch, footer, group, first)


def _rows_one_by_one(batch: Any, footer: Footer, group: int, first: int) -> Iterator[dict[str, Any]]:
    for number in range(batch.num_rows):
        row = batch.slice(number, 1)
        try:
            yield from row.to_pylist()
        except Exception as error:
            cause = f"{type(error).__name__}: {_line(error)}"
            what = f"row {first + number} cannot be converted to Python objects; read it with format='arrow': {cause}"
            member = member_name(group, _unconvertible_column(row))
            raise ShardError(what, shard=footer.shard.name, member=member) from None


def _unconvertible_column(row: Any) -> str | None:
    for name, values in zip(row.schema.names, row.columns, strict=True):
        try:
            values.to_pylist()
        except Exception:  # the error whose column is looked for; it is raised by the caller
            return str(name)
    return None


def _open(footer: Footer, pieces: Pieces) -> Any:
    import pyarrow

    source = pyarrow.PythonFile(SparseFile(pieces, footer.head.size), mode="r")
    # The bytes are in memory already, so pre-buffering would only copy. Checksums exist if the writer was asked for
    # them.
    parquet = require_pyarrow()
    return parquet.ParquetFile(source, metadata=footer.metadata, pre_buffer=False, page_checksum_verification=True)


def _decoding_error(
    footer: Footer, group: int, columns: Sequence[str] | None, pieces: Pieces, error: Exception
) -> ShardError:
    """The error with the name of its column, which is found by decoding each column alone."""
    import pyarrow

    corrupt = None
    for leaf in footer.leaves(columns):
        path = footer.metadata.schema.column(leaf).path
        try:
            alone = _open(footer, pieces).read_row_group(group, columns=[path], use_threads=False)
            if alone.num_rows == footer.rows[group]:
                continue
        except (pyarrow.ArrowException, OSError, ValueError) as cause:
            error = cause
        corrupt = path
        break
    return ShardError(f"cannot decode: {_line(error)}", shard=footer.shard.name, member=member_name(group, corrupt))


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
