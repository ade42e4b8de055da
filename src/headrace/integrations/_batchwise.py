"""An order that is dealt to the ranks batch by batch, as accelerate does it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sized

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import BatchSampler

from headrace._core.order.samplers import Order
from headrace._core.permutation import Permutation
from headrace._core.ranks.distributed import ShardOptions
from headrace.samplers import ElasticSampler

_AT_ONCE = 4096  # indices computed by one call; as headrace._core.order.samplers


class BatchwiseSampler(ElasticSampler):
    """As `ElasticSampler`, but the ranks take turns by batches: rank r has the batches r, r + world_size and so on.

    So the batches of all ranks at one step, concatenated, are consecutive in the order, and what pads the last step is
    at its end: `Accelerator.gather_for_metrics` cuts it off.

    Args:
        dataset: the dataset to sample.
        batch_size: number of samples in a batch of one rank.
        shuffle: whether the order is random, another one in each epoch.
        seed: of the order.
        rank: the rank whose part is drawn.
        world_size: number of ranks.
        drop_last: whether a last step with fewer samples than all ranks need is dropped.
        even_batches: whether such a step is padded with samples of the order's beginning; otherwise the last ranks have
            fewer samples.

    Example:
        >>> [list(BatchwiseSampler(range(9), 2, False, 0, rank, 2)) for rank in range(2)]
        [[0, 1, 4, 5, 8, 0], [2, 3, 6, 7, 1, 2]]
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        shuffle: bool,
        seed: int,
        rank: int,
        world_size: int,
        drop_last: bool = False,
        even_batches: bool = True,
    ) -> None:
        super().__init__(dataset, shuffle, seed, rank, world_size, drop_last)
        self.batch_size = batch_size
        self.even_batches = even_batches

    @property
    def dealt_at_once(self) -> int:
        """The number of samples in a batch of one rank."""
        return self.batch_size

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """The number of samples of this rank in a whole epoch."""
        full, last = self._steps(0, self._shard())
        return full * self.batch_size + last

    def remainder(self, cursor: int) -> int:
        """The number of samples of all ranks in the last step after a cursor, without padding; 0 if it is full."""
        return max(self._length - cursor, 0) % (self.batch_size * self.num_replicas)

    def _steps(self, cursor: int, shard: ShardOptions) -> tuple[int, int]:
        """The number of full steps after a cursor, and of this rank's samples in the step after them."""
        full, rest = divmod(max(self._length - cursor, 0), self.batch_size * shard.count)
        if self.drop_last or not rest:
            return full, 0
        if self.even_batches and shard.count > 1:
            return full, self.batch_size
        return full, min(max(rest - shard.index * self.batch_size, 0), self.batch_size)

    def _dealt(self, order: Order, shard: ShardOptions, cursor: int) -> Iterator[int]:
        full, last = self._steps(cursor, shard)
        size, step = self.batch_size, self.batch_size * shard.count
        first, count = cursor + shard.index * size, full * size + last

        def block(start: int) -> list[int]:
            numbers = np.arange(start, min(start + _AT_ONCE, count), dtype=np.int64)
            positions: NDArray[np.int64] = (first + numbers // size * step + numbers % size) % self._length
            if isinstance(order, Permutation):
                positions = order[positions]
            found: list[int] = positions.tolist()
            return found

        return itertools.chain.from_iterable(map(block, range(0, count, _AT_ONCE)))


class BatchwiseBatches(BatchSampler):
    """The batches of a `BatchwiseSampler`, with the attribute that `Accelerator.join_uneven_inputs` sets."""

    sampler: BatchwiseSampler

    @property
    def even_batches(self) -> bool:
        """Whether the last step is padded; read at `iter()`."""
        return self.sampler.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.sampler.even_batches = value
