"""Streams of map-style datasets, read in large blocks."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from typing import Any

from headrace._eventloop.per_loop import end_all
from headrace._order.samplers import BlockSampler
from headrace._ranks.distributed import RankChoice, ReaderShare
from headrace._records.failure import as_exception
from headrace._store.ranges import map_all
from headrace._streams.epochs import FollowsEpoch, Order, checked_seed
from headrace._streams.iterable_style import AsyncIterableDataset
from headrace._streams.kinds import T_co
from headrace._streams.resumable import BadRecord, StreamOperation, raised_or

# Blocks read at once in the order of the dataset: 8 MiB, which the processor's cache may hold.
_IN_ORDER = 32
_SINGLY = 32  # samples fetched at once after a failed request
# Samples of a call. The samples are made on the event loop, where other tasks wait up to 40 ms.
_AT_MOST = 1 << 14


class IndexStream(FollowsEpoch, AsyncIterableDataset[T_co]):
    """A stream of the samples of a map-style dataset.

    Made by `RangedShards.stream`. The order is the order of a `BlockSampler`. The sampler divides
    the samples among the readers.
    """

    splits_by_rank = splits_over_workers = True

    def __init__(
        self, dataset: Any, ranks: RankChoice, shuffle: bool, seed: int | None
    ) -> None:
        self._dataset = dataset
        self._ranks = ranks
        self._shuffle = bool(shuffle)
        self._seed = checked_seed(seed)

    def __len__(self) -> int:
        return len(self.sampler(self._ranks.shard(), self._order_for(self._seed)))

    def __repr__(self) -> str:
        return f"{self._dataset!r}.stream()"

    def __aiter__(self) -> _IndexIterator:
        """Start a pass."""
        return _IndexIterator(
            self, self._ranks.shard().in_worker(), self._order_for(self._seed)
        )

    def sampler(self, reader: ReaderShare, order: Order) -> BlockSampler:
        """Return a sampler with the order of the dataset's loader.

        Repetitions of the stream have other seeds.
        """
        sampler = BlockSampler.of(
            self._dataset.blocks,
            self._dataset,
            shuffle=self._shuffle,
            seed=order.key() if order.repetition else order.seed,
            rank=reader.index,
            world_size=reader.count,
        )
        sampler.set_epoch(order.epoch)
        return sampler


class _IndexIterator(StreamOperation[Any]):
    """Iterator over the samples of one reader in one epoch.

    Reads a block ahead. The position is the number of samples.
    """

    operation = "stream of an index"
    options = ("shards", "shuffle", "blocks", "reader")
    fields = ("order", "given")

    def __init__(
        self, stream: IndexStream[Any], reader: ReaderShare, order: Order
    ) -> None:
        super().__init__(None)
        self._stream = stream
        self._dataset = dataset = stream._dataset
        self._shards, self._shuffle = dataset._digest, stream._shuffle
        self._blocks = list(dataset.blocks.shown)
        self._reader = [reader.index, reader.count]
        self._order = order
        self._given = 0
        self._samples: deque[Any] = deque()  # the rest of the current block
        self._task: asyncio.Task[deque[Any]] | None = None  # makes the next block
        self._restored()

    def _restored(self) -> None:
        reader = ReaderShare(*self._reader)
        self._first = self._given
        self._sampler = self._stream.sampler(reader, self._order)
        # Not requested yet.
        self._rest = self._sampler.indices_from(self._given * reader.count)

    async def __anext__(self) -> Any:
        while not self._samples:
            if self._closed:
                raise StopAsyncIteration
            self._task = self._task or self._read_ahead()
            await asyncio.wait((self._task,))  # a cancelled wait loses nothing
            self._samples = self._task.result()
            self._closed = not self._samples
            self._task = None if self._closed else self._read_ahead()
        self._given += 1
        return raised_or(self._samples.popleft())

    def _read_ahead(self) -> asyncio.Task[deque[Any]]:
        return asyncio.create_task(self._next_block())

    async def _next_block(self) -> deque[Any]:
        blocks = self._dataset.blocks
        in_order = self._sampler.order_of == "samples"
        side_by_side = -(-blocks.samples // self._reader[1])
        at_once = blocks.size * _IN_ORDER if in_order else side_by_side
        indices = list(itertools.islice(self._rest, min(at_once, _AT_MOST)))
        try:
            return deque(await self._dataset.agets(indices) if indices else ())
        except Exception:
            # A request or a sample failed. Read sample by sample, so the error names the sample.
            return deque(await map_all(self._alone, indices, _SINGLY))

    async def _alone(self, index: int) -> Any:
        """Read one sample, or return a `BadRecord` with the error."""
        try:
            return await self._dataset.aget(index)
        except Exception as error:
            return BadRecord(as_exception(error))

    def origin(self, number: int) -> str:
        index = next(self._sampler.indices_from((self._first + number) * self._reader[1]))
        return str(self._dataset.sample_key(index))

    async def aclose(self) -> None:
        self._closed = True
        self._samples.clear()
        if self._task is not None:
            await end_all([self._task])
