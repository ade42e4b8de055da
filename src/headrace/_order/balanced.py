"""Batches of samples with about as many tokens each, or of about the same cost.

The order of an epoch is divided into windows. The batches of a window are planned together.
"""

from __future__ import annotations

import heapq
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from headrace._base.array_types import AnyArray, IntArray
from headrace._random.permutation import Permutation
from headrace._random.seeding import batch_seed
from headrace._ranks.distributed import ReaderShare
from headrace.errors import StateError

FILL = 0.99
"""The share of `max_tokens` to fill on average at the first attempt.

With a larger share, the longest batch of a window does not always fit.
"""
ALIKE = 0.02  # batches whose costs differ by less, of the mean, come in random order
_COSTS = 1 << 24  # the largest cost in a window, as an integer


class Limit(NamedTuple):
    """The most of something in a batch."""

    name: str
    amounts: AnyArray  # of each sample
    most: int

    def checked(self, amounts: AnyArray) -> AnyArray:
        """Return the amounts of some samples, after a check."""
        for extreme in amounts.min(), amounts.max():
            if not 0 <= extreme <= self.most:
                sample = np.argmax(self.amounts == extreme)
                raise ValueError(
                    f"sample {sample} has {extreme} {self.name}, which must be 0 to {self.most}: "
                    f"leave the sample out, or divide it"
                )
        return amounts


class Cursor(NamedTuple):
    """The position after a step."""

    window: int = 0
    batches: int = 0  # batches of the window that were drawn, over all ranks
    # Checksum of the plan's arguments and of the lengths in the window. None before the first step.
    checksum: int | None = None


class Planned(NamedTuple):
    """A batch of the plan of all ranks."""

    samples: IntArray
    after: Cursor  # the position after the batch


def balanced_batches(
    limits: Sequence[Limit],
    cost: Callable[[AnyArray], AnyArray] | None,
    window: int,
    seed: int,
    epoch: int,
    cursor: Cursor,
) -> Iterator[Planned]:
    """Yield the batches of all ranks from `cursor` on.

    At least `window` samples are planned together, or all samples if there are fewer. The first
    limit is of the tokens.
    """
    n = len(limits[0].amounts)
    order = Permutation(n, seed, epoch)
    windows = max(1, n // window)
    most = np.array([limit.most for limit in limits])
    arguments = zlib.crc32(repr((n, most.tolist(), windows, seed)).encode())
    # The plan of a saved window may be another one, or may not exist.
    for number in range(min(cursor.window, windows - 1), windows):
        samples = order[number * n // windows : (number + 1) * n // windows]
        # Checked again, since the lengths may have changed.
        amounts = [limit.checked(limit.amounts[samples]) for limit in limits]
        loads = np.stack(amounts).astype(np.int64)
        # At least one token, so that a batch has at most `max_tokens` samples.
        tokens = loads[0] = np.maximum(loads[0], 1)
        costs = tokens if cost is None else cost(tokens.astype(np.float64))
        if not 0 < costs.min() <= costs.max() < np.inf:
            raise ValueError("cost= must return positive numbers")
        weights = np.ceil(costs * (_COSTS / costs.max())).astype(np.int64)
        checksum = zlib.crc32(np.vstack([weights, loads]).tobytes(), arguments)
        if number <= cursor.window and cursor.checksum not in (None, checksum):
            raise StateError(
                "the state was saved by a BalancedBatchSampler with other lengths, max_tokens=, "
                "cost=, limits=, window= or seed=: what is left of the epoch would be other samples"
            )
        by_weight = np.argsort(-weights, kind="stable")
        dealt = _deal(weights[by_weight], loads[:, by_weight], most)
        ends = np.cumsum(np.bincount(dealt))
        batches = np.split(
            samples[by_weight[np.argsort(dealt, kind="stable")]], ends[:-1]
        )
        # Neighbours are of a step, and cost about as much. The costliest come at a random place.
        shuffled = Permutation(len(batches), batch_seed(seed, epoch, number), epoch)[:]
        totals = np.bincount(dealt, weights[by_weight])
        alike = np.rint(totals / totals.mean() / ALIKE)
        ordered = np.roll(np.lexsort((shuffled, alike)), shuffled[0])
        for at in range(cursor.batches if number == cursor.window else 0, len(batches)):
            yield Planned(batches[ordered[at]], Cursor(number, at + 1, checksum))


def batches_of_rank(
    batches: Iterator[Planned], shard: ReaderShare
) -> Iterator[tuple[list[int], Cursor]]:
    """Yield the batches of a rank.

    Each batch comes with the cursor after the step. Rank r of W takes every W-th batch, starting
    at batch r. So any number of ranks can continue.
    """
    while step := list(itertools.islice(batches, shard.count)):
        # The last step may have fewer batches than ranks. Then several ranks divide a batch. If a
        # batch has fewer samples than ranks, some of its samples come twice.
        part, number = divmod(shard.index, len(step))
        batch = step[number].samples
        own = batch[part :: len(range(number, shard.count, len(step)))]
        if not len(own):
            own = batch[part % len(batch)][None]
        yield own.tolist(), step[-1].after


def _deal(weights: IntArray, loads: IntArray, most: IntArray) -> IntArray:
    """Return the number of the batch of each sample.

    Each batch has at most `most` of each load, and the batches are few. `weights` are in descending
    order. Each sample goes into the batch with the least weight so far. If there are some light
    samples, batches differ by less than a light sample (Graham, "Bounds on Multiprocessing Timing
    Anomalies", 1969). If a batch exceeds `most`, the next attempt has more batches.
    """
    full = loads.sum(axis=1) / (most * FILL)
    halves = (most // 2 < loads.T).sum(axis=0)
    count = int(max(full.max(), halves.max())) + 1
    while True:
        count = min(count, len(weights))
        # An entry of the heap is a single integer: weight of the batch in the upper bits, number of
        # the batch in the lower bits. A heap of pairs takes twice the time.
        bits = count.bit_length()
        heap = [
            (each << bits) | number
            for number, each in enumerate(weights[:count].tolist())
        ][::-1]
        numbers, mask = list(range(count)), (1 << bits) - 1
        for each in (weights[count:] << bits).tolist():
            least = heap[0]
            numbers.append(least & mask)
            heapq.heapreplace(heap, least + each)
        dealt = np.array(numbers)
        largest = np.array([np.bincount(dealt, load).max() for load in loads])
        if (largest <= most).all():
            return dealt
        count = int(1.01 * count * (largest / most).max()) + 1
