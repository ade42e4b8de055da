"""Row groups of Parquet files one behind the other: the next ones read ahead, each decoded a block ahead."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from headrace._core.batches import as_exception
from headrace._core.interface.block_reader import Block, BlockReader
from headrace._core.shards.parquet.file import Footer, decoded, fetch_group, member
from headrace.errors import ShardError

# Rows that become Python objects at once. That holds the interpreter, so it is done in pieces of a few milliseconds.
_BLOCK = 1024

# Bytes of tables that are decoded at once: about a millisecond, beside which the way to a thread and back, 0.1 ms, is
# little. Tables of 256 rows of 32 bytes, one at a time, took 6 times the CPU of decoding them (benchmarks/parquet.py).
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A row group of a file, and which of its columns are wanted.

    Attributes:
        footer: the file's.
        number: which of its row groups.
        columns: names; None for all.
    """

    footer: Footer
    number: int
    columns: tuple[str, ...] | None

    @property
    def rows(self) -> int:
        """How many it has."""
        return int(self.footer.rows[self.number])

    @property
    def name(self) -> str:
        """The file's key, and the number."""
        return f"{self.footer.shard.key}, {member(self.number)}"


class _RowGroupReader(BlockReader):
    """Reads one row group, and decodes it a block ahead of whoever takes the samples.

    Decoding is done in threads: pyarrow releases the interpreter, and to workers the bytes would have to be copied.
    """

    def __init__(self, group: RowGroup, rows: int | None, as_rows: bool) -> None:
        self._group = group
        self._rows = _BLOCK if as_rows else rows or group.rows
        self._as_rows = as_rows
        self._batches: Iterator[Any] | None = None
        super().__init__()

    async def _next_block(self) -> Block:
        group = self._group
        try:
            if self._batches is None:
                pieces = await fetch_group(group.footer, group.number, group.columns)
                self._batches = decoded(group.footer, group.number, group.columns, pieces, self._rows)
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
                if size >= _BLOCK_BYTES:
                    break
        except Exception as error:
            if not tables:
                raise
            self._batches = _failing(error)  # behind those that could be decoded
        return tables


def _failing(error: Exception) -> Iterator[Any]:
    yield from ()
    raise error


class RowGroupStream(AsyncIterator[Any]):
    """The samples of row groups in order, the next ones read ahead. One that fails is raised at its turn.

    Args:
        groups: in the order in which they are read.
        rows: of a block that is decoded at once; None for a whole row group. Of no effect where samples are rows.
        as_rows: whether samples are dicts of one row, or tables of a block.
        ahead: row groups that are read at once.
        prefetch_bytes: bytes of them at most, as stored; one is read whatever its size.
    """

    def __init__(
        self, groups: Iterable[RowGroup], rows: int | None, as_rows: bool, ahead: int, prefetch_bytes: int
    ) -> None:
        self._waiting = deque(groups)
        self._rows, self._as_rows = rows, as_rows
        self._ahead, self._prefetch_bytes = ahead, prefetch_bytes
        self._readers: deque[tuple[_RowGroupReader, int]] = deque()
        self._held = 0
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
                self._held -= size
            if block.error is not None:
                raise block.error
        return self._samples.popleft()

    async def aclose(self) -> None:
        """Read no more; every request under way has ended when this returns."""
        self._waiting.clear()
        self._samples.clear()
        while self._readers:
            await self._readers.popleft()[0].aclose()

    def _fill(self) -> None:
        while self._waiting and len(self._readers) < self._ahead:
            group = self._waiting[0]
            size = _stored(group)
            if self._readers and self._held + size > self._prefetch_bytes:
                return
            self._waiting.popleft()
            self._held += size
            self._readers.append((_RowGroupReader(group, self._rows, self._as_rows), size))


def _stored(group: RowGroup) -> int:
    try:
        ranges = group.footer.ranges(group.number, group.columns)
    except ShardError:
        return 0  # reading it raises the same, at its turn
    return int((ranges.stops - ranges.starts).sum())
