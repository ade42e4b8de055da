"""Orders of indices that suit what they are read from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DistributedSampler, Sampler

from headrace._core.interface.distributed import RankChoice, ShardOptions
from headrace._core.seeding import batch_seed

__all__ = ["BlockShuffleSampler"]


class BlockShuffleSampler(DistributedSampler[int]):
    """A random order that stays near: blocks of neighbours are shuffled, then the samples of a few blocks at a time.

    For datasets of which a loader reads neighbours by one request (`TokenDataset`, `TarDataset.index`): a block is
    about one request. Each sample comes once in an epoch; those drawn near each other come from `blocks_at_once` places
    all over the dataset, and are shuffled among ``block_size × blocks_at_once``. Where `prefetch_factor` does not say
    otherwise, the loader of such a dataset looks `samples_ahead` far ahead: that much memory it holds.

    It splits by rank itself. As a `torch.utils.data.DistributedSampler` it is left alone by trainers that would wrap
    other samplers in one; unlike torch's, it needs no process group before it is iterated over.

    Args:
        dataset: what is sampled, for its length; or the length itself.
        block_size: neighbours that stay together until they are drawn.
        blocks_at_once: blocks among whose samples is shuffled.
        generator: as of `torch.utils.data.RandomSampler`; with None, each epoch draws a seed from torch's generator.
        seed: of the order, with the epoch, in place of `generator`; several ranks need it, and the same.
        rank: which rank's part to give; by default that of `headrace.get_rank_info` at `iter()`. With several ranks
            each is given the same number of full blocks, other ones in each epoch, and the blocks that do not go round
            are left out.
        world_size: how many ranks there are.

    Raises:
        ValueError: a number makes no sense, or there are several ranks and no `seed`; where `rank` is not given, at
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
        """The samples of two times `blocks_at_once`: one half is being delivered, the other is being read."""
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
        """Say which epoch comes next; a loader does so by itself."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        shard = self._ranks.shard()  # now, not at the first `next()`
        self._check_seed(shard)
        return self._indices(shard)

    def _check_seed(self, shard: ShardOptions) -> None:
        if shard.count > 1 and self.seed is None:
            raise ValueError(f"{shard.count} ranks must draw from one order: give all of them the same seed=")

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
