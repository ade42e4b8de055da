"""The order of a sampler, dealt to the ranks batch by batch, as accelerate does it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import BatchSampler

from headrace._core.order.samplers import Identity, Order
from headrace._core.permutation import Permutation
from headrace._core.ranks.distributed import ShardOptions
from headrace._core.ranks.rankinfo import RankInfo
from headrace._core.seeding import batch_seed, isolated_generators, seed_everything
from headrace.integrations._shared import computed_order
from headrace.samplers import ElasticSampler

_AT_ONCE = 4096  # indices computed by one call; as headrace._core.order.samplers


class BatchwiseSampler(ElasticSampler):
    """As `ElasticSampler`, but the ranks take turns by batches: rank r has the batches r, r + world_size and so on.

    So the batches of all ranks at one step, concatenated, are consecutive in the order, and what pads the last step is
    at its end: `Accelerator.gather_for_metrics` cuts it off.

    The order in which torch shuffles is replaced by a `permutation`. Any other sampler is asked for all its indices
    while the generators of the process and its own are seeded by seed and epoch; then they are restored. So every rank
    has the same order, also when it resumes.

    Args:
        sampler: whose order is dealt.
        batch_size: number of samples in a batch of one rank.
        rank: the rank whose part is drawn.
        seed: of the order, unless the sampler has a seed.
        drop_last: whether a last step with fewer samples than all ranks need is dropped.
        even_batches: whether such a step is padded with samples of the order's beginning; otherwise the last ranks have
            fewer samples.

    Example:
        >>> in_order = torch.utils.data.SequentialSampler(range(9))
        >>> [list(BatchwiseSampler(in_order, 2, RankInfo(rank, 2, ""))) for rank in range(2)]
        [[0, 1, 4, 5, 8, 0], [2, 3, 6, 7, 1, 2]]
    """

    def __init__(
        self,
        sampler: Any,
        batch_size: int,
        rank: RankInfo,
        seed: int = 0,
        *,
        drop_last: bool = False,
        even_batches: bool = True,
    ) -> None:
        order = computed_order(sampler, seed)
        shuffle, seed = order or (True, seed)
        super().__init__(len(sampler), shuffle, seed, rank.rank, rank.world_size, drop_last)
        self.batch_size = batch_size
        self.even_batches = even_batches
        self._drawn = None
        if order is None:
            self._drawn, self.order_of = sampler, type(sampler).__name__

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

    def _order(self, epoch: int) -> Order:
        if self._drawn is None:
            return super()._order(epoch)
        own = getattr(self._drawn, "generator", None)
        generator = own if isinstance(own, torch.Generator) else torch.Generator()
        before, seed = generator.get_state(), batch_seed(self.seed, epoch, 0)
        with isolated_generators():
            seed_everything(seed)
            generator.manual_seed(seed)
            if hasattr(self._drawn, "set_epoch"):
                self._drawn.set_epoch(epoch)
            try:
                return _Indices(np.fromiter(self._drawn, np.int64))
            finally:
                generator.set_state(before)

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
            if isinstance(order, Permutation | _Indices):
                positions = order[positions]
            found: list[int] = positions.tolist()
            return found

        return itertools.chain.from_iterable(map(block, range(0, count, _AT_ONCE)))


class _Indices(Identity):
    """An order that was drawn."""

    def __init__(self, indices: NDArray[np.int64]) -> None:
        super().__init__(len(indices))
        self._indices = indices

    def __getitem__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._indices[positions]


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
