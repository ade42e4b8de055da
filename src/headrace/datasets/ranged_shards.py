"""Base of map-style datasets whose samples are byte ranges of shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from headrace._core.shards.discovery import Shard
from headrace._core.streams.map_style import RangedDataset
from headrace.datasets.cached import Cacheable, Extent

__all__ = ["ByteRange", "RangedShards"]

T_co = TypeVar("T_co", covariant=True)


class ByteRange(NamedTuple):
    """The bytes of a sample.

    Attributes:
        shard: number of the shard.
        start: first byte.
        stop: one past the last byte.
    """

    shard: int
    start: int
    stop: int


class RangedShards(RangedDataset[T_co], Cacheable[T_co]):
    """Map-style dataset whose samples are byte ranges of shards: define `ranges` and `sample_of`.

    Args:
        shards: the shards, with size and version.
        counts: number of samples in each shard.
    """

    def __init__(self, shards: Sequence[Shard], counts: Sequence[int]) -> None:
        self._shards = tuple(shards)
        self._ends = np.cumsum(counts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def range(self, index: int) -> ByteRange:
        """The bytes of the sample at `index`; raises `IndexError` if there is none."""
        return ByteRange(*(int(column[0]) for column in self.ranges([index])))

    def extent(self, index: int) -> Extent:
        """The bytes of the sample at `index`, for a cache; raises `IndexError` if there is none."""
        number, start, stop = self.range(index)
        shard = self._shards[number]
        version = None if shard.head is None else shard.head.version
        return Extent(shard.store.store_id, shard.key, version, start, stop - start)

    async def read_range(self, number: int, start: int, stop: int, *, index: Any = None) -> memoryview:
        """Read bytes of the shard with that number.

        Raises:
            StoreError: the request failed, or the shard has changed since the dataset was made.
        """
        return await self._shards[number].read(start, stop, index=index)
