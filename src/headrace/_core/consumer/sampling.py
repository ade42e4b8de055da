"""The order of a loader with a seed, on one rank and on several."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from headrace._core.consumer.cursor_sampler import CursorSampler, Identity, Order
from headrace._core.consumer.rank_sampler import RankSampler
from headrace._core.permutation import Permutation


class SeededRandomSampler(CursorSampler, RandomSampler):
    """A random order that follows from the seed and the epoch alone, in headrace's loader and in any other.

    Args:
        data_source: the sampled dataset, for its length.
        seed: of the order, with the epoch.

    Example:
        >>> sampler = SeededRandomSampler(range(6), seed=0)
        >>> list(sampler)
        [3, 4, 2, 1, 0, 5]
        >>> sampler.set_epoch(0)
        >>> list(sampler)
        [3, 4, 2, 1, 0, 5]
    """

    def __init__(self, data_source: Sized, *, seed: int) -> None:
        super().__init__(data_source)
        self.seed = seed

    @property
    def epoch_size(self) -> int:
        """The number of samples."""
        return len(self.data_source)

    def _order(self, epoch: int) -> Permutation:
        return Permutation(self.epoch_size, self.seed, epoch)

    def _start_epoch(self) -> int:
        # Without a call of `set_epoch` each iteration is the next epoch.
        self.epoch += 1
        return self.epoch - 1


class SeededRankSampler(RankSampler):
    """The order of a loader with a seed, dealt to the ranks: in place of a `DistributedSampler` put in by a trainer.

    Args:
        replaced: the sampler of the trainer, which says how the ranks share the dataset.
        seed: the loader's.
    """

    def __init__(self, replaced: DistributedSampler[Any], *, seed: int) -> None:
        ranks = replaced.rank, replaced.num_replicas
        super().__init__(replaced.dataset, seed, *ranks, drop_last=replaced.drop_last)  # type: ignore[arg-type]
        self.shuffle = replaced.shuffle

    def on_one_rank(self) -> SeededRandomSampler | SequentialSampler:
        """The sampler with the same order on a single rank."""
        return SeededRandomSampler(self.dataset, seed=self.seed) if self.shuffle else SequentialSampler(self.dataset)

    def _order(self, epoch: int) -> Order:
        return Permutation(self._length, self.seed, epoch) if self.shuffle else Identity(self._length)
