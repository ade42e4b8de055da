"""Samplers that deal one order to the ranks."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from torch.utils.data import DistributedSampler, Sampler

from headrace._core.consumer.cursor_sampler import CursorSampler
from headrace._core.permutation import Permutation
from headrace._core.ranks.distributed import RankChoice, ShardOptions


class RankSampler(CursorSampler, DistributedSampler[int]):
    """A sampler that deals its order to the ranks, and needs no process group before it is iterated over."""

    seed: Any  # torch's is an int

    def __init__(
        self, dataset: Sized | int, seed: int | None, rank: int | None, world_size: int | None, *, drop_last: bool
    ) -> None:
        if seed is not None:
            Permutation(0, seed, 0)  # checks the seed
        Sampler.__init__(self)  # DistributedSampler's needs a process group
        self.dataset: Any = dataset
        self.seed = seed
        self.shuffle = True
        self.drop_last = drop_last
        self.epoch = 0
        self._length = dataset if isinstance(dataset, int) else len(dataset)
        self._ranks = RankChoice(rank, world_size)

    def _shard(self) -> ShardOptions:
        return self._ranks.shard()

    @property
    def epoch_size(self) -> int:
        """The number of samples of an epoch of all ranks, without padding."""
        return self._length

    @property
    def rank(self) -> int:  # type: ignore[override]
        """The rank whose part is sampled."""
        return self._shard().index

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        """The number of ranks."""
        return self._shard().count

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """The number of samples of each rank in a whole epoch."""
        count = self.num_replicas
        return self._length // count if self.drop_last else -(-self._length // count)

    @property
    def total_size(self) -> int:  # type: ignore[override]
        """The number of samples of all ranks in a whole epoch."""
        return self.num_samples * self.num_replicas

    def __len__(self) -> int:
        return self.num_samples
