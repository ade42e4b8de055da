"""Streams of map-style datasets of byte ranges: the samples of each shard in order, some requests at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar, Unpack

import numpy as np

from headrace._core.failure import as_exception
from headrace._core.shards.discovery import Shard
from headrace._core.shards.positions import PartPosition
from headrace._core.shards.reading import BadRecord, Block, BlockReader, PartReader
from headrace._core.shards.stream import ShardedStream, StreamOptions
from headrace._core.store.ranges import map_all, read_ranges
from headrace._core.streams.kinds import capabilities
from headrace._core.streams.map_style import RangedDataset

T_co = TypeVar("T_co", covariant=True)

_MOST_SAMPLES = 4096  # of a block
_MOST_OF_WHOLE = 32  # the same, of a shard that is read as a whole
_SAMPLES_AT_ONCE = 128  # made on the event loop before other tasks get a turn


class RangedStream(ShardedStream[T_co]):
    """The samples of a dataset of ranges as a stream; made by `RangedShards.stream`, with the numbers of samples."""

    suffixes = ()

    def __init__(self, dataset: RangedDataset[T_co], shards: Sequence[Shard], **options: Unpack[StreamOptions]) -> None:
        self._dataset = dataset
        super().__init__(shards, **options)
        self._first = np.cumsum([0, *(self._counts or ())]).tolist()  # indices in the dataset

    def __repr__(self) -> str:
        return f"{self._dataset!r}.stream()"

    def _read(self, parts: Sequence[int]) -> PartReader[_RangedReader]:
        def open_part(position: PartPosition, shard: Shard, _standby: bool) -> _RangedReader:
            return _RangedReader(self, position, shard)

        return PartReader(parts, self._shards, open_part, self._ahead.shards_in_parallel)


class _RangedReader(BlockReader):
    """Reads the samples of one shard; its position is their number."""

    def __init__(self, stream: RangedStream[Any], position: PartPosition, shard: Shard) -> None:
        self._dataset, self._ahead = stream._dataset, stream._ahead
        first, stop = stream._first[position.part : position.part + 2]
        self._rest = range(first, stop)[position.given :]  # not requested yet
        self._position = replace(position, drop=0)  # after the last block that was produced
        super().__init__(self._position, shard.head)

    @property
    def fully_requested(self) -> bool:
        return not self._rest

    async def _next_block(self) -> Block:
        samples: deque[Any] = deque()
        try:
            joined = capabilities(self._dataset).ranges  # else shards are read as a whole
            indices = self._rest[: _MOST_SAMPLES if joined else _MOST_OF_WHOLE]
            ranges = self._dataset.ranges(indices)
            ranges.check(len(indices))
            sizes = np.cumsum(ranges.stops - ranges.starts)
            most = self._ahead.chunk_bytes * self._ahead.requests_per_shard
            indices = indices[: max(1, int(np.searchsorted(sizes, most, side="right")))]
            self._rest = self._rest[len(indices) :]
            ranges = ranges.at(np.arange(len(indices)))
            if joined:
                views = await read_ranges(ranges, self._dataset.read_range, largest=self._ahead.chunk_bytes)
            else:
                views = await map_all(self._dataset.read_bytes, indices)
            self._views = views  # of the latest block: an unpacked shard is kept while it is in use
            for number, (index, view) in enumerate(zip(indices, views, strict=True), 1):
                try:
                    sample = self._dataset.sample_of(index, view)
                except Exception:  # perhaps damaged in transit
                    sample = await self._again(index)
                samples.append(sample)
                if not number % _SAMPLES_AT_ONCE:
                    await asyncio.sleep(0)
        except Exception as error:
            self._rest = self._rest[:0]
            return Block(samples, error=as_exception(error))
        self._position = replace(self._position, given=self._position.given + len(samples))
        return Block(samples, self._position if self._rest else None)

    async def _again(self, index: int) -> Any:
        """The sample, read once more by itself."""
        try:
            return await self._dataset.aget(index)
        except Exception as error:
            return BadRecord(as_exception(error))
