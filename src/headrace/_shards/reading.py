"""Reading of a shard by ranged requests: bytes in order, samples, and positions."""

from __future__ import annotations

import asyncio
import hashlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from headrace._eventloop.per_loop import end_all
from headrace._records.failure import as_exception
from headrace._shards.compression import Codec
from headrace._shards.discovery import Shard
from headrace._store.head import Head, InitialRead, same_tag
from headrace._streams.resumable import BadRecord as BadRecord
from headrace._streams.resumable import State, raised_or
from headrace.errors import HeadraceError, ShardError, StateError

if TYPE_CHECKING:
    from typing_extensions import Buffer


class PartPosition(NamedTuple):
    """Position from which reading a part continues."""

    part: int  # number of the part in the user's list
    given: int = 0  # number of the part's samples that were given out
    drop: int = 0  # number of given samples that come again after the decoder's start
    # ``{"offset": …}`` in unpacked bytes. None at the start of the part.
    decoder: dict[str, Any] | None = None
    size: int | None = None  # bytes of the object, if known
    etag: str | None = None  # version of the object, if known

    def after(self, count: int) -> PartPosition:
        """Return the position `count` samples later, with the same start."""
        return self._replace(given=self.given + count, drop=self.drop + count)

    def to_state(self, taken: int = 0, head: Head | None = None) -> State:
        """Return the fields of the position `taken` samples later.

        The decoder's start stays the same. `head` belongs to the object.
        """
        known = self if head is None else self._replace(size=head.size, etag=head.etag)
        return known.after(taken)._asdict()

    def version_of(self, shard: Shard) -> Shard:
        """Return `shard` in the version of the position.

        Raises:
            StateError: the object has another version now.
        """
        if self.size is None or not shard.store.if_match:
            return shard
        head = shard.head
        if head is None:
            return replace(shard, head=Head(shard.key, self.size, self.etag))
        if head.size != self.size or not same_tag(self.etag, head.etag):
            raise StateError(
                f"{shard.name} has changed since the state was saved: it had {self.size} bytes "
                f"and the version {self.etag}, and has {head.size} bytes and the version "
                f"{head.etag}. Start this epoch again, or put back the old version"
            )
        return shard


def names_digest(names: Iterable[str]) -> str:
    """Return number and short hash of names.

    The hash shows whether a list of parts is still the same.
    """
    digest = hashlib.blake2b(digest_size=8)
    count = 0
    for name in names:
        digest.update(name.encode("utf-8", "surrogatepass") + b"\n")
        count += 1
    return f"{count} ({digest.hexdigest()})"


class ReadAhead(NamedTuple):
    """Limits of reading shards ahead of the consumer.

    Memory holds at most about ``shards_in_parallel × (2 × requests_per_shard + 5) × chunk_bytes``.
    """

    # With nginx over loopback, 4 requests at once give 2.4 GB/s in pieces of 2 MiB and 1.4 GB/s in
    # pieces of 8 MiB. A streamed GET for each of 4 shards gives 2.1 GB/s
    # (`benchmarks/tar_stream.py`). A store with 30 ms to the first byte gives about 0.5 GB/s with
    # the 16 requests of the defaults.
    shards_in_parallel: int = 4
    requests_per_shard: int = 4
    chunk_bytes: int = 2 << 20


class ChunkReader:
    """Reads the bytes of a shard in order, prefetched by ranged requests."""

    def __init__(self, shard: Shard, ahead: ReadAhead, start: int) -> None:
        self._shard = shard
        self._ahead = ahead
        # None before the first response, unless a listing gave the head.
        self.head = shard.head
        # A task returns the exception instead of raising the exception. Otherwise a task that is
        # never awaited would log a complaint.
        self._tasks: deque[asyncio.Task[InitialRead | Exception]] = deque()
        self._next = start
        self._closed = False
        self._fill()

    async def read(self) -> memoryview | None:
        """Return the next bytes, or None at the end."""
        if not self._tasks or self._closed:
            return None
        # Cancelling this wait does not cancel the request.
        await asyncio.wait((self._tasks[0],))
        result = self._tasks.popleft().result()
        if isinstance(result, Exception):
            await self.aclose()
            raise result
        if self.head is None:
            self.head = result.head
            # If the store ignores ranges, the first response has all bytes.
            self._next = max(self._next, len(result.data))
        self._fill()
        return result.data if len(result.data) else None

    @property
    def fully_requested(self) -> bool:
        """Whether every byte has been requested."""
        return self._closed or (self.head is not None and self._next >= self.head.size)

    async def aclose(self) -> None:
        """Cancel requests in flight."""
        self._closed = True
        await end_all(self._tasks)
        self._tasks.clear()

    def _fill(self) -> None:
        most = 1 if self.head is None else self._ahead.requests_per_shard
        while len(self._tasks) < most and not self.fully_requested:
            start, self._next = self._next, self._next + self._ahead.chunk_bytes
            self._tasks.append(asyncio.create_task(self._read(start, self._next)))

    async def _read(self, start: int, stop: int) -> InitialRead | Exception:
        shard, head = self._shard, self.head
        try:
            if head is None and not start:
                return await shard.store.read_start(shard.key, stop)
            head = head or await shard.store.head(shard.key)
            return InitialRead(
                await replace(shard, head=head).read(start, min(stop, head.size)), head
            )
        except Exception as error:
            return as_exception(error)


