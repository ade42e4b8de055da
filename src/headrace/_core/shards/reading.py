"""Shards read by ranged requests: the bytes of one in order, its samples, and the samples of several in turn."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from headrace._core.eventloop.per_loop import end_all
from headrace._core.failure import as_exception
from headrace._core.shards.compression import Codec
from headrace._core.shards.discovery import Shard
from headrace._core.shards.positions import PartPosition
from headrace._core.store.head import Head, InitialRead
from headrace._core.streams.resumable import ORIGINS, Origins, ResumableIterator, State, close_all, expect
from headrace.errors import HeadraceError, ShardError, StateError

if TYPE_CHECKING:
    from typing_extensions import Buffer


R = TypeVar("R", bound="BlockReader")


class BadRecord(NamedTuple):
    """Stands for a sample that cannot be made, after which a decoder goes on; its error is raised in its place."""

    error: Exception


class Block(NamedTuple):
    """Samples that are produced together."""

    samples: deque[Any]  # in order; a `BadRecord` in place of some
    after: PartPosition | None = None  # the position of the next block; None for the last, which may be empty
    error: Exception | None = None  # raised after the samples; only of the last


class BlockReader(ABC):
    """Reads one part, from a position on: produces each block while the previous one is used; the first one at once."""

    def __init__(self, position: PartPosition, head: Head | None) -> None:
        self.part = position.part
        self.head = head  # of the object; None until it is known
        self.samples: deque[Any] = deque()  # the rest of the current block
        self.error: Exception | None = None  # raised after them
        self.ended = False  # whether they are the last
        self.first = position.given
        self.has_successor = False  # whether the part after it was opened, or there is none
        self._current = position  # the start of the current block
        self._following: PartPosition | None = position  # the start of the block after it
        self._count = 0  # samples of the current block
        self._task: asyncio.Task[Block] | None = asyncio.get_running_loop().create_task(self._next_block())

    @property
    def given(self) -> int:
        """The number of the part's samples that were given out."""
        return self._current.given + self._count - len(self.samples)

    async def fill(self) -> None:
        """Wait for the next block."""
        assert self._task is not None
        assert self._following is not None
        await asyncio.wait((self._task,))  # loses nothing when it is cancelled
        block = self._task.result()
        self._current, self._following = self._following, block.after
        self._count = len(block.samples)
        self.decoded = self._current.given + self._count  # samples up to the end of the block
        self.samples, self.error, self.ended = block.samples, block.error, block.after is None
        self._task = None if self.ended else asyncio.get_running_loop().create_task(self._next_block())

    def state_dict(self) -> State:
        """The position after the samples that were taken from `samples`."""
        if self.samples or self._following is None:
            return self._current.to_state(self._count - len(self.samples), self.head)
        return self._following.to_state(0, self.head)

    async def aclose(self) -> None:
        """Stop reading."""
        if self._task is not None:
            await end_all([self._task])
            self._task = None

    def reached(self, error: HeadraceError) -> tuple[int, int]:
        """The byte at which an error has ended the part, and the size of its object; 0 where either is unknown."""
        return 0, 0

    @property
    def fully_requested(self) -> bool:
        """Whether all of it has been requested, so that the next part may be opened."""
        return False

    @abstractmethod
    async def _next_block(self) -> Block:
        """Produce the next block; an exception becomes its `error`."""


