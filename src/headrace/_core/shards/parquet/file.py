"""Parquet files behind a store: footers by one ranged read, row groups by the ranges of the columns that are wanted."""

from __future__ import annotations

import asyncio
import io
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headrace._core.shards.discovery import Shard
from headrace._core.store.head import Head
from headrace._core.store.ranges import LARGEST_SPAN, Ranges, plan_spans
from headrace.errors import MissingExtraError, ShardError, TruncatedShardError

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Bytes of the first read. A footer takes about 100 bytes for a column of a row group, so this covers some 600 of them;
# a larger one takes a second read.
TAIL = 64 << 10
_FOOTERS = 32  # files whose footers are read at once
_MAGIC, _ENCRYPTED = b"PAR1", b"PARE"
_PADDING = 100  # bytes that old writers leave out of a chunk's length (PARQUET-816); readers of it ask for them too

Pieces = list[tuple[int, memoryview]]
"""Parts of a file: where each begins, and its bytes; in order, none over another."""


def require_pyarrow() -> Any:
    """Pyarrow's Parquet module.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import pyarrow.parquet
    except ImportError:
        raise MissingExtraError(what="reading Parquet", package="pyarrow", extra="parquet") from None
    return pyarrow.parquet


class Footer:
    """A file's footer, pickled as the bytes that it was read as, so that no process reads it again.

    Args:
        shard: the file.
        head: its size and version.
        data: the footer with the eight bytes behind it.

    Raises:
        ShardError: these bytes are no footer.
    """

    def __init__(self, shard: Shard, head: Head, data: bytes) -> None:
        self.shard = shard
        self.head = head
        self._data = data
        self._parse()

    def __getstate__(self) -> tuple[Shard, Head, bytes]:
        return self.shard, self.head, self._data

    def __setstate__(self, state: tuple[Shard, Head, bytes]) -> None:
        self.shard, self.head, self._data = state
        self._parse()

    def _parse(self) -> None:
        import pyarrow

        try:
            self.metadata = require_pyarrow().read_metadata(pyarrow.BufferReader(_MAGIC + self._data))
            self.schema = self.metadata.schema.to_arrow_schema()
            self.rows = tuple(self.metadata.row_group(group).num_rows for group in range(self.metadata.num_row_groups))
        except (pyarrow.ArrowException, OSError) as error:
            offset = self.head.size - len(self._data)
            raise ShardError(f"its footer is damaged: {_line(error)}", shard=self.shard.name, offset=offset) from None
        if sum(self.rows) != self.metadata.num_rows or min(self.rows, default=0) < 0:
            what = f"its footer is damaged: it tells of {self.metadata.num_rows} rows, its row groups of {self.rows}"
            raise ShardError(what, shard=self.shard.name)

    def leaves(self, columns: Sequence[str] | None) -> list[int]:
        """The numbers of the stored columns that `columns` are made of; a nested one has several."""
        paths = [self.metadata.schema.column(number).path for number in range(self.metadata.num_columns)]
        if columns is None:
            return list(range(len(paths)))
        return [n for n, path in enumerate(paths) if any(path == c or path.startswith(f"{c}.") for c in columns)]

    def ranges(self, group: int, columns: Sequence[str] | None) -> Ranges:
        """The bytes of a row group that `columns` need.

        Raises:
            ShardError: they would lie outside of the file.
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
                what = f"its footer is damaged: bytes {start} to {start + length} of {self.head.size} cannot be"
                raise ShardError(what, shard=self.shard.name, member=member(group, chunk.path_in_schema))
            ranges.append((start, min(start + length + padding, self.head.size)))
        return Ranges.of(ranges)


def member(group: int, column: str | None = None) -> str:
    """What errors call a row group, or a column of it."""
    return f"row group {group}" + ("" if column is None else f", column {column}")


