"""Shards with an index, map-style: the base of what `index` of a stream of shards returns."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace._core.array_types import IntArray
from headrace._core.shards.compression import compression_of, unpack_object
from headrace._core.shards.indexing import DecoderOf, OpenedIndex
from headrace._core.shards.reading import Decoder
from headrace._core.shards.unpacked import UnpackedShards
from headrace._core.store.ranges import Ranges, map_all
from headrace._core.streams.kinds import Blocks, T_co
from headrace.datasets.cached import RangedShards

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["MOST_DECODERS", "IndexedDataset"]

# A block in random order has as many parts of a compressed shard, and reads about one more.
PARTS_IN_BLOCK = 4
MOST_DECODERS = 1024  # that are kept, of a kilobyte each


class IndexedDataset(RangedShards[T_co]):
    """The samples of shards with an index, map-style; made by `index` of a stream.

    A sample is one ranged GET. A corrupt sample is read a second time.
    A loader reads samples of its look-ahead that are near each other by one request.

    Args:
        opened: the shards, as they are in their index.
        unpacked_bytes: bytes of unpacked shards that each process keeps.
        decoder_of: makes the decoder of a shard.
    """

    def __init__(self, opened: OpenedIndex, unpacked_bytes: int, decoder_of: DecoderOf) -> None:
        super().__init__(opened.shards, opened.file.counts[opened.numbers].tolist())
        self._unpacked, self._most_unpacked = UnpackedShards(unpacked_bytes), unpacked_bytes
        self._compressed = [compression_of(shard.key) is not None for shard in opened.shards]
        self._index, self._numbers = opened.file, opened.numbers
        self._decoder_of = decoder_of
        self._decoders: dict[int, Decoder] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_decoders": {}}

    @functools.cached_property
    def _urls(self) -> tuple[str, ...]:
        return tuple(shard.name for shard in self._shards)

    def _at(self, indices: Sequence[int]) -> tuple[IntArray, IntArray, IntArray]:
        """Numbers of the samples' shards here and in the index, and places in the index."""
        shards, rows, _ = self._rows(indices)
        numbers = self._numbers[shards]
        return shards, numbers, self._index.firsts[numbers] + rows

    def ranges(self, indices: Sequence[int]) -> Ranges:
        """The bytes of the samples at `indices`; raises `IndexError` if there is no such sample."""
        shards, numbers, places = self._at(indices)
        return Ranges(shards, *self._index.bounds(numbers, places))

    def sample_of(self, index: int, data: memoryview) -> T_co:
        """Make the sample at `index` of its bytes; raises `ShardError` for invalid bytes."""
        return self.samples_of([index], [data])[0]

    def samples_of(self, indices: Sequence[int], data: Sequence[memoryview]) -> list[T_co]:
        """Make the samples of a batch; raises `ShardError` for invalid bytes."""
        shards, numbers, places = self._at(indices)
        starts = self._index.starts(numbers, places)
        return list(map(self.decode, shards.tolist(), starts.tolist(), data))

    @property
    def lengths(self) -> NDArray[np.uint32]:
        """The length of each sample, as the index has it; raises `ValueError` if the index has none."""
        index = self._index
        if not index.length:
            what = f"the index {index.name} has no lengths"
            raise ValueError(f"{what}; make it again: headrace index URL --length module:function")
        firsts, counts = index.firsts[self._numbers], index.counts[self._numbers]
        return index.lengths[np.repeat(firsts - self._firsts, counts) + np.arange(len(self))]

    @functools.cached_property
    def blocks(self) -> Blocks:
        """The sizes of blocks for a random order: compressed shards, or some of their parts."""
        if not any(self._compressed):
            return super().blocks
        rows = [self._index.shards[number] for number in self._numbers.tolist()]
        nbytes = sum(row.end for row in rows)
        parts = sum(len(row.borders()) - 1 for row in rows)
        size = -(-len(self) // max(len(rows), parts // PARTS_IN_BLOCK))
        return Blocks.within(self._most_unpacked, nbytes // max(1, len(self)), size)

    def shard_size(self, number: int) -> int:
        """Return the number of bytes of a shard, unpacked if the shard is compressed."""
        if not self._compressed[number]:
            return super().shard_size(number)
        return int(self._index.shards[self._numbers[number]].end)

    async def read_range(
        self, number: int, start: int, stop: int, *, index: Any = None
    ) -> memoryview:
        """Read bytes of a shard; a part of a compressed shard is unpacked once for all samples that wait."""
        if not self._compressed[number]:
            return await super().read_range(number, start, stop, index=index)
        borders = self._index.shards[self._numbers[number]].borders()
        first, last = np.searchsorted(borders[:, 1], (start, stop - 1), side="right")
        parts = [*pairwise(borders[first - 1 : last + 1].tolist())]

        async def unpacked(part: Any) -> Any:
            return await self._unpacked.get(
                (number, part[0][0]), functools.partial(self._unpack, number, *part)
            )

        found = await map_all(unpacked, parts)
        data: Any = found[0] if len(found) == 1 else np.concatenate(found)
        begin = parts[0][0][1]
        return memoryview(data)[start - begin : stop - begin]

    async def _unpack(self, number: int, first: list[int], last: list[int]) -> NDArray[np.uint8]:
        shard, (start, begin), (stop, end) = self._shards[number], first, last
        data = await shard.read(start, stop)
        unpacked = await asyncio.to_thread(unpack_object, data, shard.key, shard.name, end - begin)
        return np.frombuffer(unpacked, np.uint8)

    def decode(self, number: int, start: int, data: memoryview) -> T_co:
        """Make a sample of bytes at an offset of a shard; raises `ShardError` for invalid bytes."""
        # A decoder is used again after a sample that was made: that takes a third less time.
        decoder = self._decoders.pop(number, None) or self._decoder_of(self._shards[number])
        sample: T_co = decoder.whole_sample(data, start)
        if len(self._decoders) < MOST_DECODERS:
            self._decoders[number] = decoder
        return sample
