"""Batches of samples of different lengths with about as many tokens each, planned window by window of an order."""

from __future__ import annotations

import heapq
import itertools
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
    checksum: int | None = None  # of the plan's arguments and the lengths in the window; None before the first step


class BalancedOrder:
    """The batches of an epoch, over all ranks: each rank has every W-th, so that any number of ranks can continue.

    At least `window` samples are planned together; all if there are fewer.
    """

    def __init__(self, lengths: NDArray[Any], max_tokens: int, window: int, seed: int, epoch: int) -> None:
        self._lengths, self._max_tokens, self._seed, self._epoch = lengths, max_tokens, seed, epoch
        self._order = Permutation(len(lengths), seed, epoch)
        self._windows = max(1, len(lengths) // window)

    def steps(self, shard: ShardOptions, cursor: Cursor) -> Iterator[tuple[list[int], Cursor]]:
        """A rank's batches from a position on, each with the position after its step."""
        batches = self._batches(cursor)
        while step := list(itertools.islice(batches, shard.count)):
            # The last step may have fewer batches than ranks: each of them is dealt to several, and if it has fewer
            # samples than those are, some of its samples come twice.
            part, number = divmod(shard.index, len(step))
            batch = step[number][0]
            own = batch[part :: len(range(number, shard.count, len(step)))]
            yield (own if len(own) else batch[part % len(batch)][None]).tolist(), step[-1][1]

    def _batches(self, cursor: Cursor) -> Iterator[tuple[NDArray[np.int64], Cursor]]:
        for window in range(cursor.window, self._windows):
            checksum, batches = self._plan(window)
            first = cursor.batches if window == cursor.window else 0
            if window == cursor.window and cursor.checksum not in (None, checksum):
                raise StateError(
                    "the state was saved by a BalancedBatchSampler with other lengths, max_tokens=, window= or seed=: "
                    "what is left of the epoch would be other samples"
                )
            for number, batch in enumerate(batches[first:], first + 1):
                yield batch, Cursor(window, number, checksum)

    def _plan(self, window: int) -> tuple[int, list[NDArray[np.int64]]]:
        """The checksum and the batches of a window, in random order."""
        n = len(self._lengths)
        samples = self._order[window * n // self._windows : (window + 1) * n // self._windows]
        tokens = np.maximum(
            self._lengths[samples].astype(np.int64), 1
        )  # so that a batch has at most `max_tokens` samples
        checksum = zlib.crc32(
            tokens.tobytes(), zlib.crc32(repr((n, self._max_tokens, self._windows, self._seed)).encode())
        )
        by_length = np.argsort(-tokens, kind="stable")
        numbers = _deal(tokens[by_length], self._max_tokens)
        ends = np.cumsum(np.bincount(numbers))
        batches = np.split(samples[by_length[np.argsort(numbers, kind="stable")]], ends[:-1])
        shuffled = Permutation(len(batches), batch_seed(self._seed, self._epoch, window), self._epoch)
        return checksum, [batches[number] for number in shuffled]


def _deal(tokens: NDArray[np.int64], max_tokens: int) -> NDArray[np.int64]:
    """The number of the batch for each sample, of few batches with at most `max_tokens`.

    Longest first, each into the batch with the fewest tokens: they differ by less than a short sample, if there are
    some (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969). If one has too many, there must be more batches.
    `tokens` are of each sample, in descending order.
    """
    count, more = max(int(tokens.sum() / (max_tokens * FILL)), int((tokens > max_tokens // 2).sum())) + 1, 0.01
    while True:
        count = min(count, len(tokens))
        # One number for the tokens of a batch, in the upper bits, and its own: half the time of a heap of pairs.
        bits = count.bit_length()
        heap = [(each << bits) | number for number, each in enumerate(tokens[:count].tolist())][::-1]
        numbers, mask = list(range(count)), (1 << bits) - 1
        for each in (tokens[count:] << bits).tolist():
            least = heap[0]
            numbers.append(least & mask)
            heapq.heapreplace(heap, least + each)
        if max(heap) >> bits <= max_tokens:
            return np.array(numbers)
        count, more = int(count * (1 + more)) + 1, 2 * more
