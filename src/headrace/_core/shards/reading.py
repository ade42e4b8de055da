"""Shards read by ranged requests: the bytes of one in order, its samples, and the samples of several in turn."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace._core.eventloop.per_loop import end_all
from headrace._core.failure import as_exception
from headrace._core.shards.compression import Codec
from headrace._core.shards.discovery import Shard
from headrace._core.shards.positions import Part, PartPosition, opened_parts, position_in
from headrace._core.store.head import Head, InitialRead
from headrace._core.streams.resumable import ResumableIterator, State, expect
from headrace.errors import StateError

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Block(NamedTuple):
    """Samples that are produced together."""

    samples: deque[Any]  # in order
    error: Exception | None = None  # raised after the samples; the last block if there is one
    end: bool = False  # whether this is the last block


class BlockReader(ABC):
    """Produces each block while the previous one is used; the first one at once."""

    def __init__(self) -> None:
        self._task: asyncio.Task[Block] | None = asyncio.get_running_loop().create_task(self._next_block())

    async def block(self) -> Block:
        """The next block; the last one may be empty."""
        assert self._task is not None
        await asyncio.wait((self._task,))  # loses nothing when it is cancelled
        block = self._task.result()
        self._task = None if block.end else asyncio.get_running_loop().create_task(self._next_block())
        return block

    async def aclose(self) -> None:
        if self._task is not None:
            await end_all([self._task])
            self._task = None

    @abstractmethod
    async def _next_block(self) -> Block:
        """Produce the next block; an exception becomes its `error`."""


class PartReader(ResumableIterator[Any]):
    """Reads parts, which are opened in order; its position is that of each open part, and the number of those opened.

    `count` is the number of all parts of the stream.
    """

    def __init__(self, parts: Sequence[Part], count: int, shard_of: Callable[[int], Shard]) -> None:
        self._parts = parts
        self._count = count
        self._shard_of = shard_of
        self._opened = 0
        self._pending: deque[PartPosition] = deque()  # opened and not read yet, as those that were restored
        self._closed: State | None = None  # the state in which it was closed

    def _next_part(self) -> PartPosition | None:
        """The first of the pending parts, after opening one if there is none; None after the last.

        Raises:
            StateError: the object has another version than that of the position.
        """
        if not self._pending and self._opened < len(self._parts):
            self._opened += 1
            position = position_in(self._parts[self._opened - 1])
            position.version_of(self._shard_of(position.part))
            self._pending.append(position)
        return self._pending[0] if self._pending else None

    @abstractmethod
    def _positions(self) -> tuple[list[State], int]:
        """The positions in open parts, and the number of parts that were opened after these to prefetch them."""

    @abstractmethod
    def _release(self) -> list[BlockReader]:
        """Forget all readers; returns them."""

    def state_dict(self) -> State:
        if self._closed is not None:
            return self._closed
        open, prefetched = self._positions()
        return {"opened": self._opened - prefetched, "open": open}

    def load_state_dict(self, state: State) -> None:
        opened, positions = opened_parts(state, self._count)
        if opened > len(self._parts):
            raise StateError(f"the state is damaged: {opened} parts were opened, and there are {len(self._parts)}")
        for position in positions:
            position.version_of(self._shard_of(position.part))
        self._opened = opened
        self._pending.extend(positions)

    async def aclose(self) -> None:
        """Stop reading; no request is in flight when this returns."""
        self._closed = self.state_dict()
        self._parts = ()
        self._pending.clear()
        for reader in self._release():
            await reader.aclose()


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

    In standby, only one request is in flight until `activate` is called.
    """

    def __init__(self, shard: Shard, ahead: ReadAhead, *, standby: bool = False, start: int = 0) -> None:
        self._shard = shard
        self._ahead = ahead
        self._max_requests = 1 if standby else ahead.requests_per_shard
        self._head = shard.head
        # A task returns its exception instead of raising it: one that is never awaited logs no complaint.
        self._tasks: deque[asyncio.Task[InitialRead | Exception]] = deque()
        self._next = start
        self._closed = False
        if self._head is None:
            self._request_next()
        else:
            self._fill()

    @property
    def head(self) -> Head | None:
        """The shard's size and version; None before the first response, if the listing did not give them."""
        return self._head

    async def read(self) -> memoryview | None:
        """Return the next bytes, or None at the end.

        Raises:
            StoreError: the request failed.
        """
        if not self._tasks or self._closed:
            return None
        await asyncio.wait((self._tasks[0],))  # cancelling this wait does not cancel the request
        result = self._tasks.popleft().result()
        if isinstance(result, Exception):
            await self.aclose()
            raise result
        if self._head is None:
            self._head = result.head
            self._next = max(self._next, len(result.data))  # all bytes, of a store that ignores ranges
        self._fill()
        return result.data if len(result.data) else None

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

    async def _read(self, start: int, stop: int) -> InitialRead | Exception:
        shard, head = self._shard, self._head
        try:
            if head is None:
                return await shard.store.read_start(shard.key, stop)
            return InitialRead(await replace(shard, head=head).read(start, stop), head)
        except Exception as error:
            return as_exception(error)


