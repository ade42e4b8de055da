"""Shards with an index, map-style: the base of what `index` of a stream of shards returns."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import Any

from headrace._core.array_types import IntArray
from headrace._core.shards.discovery import Shard
from headrace._core.shards.index_file import IndexFile
from headrace._core.shards.indexing import DecoderOf
from headrace._core.shards.reading import Decoder
from headrace._core.store.ranges import Ranges
from headrace._core.store.store import Store
from headrace._core.streams.kinds import T_co
from headrace.datasets.cached import RangedShards

__all__ = ["MOST_DECODERS", "IndexedShards"]

MOST_DECODERS = 1024  # that are kept, of a kilobyte each


class IndexedShards(RangedShards[T_co]):
    """The samples of shards with an index, map-style; made by `index` of a stream.

    A sample is one ranged GET, and its CRC-32 is checked. A corrupt sample is read a second time.
    A loader reads samples of its look-ahead that are near each other by one request.

    Args:
        index: the index.
        shards: the shards, with the versions that were indexed.
        numbers: number of each shard in the index.
        decoder_of: makes the decoder of a shard.
    """

    def __init__(
        self,
        index: IndexFile,
        shards: Sequence[Shard],
        numbers: IntArray,
        decoder_of: DecoderOf,
    ) -> None:
        super().__init__(shards, index.counts[numbers].tolist())
        self._index, self._numbers, self._decoder_of = index, numbers, decoder_of
        self._decoders: dict[int, Decoder] = {}

    def __getstate__(self) -> dict[str, Any]:
        """The state; of shards in one folder of one store without what the index has."""
        state = {**self.__dict__, "_decoders": {}}
        state.pop("_urls", None)
        store, key = self._shards[0].store, self._shards[0].key
        folder = key.removesuffix(self._index.shards[self._numbers[0]].name)
        if self._shards_below(store, folder) == self._shards:
            state["_shards"] = store, folder
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not isinstance(state["_shards"][0], Shard):
            self._shards = self._shards_below(*state["_shards"])

    def _shards_below(self, store: Store, folder: str) -> tuple[Shard, ...]:
        """The shards, as they are named and versioned in the index."""
        rows = [self._index.shards[number] for number in self._numbers.tolist()]
        keys = [folder + row.name for row in rows]
        found = zip(rows, keys, strict=True)
        return tuple(Shard(store, key, row.head(key)) for row, key in found)

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
        """Make the sample at `index` of its bytes; raises `ShardError` if the checksum is wrong."""
        return self.samples_of([index], [data])[0]

    def samples_of(self, indices: Sequence[int], data: Sequence[memoryview]) -> list[T_co]:
        """Make the samples of a batch; raises `ShardError` if the checksum of a sample is wrong."""
        shards, _, places = self._at(indices)
        starts = self._index.starts(places)
        expected = self._index.checksums[places].tolist()
        found = list(map(zlib.crc32, data))
        if found != expected:
            slot = [*map(int.__eq__, found, expected)].index(False)
            what = f"the checksum of a sample of {len(data[slot])} bytes is wrong"
            raise self._shards[int(shards[slot])].error(what, offset=int(starts[slot]))
        return list(map(self.decode, shards.tolist(), starts.tolist(), data))

    def decode(self, number: int, start: int, data: memoryview) -> T_co:
        """Make a sample of bytes at an offset of a shard; raises `ShardError` for invalid bytes."""
        # A decoder is used again after a sample that was made: that takes a third less time.
        decoder = self._decoders.pop(number, None) or self._decoder_of(self._shards[number])
        sample: T_co = decoder.whole_sample(data, start)
        if len(self._decoders) < MOST_DECODERS:
            self._decoders[number] = decoder
        return sample
