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

    The blocks are permuted, and divided into groups of `lanes` blocks. A group is read in lanes
    side by side: position p of the group belongs to lane p mod `lanes`, and within a lane, which is
    a block of a full group, the order is random. So a rank that has each W-th position has ``lanes
    / W`` blocks for itself, if W divides `lanes`.

    The group that is not full is divided into as many lanes, of neighbours. It comes at a random
    place, since samples at the end of each epoch would never be seen by a training that ends its
    epochs early.

    Blocks may be of different sizes: `borders` has the first sample of each. A lane is then a part
    of a group that may begin and end within a block.

    Without `shuffle`, blocks, groups and the samples of a lane stay in the order of the dataset.
    """

    def __init__(
        self,
        n: int,
        block_size: int,
        lanes: int,
        seed: int,
        epoch: int,
        *,
        shuffle: bool = True,
        borders: IntArray | None = None,  # None for blocks of `block_size` samples
    ) -> None:
        self._n = n
        self._shuffle = shuffle
        self._block_size = block_size
        self._lanes = lanes
        self._group_size = block_size * lanes
        self._blocks = Permutation(n // block_size, seed, epoch)
        # Numbers of the blocks of several groups: a call for a few costs as much as one for
        # thousands.
        self._known = range(0), np.empty(0, dtype=np.int64)
        self._seed = batch_seed(seed, epoch, 1)
        # Position p is sample number p + shift, modulo n, of the groups in turn, of which the last
        # one is not full.
        full_groups = n // self._group_size if borders is None else len(borders) // lanes
        groups = batch_seed(seed, epoch, 2) % (full_groups + 1) if shuffle else 0
        self._borders = borders
        if borders is None:
            self._shift = groups * self._group_size
            return
        count = len(borders)
        self._numbers_of_all = Permutation(count, seed, epoch)[:] if shuffle else np.arange(count)
        self._sizes = np.diff(borders, append=n)[self._numbers_of_all]
        # The places where groups begin, and where the last one ends.
        begins = np.cumsum(self._sizes) - self._sizes
        self._starts = np.append(begins[::lanes], n)
        self._shift = int(self._starts[groups])

    def __len__(self) -> int:
        return self._n

    def at(self, positions: range | IntArray) -> Iterator[IntArray]:
        """The indices at some positions, ascending, as an array for each group."""
        while len(positions):
            place = (int(positions[0]) + self._shift) % self._n
            number, begin, size = self._group_at(place)
            start = int(positions[0]) - (place - begin)
            end = bisect.bisect_left(positions, start + size)
            part, positions = positions[:end], positions[end:]
            if isinstance(part, range):
                part = np.arange(part.start, part.stop, part.step)
            if self._shuffle:
                yield self._group(number, size, part - start)
            else:
                yield begin + self._group_in_order(size, part - start)

    def group_at(self, position: int) -> int:
        """The number of the group of blocks at a position."""
        return self._group_at((position + self._shift) % self._n)[0]

    def _group_at(self, place: int) -> tuple[int, int, int]:
        """The number of the group at a place of all groups in turn, the place where it begins, and its size."""
        if self._borders is None:
            number = place // self._group_size
            begin = number * self._group_size
            return number, begin, min(self._group_size, self._n - begin)
        number = int(np.searchsorted(self._starts, place, side="right")) - 1
        begin = int(self._starts[number])
        return number, begin, int(self._starts[number + 1]) - begin

    def _group_in_order(self, size: int, within: IntArray) -> IntArray:
        each, longer = divmod(size, self._lanes)  # the first lanes have one sample more
        steps, lane = np.divmod(within, self._lanes)
        starts = lane * each + np.minimum(lane, longer)
        return starts + steps

    def _group(self, number: int, size: int, within: IntArray) -> IntArray:
        lanes, each = self._lanes, -(-size // self._lanes)
        draws = np.random.Philox(key=batch_seed(self._seed, 0, number)).random_raw(
            lanes * (each + 1)
        )
        ranges = _ranks_of(draws[:lanes])  # which part of the group a lane is
        steps, lane = np.divmod(within, lanes)
        own = np.flatnonzero(np.bincount(lane, minlength=lanes))  # the lanes that are asked for
        draws = draws[lanes:].reshape(lanes, each)[own]
        shorter = each * lanes - size  # lanes, the last ones, have one sample less
        sizes = np.full(lanes, each)
        sizes[ranges[lanes - shorter :]] -= 1
        starts = (np.cumsum(sizes) - sizes)[ranges]
        if shorter:
            draws[own >= lanes - shorter, -1] = np.iinfo(
                np.uint64
            ).max  # comes last, and is not asked for
        row = np.empty(lanes, dtype=np.int64)
        row[own] = np.arange(len(own))
        return self._indices(number, starts[lane] + _ranks_of(draws)[row[lane], steps])

    def _indices(self, group: int, places: IntArray) -> IntArray:
        """The indices of places in the blocks of a group, one block after the other."""
        indices: IntArray
        if self._borders is None:
            block, offset = np.divmod(places, self._block_size)
            indices = self._numbers(group)[block] * self._block_size + offset
            return indices
        own = slice(group * self._lanes, (group + 1) * self._lanes)
        ends = np.cumsum(self._sizes[own])
        # What is added to a place in each block.
        moved = self._borders[self._numbers_of_all[own]] - (ends - self._sizes[own])
        indices = places + moved[np.searchsorted(ends, places, side="right")]
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
