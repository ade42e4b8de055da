"""A stream of row groups of Parquet files: the next ones prefetched, each decoded one block ahead."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace._core.failure import as_exception
from headrace._core.interface.block_reader import Block, BlockReader
from headrace._core.interface.stream_state import ResumableIterator, State
from headrace._core.shards.discovery import Shard
from headrace._core.shards.parquet.file import Footer, Pieces, decode_row_group, fetch_row_group, member_name
from headrace._core.shards.positions import Part, PartPosition, PartQueue
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
    def shard(self) -> Shard:
        """The file, in the version of the footer."""
        return replace(self.footer.shard, head=self.footer.head)

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

    def decode(self, pieces: Pieces, rows: int) -> Iterator[object]:
        return decode_row_group(self.footer, self.number, self.columns, pieces, rows)


class _RowGroupReader(BlockReader):
    """Reads one row group and decodes it one block ahead of the consumer.

    Decoding is done in threads: pyarrow releases the interpreter lock, and for workers the bytes would be copied.

    Args:
        group: the row group.
        rows: rows of a table; None for all.
        as_rows: whether samples are rows.
        position: how many samples to leave out, and where to stop.

    Attributes:
        group: the row group.
        size: its compressed bytes.
    """

    def __init__(self, group: RowGroup, rows: int | None, as_rows: bool, position: PartPosition) -> None:
        self.group = group
        self.size = group.stored_bytes
        self._rows = _ROWS_AT_ONCE if as_rows else rows or group.rows
        self._as_rows = as_rows
        self._drop = position.drop
        self._left = None if position.stop is None else position.stop - position.given
        self._batches: Iterator[object] | None = None
        super().__init__()

    async def _next_block(self) -> Block:
        try:
            if self._batches is None:
                self._batches = self.group.decode(await self.group.fetch(), self._rows)
            samples = await asyncio.to_thread(self._decode, self._batches)
        except Exception as error:
            return Block(deque(), as_exception(error), end=True)
        if self._left is not None:
            while len(samples) > self._left:
                samples.pop()
            self._left -= len(samples)
        return Block(samples, end=not samples)

    def _decode(self, batches: Iterator[Any]) -> deque[object]:
        if not self._as_rows:
            return self._tables(batches)
        for batch in batches:
            dropped = min(self._drop, batch.num_rows)
            self._drop -= dropped
            if dropped < batch.num_rows:
                return deque(batch.slice(dropped).to_pylist())
        return deque()

    def _tables(self, batches: Iterator[Any]) -> deque[object]:
        import pyarrow

        tables: deque[object] = deque()
        size = 0
        try:
            for batch in batches:
                if self._drop:
                    self._drop -= 1
                    continue
                tables.append(pyarrow.Table.from_batches([batch]))
                size += batch.nbytes
                if size >= _TABLE_BYTES_AT_ONCE:
                    break
        except Exception as error:
            if not tables:
                raise
            self._batches = _raising(error)  # after the tables before it
        return tables


def _raising(error: Exception) -> Iterator[object]:
    yield from ()
    raise error


class RowGroupStream(ResumableIterator[object]):
    """The samples of row groups in order, the next groups prefetched. The error of one is raised at its turn.

    Its position is the number of samples that were given out of the current row group; that is read again.

    Args:
        groups: all row groups.
        parts: those to read, in order.
        rows: rows of a table; None for a whole row group. Ignored with `as_rows`.
        as_rows: whether samples are dicts of one row instead of tables.
        prefetch_row_groups: maximum row groups read at once.
        prefetch_bytes: maximum compressed bytes of them; at least one is read whatever its size.
    """

    def __init__(
        self,
        groups: Sequence[RowGroup],
        parts: Sequence[Part],
        *,
        rows: int | None,
        as_rows: bool,
        prefetch_row_groups: int,
        prefetch_bytes: int,
    ) -> None:
        self._groups = groups
        self._queue = PartQueue(parts, len(groups))
        self._rows, self._as_rows = rows, as_rows
        self._prefetch_row_groups, self._prefetch_bytes = prefetch_row_groups, prefetch_bytes
        self._pending: deque[PartPosition] = deque()  # restored, or opened by the queue and too large to prefetch yet
        self._readers: deque[tuple[_RowGroupReader, PartPosition]] = deque()
        self._bytes = 0
        self._samples: deque[object] = deque()
        self._given = 0  # samples of the first group in the blocks up to the current one
        self._closed: State | None = None  # the state in which it was closed

    async def __anext__(self) -> object:
        while not self._samples:
            self._fill()
            if not self._readers:
                raise StopAsyncIteration
            reader, _ = self._readers[0]
            block = await reader.block()
            self._samples = block.samples
            self._given += len(block.samples)
            if block.end:
                self._readers.popleft()
                self._given = 0
                self._bytes -= reader.size
            if block.error is not None:
                raise block.error
        return self._samples.popleft()

    def state_dict(self) -> State:
        if self._closed is not None:
            return self._closed
        if not self._readers:
            return self._queue.to_state([position.to_state() for position in self._pending])
        reader, position = self._readers[0]
        current = position.to_state(self._given - len(self._samples), reader.group.footer.head)
        return self._queue.to_state([current], prefetched=len(self._readers) - 1 + len(self._pending))

    def load_state_dict(self, state: State) -> None:
        positions = self._queue.restore(state)
        for position in positions:
            position.version_of(self._groups[position.part].shard)
        self._pending.extend(positions)

    async def aclose(self) -> None:
        """Stop reading; no request is in flight when this returns."""
        self._closed = self.state_dict()
        self._queue.clear()
        self._pending.clear()
        self._samples.clear()
        while self._readers:
            await self._readers.popleft()[0].aclose()

    def _fill(self) -> None:
        while len(self._readers) < self._prefetch_row_groups:
            position = self._pending.popleft() if self._pending else self._queue.pop()
            if position is None:
                return
            group = self._groups[position.part]
            if self._readers and self._bytes + group.stored_bytes > self._prefetch_bytes:
                self._pending.appendleft(position)
                return
            reader = _RowGroupReader(group, self._rows, self._as_rows, position)
            self._bytes += reader.size
            self._readers.append((reader, position))
