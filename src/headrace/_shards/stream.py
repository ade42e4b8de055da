"""Samples of several shards in turn, and the position in the shards."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from headrace._ranks.distributed import ReaderShare
from headrace._shards.reading import BadRecord, PartPosition, ShardReader
from headrace._streams.epochs import Order
from headrace._streams.resumable import (
    ORIGINS,
    Origins,
    State,
    StreamOperation,
    close_all,
)
from headrace.errors import HeadraceError, StateError


class ShardIterator(StreamOperation[Any]):
    """Samples of a reader in an epoch.

    The iterator takes a sample of each open shard in turn, always in the same order. The reader is
    a rank, or a worker of the rank, and reads every n-th shard. Shards are opened in the order of
    the epoch, several at once. The error of a shard is raised at the shard's turn, after the
    shard's earlier samples. The other shards continue. A shard that ends is replaced by the next
    shard. When all bytes of a shard have been requested, the next shard is opened, so that the
    first samples are there in time.

    The position consists of the position of each open shard, in the order of turns, and the number
    of opened shards. The state of another epoch can be loaded: the iterator then continues in that
    epoch's order. After a restore, blocks differ, since chunks start elsewhere. The order of
    samples stays the same.

    `stream` is a `ShardedStream` with the shards and the decoders.
    """

    operation = "shards"
    fields = ("order",)

    def __init__(self, stream: Any, reader: ReaderShare, order: Order) -> None:
        super().__init__(None)
        self._stream = stream
        self._reader = reader
        self._order = order
        self._opened = 0  # number of opened shards
        # Positions of the shards that were open when the state was saved.
        self._from_state: deque[PartPosition] = deque()
        self._open_ones: deque[ShardReader] = deque()
        self._ahead: deque[ShardReader] = deque()  # successors of open shards
        self._origins = Origins(maxlen=ORIGINS)
        self._before = 0  # samples and errors of shards that have ended
        self._usual = 0  # number of samples of the last shard that was read to the end
        self._restored()

    def _restored(self) -> None:
        self._parts = list(range(len(self._stream._parts)))
        if self._stream._shuffle:
            random.Random(self._order.key()).shuffle(self._parts)
        self._parts = self._parts[self._reader.index :: self._reader.count]

    async def __anext__(self) -> Any:
        readers = self._open_ones
        while not self._closed and (readers or self._start()):
            reader = readers[0]
            block = reader.block
            if block.samples:
                readers.rotate(-1)
                sample = block.samples.popleft()
                if type(sample) is BadRecord:
                    raise sample.error
                return sample
            if block.after is None:
                readers.popleft()
                successor = self._ahead.popleft() if self._ahead else self._open_next()
                if successor is not None:
                    readers.appendleft(successor)
                self._before += reader.given - reader.first + (block.error is not None)
                self._note_origin()
                if block.error is not None:
                    raise self._ending(reader, block.error)
                self._usual = block.decoded
            else:
                await self._fill(reader)
        raise StopAsyncIteration

    def _ending(self, reader: ShardReader, error: Exception) -> Exception:
        """Return the error that ends a shard, with the number of lost samples.

        The number is estimated from the bytes, or from the last shard.
        """
        if isinstance(error, HeadraceError) and not isinstance(error, StateError):
            at, size = reader.reached(error)
            decoded = reader.block.decoded
            estimate = decoded * size // at if 0 < at < size else self._usual
            lost = error.lost_samples = max(0, estimate - decoded)
            number = f"about {lost:,}" if lost else "an unknown number of"
            where = f" from byte {at:,} of {size:,}" if size else ""
            rest = f"its rest{where} cannot" if decoded else "nothing of it can"
            error.args = (f"{error}; {rest} be read: {number} samples",)
        return error

    def _start(self) -> bool:
        in_parallel = self._stream._ahead.shards_in_parallel
        while (
            len(self._open_ones) < in_parallel
            and (reader := self._open_next()) is not None
        ):
            self._open_ones.append(reader)
        self._note_origin()
        return bool(self._open_ones)

    def _note_origin(self) -> None:
        """Note the shards of the next samples."""
        places = [(reader.part, reader.given) for reader in self._open_ones]
        number = self._before + sum(
            reader.given - reader.first for reader in self._open_ones
        )

        def origin(offset: int) -> str:
            turns, turn = divmod(offset, len(places))
            name: str = self._stream._name_of(places[turn][0], places[turn][1] + turns)
            return name

        self._origins.append((number, origin if places else None))

    def origin(self, number: int) -> Any:
        return self._origins.of(number)

    def _open_next(self) -> ShardReader | None:
        """Open the next shard, or return None.

        Raises:
            StateError: the shard has another version than the position.
        """
        if self._from_state:
            position = self._from_state.popleft()
        elif self._opened < len(self._parts):
            position = PartPosition(self._parts[self._opened])
            self._opened += 1
        else:
            return None
        stream = self._stream
        shard = position.version_of(stream._parts[position.part])
        return ShardReader(shard, stream.decoder(shard), stream._ahead, position)

    async def _fill(self, reader: ShardReader) -> None:
        """Wait for the next block of an open shard.

        May open the next shard ahead.
        """
        await reader.fill()
        if reader.fully_requested and not reader.has_successor:
            reader.has_successor = True
            if (following := self._open_next()) is not None:
                self._ahead.append(following)

    def _options(self) -> State:
        return {
            **self._stream._options(),
            "reader": [self._reader.index, self._reader.count],
        }

    def _inner_state(self) -> State:
        open_ones = [reader.state_dict() for reader in self._open_ones]
        open_ones += [position.to_state() for position in self._from_state]
        return {"opened": self._opened - len(self._ahead), "open": open_ones}

    def _restore_inner(self, state: State) -> None:
        positions = [PartPosition(**fields) for fields in state["inner"]["open"]]
        for position in positions:
            position.version_of(self._stream._parts[position.part])
        self._opened = state["inner"]["opened"]
        self._from_state.extend(positions)

    async def aclose(self) -> None:
        """Stop reading. Afterwards no request is in flight."""
        self._closed = True
        await close_all(*self._open_ones, *self._ahead)
