"""The random order of a loader with a seed."""

from __future__ import annotations

from collections.abc import Sized

from torch.utils.data import RandomSampler

from headrace._core.consumer.cursor_sampler import CursorSampler
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