class Decoder(ABC):
    """Makes samples of the unpacked bytes of one shard, which come in pieces of any size. Does no I/O."""

    @abstractmethod
    def feed(self, data: Buffer) -> Iterator[Any]:
        """Parse the next bytes and yield the samples completed by them. The iterator must be exhausted."""

    @abstractmethod
    def finish(self) -> Iterator[Any]:
        """Signal the end of the shard; yields the last sample, or raises if the shard is truncated."""

    def position(self) -> State | None:
        """Where a new decoder can go on, after a `feed`: ``"offset"`` of its first byte, and what it must know.

        None: only at the start of the shard.
        """
        return None

    def restore(self, position: State) -> None:
        """Go on from a position; called before the first `feed`.

        Raises:
            StateError: the position is damaged.
        """
        raise NotImplementedError  # not called where `position` gives None


class ShardReader(BlockReader):
    """Reads, unpacks and parses one shard, one block of samples ahead of its consumer.

    The samples to drop of its position are not given.
    """

    def __init__(
        self, shard: Shard, decoder: Decoder, ahead: ReadAhead, position: PartPosition, *, standby: bool = False
    ) -> None:
        self.part = position.part
        self._shard = shard
        self._codec = Codec(shard.key, shard.name)
        self._decoder = decoder
        offset = 0
        if position.decoder is not None:
            decoder.restore(position.decoder)
            offset = expect(position.decoder, "offset", int)
        start = 0 if self._codec.compressed else offset
        self._skip, self._drop, self._stop = offset - start, position.drop, position.stop
        self._current = position  # the start of the current block
        self._following = position  # the start of the block after it
        self._decoded = position  # the position after the last block that was produced
        self._count = 0  # samples of the current block
        self._pieces: Iterator[Buffer] = iter(())
        self.samples: deque[Any] = deque()  # the rest of the current block
        self.error: Exception | None = None  # raised after them
        self.ended = False  # whether they are the last
        self.has_successor = False  # whether the shard after it was opened, or there is none
        self.chunks = ChunkReader(shard, ahead, standby=standby, start=start)
        super().__init__()

    async def fill(self) -> None:
        """Wait for the next block."""
        block = await self.block()
        # `block` has made the task of the block after it, which has not run yet.
        self._current, self._following = self._following, self._decoded
        self._count = len(block.samples)
        self.samples, self.error, self.ended = block.samples, block.error, block.end

    def differs_from(self, count: int) -> bool:
        """Whether the samples up to the end of the current block show that the shard has not `count` of them."""
        decoded = self._current.given + self._count
        return decoded > count or (decoded < count and self.ended and self.error is None and self._stop is None)

    def state_dict(self) -> State:
        """The position after the samples that were taken from `samples`."""
        if self.samples or self.ended:
            return self._current.to_state(self._count - len(self.samples), self.chunks.head)
        return self._following.to_state(0, self.chunks.head)

    async def aclose(self) -> None:
        """Stop reading."""
        await super().aclose()
        await self.chunks.aclose()

    async def _next_block(self) -> Block:
        samples: deque[Any] = deque()
        error: Exception | None = None
        end = False
        while not (samples or end):
            try:
                piece = await self._next_piece()
                if piece is None:
                    end = True
                    self._codec.finish()
                # One by one, to keep those before an error.
                for sample in self._decoder.finish() if piece is None else self._decoder.feed(piece):
                    samples.append(sample)
            except Exception as caught:
                error, end = as_exception(caught), True
            while self._drop and samples:
                samples.popleft()
                self._drop -= 1
            if self._stop is not None and not self._drop and self._decoded.given + len(samples) >= self._stop:
                while self._decoded.given + len(samples) > self._stop:
                    samples.pop()
                error, end = None, True
        if not end:
            self._decoded = self._position_after(len(samples))
            return Block(samples)
        await self.chunks.aclose()
        if self._drop and error is None:
            given = self._decoded.given
            error = StateError(
                f"{self._shard.name} has changed since the state was saved: it ends after {given - self._drop} "
                f"samples, and {given} of them had been given out"
            )
        return Block(samples, error, end=True)

    def _position_after(self, count: int) -> PartPosition:
        last, decoder = self._decoded, self._decoder.position()
        if decoder is None:
            return last.after(count)
        return PartPosition(last.part, last.given + count, decoder=decoder, stop=last.stop)

    async def _next_piece(self) -> Buffer | None:
        while True:
            # zlib and zstd release the interpreter lock while they unpack.
            piece = await asyncio.to_thread(self._unpack) if self._codec.compressed else self._unpack()
            if piece is not None:
                if not self._skip:
                    return piece
                view = memoryview(piece).cast("B")
                skipped = min(self._skip, len(view))
                self._skip -= skipped
                if skipped < len(view):
                    return view[skipped:]
                continue
            chunk = await self.chunks.read()
            if chunk is None:
                return None
            self._pieces = self._codec.feed(chunk)

    def _unpack(self) -> Buffer | None:
        return next(self._pieces, None)


