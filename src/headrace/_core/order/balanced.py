"""Batches of samples of different lengths with about as many tokens each, planned window by window of an order."""

from __future__ import annotations

import heapq
import itertools
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from headrace._core.array_types import AnyArray, IntArray
from headrace._core.permutation import Permutation
from headrace._core.ranks.distributed import ShardOptions
from headrace._core.seeding import batch_seed
from headrace.errors import StateError

FILL = 0.99
"""The share of the budget that is tried first: with less room the longest batch of a window does not always fit."""


class Cursor(NamedTuple):
    """The position after a step."""

    window: int = 0
    batches: int = 0  # of it, over all ranks
    checksum: int | None = (
        None  # of the plan's arguments and the lengths in the window; None before the first step
    )


def balanced_batches(
    lengths: AnyArray, max_tokens: int, window: int, seed: int, epoch: int, cursor: Cursor
) -> Iterator[tuple[IntArray, Cursor]]:
    """The batches of an epoch from a position on, over all ranks, each with the position after it.

    At least `window` samples are planned together; all if there are fewer.
    """
    n, order = len(lengths), Permutation(len(lengths), seed, epoch)
    windows = max(1, n // window)
    arguments = zlib.crc32(repr((n, max_tokens, windows, seed)).encode())
    for number in range(cursor.window, windows):
        samples = order[number * n // windows : (number + 1) * n // windows]
        tokens = np.maximum(
            lengths[samples].astype(np.int64), 1
        )  # so a batch has at most `max_tokens` samples
        if tokens.max() > max_tokens:
            longest = int(samples[tokens.argmax()])
            raise ValueError(
                f"sample {longest} has {tokens.max()} tokens, more than max_tokens={max_tokens}: the lengths have "
                f"changed since the BalancedBatchSampler was made. Make another one"
            )
        checksum = zlib.crc32(tokens.tobytes(), arguments)
        if number == cursor.window and cursor.checksum not in (None, checksum):
            raise StateError(
                "the state was saved by a BalancedBatchSampler with other lengths, max_tokens=, window= or seed=: "
                "what is left of the epoch would be other samples"
            )
        by_length = np.argsort(-tokens, kind="stable")
        dealt = _deal(tokens[by_length], max_tokens)
        ends = np.cumsum(np.bincount(dealt))
        batches = np.split(samples[by_length[np.argsort(dealt, kind="stable")]], ends[:-1])
        shuffled = [*Permutation(len(batches), batch_seed(seed, epoch, number), epoch)]
        for at in range(cursor.batches if number == cursor.window else 0, len(batches)):
            yield batches[shuffled[at]], Cursor(number, at + 1, checksum)


def of_rank(
    batches: Iterator[tuple[IntArray, Cursor]], shard: ShardOptions
) -> Iterator[tuple[list[int], Cursor]]:
    """A rank's batches, each with the position after its step: every W-th, so that any number of ranks can continue."""
    while step := list(itertools.islice(batches, shard.count)):
        # The last step may have fewer batches than ranks: each of them is dealt to several, and if
        # it has fewer samples than those are, some of its samples come twice.
        part, number = divmod(shard.index, len(step))
        batch = step[number][0]
        own = batch[part :: len(range(number, shard.count, len(step)))]
        yield (own if len(own) else batch[part % len(batch)][None]).tolist(), step[-1][1]


def _deal(tokens: IntArray, max_tokens: int) -> IntArray:
    """The number of the batch for each sample, by tokens in descending order, of few batches with at most `max_tokens`.

    Longest first, each into the batch with the fewest tokens: they differ by less than a short
    sample, if there are some (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969). If one
    has too many, there must be more batches.
    """
    count, more = (
        max(int(tokens.sum() / (max_tokens * FILL)), int((tokens > max_tokens // 2).sum())) + 1,
        0.01,
    )
    while True:
        count = min(count, len(tokens))
        # One number for the tokens of a batch, in the upper bits, and its own: half the time of a
        # heap of pairs.
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
