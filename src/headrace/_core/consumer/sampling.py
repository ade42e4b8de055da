"""The random order of a loader with a seed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import RandomSampler

from headrace._core.seeding import batch_seed


class EpochGenerator(torch.Generator):
    """The generator that a loader with a `seed` makes for itself.

    A class of its own, so that a loader rebuilt from the attributes of another recognises it.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_generator, (self.get_state(),)


def _restore_generator(state: torch.Tensor) -> EpochGenerator:
    generator = EpochGenerator()
    generator.set_state(state)
    return generator


class SeededRandomSampler(RandomSampler):
    """A random order that follows from the seed and the epoch alone, in headrace's loader and in any other.

    Args:
        data_source: the sampled dataset, for its length.
        seed: of the order, with the epoch.
        generator: draws the order; reseeded for each epoch.

    Example:
        >>> sampler = SeededRandomSampler(range(6), seed=0, generator=EpochGenerator())
        >>> list(sampler)
        [5, 0, 1, 2, 3, 4]
        >>> sampler.set_epoch(0)
        >>> list(sampler)
        [5, 0, 1, 2, 3, 4]
    """

    wants_epoch = True
    """Loaders call `set_epoch` before each epoch."""

    def __init__(self, data_source: Any, *, seed: int, generator: EpochGenerator) -> None:
        super().__init__(data_source, generator=generator)
        self.seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; without this call each iteration is the next epoch."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        # A generator function: torch's loader calls iter() twice for an epoch, and draws from one of the two.
        epoch, self._epoch = self._epoch, self._epoch + 1
        self.generator.manual_seed(batch_seed(self.seed, epoch, 0) >> 1)
        yield from super().__iter__()
