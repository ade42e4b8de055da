"""Streams of map-style datasets: the samples in the order of a sampler, read in large blocks."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from headrace._core.failure import as_exception
from headrace._core.order.samplers import BlockSampler
from headrace._core.ranks.distributed import RankChoice, ShardOptions
from headrace._core.shards.discovery import Shard
from headrace._core.shards.positions import PartPosition
from headrace._core.shards.reading import BadRecord, Block, BlockReader, PartReader
from headrace._core.shards.stream import PartStream
from headrace._core.store.ranges import map_all
from headrace._core.streams.epochs import Order
from headrace._core.streams.kinds import Blocks, T_co, capabilities

__all__ = ["IndexStream"]

_IN_ORDER = 32  # blocks read at once in the order of the dataset: 8 MiB, which the processor's cache may hold
_SINGLY = 32  # samples fetched at once from a dataset that has no batches
_AT_MOST = 1024  # samples of a block: they are made on the event loop, where other tasks wait


class IndexStream(PartStream[T_co]):
    """The samples of a map-style dataset as a stream; made by `RangedShards.stream`.

    The whole dataset is one part. Its order is that of a `BlockSampler`, which divides the samples among the readers.
    """

    parts_name = "samples"
    ranks_differ = False

    def __init__(
        self, dataset: Any, shards: Sequence[Shard], ranks: RankChoice, shuffle: bool, seed: int | None
    ) -> None:
        super().__init__(ranks, shuffle, 0, seed)
        self._dataset = self._parts = dataset
        self._shards = shards
        self._blocks: Blocks = dataset.blocks

    def __len__(self) -> int:
        return len(self._sampler(self._ranks.shard(), self._order_for(self._seed)))

    def __repr__(self) -> str:
        return f"{self._dataset!r}.stream()"

    def _sampler(self, reader: ShardOptions, order: Order) -> BlockSampler:
        """The sampler that a loader of the dataset has; in repetitions of the stream with other seeds."""
        sampler = BlockSampler.of(
            self._blocks,
            self._dataset,
            shuffle=self._shuffle,
            seed=order.key() if order.repetition else order.seed,
            rank=reader.index,
            world_size=reader.count,
        )
        sampler.set_epoch(order.epoch)
        return sampler

    def _reader_of(self, reader: ShardOptions, order: Order) -> PartReader[Any]:
        sampler = self._sampler(reader, order)
        in_order = sampler.order_of == "samples"
        at_once = self._blocks.size * _IN_ORDER if in_order else -(-self._blocks.samples // reader.count)

        def open_part(position: PartPosition, _shard: Shard, _standby: bool) -> _IndexReader:
            indices = sampler.indices_from(position.given * reader.count)
            return _IndexReader(self._dataset, indices, at_once, position)

        def name_of(_part: int, number: int) -> str:
            return str(self._dataset.sample_key(next(sampler.indices_from(number * reader.count))))

        samples = PartReader([0], self._shards[:1], open_part)
        samples.name_of = name_of
        return samples

    def _options(self) -> dict[str, object]:
        return {**super()._options(), "blocks": list(self._blocks.shown)}

    def _part_names(self) -> Iterable[str]:
        sizes = (None if shard.head is None else shard.head.size for shard in self._shards)
        names = (shard.name for shard in self._shards)
        return map(str, zip(names, sizes, self._dataset.counts, strict=True))


class _IndexReader(BlockReader):
    """Reads the samples at some indices in blocks of `at_once` samples. The position is the number of samples."""

    def __init__(self, dataset: Any, indices: Iterator[int], at_once: int, position: PartPosition) -> None:
        self._dataset = dataset
        self._rest = indices  # not requested yet
        can = capabilities(dataset)
        self._at_once = min(at_once, _AT_MOST if can.agets or can.ranges else _SINGLY)
        self._position = replace(position, drop=0)  # after the last block that was produced
        super().__init__(self._position, None)

    async def _next_block(self) -> Block:
        indices = list(itertools.islice(self._rest, self._at_once))
        if not indices:
            return Block(deque())
        try:
            samples = deque(await self._dataset.agets(indices))
        except Exception:  # of one request or sample: read sample by sample, the error names the sample
            samples = deque(await map_all(self._alone, indices, _SINGLY))
        self._position = replace(self._position, given=self._position.given + len(indices))
        return Block(samples, self._position)

    async def _alone(self, index: int) -> Any:
        """Read one sample by itself; a `BadRecord` with the error if the sample cannot be made."""
        try:
            return await self._dataset.aget(index)
        except Exception as error:
            return BadRecord(as_exception(error))
