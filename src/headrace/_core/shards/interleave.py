"""Reading shards: ranges of one ahead of whoever parses them, samples of several in turn, bounded bytes in memory."""

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
from headrace._core.store.head import Head, InitialRead
from headrace._core.store.whole_objects import WholeStream

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Decoder(Protocol):
    """Takes the unpacked bytes of a shard in any pieces, gives its samples. Plain functions, no I/O."""

    def feed(self, data: Buffer) -> Iterator[Any]:
        """Take the next bytes; gives the samples that are complete. Read to its end."""

    def finish(self) -> Iterator[Any]:
        """Say that there are no more bytes; gives what was still incomplete, or raises if it must not be."""


@dataclass(frozen=True, slots=True)
class ReadAhead:
    """How far shards are read ahead of their consumer.

    Memory holds at most about ``shards_in_parallel × (requests_per_shard + 6) × chunk_bytes``.
    """

    shards_in_parallel: int
    requests_per_shard: int
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What became of a task: it never raises, so that one nobody waits for leaves no complaint."""

    value: Any
    error: Exception | None = None


class ChunkReader:
    """The bytes of one shard in order, in ranges that are asked for ahead.

    Args:
        shard: the shard; of one whose size is not known the first range tells it.
        ahead: how much.
        spare: whether only the first range is asked for, and the next when it is taken, until `hurry`.

    Attributes:
        done: how many bytes have been given.
    """

    def __init__(self, shard: Shard, ahead: ReadAhead, *, spare: bool = False) -> None:
        self._shard = shard
        self._ahead = ahead
        self._most = 1 if spare else ahead.requests_per_shard
        self._head: Head | None = shard.head
        self._tasks: deque[asyncio.Task[_Outcome]] = deque()
        self._next = 0
        self.done = 0
        self._whole: WholeStream | None = None  # of a store that does not do ranges
        self._ended = False
        if self._head is None:
            self._ask()
        else:
            self._fill()

    async def read(self) -> memoryview | None:
        """The next bytes; None behind the last.

        Raises:
            StoreError: they could not be read.
        """
        if self._whole is not None:
            return self._counted(await self._whole.read())
        if not self._tasks or self._ended:
            return None
        await asyncio.wait((self._tasks[0],))  # which a cancellation of ours does not cancel
        outcome = self._tasks.popleft().result()
        if outcome.error is not None:
            self._ended = True
            await self.aclose()
            raise outcome.error
        read: InitialRead | None = outcome.value
        if read is None:
            await self.aclose()
            shard = self._shard
            self._whole = shard.store.stream(shard.key, self._ahead.chunk_bytes, head=self._head, skip=self.done)
            return self._counted(await self._whole.read())
        if self._head is None:
            self._head = read.head
        self._fill()
        return self._counted(read.data if len(read.data) else None)

    @property
    def asked(self) -> bool:
        """Whether there is nothing more to ask for."""
        return self._ended or (self._head is not None and self._next >= self._head.size)

    def hurry(self) -> None:
        """Ask for as many ranges as may be asked for."""
        self._most = self._ahead.requests_per_shard
        if self._head is not None:
            self._fill()

    async def aclose(self) -> None:
        """End the requests under way."""
        self._ended = True
        await end_all(self._tasks)
        self._tasks.clear()

    def _fill(self) -> None:
        assert self._head is not None
        while len(self._tasks) < self._most and not self.asked:
            self._ask()

    def _ask(self) -> None:
        start, self._next = self._next, self._next + self._ahead.chunk_bytes
        stop = self._next if self._head is None else min(self._next, self._head.size)
        self._tasks.append(asyncio.get_running_loop().create_task(self._read(start, stop)))

    def _counted(self, data: memoryview | None) -> memoryview | None:
        self.done += 0 if data is None else len(data)
        return data

    async def _read(self, start: int, stop: int) -> _Outcome:
        store, key, head = self._shard.store, self._shard.key, self._head
        try:
            if head is None:
                return _Outcome(await store.read_start(key, stop, whole=False))
            data = await store.read(key, start, stop, size=head.size, etag=head.etag, whole=False)
            return _Outcome(InitialRead(data, head))
        except RangesIgnoredError:
            return _Outcome(None)
        except Exception as error:
            return _Outcome(None, as_exception(error))


class ShardReader(BlockReader):
    """Reads, unpacks and parses one shard, a block of samples ahead of whoever takes them.

    Args:
        shard: the shard.
        decoder: makes samples of its bytes.
        ahead: how much is read ahead.
        spare: as for `ChunkReader`.

    Attributes:
        chunks: its bytes.
    """

    def __init__(self, shard: Shard, decoder: Decoder, ahead: ReadAhead, *, spare: bool = False) -> None:
        self.chunks = ChunkReader(shard, ahead, spare=spare)
        self._codec = codec_for(shard.key)(shard.name)
        self._decoder = decoder
        self._pieces: Iterator[Buffer] = iter(())
        super().__init__()

    async def aclose(self) -> None:
        """End what is under way."""
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
                # One by one, so that what comes before an error is kept.
                for sample in self._decoder.feed(piece):
                    samples.append(sample)
        except Exception as error:
            await self.chunks.aclose()
            return Block(samples, as_exception(error), end=True)
        return Block(samples)

    async def _next_piece(self) -> Buffer | None:
        while True:
            # zlib and zstd release the interpreter while they unpack.
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
    """The samples of several shards, one of each in turn: the same order in every run, however fast each comes.

    A shard that fails is raised at its turn, behind the samples that it gave, and the others go on without it.

    Args:
        shards: in the order in which they are begun. When everything of one has been asked for, the next is begun, so
            that nobody waits for its first bytes at its turn.
        decoder: makes the decoder of a shard.
        ahead: how many at once, and how much of each is read ahead.
    """

    def __init__(self, shards: Iterable[Shard], decoder: Callable[[Shard], Decoder], ahead: ReadAhead) -> None:
        self._shards = iter(shards)
        self._decoder = decoder
        self._ahead = ahead
        self._lanes: deque[_OpenShard] = deque()
        self._spares: deque[_OpenShard] = deque()  # begun already, for lanes that will end
        self._begun = False

    async def __anext__(self) -> Any:
        if not self._begun:
            self._begun = True
            self._begin()
        lanes = self._lanes
        while lanes:
            lane = lanes[0]
            if lane.samples:
                lanes.rotate(-1)
                return lane.samples.popleft()
            if lane.ended:
                lanes.popleft()
                following = self._spares.popleft() if self._spares else self._open()
                if following is not None:
                    following.reader.chunks.hurry()
                    lanes.appendleft(following)
                if lane.error is not None:
                    raise lane.error
            else:
                await lane.fill()
                if lane.reader.chunks.asked and not lane.followed:
                    lane.followed = True
                    if (spare := self._open(spare=True)) is not None:
                        self._spares.append(spare)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Read no more; every request under way has ended when this returns."""
        self._shards = iter(())
        lanes = [*self._lanes, *self._spares]
        self._lanes.clear()
        self._spares.clear()
        for lane in lanes:
            await lane.reader.aclose()

    def _begin(self) -> None:
        while len(self._lanes) < self._ahead.shards_in_parallel and (lane := self._open()) is not None:
            self._lanes.append(lane)

    def _open(self, *, spare: bool = False) -> _OpenShard | None:
        shard = next(self._shards, None)
        return None if shard is None else _OpenShard(ShardReader(shard, self._decoder(shard), self._ahead, spare=spare))


class _OpenShard:
    """A shard's place among those that are read."""

    def __init__(self, reader: ShardReader) -> None:
        self.reader = reader
        self.samples: deque[Any] = deque()
        self.error: Exception | None = None
        self.ended = False
        self.followed = False  # whether there is a spare for when it ends, or no more shard for one

    async def fill(self) -> None:
        block = await self.reader.block()
        self.samples, self.error, self.ended = block.samples, block.error, block.end