async def open_footers(shards: Sequence[Shard]) -> list[Footer]:
    """Read the footers of files, each by one request, two where it is larger than 64 KiB.

    Raises:
        ShardError: a file is not Parquet, or damaged, or encrypted.
        StoreError: the store refused or failed.
    """
    limit = asyncio.Semaphore(_FOOTERS)

    async def one(shard: Shard) -> Footer:
        async with limit:
            return await _open(shard)

    tasks = [asyncio.ensure_future(one(shard)) for shard in shards]
    try:
        return list(await asyncio.gather(*tasks))
    finally:  # one that failed, or a cancellation, ends the others
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _open(shard: Shard) -> Footer:
    read = await shard.read_end(TAIL)
    head, tail = read.head, bytes(read.data)
    ending = tail[-4:]
    if ending == _ENCRYPTED:
        raise ShardError("its footer is encrypted, and headrace has no key; decrypt the file first", shard=shard.name)
    if ending != _MAGIC or head.size < 12:
        what = f"it is no Parquet file, or cut short: it ends in {ending!r} in place of {_MAGIC!r}"
        raise TruncatedShardError(what, shard=shard.name, offset=head.size)
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if length + len(_MAGIC) > head.size:
        what = f"its footer is damaged: it would have {length - 8} bytes, and the file has {head.size}"
        raise ShardError(what, shard=shard.name, offset=head.size - 8)
    if length > len(tail):
        start = head.size - length
        rest = await replace(shard, head=head).read(start, head.size - len(tail))
        tail = bytes(rest) + tail
    return Footer(shard, head, tail[len(tail) - length :])


async def fetch_group(footer: Footer, group: int, columns: Sequence[str] | None) -> Pieces:
    """Read the bytes that `columns` of a row group need: neighbours by one request, large chunks by several.

    Raises:
        ShardError: the footer is damaged.
        StoreError: the store refused or failed, or the file has changed.
    """
    shard = replace(footer.shard, head=footer.head)
    bounds = [
        (start, min(start + LARGEST_SPAN, span.stop))
        for span in plan_spans(footer.ranges(group, columns))
        for start in range(span.start, span.stop, LARGEST_SPAN)
    ]
    reads = [asyncio.ensure_future(shard.read(*bound)) for bound in bounds]
    if not reads:
        return []
    try:
        parts = await asyncio.gather(*reads)
    finally:
        for read in reads:
            read.cancel()
        await asyncio.wait(reads)
    return [(start, part) for (start, _), part in zip(bounds, parts, strict=True)]


class SparseFile(io.RawIOBase):
    """The parts of a file that were fetched, for a reader that takes it for the whole.

    Args:
        pieces: the parts.
        size: the whole file's, in bytes.

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
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def size(self) -> int:
        """Bytes of the whole file."""
        return self._size

    def tell(self) -> int:
        """Where it is read from next."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Read bytes; raises `OSError` where they were not fetched."""
        return bytes(self.read_buffer(size))

    def read_buffer(self, size: int = -1) -> Buffer:
        """As `read`, without a copy where they came as one piece; pyarrow prefers it."""
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


def decoded(footer: Footer, group: int, columns: Sequence[str] | None, pieces: Pieces, rows: int) -> Iterator[Any]:
    """Decode a row group, as record batches of `rows` rows, the last with what is left.

    Raises:
        ShardError: a page is damaged, or rows are missing; it names the column.
    """
    import pyarrow

    left = footer.rows[group]
    try:
        for batch in _file(footer, pieces).iter_batches(
            rows, row_groups=[group], columns=None if columns is None else list(columns), use_threads=False
        ):
            left -= batch.num_rows
            yield batch
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        damage: Exception = error
    else:
        if not left:
            return
        damage = ValueError(f"{left} of {footer.rows[group]} rows are missing")
    raise _damaged(footer, group, columns, pieces, damage) from None


def _file(footer: Footer, pieces: Pieces) -> Any:
    import pyarrow

    source = pyarrow.PythonFile(SparseFile(pieces, footer.head.size), mode="r")
    # What is read is in memory already, so that reading ahead would only copy. Checksums are there where the writer
    # was asked for them.
    parquet = require_pyarrow()
    return parquet.ParquetFile(source, metadata=footer.metadata, pre_buffer=False, page_checksum_verification=True)


def _damaged(footer: Footer, group: int, columns: Sequence[str] | None, pieces: Pieces, error: Exception) -> ShardError:
    """The error, with the column that it is about: found by decoding each alone."""
    import pyarrow

    guilty = None
    for leaf in footer.leaves(columns):
        path = footer.metadata.schema.column(leaf).path
        try:
            alone = _file(footer, pieces).read_row_group(group, columns=[path], use_threads=False)
            if alone.num_rows == footer.rows[group]:
                continue
        except (pyarrow.ArrowException, OSError, ValueError) as cause:
            error = cause
        guilty = path
        break
    return ShardError(f"it cannot be decoded: {_line(error)}", shard=footer.shard.name, member=member(group, guilty))


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
