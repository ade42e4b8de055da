"""One shard: its bytes are unpacked and parsed one block of samples ahead of the consumer, from any position."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from headrace._core.failure import as_exception
from headrace._core.interface.block_reader import Block, BlockReader
from headrace._core.interface.resumable import State, expect_int
from headrace._core.shards.chunks import ChunkReader, ReadAhead
from headrace._core.shards.compression import codec_for
from headrace._core.shards.discovery import Shard
from headrace._core.shards.positions import PartPosition
from headrace.errors import StateError

if TYPE_CHECKING:
    from typing_extensions import Buffer


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
        raise NotImplementedError


class ShardReader(BlockReader):
    """Reads, unpacks and parses one shard, one block of samples ahead of its consumer.

    Args:
        shard: the shard, in the version of the position.
        decoder: its decoder.
        ahead: limits.
        position: where to start; its samples to drop are not given.
        standby: keep only one request in flight until `chunks.activate` is called.

    Attributes:
        part: the shard's number in the user's list.
        chunks: its bytes.
        samples: the rest of the current block.
        error: raised after `samples`.
        ended: whether `samples` are the last.
        has_successor: whether the shard after it was opened, or there is none.
    """

    def __init__(
        self, shard: Shard, decoder: Decoder, ahead: ReadAhead, position: PartPosition, *, standby: bool = False
    ) -> None:
        self.part = position.part
        self._shard = shard
        self._codec = codec_for(shard.key)(shard.name)
        self._decoder = decoder
        if position.decoder is not None:
            decoder.restore(position.decoder)
            self._codec.restore(position.start, expect_int(position.decoder, "offset") - position.skip)
        self._skip, self._drop, self._stop = position.skip, position.drop, position.stop
        self._current = position  # the start of the current block
        self._following = position  # the start of the block after it
        self._decoded = position  # the position after the last block that was produced
        self._count = 0  # samples of the current block
        self._pieces: Iterator[Buffer] = iter(())
        self.samples: deque[Any] = deque()
        self.error: Exception | None = None
        self.ended = False
        self.has_successor = False
        self.chunks = ChunkReader(shard, ahead, standby=standby, start=position.start)
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
        read_whole = self.ended and self.error is None and self._stop is None
        return decoded > count or (read_whole and decoded < count)

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
        end = False
        try:
            while not (samples or end):
                piece = await self._next_piece()
                if piece is None:
                    end = True
                    self._codec.finish()
                # One by one, to keep those before an error.
                for sample in self._decoder.finish() if piece is None else self._decoder.feed(piece):
                    samples.append(sample)
                if self._drop:
                    self._drop_from(samples)
                if self._reaches_stop(samples):
                    await self.chunks.aclose()
                    return Block(samples, end=True)
            if self._drop:
                given = self._decoded.given
                raise StateError(
                    f"{self._shard.name} has changed since the state was saved: it ends after {given - self._drop} "
                    f"samples, and {given} of them had been given out"
                )
        except Exception as error:
            self._drop_from(samples)
            await self.chunks.aclose()
            stopped = self._reaches_stop(samples)
            return Block(samples, None if stopped else as_exception(error), end=True)
        self._decoded = self._position_after(len(samples))
        return Block(samples, end=end)

    def _drop_from(self, samples: deque[Any]) -> None:
        while self._drop and samples:
            samples.popleft()
            self._drop -= 1

    def _reaches_stop(self, samples: deque[Any]) -> bool:
        """Whether the next samples end the part of the shard that is to be read; removes those after it."""
        if self._stop is None or self._drop or self._decoded.given + len(samples) < self._stop:
            return False
        while self._decoded.given + len(samples) > self._stop:
            samples.pop()
        return True

    def _position_after(self, count: int) -> PartPosition:
        last, decoder = self._decoded, self._decoder.position()
        if decoder is None:
            return last.after(count)
        offset = expect_int(decoder, "offset")
        start, unpacked = self._codec.restart(offset)
        return PartPosition(
            last.part, last.given + count, start=start, skip=offset - unpacked, decoder=decoder, stop=last.stop
        )

    async def _next_piece(self) -> Buffer | None:
        while True:
            # zlib and zstd release the interpreter lock while they unpack.
            piece = await asyncio.to_thread(self._unpack) if self._codec.heavy else self._unpack()
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