class PartReader(ResumableIterator[Any], Generic[R]):
    """Reads parts, which are opened in order, `parallel` at once: one sample of each in turn, in the same order always.

    The error of a part is raised at its turn, after the samples before it; the other parts continue. A part that ends
    is replaced by the next. When all of one has been requested, the next is opened in standby, so that its first
    samples are there at its turn. The position is that of each open part, in the order of their turns, and the number
    of those that were opened. Blocks differ after a restore, since chunks start elsewhere; the order does not.

    `shards` has the object of each part of the stream; `open_part` starts to read one, perhaps in standby.
    """

    name_of: Callable[[int, int], str]  # names a sample by its part and its number in that
    _usual = 0  # samples of the last part that was read to its end

    def __init__(
        self,
        parts: Sequence[int],
        shards: Sequence[Shard],
        open_part: Callable[[PartPosition, Shard, bool], R],
        parallel: int = 1,
    ) -> None:
        self._parts = parts
        self._shards = shards
        self._open_part = open_part
        self._parallel = parallel
        self._opened = 0
        self._restored: deque[PartPosition] = deque()  # of parts that were open when the state was saved
        self._open: deque[R] = deque()
        self._ahead: deque[R] = deque()  # successors of those that are open
        self._only: deque[Any] = deque()  # samples of the part that is open, where it is the only one
        self._closed: State | None = None  # the state in which it was closed
        self._origins = Origins(maxlen=ORIGINS)
        self._before = 0  # samples and errors of parts that have ended

    async def __anext__(self) -> Any:
        if self._only:
            if type(sample := self._only.popleft()) is BadRecord:
                raise sample.error
            return sample
        readers = self._open
        while readers or self._start():
            reader = readers[0]
            if samples := reader.samples:
                readers.rotate(-1)
                if type(sample := samples.popleft()) is BadRecord:
                    raise sample.error
                return sample
            if reader.ended:
                readers.popleft()
                successor = self._ahead.popleft() if self._ahead else self._open_next()
                if successor is not None:
                    readers.appendleft(successor)
                self._before += reader.given - reader.first + (reader.error is not None)
                self._note_origin()
                if reader.error is not None:
                    raise self._ending(reader, reader.error)
                self._usual = reader.decoded
            else:
                await self._fill(reader)
                if self._parallel == 1:
                    self._only = reader.samples
        raise StopAsyncIteration

    def _ending(self, reader: R, error: Exception) -> Exception:
        """The error that ends a part, with the number of lost samples, estimated by the bytes or by the last part."""
        if isinstance(error, HeadraceError) and not isinstance(error, StateError):
            at, size = reader.reached(error)
            estimate = reader.decoded * size // at if 0 < at < size else self._usual
            lost = error.lost_samples = max(0, estimate - reader.decoded)
            number = f"about {lost:,}" if lost else "an unknown number of"
            where = f" from byte {at:,} of {size:,}" if size else ""
            rest = f"its rest{where} cannot" if reader.decoded else "nothing of it can"
            error.args = (f"{error}; {rest} be read: {number} samples",)
        return error

    def _start(self) -> bool:
        while len(self._open) < self._parallel and (reader := self._open_next()) is not None:
            self._open.append(reader)
        self._note_origin()
        return bool(self._open)

    def _note_origin(self) -> None:
        """Note which parts the next samples are of."""
        places = [(reader.part, reader.given) for reader in self._open]
        number = self._before + sum(reader.given - reader.first for reader in self._open)

        def origin(offset: int) -> str:
            turns, turn = divmod(offset, len(places))
            return self.name_of(places[turn][0], places[turn][1] + turns)

        self._origins.append((number, origin if places else None))

    def origin(self, number: int) -> Any:
        return self._origins.of(number)

    def _peek(self) -> PartPosition | None:
        """Where the part is read that is opened next; None after the last."""
        if self._restored:
            return self._restored[0]
        return PartPosition(self._parts[self._opened]) if self._opened < len(self._parts) else None

    def _open_next(self) -> R | None:
        """Open the next part; raises `StateError` if its object has another version than that of the position."""
        position = self._peek()
        if position is None:
            return None
        if self._restored:
            self._restored.popleft()
        else:
            self._opened += 1
        shard = position.version_of(self._shards[position.part])
        return self._open_part(position, shard, len(self._open) == self._parallel)

    async def _fill(self, reader: R) -> None:
        """Wait for the next block of an open part; opens parts ahead."""
        await reader.fill()
        if reader.fully_requested and not reader.has_successor:
            reader.has_successor = True
            if (following := self._open_next()) is not None:
                self._ahead.append(following)

    def state_dict(self) -> State:
        if self._closed is not None:
            return self._closed
        open = [reader.state_dict() for reader in self._open]
        open += [position.to_state() for position in self._restored]
        return {"opened": self._opened - len(self._ahead), "open": open}

    def load_state_dict(self, state: State) -> None:
        opened = expect(state, "opened", int)
        positions = [PartPosition.from_state(one, len(self._shards)) for one in expect(state, "open", list)]
        if not len(positions) <= opened <= len(self._parts):
            raise StateError(
                f"the state is damaged: {len(positions)} parts are open of {opened} opened, and there are "
                f"{len(self._parts)}"
            )
        for position in positions:
            position.version_of(self._shards[position.part])
        self._opened = opened
        self._restored.extend(positions)

    async def aclose(self) -> None:
        """Stop reading; no request is in flight when this returns."""
        self._closed = self.state_dict()
        self._parts, self._only = (), deque()
        readers = [*self._open, *self._ahead]
        for queue in (self._restored, self._open, self._ahead):
            queue.clear()
        await close_all(*readers)


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
        self.head = shard.head  # None before the first response, if the listing did not give it
        # A task returns its exception instead of raising it: one that is never awaited logs no complaint.
        self._tasks: deque[asyncio.Task[InitialRead | Exception]] = deque()
        self._next = start
        self._closed = False
        self._fill()

    async def read(self) -> memoryview | None:
        """Return the next bytes, or None at the end."""
        if not self._tasks or self._closed:
            return None
        await asyncio.wait((self._tasks[0],))  # cancelling this wait does not cancel the request
        result = self._tasks.popleft().result()
        if isinstance(result, Exception):
            await self.aclose()
            raise result
        if self.head is None:
            self.head = result.head
            self._next = max(self._next, len(result.data))  # all bytes, of a store that ignores ranges
        self._fill()
        return result.data if len(result.data) else None

    @property
    def fully_requested(self) -> bool:
        """Whether every byte has been requested."""
        return self._closed or (self.head is not None and self._next >= self.head.size)

    def activate(self) -> None:
        """Leave standby: use all requests."""
        self._max_requests = self._ahead.requests_per_shard
        self._fill()

    async def aclose(self) -> None:
        """Cancel requests in flight."""
        self._closed = True
        await end_all(self._tasks)
        self._tasks.clear()

    def _fill(self) -> None:
        while len(self._tasks) < (1 if self.head is None else self._max_requests) and not self.fully_requested:
            start, self._next = self._next, self._next + self._ahead.chunk_bytes
            stop = self._next if self.head is None else min(self._next, self.head.size)
            self._tasks.append(asyncio.get_running_loop().create_task(self._read(start, stop)))

    async def _read(self, start: int, stop: int) -> InitialRead | Exception:
        shard, head = self._shard, self.head
        try:
            if head is None:
                return await shard.store.read_start(shard.key, stop)
            return InitialRead(await replace(shard, head=head).read(start, stop), head)
        except Exception as error:
            return as_exception(error)


