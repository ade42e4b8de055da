"""From samplers to batch plans: lazy, cheap, no I/O."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import RandomSampler

from headrace.batches import BatchPlan, ResumePoint
from headrace.rankinfo import RankInfo

__all__ = ["EpochGenerator", "Planner", "SeededRandomSampler", "batch_seed"]

_SEED_INPUT = struct.Struct("<QQQ")


def batch_seed(base: int, epoch: int, number: int) -> int:
    """The 64-bit seed of one batch: the same for the same base seed, epoch and batch number, on every machine.

    A hash, so that neighbouring batches get unrelated seeds (BLAKE2b, RFC 7693).
    """
    digest = hashlib.blake2b(_SEED_INPUT.pack(base, epoch, number), digest_size=8).digest()
    return int.from_bytes(digest, "little")


class EpochGenerator(torch.Generator):
    """The generator that a loader with a `seed` makes for itself.

    A class of its own, so that a loader which is made anew from the attributes of another knows it for what it is.
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


class Planner(Iterator[BatchPlan]):
    """Draws one epoch's plans from a sampler or a batch sampler.

    Args:
        draws: an iterator over the sampler: one index at a time, or where `batched`, a sequence of them.
        batched: whether each draw is a whole batch.
        base_seed: what the batches' seeds derive from.
        epoch: the epoch's number, from 0.
        rank: the rank that the batches are for; they are seeded by their number among those of all ranks.
    """

    def __init__(self, draws: Iterable[Any], *, batched: bool, base_seed: int, epoch: int, rank: RankInfo) -> None:
        self._draws = iter(draws)
        self._batched = batched
        self._base_seed = base_seed
        self._epoch = epoch
        self._rank = rank
        self._number = 0
        self._samples = 0

    def __next__(self) -> BatchPlan:
        indices = self._draw()
        self._samples += len(indices)
        return self._plan(indices)

    def repeat(self, indices: Sequence[Any] | None) -> BatchPlan:
        """Plan one more batch, of samples that were planned before, or of a stream if `indices` is None."""
        return self._plan(self._draw() if indices is None else indices, repeat=True)

    def _draw(self) -> Sequence[Any]:
        drawn = next(self._draws)
        return tuple(drawn) if self._batched else (drawn,)

    def _plan(self, indices: Sequence[Any], *, repeat: bool = False) -> BatchPlan:
        number = self._number
        self._number += 1
        return BatchPlan(
            number=number,
            indices=indices,
            seed=batch_seed(self._base_seed, self._epoch, number * self._rank.world_size + self._rank.rank),
            resume_point=ResumePoint(self._epoch, self._number, self._samples),
            repeat=repeat,
        )
