"""Map-style datasets of shards with an index."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace._shards.compression import unpack_object
from headrace._shards.indexing import DecoderOf, OpenedIndex
from headrace._shards.reading import Decoder
from headrace._shards.unpacked import UnpackedShards
from headrace._store.ranges import Ranges, map_all
from headrace._streams.kinds import Blocks, T_co
from headrace.datasets.cached import RangedShards

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["MOST_DECODERS", "IndexedDataset"]

PARTS_IN_BLOCK = 4  # pieces of a compressed shard in a block; a block reads about one more piece
MOST_DECODERS = 1024  # in memory, a kilobyte each


class IndexedDataset(RangedShards[T_co]):
    """A map-style dataset of shards with an index.

    `index` of a stream makes the dataset. A sample is one ranged GET. A corrupt sample is read a
    second time. A loader reads neighbouring samples of the look-ahead by one request.

    Args:
        opened: the index and the shards.
        unpacked_bytes: bytes of unpacked shards in each process.
        decoder_of: makes the decoder of a shard.
    """

    def __init__(self, opened: OpenedIndex, unpacked_bytes: int, decoder_of: DecoderOf) -> None:
        super().__init__(opened.shards, opened.file.counts[opened.numbers])
        self._unpacked, self._most_unpacked = UnpackedShards(unpacked_bytes), unpacked_bytes
        self._index, self._numbers = opened.file, opened.numbers
        self._decoder_of = decoder_of
        self._decoders: dict[int, Decoder] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_decoders": {}}

    def ranges(self, indices: Sequence[int]) -> Ranges:
        """Return byte ranges of samples; raises `IndexError` out of range."""
        shards, rows, _ = self._rows(indices)
        return Ranges(shards, *self._index.bounds(self._numbers[shards], rows))

    def sample_of(self, index: int, data: memoryview) -> T_co:
        """Make the sample at `index`; raises `ShardError` for invalid bytes."""
        return self.samples_of([index], [data])[0]

    def samples_of(self, indices: Sequence[int], data: Sequence[memoryview]) -> list[T_co]:
        """Make the samples of a batch; raises `ShardError` for invalid bytes."""
        ranges = self.ranges(indices)
        return list(map(self.decode, ranges.objects.tolist(), ranges.starts.tolist(), data))

    @property
    def lengths(self) -> NDArray[np.uint32]:
        """Length of each sample, uint32.

        Raises:
            ValueError: the index has no lengths.
        """
        index = self._index
        if len(index.lengths) < index.counts.sum():
            what = f"the index {index.name} has no lengths"
            raise ValueError(f"{what}; make it again: headrace index URL --length module:function")
        firsts, counts = index.firsts[self._numbers], index.counts[self._numbers]
        return index.lengths[np.repeat(firsts - self._firsts, counts) + np.arange(len(self))]

    @functools.cached_property
    def blocks(self) -> Blocks:
        """Sizes of blocks: compressed shards, or some of the pieces."""
        index, numbers = self._index, self._numbers
        if not (pieces := int(index.pieces[numbers].sum())):
            return super().blocks
        nbytes = int(index.ends[numbers].sum())
        size = -(-len(self) // max(len(numbers), pieces // PARTS_IN_BLOCK))
        return Blocks.within(self._most_unpacked, nbytes // max(1, len(self)), size)

    def shard_size(self, number: int) -> int:
        """Return the number of bytes of a shard, unpacked if the shard is compressed."""
        index, place = self._index, self._numbers[number]
        return int(index.ends[place]) if index.pieces[place] else super().shard_size(number)

    async def read_range(
        self, number: int, start: int, stop: int, *, index: Any = None
    ) -> memoryview:
        """Read bytes of a shard.

        A piece of a compressed shard is unpacked once for all samples that wait.
        """
        place = self._numbers[number]
        if not self._index.pieces[place]:
            return await super().read_range(number, start, stop, index=index)
        borders = self._index.shard(place).borders()
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
        """Make a sample; raises `ShardError` for invalid bytes.

        Args:
            number: number of the shard.
            start: offset of the sample in the shard.
            data: bytes of the sample.
        """
        # A decoder is used again after a good sample: a third less time.
        decoder = self._decoders.pop(number, None) or self._decoder_of(self._shards[number])
        sample: T_co = decoder.whole_sample(data, start)
        if len(self._decoders) < MOST_DECODERS:
            self._decoders[number] = decoder
        return sample