class Decoder(ABC):
    """Makes samples of the unpacked bytes of one shard, which come in pieces of any size. Does no I/O."""

    pages: bool = False
    """Whether a web page may be a shard; else it is taken for an error page in place of one."""

    format: str = ""
    """What the samples are, as "tar"; of decoders whose samples can be indexed, which keep `complete`."""

    complete: int = 0
    """The byte after the last sample that was yielded."""

    @abstractmethod
    def feed(self, data: Buffer) -> Iterator[Any]:
        """Parse the next bytes and yield the samples completed by them. The iterator must be exhausted.

        A `BadRecord` stands for a sample after which it can go on; an exception ends the shard.
        """

    @abstractmethod
    def finish(self) -> Iterator[Any]:
        """Signal the end of the shard; yields the last sample, or raises if the shard is truncated."""

    def position(self) -> State | None:
        """Where a new decoder can go on, after a `feed`: ``"offset"`` of its first byte, and JSON values of its own.

        None: only at the start of the shard, which a restored stream then reads again.
        """
        return None

    def restore(self, position: State) -> None:
        """Go on from a position, which is checked; called before the first `feed`."""
        raise NotImplementedError  # not called where `position` gives None

    ending: bytes = b""
    """What ends a shard after the last sample."""

    def whole_sample(self, data: Buffer, offset: int) -> Any:
        """The sample that bytes from an offset on are, of a format that can be indexed.

        The decoder is new. Without an `ending` it may also have made such a sample before.

        Raises:
            ShardError: the sample cannot be made.
        """
        self.restore({"offset": offset, "number": None})
        samples = [*self.feed(data), *self.feed(self.ending), *self.finish()]
        if len(samples) != 1:
            raise ShardError(f"{len(samples)} samples in place of one", offset=offset)
        if type(samples[0]) is BadRecord:
            raise samples[0].error
        return samples[0]


class ShardReader(BlockReader):
    """Reads, unpacks and parses one shard, one block of samples ahead of its consumer.

    The samples to drop of its position are not given.
    """

    def __init__(
        self, shard: Shard, decoder: Decoder, ahead: ReadAhead, position: PartPosition, *, standby: bool = False
    ) -> None:
        self._shard = shard
        self._codec = Codec(shard.key, shard.name, pages=decoder.pages)
        self._decoder = decoder
        offset = 0
        if position.decoder is not None:
            decoder.restore(position.decoder)
            offset = expect(position.decoder, "offset", int)
        start = 0 if self._codec.compressed else offset
        self._codec.taken = start
        self._skip, self._drop = offset - start, position.drop
        self._decoded = position  # the position after the last block that was produced
        self._pieces: Iterator[Buffer] = iter(())
        self._chunks = ChunkReader(shard, ahead, standby=standby, start=start)
        super().__init__(position, shard.head)

    @property
    def fully_requested(self) -> bool:
        return self._chunks.fully_requested

    async def fill(self) -> None:
        self._chunks.activate()
        await super().fill()

    def reached(self, error: HeadraceError) -> tuple[int, int]:
        offset = None if self._codec.compressed else getattr(error, "offset", None)
        return self._codec.taken if offset is None else offset, 0 if self.head is None else self.head.size

    async def aclose(self) -> None:
        await close_all(self._chunks, super())

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
                # Those before an error are kept.
                samples.extend(self._decoder.finish() if piece is None else self._decoder.feed(piece))
            except Exception as caught:
                error, end = as_exception(caught), True
            while self._drop and samples:
                samples.popleft()
                self._drop -= 1
        self.head = self._chunks.head
        if not end:
            last, place = self._decoded, self._decoder.position()
            self._decoded = last.after(len(samples))
            if place is not None:
                self._decoded = replace(self._decoded, drop=0, decoder=place)
            return Block(samples, self._decoded)
        await self._chunks.aclose()
        if self._drop and error is None:
            given = self._decoded.given
            error = StateError(
                f"{self._shard.name} has changed since the state was saved: it ends after {given - self._drop} "
                f"samples, and {given} of them had been given out"
            )
        return Block(samples, error=error)

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
            chunk = await self._chunks.read()
            if chunk is None:
                return None
            self._pieces = self._codec.feed(chunk)

    def _unpack(self) -> Buffer | None:
        return next(self._pieces, None)
