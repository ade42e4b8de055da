"""Batches of samples with about as many tokens each.

The order of an epoch is divided into windows. The batches of a window are planned together.
"""

from __future__ import annotations

import heapq
import itertools
import zlib
from collections.abc import Iterator
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
    lengths: AnyArray, max_tokens: int, window: int, seed: int, epoch: int, cursor: Cursor
) -> Iterator[Planned]:
    """Yield the batches of all ranks from `cursor` on.

    At least `window` samples are planned
    together, or all samples if there are fewer.
    """
    n, order = len(lengths), Permutation(len(lengths), seed, epoch)
    windows = max(1, n // window)
    arguments = zlib.crc32(repr((n, max_tokens, windows, seed)).encode())
    # The plan of a saved window may be another one, or may not exist.
    for number in range(min(cursor.window, windows - 1), windows):
        samples = order[number * n // windows : (number + 1) * n // windows]
        # At least one token, so that a batch has at most `max_tokens` samples.
        tokens = np.maximum(lengths[samples].astype(np.int64), 1)
        if tokens.max() > max_tokens:
            longest = int(samples[tokens.argmax()])
            raise ValueError(
                f"sample {longest} has {tokens.max()} tokens, more than max_tokens={max_tokens}: "
                f"the lengths have changed since the BalancedBatchSampler was made. "
                f"Make another one"
            )
        checksum = zlib.crc32(tokens.tobytes(), arguments)
        if number <= cursor.window and cursor.checksum not in (None, checksum):
            raise StateError(
                "the state was saved by a BalancedBatchSampler with other lengths, max_tokens=, "
                "window= or seed=: what is left of the epoch would be other samples"
            )
        by_length = np.argsort(-tokens, kind="stable")
        dealt = _deal(tokens[by_length], max_tokens)
        ends = np.cumsum(np.bincount(dealt))
        batches = np.split(samples[by_length[np.argsort(dealt, kind="stable")]], ends[:-1])
        shuffled = [*Permutation(len(batches), batch_seed(seed, epoch, number), epoch)]
        for at in range(cursor.batches if number == cursor.window else 0, len(batches)):
            yield Planned(batches[shuffled[at]], Cursor(number, at + 1, checksum))


def of_rank(batches: Iterator[Planned], shard: ReaderShare) -> Iterator[tuple[list[int], Cursor]]:
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


def _deal(tokens: IntArray, max_tokens: int) -> IntArray:
    """Return the number of the batch of each sample.

    Each batch has at most `max_tokens` tokens, and the batches are few. `tokens` are in descending
    order. Each sample goes into the batch with the fewest tokens so far. If there are some short
    samples, batches differ by less than a short sample (Graham, "Bounds on Multiprocessing Timing
    Anomalies", 1969). If a batch exceeds `max_tokens`, the next attempt has more batches.
    """
    count, more = (
        max(int(tokens.sum() / (max_tokens * FILL)), int((tokens > max_tokens // 2).sum())) + 1,
        0.01,
    )
    while True:
        count = min(count, len(tokens))
        # An entry of the heap is a single integer: tokens of the batch in the upper bits, number of
        # the batch in the lower bits. A heap of pairs takes twice the time.
        bits = count.bit_length()
        heap = [(each << bits) | number for number, each in enumerate(tokens[:count].tolist())][
            ::-1
        ]
        numbers, mask = list(range(count)), (1 << bits) - 1
        for each in (tokens[count:] << bits).tolist():
            least = heap[0]
            numbers.append(least & mask)
            heapq.heapreplace(heap, least + each)
        if max(heap) >> bits <= max_tokens:
            return np.array(numbers)
        count, more = int(count * (1 + more)) + 1, 2 * more
