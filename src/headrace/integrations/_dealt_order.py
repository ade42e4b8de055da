"""The order of any sampler, dealt to ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace._core.order.samplers import Order
from headrace._core.seeding import batch_seed, isolated_generators, seed_everything
from headrace.samplers import ElasticSampler


class DealtSampler(ElasticSampler):
    """Deals the indices of another sampler to ranks, as `ElasticSampler` deals its own.

    Whatever that sampler draws follows from seed and epoch: the generators of the process and its own are seeded while
    it is asked, and are then restored. So every rank draws the same order, also when it resumes.

    Args:
        sampler: gives all ranks' indices; asked once for an epoch, for all of them.
        seed: of its random numbers, with the epoch.
        rank: the rank whose part is drawn.
        world_size: number of ranks.
        drop_last: whether the last samples are dropped if they cannot be divided evenly.
    """

    def __init__(self, sampler: Any, *, seed: int, rank: int, world_size: int, drop_last: bool) -> None:
        super().__init__(len(sampler), seed=seed, rank=rank, world_size=world_size, drop_last=drop_last)
        self._sampler = sampler
        self.order_of = type(sampler).__name__

    def _order(self, epoch: int) -> Order:
        own = getattr(self._sampler, "generator", None)
        generator = own if isinstance(own, torch.Generator) else None
        before = None if generator is None else generator.get_state()
        seed = batch_seed(self.seed, epoch, 0)
        with isolated_generators():
            seed_everything(seed)
            if generator is not None:
                generator.manual_seed(seed)
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(epoch)
            try:
                return _Drawn(np.fromiter(self._sampler, np.int64))
            finally:
                if generator is not None and before is not None:
                    generator.set_state(before)


class _Drawn:
    def __init__(self, indices: NDArray[np.int64]) -> None:
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def blocks(self, start: int = 0, stop: int | None = None, step: int = 1) -> Iterator[NDArray[np.int64]]:
        """The indices at these positions."""
        yield self._indices[start:stop:step]