class Decoder(ABC):
    """Makes samples from the unpacked bytes of a shard.

    The bytes come in pieces of any size. A decoder does no I/O.

    Attributes:
        pages: whether a web page may be a shard. Otherwise a web page is taken for an error page in
            place of a shard.
        format: kind of the samples, as "tar". Set by decoders whose samples can be indexed. These
            decoders also set `complete`.
        complete: the byte after the last sample that was yielded.
    """

    pages: bool = False
    format: str = ""
    complete: int = 0

    @abstractmethod
    def feed(self, data: Buffer) -> Iterator[Any]:
        """Parse the next bytes, and yield the completed samples.

        The iterator must be exhausted. After a `BadRecord`, the decoder continues. An exception
        ends the shard.
        """

    @abstractmethod
    def finish(self) -> Iterator[Any]:
        """Signal the end of the shard.

        Yields the last sample, or raises if the shard is truncated.
        """

    def position(self) -> State | None:
        """Return the place where a new decoder can continue, after a `feed`.

        The place has the ``"offset"`` of the first byte, and JSON values of the decoder. None if a
        decoder can begin only at the start of the shard. A restored stream then reads the shard
        again.
        """
        return None

    def restore(self, position: Any) -> None:
        """Continue from a position; called before the first `feed`."""
        raise NotImplementedError  # not called where `position` gives None

    def whole_sample(self, data: Buffer, offset: int) -> Any:
        """Return the sample encoded by bytes from an offset on.

        Only for a format that can be indexed. The decoder is new, or has made a sample by
        `whole_sample` before.

        Raises:
            ShardError: the sample cannot be made.
        """
        self.restore({"offset": offset, "number": None})
        return only_sample([*self.feed(data), *self.finish()], offset)


def only_sample(samples: Sequence[Any], offset: int) -> Any:
    """Return the only sample; raise the error of a sample that cannot be made."""
    if len(samples) != 1:
        raise ShardError(f"{len(samples)} samples in place of one", offset=offset)
    return raised_or(samples[0])


class RecordDecoder(Decoder):
    """Decoder of consecutive records.

    A position has the byte of a record, and the number of the record, counted from 1.

    Attributes:
        record: name of a record in errors.
    """

    record: ClassVar[str]

    def __init__(self, shard: str) -> None:
        self._shard = shard
        self._parts: list[bytes] = []  # bytes from `_offset` on
        self._offset = 0  # offset of the next record
        self._number: int | None = 1  # number of the next record; None if unknown

    def position(self) -> State | None:
        return {"offset": self._offset, "number": self._number}

    def restore(self, position: Any) -> None:
        self._parts = []  # drops bytes of an earlier sample
        self._offset, self._number = position["offset"], position["number"]

    @property
    def _name(self) -> str:
        return self.record if self._number is None else f"{self.record} {self._number:,}"

    def _passed(self, end: int) -> None:
        """Continue behind a record that ends at a byte."""
        self._offset = end
        if self._number is not None:
            self._number += 1

    def _error(self, what: str) -> ShardError:
        return ShardError(what, shard=self._shard, offset=self._offset)


class Block(NamedTuple):
    """Samples that are produced together."""

    begin: PartPosition
    samples: deque[Any]  # samples left, in order; a `BadRecord` in place of some
    size: int  # number of samples at the beginning
    # Position of the next block. None for the last block. The last block may be empty.
    after: PartPosition | None
    error: Exception | None = None  # raised after the samples; only in the last block

    @property
    def decoded(self) -> int:
        """Number of samples of the shard up to the end of the block."""
        return self.begin.given + self.size


