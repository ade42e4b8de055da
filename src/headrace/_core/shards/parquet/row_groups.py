"""A stream of row groups of Parquet files: the next ones prefetched, each decoded one block ahead."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from headrace._core.batches import as_exception
from headrace._core.interface.block_reader import Block, BlockReader
from headrace._core.shards.parquet.file import Footer, Pieces, decode_row_group, fetch_row_group, member_name
from headrace.errors import ShardError

# Rows that become Python objects at once. This holds the interpreter lock, so it is done for a few milliseconds at a
# time.
_ROWS_AT_ONCE = 1024

# Bytes of tables that are decoded at once: about a millisecond, against 0.1 ms for the way to a thread and back. Tables
# of 256 rows of 32 bytes, one at a time, took 6 times the CPU of decoding them (benchmarks/parquet.py).
_TABLE_BYTES_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A row group of a file.

    Attributes:
        footer: footer of the file.
        number: number of the row group in the file.
        columns: names of the columns to read; None for all.
    """

    footer: Footer
    number: int
    columns: tuple[str, ...] | None

    @property
    def rows(self) -> int:
        return int(self.footer.rows[self.number])

    @property
    def name(self) -> str:
        return f"{self.footer.shard.key}, {member_name(self.number)}"

    @property
    def stored_bytes(self) -> int:
        """Compressed size; 0 if the footer is corrupt, since reading raises then."""
        try:
            ranges = self.footer.ranges(self.number, self.columns)
        except ShardError:
            return 0
        return int((ranges.stops - ranges.starts).sum())

    async def fetch(self) -> Pieces:
        return await fetch_row_group(self.footer, self.number, self.columns)

    def decode(self, pieces: Pieces, rows: int) -> Iterator[Any]:
        return decode_row_group(self.footer, self.number, self.columns, pieces, rows)


class _RowGroupReader(BlockReader):
    """Reads one row group and decodes it one block ahead of the consumer.

    Decoding is done in threads: pyarrow releases the interpreter lock, and for workers the bytes would be copied.
    """

    def __init__(self, group: RowGroup, rows: int | None, as_rows: bool) -> None:
        self._group = group
        self._rows = _ROWS_AT_ONCE if as_rows else rows or group.rows
        self._as_rows = as_rows
        self._batches: Iterator[Any] | None = None
        super().__init__()

    async def _next_block(self) -> Block:
        try:
            if self._batches is None:
                self._batches = self._group.decode(await self._group.fetch(), self._rows)
            samples = await asyncio.to_thread(self._decode, self._batches)
        except Exception as error:
            return Block(deque(), as_exception(error), end=True)
        return Block(samples, end=not samples)

    def _decode(self, batches: Iterator[Any]) -> deque[Any]:
        if not self._as_rows:
            return self._tables(batches)
        batch = next(batches, None)
        return deque() if batch is None else deque(batch.to_pylist())

    def _tables(self, batches: Iterator[Any]) -> deque[Any]:
        import pyarrow

        tables: deque[Any] = deque()
        size = 0
        try:
            for batch in batches:
                tables.append(pyarrow.Table.from_batches([batch]))
                size += batch.nbytes
                if size >= _TABLE_BYTES_AT_ONCE:
                    break
        except Exception as error:
            if not tables:
                raise
            self._batches = _raising(error)  # after the tables before it
        return tables


def _raising(error: Exception) -> Iterator[Any]:
    yield from ()
    raise error


class RowGroupStream(AsyncIterator[Any]):
    """The samples of row groups in order, the next groups prefetched. The error of one is raised at its turn.

    Args:
        groups: in reading order.
        rows: rows of a table; None for a whole row group. Ignored with `as_rows`.
        as_rows: whether samples are dicts of one row instead of tables.
        prefetch_row_groups: maximum row groups read at once.
        prefetch_bytes: maximum compressed bytes of them; at least one is read whatever its size.
    """

    def __init__(
        self,
        groups: Iterable[RowGroup],
        *,
        rows: int | None,
        as_rows: bool,
        prefetch_row_groups: int,
        prefetch_bytes: int,
    ) -> None:
        self._waiting = deque(groups)
        self._rows, self._as_rows = rows, as_rows
        self._prefetch_row_groups, self._prefetch_bytes = prefetch_row_groups, prefetch_bytes
        self._readers: deque[tuple[_RowGroupReader, int]] = deque()  # each with its compressed bytes
        self._bytes = 0
        self._samples: deque[Any] = deque()

    async def __anext__(self) -> Any:
        while not self._samples:
            self._fill()
            if not self._readers:
                raise StopAsyncIteration
            reader, size = self._readers[0]
            block = await reader.block()
            self._samples = block.samples
            if block.end:
                self._readers.popleft()
                self._bytes -= size
            if block.error is not None:
                raise block.error
        return self._samples.popleft()

    async def aclose(self) -> None:
        """Stop reading; no request is in flight when this returns."""
        self._waiting.clear()
        self._samples.clear()
        while self._readers:
            await self._readers.popleft()[0].aclose()

    def _fill(self) -> None:
        while self._waiting and len(self._readers) < self._prefetch_row_groups:
            size = self._waiting[0].stored_bytes
            if self._readers and self._bytes + size > self._prefetch_bytes:
                return
            group = self._waiting.popleft()
            self._bytes += size
            self._readers.append((_RowGroupReader(group, self._rows, self._as_rows), size))
