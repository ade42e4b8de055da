"""From samplers to batch plans: lazy, cheap, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from headrace._core.batches import BatchPlan, ResumePoint
from headrace._core.rankinfo import RankInfo
from headrace._core.seeding import batch_seed


class Planner(Iterator[BatchPlan]):
    """Draws one epoch's plans from a sampler or a batch sampler.

    Args:
        draws: an iterator over the sampler: one index at a time, or where `batched`, a sequence of them.
        batched: whether each draw is a whole batch.
        base_seed: the seed that the batches' seeds derive from.
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

    def repeat(self, indices: Sequence[object] | None) -> BatchPlan:
        """Plan one more batch, of samples that were planned before, or of a stream if `indices` is None."""
        return self._plan(self._draw() if indices is None else indices, repeat=True)

    def _draw(self) -> Sequence[object]:
        drawn = next(self._draws)
        return tuple(drawn) if self._batched else (drawn,)

    def _plan(self, indices: Sequence[object], *, repeat: bool = False) -> BatchPlan:
        number = self._number
        self._number += 1
        return BatchPlan(
            number=number,
            indices=indices,
            seed=batch_seed(self._base_seed, self._epoch, number * self._rank.world_size + self._rank.rank),
            resume_point=ResumePoint(self._epoch, self._number, self._samples),
            repeat=repeat,
        )
