"""From samplers to batch plans: lazy, cheap, no I/O."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from headrace._core.batches import BatchPlan
from headrace._core.order.lanes import LaneTurns
from headrace._core.order.order import Scattered
from headrace._core.order.progress import EpochProgress
from headrace._core.order.restore import EpochSpec
from headrace._core.seeding import batch_seed, random_key

_SAMPLES_AT_MOST = 1 << 48  # of one rank in an epoch; replacements of lost batches have positions after these


class Planner(Iterator[BatchPlan]):
    """Draws one epoch's plans from a sampler or a batch sampler.

    Args:
        spec: the epoch.
        progress: records each plan.
        batched: whether the sampler gives sequences of indices, and not one at a time.

    Attributes:
        turns: the turns of the lanes, of a stream that is read by lanes.
        taken: number of the last batch that was taken; out of order, one less than their number. Set by the consumer.
    """

    def __init__(self, spec: EpochSpec, progress: EpochProgress, *, batched: bool) -> None:
        self._spec = spec
        self._progress = progress
        self._draws = spec.draws
        self._batched = batched
        self._epoch, self._number = spec.begun.epoch, spec.begun.batches
        self._random_key = random_key(spec.base_seed, self._epoch)
        self.taken = self._number - 1
        self._repeats, self._over = spec.begun.skipped[-1], spec.over
        self._samples = spec.order.first_sample
        self.turns = LaneTurns(spec.session) if spec.session.lanes > 1 else None

    def __next__(self) -> BatchPlan:
        try:
            if self._over or (self.turns is not None and not self.turns.left):
                raise StopIteration
            drawn = next(self._draws)
        except StopIteration:
            self._progress.on_exhausted()
            raise
        if type(drawn) is Scattered:
            self._samples = drawn.samples[-1] + 1
            return self._plan(drawn.indices, [self._position(number) for number in drawn.samples])
        indices = tuple(drawn) if self._batched else (drawn,)
        first = self._samples
        self._samples += len(indices)
        return self._plan(indices, self._positions(first, len(indices)))

    def repeat(self, indices: Sequence[object] | None) -> BatchPlan:
        """Plan one more batch, of samples that were planned before, or of a stream if `indices` is None."""
        if indices is None:
            drawn = next(self._draws)
            indices = tuple(drawn) if self._batched else (drawn,)
        first = _SAMPLES_AT_MOST + self._repeats * len(indices)
        self._repeats += 1
        return self._plan(indices, self._positions(first, len(indices)), repeat=True)

    def _position(self, number: int) -> int:
        """The position of this rank's sample of this number."""
        spec = self._spec
        block, inside = divmod(number, spec.block)
        return spec.first + block * spec.block * spec.stride + inside

    def _positions(self, first: int, count: int) -> Sequence[int]:
        start, block, stride = self._position(first), self._spec.block, self._spec.stride
        if block == 1:
            return range(start, start + count * stride, stride)
        if first % block + count <= block:
            return range(start, start + count)
        return [self._position(number) for number in range(first, first + count)]

    def _plan(self, indices: Sequence[object], positions: Sequence[int], *, repeat: bool = False) -> BatchPlan:
        number = self._number
        self._number += 1
        seeded_by = positions[0] if positions else self._position(self._samples)
        lane: int | None = None
        if self.turns is not None:
            if repeat:
                lane = self.turns.repeating
            else:
                lane, before = self.turns.take(len(indices))
                seeded_by = self._position(before * self.turns.lanes + lane)
            first = (_SAMPLES_AT_MOST if repeat else 0) + lane
            # Sample n of lane k of K is number n * K + k of this rank, whenever the other lanes end.
            step = self._spec.stride * self.turns.lanes
            start = self._position(first)
            positions = range(start, start + _SAMPLES_AT_MOST * step, step)
        elif self._spec.order.is_stream:  # which of its samples are in the batch is known when it is read
            positions = self._positions(_SAMPLES_AT_MOST if repeat else 0, _SAMPLES_AT_MOST)
        plan = BatchPlan(
            number=number,
            indices=indices,
            seed=batch_seed(self._spec.base_seed, self._epoch, seeded_by),
            epoch=self._epoch,
            positions=positions,
            repeat=repeat,
            random_key=self._random_key,
            planned=time.perf_counter(),
            lane=lane,
            taken=self.taken,
        )
        self._progress.on_plan(plan, self._samples)
        return plan
