"""Interleaved reading of several shards, each prefetched by ranged requests; bounded bytes in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from headrace._core.interface.resumable import ResumableIterator, State
from headrace._core.shards.chunks import ReadAhead
from headrace._core.shards.discovery import Shard
from headrace._core.shards.positions import Part, PartPosition, PartQueue
from headrace._core.shards.shard_reader import Decoder, ShardReader


class InterleavedShards(ResumableIterator[Any]):
    """The samples of several shards, one of each in turn: the same order in every run, whichever responds faster.

    The error of a shard is raised at its turn, after the samples before it; the other shards continue.

    Its position is that of each open shard, in the order of their turns, and the number of those that were opened.
    Blocks differ after it, since chunks start elsewhere; the order does not: a shard that ends is replaced by the next
    part, whenever that was opened.

    Args:
        shards: all shards.
        parts: those to read, in the order in which they are opened. When all of one has been requested, the next is
            opened in standby, so that its first samples are there at its turn.
        decoder: makes the decoder of a shard.
        ahead: limits.
        on_block: called with a shard's reader after each block of its samples; None for no call.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        parts: Sequence[Part],
        decoder: Callable[[Shard], Decoder],
        ahead: ReadAhead,
        on_block: Callable[[ShardReader], None] | None = None,
    ) -> None:
        self._shards = shards
        self._queue = PartQueue(parts, len(shards))
        self._decoder = decoder
        self._ahead = ahead
        self._on_block = on_block
        self._restored: list[tuple[Shard, PartPosition]] = []  # until reading starts
        self._open: deque[ShardReader] = deque()
        self._standby: deque[ShardReader] = deque()  # successors of those that will end
        self._started = False
        self._closed: State | None = None  # the state in which it was closed

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
                if self._on_block is not None:
                    self._on_block(reader)
        raise StopAsyncIteration

    def state_dict(self) -> State:
        if self._closed is not None:
            return self._closed
        if not self._started:
            return self._queue.to_state([position.to_state() for _, position in self._restored])
        return self._queue.to_state([reader.state_dict() for reader in self._open], prefetched=len(self._standby))

    def load_state_dict(self, state: State) -> None:
        positions = self._queue.restore(state)
        self._restored = [(position.version_of(self._shards[position.part]), position) for position in positions]

    async def aclose(self) -> None:
        """Stop reading; no request is in flight when this returns."""
        self._closed = self.state_dict()
        self._started = True
        self._queue.clear()
        self._restored = []
        readers = [*self._open, *self._standby]
        self._open.clear()
        self._standby.clear()
        for reader in readers:
            await reader.aclose()

    def _start(self) -> None:
        for shard, position in self._restored:
            self._open.append(ShardReader(shard, self._decoder(shard), self._ahead, position))
        self._restored = []
        while len(self._open) < self._ahead.shards_in_parallel and (reader := self._open_next()) is not None:
            self._open.append(reader)

    def _open_next(self, *, standby: bool = False) -> ShardReader | None:
        position = self._queue.pop()
        if position is None:
            return None
        shard = position.version_of(self._shards[position.part])
        return ShardReader(shard, self._decoder(shard), self._ahead, position, standby=standby)
