"""Interleaved reading of several shards, each prefetched by ranged requests; bounded bytes in memory."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from headrace._core.batches import as_exception
from headrace._core.interface.block_reader import Block, BlockReader, end_all
from headrace._core.shards.compression import codec_for
from headrace._core.shards.discovery import Shard
from headrace._core.store.errors import RangesIgnoredError
from headrace._core.store.head import InitialRead
from headrace._core.store.whole_objects import WholeStream

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Decoder(Protocol):
    """Makes samples of the unpacked bytes of one shard, which come in pieces of any size. Does no I/O."""

    def feed(self, data: Buffer) -> Iterator[Any]:
        """Parse the next bytes and yield the samples completed by them. The iterator must be exhausted."""

    def finish(self) -> Iterator[Any]:
        """Signal the end of the shard; yields the last sample, or raises if the shard is truncated."""


@dataclass(frozen=True, slots=True)
class ReadAhead:
    """How far shards are read ahead of their consumer.

    Memory holds at most about ``shards_in_parallel × (requests_per_shard + 6) × chunk_bytes``.
    """

    shards_in_parallel: int
    requests_per_shard: int
    chunk_bytes: int


class ChunkReader:
    """The bytes of one shard in order, prefetched by ranged requests.

    Args:
        shard: the shard; if its size is unknown, the first response gives it.
        ahead: limits.
        standby: keep only one request in flight until `activate` is called.

    Attributes:
        bytes_read: number of bytes returned so far.
    """

    def __init__(self, shard: Shard, ahead: ReadAhead, *, standby: bool = False) -> None:
        self._shard = shard
        self._ahead = ahead
        self._max_requests = 1 if standby else ahead.requests_per_shard
        self._head = shard.head
        # A task returns its exception instead of raising it: one that is never awaited logs no complaint.
        self._tasks: deque[asyncio.Task[InitialRead | Exception | None]] = deque()
        self._next = 0
        self.bytes_read = 0
        self._whole: WholeStream | None = None  # for a store without range requests
        self._closed = False
        if self._head is None:
            self._request_next()
        else:
            self._fill()

    async def read(self) -> memoryview | None:
        """Return the next bytes, or None at the end.

        Raises:
            StoreError: the request failed.
        """
        if self._whole is not None:
            return self._counted(await self._whole.read())
        if not self._tasks or self._closed:
            return None
        await asyncio.wait((self._tasks[0],))  # cancelling this wait does not cancel the request
        result = self._tasks.popleft().result()
        if isinstance(result, Exception):
            await self.aclose()
            raise result
        if result is None:
            await self.aclose()
            store, key = self._shard.store, self._shard.key
            self._whole = store.stream(key, self._ahead.chunk_bytes, head=self._head, skip=self.bytes_read)
            return self._counted(await self._whole.read())
        self._head = self._head or result.head
        self._fill()
        return self._counted(result.data if len(result.data) else None)

    @property
    def fully_requested(self) -> bool:
        """Whether every byte has been requested."""
        return self._closed or (self._head is not None and self._next >= self._head.size)

    def activate(self) -> None:
        """Leave standby: use all requests."""
        self._max_requests = self._ahead.requests_per_shard
        if self._head is not None:
            self._fill()

    async def aclose(self) -> None:
        """Cancel requests in flight."""
        self._closed = True
        await end_all(self._tasks)
        self._tasks.clear()

    def _fill(self) -> None:
        while len(self._tasks) < self._max_requests and not self.fully_requested:
            self._request_next()

    def _request_next(self) -> None:
        start, self._next = self._next, self._next + self._ahead.chunk_bytes
        stop = self._next if self._head is None else min(self._next, self._head.size)
        self._tasks.append(asyncio.get_running_loop().create_task(self._read(start, stop)))

    def _counted(self, data: memoryview | None) -> memoryview | None:
        self.bytes_read += 0 if data is None else len(data)
        return data

    async def _read(self, start: int, stop: int) -> InitialRead | Exception | None:
        store, key, head = self._shard.store, self._shard.key, self._head
        try:
            if head is None:
                return await store.read_start(key, stop, whole=False)
            data = await store.read(key, start, stop, size=head.size, etag=head.etag, whole=False)
            return InitialRead(data, head)
        except RangesIgnoredError:
            return None
        except Exception as error:
            return as_exception(error)


class ShardReader(BlockReader):
    """Reads, unpacks and parses one shard, one block of samples ahead of its consumer.

    Attributes:
        chunks: its bytes.
        samples: the rest of the current block.
        error: raised after `samples`.
        ended: whether `samples` are the last.
        has_successor: whether the shard after it was opened, or there is none.
    """

    def __init__(self, shard: Shard, decoder: Decoder, ahead: ReadAhead, *, standby: bool = False) -> None:
        self.chunks = ChunkReader(shard, ahead, standby=standby)
        self._codec = codec_for(shard.key)(shard.name)
        self._decoder = decoder
        self._pieces: Iterator[Buffer] = iter(())
        self.samples: deque[Any] = deque()
        self.error: Exception | None = None
        self.ended = False
        self.has_successor = False
        super().__init__()

    async def fill(self) -> None:
        """Wait for the next block."""
        block = await self.block()
        self.samples, self.error, self.ended = block.samples, block.error, block.end

    async def aclose(self) -> None:
        """Stop reading."""
        await super().aclose()
        await self.chunks.aclose()

    async def _next_block(self) -> Block:
        samples: deque[Any] = deque()
        try:
            while not samples:
                piece = await self._next_piece()
                if piece is None:
                    self._codec.finish()
                    samples.extend(self._decoder.finish())
                    return Block(samples, end=True)
                # One by one, to keep those before an error.
                for sample in self._decoder.feed(piece):
                    samples.append(sample)
        except Exception as error:
            await self.chunks.aclose()
            return Block(samples, as_exception(error), end=True)
        return Block(samples)

    async def _next_piece(self) -> Buffer | None:
        while True:
            # zlib and zstd release the interpreter lock while they unpack.
            piece = await asyncio.to_thread(self._unpack) if self._codec.heavy else self._unpack()
            if piece is not None:
                return piece
            chunk = await self.chunks.read()
            if chunk is None:
                return None
            self._pieces = self._codec.feed(chunk)

    def _unpack(self) -> Buffer | None:
        return next(self._pieces, None)


class InterleavedShards(AsyncIterator[Any]):
    """The samples of several shards, one of each in turn: the same order in every run, whichever responds faster.

    The error of a shard is raised at its turn, after the samples before it; the other shards continue.

    Args:
        shards: in the order in which they are opened. When all of one has been requested, the next is opened in
            standby, so that its first samples are there at its turn.
        decoder: makes the decoder of a shard.
        ahead: limits.
    """

    def __init__(self, shards: Iterable[Shard], decoder: Callable[[Shard], Decoder], ahead: ReadAhead) -> None:
        self._shards = iter(shards)
        self._decoder = decoder
        self._ahead = ahead
        self._open: deque[ShardReader] = deque()
        self._standby: deque[ShardReader] = deque()  # successors of those that will end
        self._started = False

    async def __anext__(self) -> Any:
        if not self._started:
            self._started = True
            self._start()
        readers = self._open
        while readers:
            reader = readers[0]
            if reader.samples:
                readers.rotate(-1)
                return reader.samples.popleft()
            if reader.ended:
                readers.popleft()
                successor = self._standby.popleft() if self._standby else self._open_next()
                if successor is not None:
                    successor.chunks.activate()
                    readers.appendleft(successor)
                if reader.error is not None:
                    raise reader.error
            else:
                await reader.fill()
                if reader.chunks.fully_requested and not reader.has_successor:
                    reader.has_successor = True
                    if (standby := self._open_next(standby=True)) is not None:
                        self._standby.append(standby)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Stop reading; no request is in flight when this returns."""
        self._shards = iter(())
        readers = [*self._open, *self._standby]
        self._open.clear()
        self._standby.clear()
        for reader in readers:
            await reader.aclose()

    def _start(self) -> None:
        while len(self._open) < self._ahead.shards_in_parallel and (reader := self._open_next()) is not None:
            self._open.append(reader)

    def _open_next(self, *, standby: bool = False) -> ShardReader | None:
        shard = next(self._shards, None)
        return None if shard is None else ShardReader(shard, self._decoder(shard), self._ahead, standby=standby)