class ShardReader:
    """Reads, unpacks and parses a shard from a position on.

    A block of samples is read ahead of the consumer. The first samples of the position, as many as
    `position.drop`, are dropped.

    Attributes:
        part: number of the shard.
        first: number of the shard's samples given out before.
        block: the current block.
        has_successor: whether the next shard was opened, or there is no next shard.
        codec: unpacks the shard.
    """

    def __init__(
        self, shard: Shard, decoder: Decoder, ahead: ReadAhead, position: PartPosition
    ) -> None:
        self.part, self.first = position.part, position.given
        self.block = Block(position, deque(), 0, after=position)
        self.has_successor = False
        self._shard = shard
        self.codec = Codec(shard.key, shard.name, pages=decoder.pages)
        self._decoder = decoder
        offset = 0
        if position.decoder is not None:
            decoder.restore(position.decoder)
            offset = position.decoder["offset"]
        start = 0 if self.codec.compressed else offset
        self.codec.taken = start
        self._skip, self._drop = offset - start, position.drop
        self._pieces: Iterator[Buffer] = iter(())
        self._chunks = ChunkReader(shard, ahead, start)
        self._read_ahead(position)

    @property
    def given(self) -> int:
        """Number of the shard's samples that were given out."""
        return self.block.decoded - len(self.block.samples)

    @property
    def fully_requested(self) -> bool:
        """Whether all bytes have been requested.

        Then the next shard may be opened.
        """
        return self._chunks.fully_requested

    async def fill(self) -> None:
        """Wait for the next block."""
        assert self._task is not None
        await asyncio.wait((self._task,))  # a cancellation of this wait loses nothing
        self.block = self._task.result()
        self._read_ahead(self.block.after)

    def _read_ahead(self, begin: PartPosition | None) -> None:
        self._task: asyncio.Task[Block] | None = None
        if begin is not None:
            self._task = asyncio.create_task(self._next_block(begin))

    def state_dict(self) -> State:
        """Return the position after the samples taken from `block`."""
        block, head = self.block, self._chunks.head
        if block.samples or block.after is None:
            return block.begin.to_state(block.size - len(block.samples), head)
        return block.after.to_state(0, head)

    def reached(self, error: HeadraceError) -> tuple[int, int]:
        """Return the byte at which an error ended the shard, and the size.

        Each number is 0 if unknown.
        """
        offset = None if self.codec.compressed else getattr(error, "offset", None)
        head = self._chunks.head
        return (
            self.codec.taken if offset is None else offset,
            0 if head is None else head.size,
        )

    async def aclose(self) -> None:
        """Stop reading."""
        try:
            if self._task is not None:
                await end_all([self._task])
                self._task = None
        finally:
            await self._chunks.aclose()

    async def _next_block(self, begin: PartPosition) -> Block:
        samples: deque[Any] = deque()
        error: Exception | None = None
        end = False
        while not (samples or end):
            try:
                piece = await self._next_piece()
                if piece is None:
                    end = True
                    self.codec.finish()
                # Samples before an error are kept.
                samples.extend(
                    self._decoder.finish() if piece is None else self._decoder.feed(piece)
                )
            except Exception as caught:
                error, end = as_exception(caught), True
            while self._drop and samples:
                samples.popleft()
                self._drop -= 1
        after: PartPosition | None = None
        if end:
            await self._chunks.aclose()
            if self._drop and error is None:
                error = StateError(
                    f"{self._shard.name} has changed since the state was saved: it ends after "
                    f"{begin.given - self._drop} samples, and {begin.given} of them had been "
                    f"given out"
                )
        else:
            after, place = begin.after(len(samples)), self._decoder.position()
            if place is not None:
                after = after._replace(drop=0, decoder=place)
        return Block(begin, samples, len(samples), after, error)

    async def _next_piece(self) -> Buffer | None:
        while True:
            # zlib and zstd release the interpreter lock while they unpack.
            piece = (
                await asyncio.to_thread(next, self._pieces, None)
                if self.codec.compressed
                else next(self._pieces, None)
            )
            if piece is None:
                chunk = await self._chunks.read()
                if chunk is None:
                    return None
                self._pieces = self.codec.feed(chunk)
                continue
            if not self._skip:
                return piece
            view = memoryview(piece).cast("B")
            skipped = min(self._skip, len(view))
            self._skip -= skipped
            if skipped < len(view):
                return view[skipped:]