class InterleavedShards(PartReader):
    """The samples of several shards, one of each in turn: the same order in every run, whichever responds faster.

    The error of a shard is raised at its turn, after the samples before it; the other shards continue. When all of one
    has been requested, the next is opened in standby, so that its first samples are there at its turn.

    Its position is that of each open shard, in the order of their turns, and the number of those that were opened.
    Blocks differ after it, since chunks start elsewhere; the order does not: a shard that ends is replaced by the next
    part, whenever that was opened.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        parts: Sequence[Part],
        decoder: Callable[[Shard], Decoder],
        ahead: ReadAhead,
        on_block: Callable[[ShardReader], None] | None = None,
    ) -> None:
        super().__init__(parts, len(shards), shards.__getitem__)
        self._decoder = decoder
        self._ahead = ahead
        self._on_block = on_block
        self._open: deque[ShardReader] = deque()
        self._standby: deque[ShardReader] = deque()  # successors of those that will end
        self._started = False

    async def __anext__(self) -> Any:
        if not self._started:
            self._started = True
            while len(self._open) < self._ahead.shards_in_parallel and (first := self._open_next()) is not None:
                self._open.append(first)
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
                if self._on_block is not None:
                    self._on_block(reader)
        raise StopAsyncIteration

    def _positions(self) -> tuple[list[State], int]:
        open = [reader.state_dict() for reader in self._open]
        return [*open, *(position.to_state() for position in self._pending)], len(self._standby)

    def _release(self) -> list[BlockReader]:
        readers: list[BlockReader] = [*self._open, *self._standby]
        self._open.clear()
        self._standby.clear()
        return readers

    def _open_next(self, *, standby: bool = False) -> ShardReader | None:
        position = self._next_part()
        if position is None:
            return None
        self._pending.popleft()
        shard = position.version_of(self._shard_of(position.part))
        return ShardReader(shard, self._decoder(shard), self._ahead, position, standby=standby)
