"""Random order with locality.

Blocks of neighbouring samples are shuffled, and some blocks are read side by side.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace._base.array_types import IntArray, index_array
from headrace._random.permutation import Permutation
from headrace._random.seeding import batch_seed


class _Group(NamedTuple):
    """Blocks that are read side by side."""

    number: int
    begin: int  # place of the first sample
    size: int  # number of samples


class _KnownBlocks(NamedTuple):
    """Numbers of the blocks of several groups."""

    places: range
    numbers: IntArray


class BlockOrder:
    """Order of samples, computed at any position.

    The order takes the memory of a group of blocks. The blocks are permuted, and divided into
    groups of `lanes` blocks. The lanes of a group are read side by side: position p of the group
    belongs to lane p mod `lanes`. In a full group, a lane is a block, and the samples of a lane are
    shuffled. So a rank that reads each W-th position has ``lanes / W`` blocks for itself, if W
    divides `lanes`.

    The last group may have fewer samples. This group is divided into `lanes` lanes too, each of
    neighbouring samples, and comes at a random position of the epoch. Otherwise a training that
    ends its epochs early would never see the samples of the last group.

    Blocks may have different sizes: `borders` holds the index of the first sample of each block.
    Then a lane is a part of a group, and may begin and end within a block.

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
        # A permutation of thousands of numbers costs as much as a permutation of a few.
        self._known = _KnownBlocks(range(0), np.empty(0, dtype=np.int64))
        self._seed = batch_seed(seed, epoch, 1)
        # Position p is place (p + shift) mod n of all groups in turn. The last group may be
        # shorter than the others.
        full_groups = n // self._group_size if borders is None else len(borders) // lanes
        groups = batch_seed(seed, epoch, 2) % (full_groups + 1) if shuffle else 0
        self._borders = borders
        if borders is None:
            self._shift = groups * self._group_size
            return
        count = len(borders)
        self._numbers_of_all = (
            Permutation(count, seed, epoch)[:] if shuffle else np.arange(count)
        )
        self._sizes = np.diff(borders, append=n)[self._numbers_of_all]
        # Places where the groups begin, and the place where the last group ends.
        begins = np.cumsum(self._sizes) - self._sizes
        self._starts = np.append(begins[::lanes], n)
        self._shift = int(self._starts[groups])

    def __len__(self) -> int:
        return self._n

    def at(self, positions: range | IntArray) -> Iterator[IntArray]:
        """Yield the indices at ascending positions, an array for each group."""
        while len(positions):
            place = (int(positions[0]) + self._shift) % self._n
            group = self._group_at(place)
            start = int(positions[0]) - (place - group.begin)
            end = bisect.bisect_left(positions, start + group.size)
            part, positions = index_array(positions[:end]), positions[end:]
            if self._shuffle:
                yield self._group(group.number, group.size, part - start)
            else:
                yield group.begin + self._group_in_order(group.size, part - start)

    def group_at(self, position: int) -> int:
        """Return the number of the group at a position."""
        return self._group_at((position + self._shift) % self._n).number

    def _group_at(self, place: int) -> _Group:
        if self._borders is None:
            number = place // self._group_size
            begin = number * self._group_size
            return _Group(number, begin, min(self._group_size, self._n - begin))
        number = int(np.searchsorted(self._starts, place, side="right")) - 1
        begin = int(self._starts[number])
        return _Group(number, begin, int(self._starts[number + 1]) - begin)

    def _group_in_order(self, size: int, within: IntArray) -> IntArray:
        # The first `longer` lanes have a sample more.
        each, longer = divmod(size, self._lanes)
        steps, lane = np.divmod(within, self._lanes)
        starts = lane * each + np.minimum(lane, longer)
        return starts + steps

    def _group(self, number: int, size: int, within: IntArray) -> IntArray:
        lanes, each = self._lanes, -(-size // self._lanes)
        draws = np.random.Philox(key=batch_seed(self._seed, 0, number)).random_raw(
            lanes * (each + 1)
        )
        # Number of the part of the group, for each lane.
        ranges = _ranks_of(draws[:lanes])
        steps, lane = np.divmod(within, lanes)
        own = np.flatnonzero(np.bincount(lane, minlength=lanes))  # the lanes of `within`
        draws = draws[lanes:].reshape(lanes, each)[own]
        shorter = each * lanes - size  # the last `shorter` lanes have a sample less
        sizes = np.full(lanes, each)
        sizes[ranges[lanes - shorter :]] -= 1
        starts = (np.cumsum(sizes) - sizes)[ranges]
        if shorter:
            # The missing sample sorts last, and no position asks for the sample.
            draws[own >= lanes - shorter, -1] = np.iinfo(np.uint64).max
        row = np.empty(lanes, dtype=np.int64)
        row[own] = np.arange(len(own))
        return self._indices(number, starts[lane] + _ranks_of(draws)[row[lane], steps])

    def _indices(self, group: int, places: IntArray) -> IntArray:
        """Return the indices at places in the concatenated blocks of a group."""
        indices: IntArray
        if self._borders is None:
            block, offset = np.divmod(places, self._block_size)
            indices = self._numbers(group)[block] * self._block_size + offset
            return indices
        own = slice(group * self._lanes, (group + 1) * self._lanes)
        ends = np.cumsum(self._sizes[own])
        # Difference of index and place, for each block.
        moved = self._borders[self._numbers_of_all[own]] - (ends - self._sizes[own])
        indices = places + moved[np.searchsorted(ends, places, side="right")]
        return indices

    def _numbers(self, group: int) -> IntArray:
        # Another thread may replace `self._known`.
        first, known = group * self._lanes, self._known
        if first not in known.places:
            end = first + max(4096 // self._lanes, 1) * self._lanes
            # If the last block is not full, the block comes last in the last group.
            numbers = np.append(self._blocks[first:end], len(self._blocks))
            self._known = known = _KnownBlocks(range(first, end), numbers)
        start = first - known.places.start
        return known.numbers[start : start + self._lanes]


def _ranks_of(draws: NDArray[np.uint64]) -> IntArray:
    """Return a random permutation of each row's columns.

    Sorting random numbers that carry their column takes half the time of `argsort`.
    """
    columns = np.arange(draws.shape[-1], dtype=np.uint64)
    mask = np.uint64((1 << draws.shape[-1].bit_length()) - 1)
    return (np.sort((draws & ~mask) | columns, axis=-1) & mask).view(np.int64)
