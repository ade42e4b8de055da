"""A random order with locality: blocks of neighbours are shuffled, and some of them read side by side."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from headrace._core.array_types import IntArray
from headrace._core.permutation import Permutation
from headrace._core.seeding import batch_seed


class BlockOrder:
    """An order in which any position is computed, with the memory of one group of blocks.

    The blocks are permuted, and divided into groups of `lanes` blocks. A group is read in lanes side by side: position
    p of the group belongs to lane p mod `lanes`, and within a lane, which is a block of a full group, the order is
    random. So a rank that has each W-th position has ``lanes / W`` blocks for itself, if W divides `lanes`.

    The group that is not full is divided into as many lanes, of neighbours. It comes at a random place, since samples
    at the end of each epoch would never be seen by a training that ends its epochs early.

    Without `shuffle`, blocks, groups and the samples of a lane stay in the order of the dataset.
    """

    def __init__(self, n: int, block_size: int, lanes: int, seed: int, epoch: int, *, shuffle: bool = True) -> None:
        self._n = n
        self._shuffle = shuffle
        self._block_size = block_size
        self._lanes = lanes
        self._group_size = block_size * lanes
        self._blocks = Permutation(n // block_size, seed, epoch)
        # Numbers of the blocks of several groups: a call for a few costs as much as one for thousands.
        self._known = range(0), np.empty(0, dtype=np.int64)
        self._seed = batch_seed(seed, epoch, 1)
        # Position p is sample number p + shift, modulo n, of the groups in turn, of which the last one is not full.
        groups = batch_seed(seed, epoch, 2) % (n // self._group_size + 1) if shuffle else 0
        self._shift = groups * self._group_size

    def __len__(self) -> int:
        return self._n

    def blocks(self, start: int = 0, stop: int | None = None, step: int = 1) -> Iterator[IntArray]:
        """The indices at the positions ``range(start, stop, step)``, as an array for each group."""
        return self.at(range(self._n)[start:stop:step])

    def at(self, positions: range | IntArray) -> Iterator[IntArray]:
        """The indices at some positions, ascending, as an array for each group."""
        while len(positions):
            number, first = divmod((int(positions[0]) + self._shift) % self._n, self._group_size)
            start, size = int(positions[0]) - first, min(self._group_size, self._n - number * self._group_size)
            end = bisect.bisect_left(positions, start + size)
            part, positions = positions[:end], positions[end:]
            if isinstance(part, range):
                part = np.arange(part.start, part.stop, part.step)
            group = self._group if self._shuffle else self._group_in_order
            yield group(number, size, part - start)

    def _group_in_order(self, number: int, size: int, within: IntArray) -> IntArray:
        each, longer = divmod(size, self._lanes)  # the first lanes have one sample more
        steps, lane = np.divmod(within, self._lanes)
        starts = lane * each + np.minimum(lane, longer)
        return number * self._group_size + starts + steps

    def _group(self, number: int, size: int, within: IntArray) -> IntArray:
        lanes, each = self._lanes, -(-size // self._lanes)
        draws = np.random.Philox(key=batch_seed(self._seed, 0, number)).random_raw(lanes * (each + 1))
        ranges = _ranks_of(draws[:lanes])  # which part of the group a lane is
        steps, lane = np.divmod(within, lanes)
        own = np.flatnonzero(np.bincount(lane, minlength=lanes))  # the lanes that are asked for
        draws = draws[lanes:].reshape(lanes, each)[own]
        shorter = each * lanes - size  # lanes, the last ones, have one sample less
        sizes = np.full(lanes, each)
        sizes[ranges[lanes - shorter :]] -= 1
        starts = (np.cumsum(sizes) - sizes)[ranges]
        if shorter:
            draws[own >= lanes - shorter, -1] = np.iinfo(np.uint64).max  # comes last, and is not asked for
        row = np.empty(lanes, dtype=np.int64)
        row[own] = np.arange(len(own))
        block, offset = np.divmod(starts[lane] + _ranks_of(draws)[row[lane], steps], self._block_size)
        indices: IntArray = self._numbers(number)[block] * self._block_size + offset
        return indices

    def _numbers(self, group: int) -> IntArray:
        first, known = group * self._lanes, self._known  # which another thread may replace
        if first not in known[0]:
            end = first + max(4096 // self._lanes, 1) * self._lanes
            # A block that is not full is the last one of the last group.
            known = range(first, end), np.append(self._blocks[first:end], len(self._blocks))
            self._known = known
        start = first - known[0].start
        return known[1][start : start + self._lanes]


def _ranks_of(draws: NDArray[np.uint64]) -> IntArray:
    """A random permutation of each row's columns, by sorting random numbers: as `argsort`, in half the time."""
    columns = np.arange(draws.shape[-1], dtype=np.uint64)
    mask = np.uint64((1 << draws.shape[-1].bit_length()) - 1)
    return (np.sort((draws & ~mask) | columns, axis=-1) & mask).view(np.int64)
