"""A stream of row groups of Parquet files: the next ones prefetched, each decoded one block ahead."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from headrace._core.failure import as_exception
from headrace._core.shards.parquet_file import Pieces, RowGroup
from headrace._core.shards.positions import Part, PartPosition
from headrace._core.shards.reading import Block, BlockReader, PartReader
from headrace._core.streams.resumable import State

# Rows that become Python objects at once. This holds the interpreter lock, so it is done for a few milliseconds at a
# time.
_ROWS_AT_ONCE = 1024

# Bytes of tables that are decoded at once: about a millisecond, against 0.1 ms for the way to a thread and back. Tables
# of 256 rows of 32 bytes, one at a time, took 6 times the CPU of decoding them (benchmarks/parquet.py).
_TABLE_BYTES_AT_ONCE = 1 << 20

# Tables that are decoded as one and then cut, if they are small: 18 µs for each of these tables, against 25.
_TABLES_AT_ONCE = 32
_COPIED_AT_ONCE = 1 << 16  # bytes


class _RowGroupReader(BlockReader):
    """Reads one row group and decodes it one block ahead of the consumer.

    Decoding is done in threads: pyarrow releases the interpreter lock, and for workers the bytes would be copied.
    """

    def __init__(
        self,
        group: RowGroup,
        rows: int | None,
        as_rows: bool,
        position: PartPosition,
        on_fetched: Callable[[], None],
    ) -> None:
        self.group = group
        self.size = group.stored_bytes  # compressed
        self.fetched = False  # whether its bytes are there
        self._on_fetched = on_fetched
        self._table_rows = rows or group.rows
        if as_rows:
            self._rows, self._bytes_at_once = _ROWS_AT_ONCE, 0
        else:
            table_bytes = max(1, group.decoded_bytes * self._table_rows // group.rows)
            tables = max(1, min(_TABLES_AT_ONCE, _TABLE_BYTES_AT_ONCE // table_bytes))
            self._rows, self._bytes_at_once = self._table_rows * tables, _TABLE_BYTES_AT_ONCE
        self._as_rows = as_rows
        self._undecoded = group.rows
        self._drop = position.drop
        self._left = None if position.stop is None else position.stop - position.given
        self._pieces: Pieces = []
        self._batches: Iterator[Any] = iter(())
        super().__init__()

    async def _next_block(self) -> Block:
        try:
            if not self.fetched:
                self._pieces = await self.group.fetch()
                self._batches = self.group.decode(self._pieces, self._rows)
                self.fetched = True
                self._on_fetched()
        except Exception as error:
            return Block(deque(), as_exception(error), end=True)
        block = await asyncio.to_thread(self._decode)
        if self._left is None:
            return block
        while len(block.samples) > self._left:
            block.samples.pop()
        self._left -= len(block.samples)
        return block if self._left else Block(block.samples, end=True)

    def _decode(self) -> Block:
        """The next samples; with the last of them the end, where the iterator checks that no row is missing."""
        samples: deque[object] = deque()
        size = 0
        try:
            for batch in self._batches:
                samples.extend(self._samples_of(batch))
                size += batch.nbytes
                self._undecoded -= batch.num_rows
                if samples and size >= self._bytes_at_once and self._undecoded > 0:
                    return Block(samples)
        except Exception as error:
            return Block(samples, as_exception(error), end=True)
        return Block(samples, end=True)

    def _samples_of(self, batch: Any) -> Sequence[object]:
        if self._as_rows:
            dropped = min(self._drop, batch.num_rows)
            samples: list[object] = self._to_dicts(batch.slice(dropped))
        else:
            tables = _tables(batch, self._table_rows)
            dropped = min(self._drop, len(tables))
            samples = tables[dropped:]
        self._drop -= dropped
        return samples

    def _to_dicts(self, batch: Any) -> list[Any]:
        try:
            return cast("list[Any]", batch.to_pylist())
        except Exception as error:  # OverflowError, UnicodeDecodeError and others
            cause = f"{type(error).__name__}: {error}"
            what = f"some of its rows cannot be converted to Python objects; read it with format='arrow': {cause}"
            raise self.group.error(what) from None


def _tables(batch: Any, rows: int) -> list[object]:
    """A record batch as tables of `rows` rows, each with memory of its own.

    A slice would keep the whole batch alive, and be sent to another process with it. Arrow's stream format copies.
    """
    import pyarrow

    whole = pyarrow.Table.from_batches([batch])
    if batch.num_rows <= rows:
        return [whole]
    written = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(written, whole.schema) as stream:
        stream.write_table(whole, rows)
    copied = pyarrow.input_stream(written.getvalue(), buffer_size=_COPIED_AT_ONCE)
    with pyarrow.ipc.open_stream(copied) as stream:
        return [pyarrow.Table.from_batches([part]) for part in stream.read_all().to_batches()]


class RowGroupStream(PartReader):
    """The samples of row groups in order, the next groups prefetched. The error of one is raised at its turn.

    Its position is the number of samples that were given out of the current row group; that is read again. At most
    `prefetch_row_groups` are read at once, ahead of the current one as soon as its bytes are there, and at most
    `prefetch_bytes` compressed bytes; at least one is read whatever its size.
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
        super().__init__(parts, len(groups), lambda part: groups[part].shard)
        self._groups = groups
        self._rows, self._as_rows = rows, as_rows
        self._prefetch_row_groups, self._prefetch_bytes = prefetch_row_groups, prefetch_bytes
        self._readers: deque[tuple[_RowGroupReader, PartPosition]] = deque()
        self._bytes = 0
        self._block = Block(deque())  # of the first group
        self._samples = self._block.samples
        self._given = 0  # samples of the first group in the blocks up to this one

    async def __anext__(self) -> object:
        while not self._samples:
            if self._block.end:
                self._end_group()
            self._fill()
            if not self._readers:
                raise StopAsyncIteration
            reader, _ = self._readers[0]
            self._block = await reader.block()
            self._samples = self._block.samples
            self._given += len(self._samples)
        return self._samples.popleft()

    def _positions(self) -> tuple[list[State], int]:
        if not self._readers:
            return [position.to_state() for position in self._pending], 0
        reader, position = self._readers[0]
        current = position.to_state(self._given - len(self._samples), reader.group.footer.head)
        return [current], len(self._readers) - 1 + len(self._pending)

    def _release(self) -> list[BlockReader]:
        readers: list[BlockReader] = [reader for reader, _ in self._readers]
        self._readers.clear()
        self._block = Block(deque())
        self._samples = self._block.samples
        return readers

    def _end_group(self) -> None:
        """Leave the first group; raises its error."""
        reader, _ = self._readers.popleft()
        self._bytes -= reader.size
        self._given = 0
        error, self._block = self._block.error, Block(self._samples)
        if error is not None:
            raise error

    def _fill(self) -> None:
        """Read further groups ahead of the first one, which counts until its bytes are there."""
        while len(self._readers) - (bool(self._readers) and self._readers[0][0].fetched) < self._prefetch_row_groups:
            position = self._next_part()
            if position is None:
                return
            group = self._groups[position.part]
            if self._readers and self._bytes + group.stored_bytes > self._prefetch_bytes:
                return
            self._pending.popleft()
            reader = _RowGroupReader(group, self._rows, self._as_rows, position, self._fill)
            self._bytes += reader.size
            self._readers.append((reader, position))
