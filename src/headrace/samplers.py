"""Samplers that fit how a dataset is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DistributedSampler, Sampler

from headrace._core.interface.distributed import RankChoice, ShardOptions
from headrace._core.permutation import Permutation
from headrace._core.seeding import batch_seed

__all__ = ["BlockShuffleSampler", "Permutation", "permutation"]


def permutation(n: int, seed: int, epoch: int = 0) -> Permutation:
    """A random order of ``range(n)`` that takes no memory: each position is computed when it is asked for.

    The order of loaders with ``shuffle=True`` and a seed, and of `ElasticSampler`. About half the time of
    `torch.randperm` and `tolist` (benchmarks/permutation.py).

    Args:
        n: number of values.
        seed: of the order, with `epoch`; both between 0 and 2**64 - 1.
        epoch: number of the epoch.

    Returns:
        A sequence. An int is its index, or a slice or an array of integers, for which it returns a NumPy array of
        int64.

    Raises:
        ValueError: a number is out of range.

    Example:
        >>> order = permutation(10**9, seed=0)
        >>> len(order)
        1000000000
        >>> order[500_000_000:500_000_003]
        array([526686746, 878451399, 335532236])
    """
    return Permutation(n, seed, epoch)


class BlockShuffleSampler(DistributedSampler[int]):
    """A random order with locality: blocks of neighbours are shuffled, then the samples of a few blocks at a time.

    For datasets of which a loader reads neighbours by one request (`TokenDataset`, `TarDataset.index`): a block is
    about one request. Each index is drawn once in an epoch, shuffled among the ``block_size × blocks_at_once`` samples
    of `blocks_at_once` blocks from all over the dataset. Unless `prefetch_factor` is given, the loader of such a
    dataset prefetches `samples_ahead` samples, and holds them in memory.

    It splits by rank itself. Trainers that wrap other samplers in a `torch.utils.data.DistributedSampler` leave it
    unchanged, since it is one; unlike torch's, it needs no process group before it is iterated over.

    Args:
        dataset: the dataset to sample, or its length.
        block_size: number of neighbours in a block.
        blocks_at_once: number of blocks whose samples are shuffled together.
        generator: as of `torch.utils.data.RandomSampler`; None: each epoch draws a seed from torch's generator.
        seed: seed of the order, combined with the epoch, instead of `generator`; several ranks need the same one.
        rank: the rank whose part is drawn; by default that of `headrace.get_rank_info` at `iter()`. Every rank gets
            the same number of full blocks, other ones in each epoch; blocks that cannot be divided are dropped.
        world_size: number of ranks.

    Raises:
        ValueError: a number is out of range, or there are several ranks and no `seed`; if `rank` is not given, at
            `iter()`.

    Example:
        >>> sampler = BlockShuffleSampler(12, block_size=4, blocks_at_once=2, seed=0)
        >>> list(sampler)
        [11, 4, 5, 10, 7, 8, 6, 9, 2, 1, 0, 3]
    """

    wants_epoch = True
    """Loaders call `set_epoch` before each epoch."""

    seed: Any  # torch's is an int

    def __init__(
        self,
        dataset: Any,
        *,
        block_size: int,
        blocks_at_once: int = 64,
        generator: torch.Generator | None = None,
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if block_size < 1 or blocks_at_once < 1:
            raise ValueError(f"block_size={block_size} and blocks_at_once={blocks_at_once} must be at least 1")
        if generator is not None and seed is not None:
            raise ValueError("generator= and seed= exclude each other")
        Sampler.__init__(self)  # DistributedSampler's needs a process group
        self.dataset = dataset
        self.block_size = block_size
        self.blocks_at_once = blocks_at_once
        self.generator = generator
        self.seed = seed
        self.shuffle = True
        self.drop_last = True
        self.epoch = 0
        self._length = dataset if isinstance(dataset, int) else len(dataset)
        self._ranks = RankChoice(rank, world_size)
        if self._ranks.given is not None:
            self._check_seed(self._ranks.given)

    @property
    def samples_ahead(self) -> int:
        """The samples of twice `blocks_at_once` blocks: one half is delivered while the other is read."""
        return min(2 * self.block_size * self.blocks_at_once, self._length)

    @property
    def rank(self) -> int:  # type: ignore[override]
        """The rank whose part is sampled."""
        return self._ranks.shard().index

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        """The number of ranks."""
        return self._ranks.shard().count

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """The number of samples of each rank."""
        count = self.num_replicas
        return self._length if count == 1 else self._length // self.block_size // count * self.block_size

    @property
    def total_size(self) -> int:  # type: ignore[override]
        """The number of samples of all ranks."""
        return self.num_samples * self.num_replicas

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch; loaders call this."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        shard = self._ranks.shard()  # now, not at the first `next()`
        self._check_seed(shard)
        return self._indices(shard)

    def _check_seed(self, shard: ShardOptions) -> None:
        if shard.count > 1 and self.seed is None:
            raise ValueError(f"{shard.count} ranks must draw from the same order: give all of them the same seed=")

    def _indices(self, shard: ShardOptions) -> Iterator[int]:
        generator = self._generator()
        whole, rest = divmod(self._length, self.block_size)
        if shard.count == 1:
            blocks = torch.randperm(whole + bool(rest), generator=generator)
        else:
            mine = whole // shard.count
            blocks = torch.randperm(whole, generator=generator)[shard.index * mine :][:mine]
        offsets = torch.arange(self.block_size)
        for first in range(0, len(blocks), self.blocks_at_once):
            pool = (blocks[first : first + self.blocks_at_once, None] * self.block_size + offsets).flatten()
            pool = pool[pool < self._length]
            yield from pool[torch.randperm(len(pool), generator=generator)].tolist()

    def _generator(self) -> torch.Generator:
        if self.generator is not None:
            return self.generator
        generator = torch.Generator()
        if self.seed is None:  # as torch's RandomSampler
            return generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
        return generator.manual_seed(batch_seed(self.seed, self.epoch, 0) >> 1)
