"""Order of a mix of map-style datasets, computed at any position."""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from headrace._base.array_types import IntArray
from headrace._order.blocks import BlockOrder
from headrace._random.permutation import LARGEST, Permutation
from headrace._random.seeding import batch_seed
from headrace._streams.kinds import Blocks

FEWEST_ROWS = 64
"""Least number of rows of the shortest source. At the end, lanes differ by up to 2 rows."""

_ROWS = 8  # rows of a window: a position needs all rows of the position's window
# Slots between two rows of a window: a prime above 8, for windows that are cut short.
_STRIDE = 11
# Sum of the shares as whole numbers: a share times a row fits into 64 bits.
_SCALE = 1 << 30
_OF_WINDOWS = 3  # purpose of a seed derived for windows; `BlockOrder` uses 1 and 2


class Source(NamedTuple):
    """Dataset in a mix."""

    name: str
    length: int
    blocks: Blocks | None = None  # None if the dataset is not read in blocks


class WeightedRows:
    """Rows with the same weights, from `row` on.

    Of the first n rows, the most frequent source has n times its share, rounded. The other sources
    divide the other rows in the same way. So every source has its share to within a few rows.

    Each lane begins at another place of the sequence. Otherwise all lanes would draw a rare source
    in the same row, and a batch would have many samples of the rare source, or none.
    """

    def __init__(self, row: int, weights: Sequence[float], before: IntArray) -> None:
        lanes = before.shape[1]
        scale = _SCALE / math.fsum(weights)
        self._shares: list[tuple[int, int]] = []
        for source, weight in enumerate(weights):
            if weight:
                self._shares.append((max(1, round(weight * scale)), source))
        self._shares.sort(reverse=True)
        self._first = Permutation(_SCALE // _ROWS, 0)[:lanes] * _ROWS
        self._first[0] = 0
        self._first -= row
        self._offset = np.zeros_like(before)
        self._offset = before - self.drawn(np.full(lanes, row), np.arange(lanes))

    def drawn(self, rows: IntArray, lane: IntArray) -> IntArray:
        """Return how often each source was drawn before some rows of some lanes.

        The shape is [sources, lanes].
        """
        counts = self._offset[:, lane]
        total = sum(share for share, _ in self._shares)
        cycles, left = np.divmod(rows + self._first[lane], total)
        for share, source in self._shares:
            own = (left * share + total // 2) // total
            counts[source] += own + cycles * share
            left -= own
            total -= share
        return counts


class MixPlan:
    """Plan of a mix: draws of each source, and end of an epoch.

    All epochs have the same plan.

    Position p of an epoch is row ``p // lanes`` of lane ``p % lanes``. In each lane, every source
    has its share of the rows. Draw j of a source in lane l is sample ``j * lanes + l`` in the
    source's own order. If W divides `lanes`, a rank with each W-th position has lanes for itself in
    every source. After the last sample of a source the next pass over the source begins.

    Args:
        sources: the datasets.
        schedule: numbers of samples of the mix, ascending from 0, and weights from the next row on.
        stop: whether an epoch ends with the first source that has ended, or with the last.

    Attributes:
        lanes: number of lanes: at most the number of blocks side by side in each source with
            blocks, and so few that every source has `FEWEST_ROWS` samples for each lane.
        starts: the first row of each part of the epoch with the same weights.
        ends: the row after the last row of each part.
        length: number of samples of an epoch, over all ranks.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        schedule: Sequence[tuple[int, Sequence[float]]],
        stop: Literal["first", "all"],
    ) -> None:
        self.sources = sources
        lengths = np.array([[source.length] for source in sources])
        has_weight = np.array([weights for _, weights in schedule], dtype=bool)
        shortest = lengths[has_weight.any(axis=0)].min()
        if not shortest:
            empty = [source.name for source in sources if not source.length]
            raise ValueError(
                f"datasets {empty} of the mix have no samples: leave out the datasets"
            )
        self.lanes = min(
            (each.blocks.at_once for each in sources if each.blocks), default=1
        )
        while self.lanes > 1 and shortest < self.lanes * FEWEST_ROWS:
            self.lanes //= 2
        every_lane = np.arange(self.lanes)
        # Weights for less than a row have no effect.
        starts = np.array([start for start, _ in schedule])
        self.starts = -(-starts // self.lanes)
        self.ends = np.append(self.starts[1:], LARGEST)
        self._pieces: list[WeightedRows] = []
        drawn = np.zeros((len(sources), self.lanes), dtype=np.int64)
        for row, (_, weights) in zip(self.starts.tolist(), schedule, strict=True):
            if row:
                drawn = self.drawn(np.full(self.lanes, row), every_lane)
            self._pieces.append(WeightedRows(row, weights, drawn))
        # Rows in the first pass of each source, and the row after the last row with a weight.
        whole = (lengths - every_lane + self.lanes - 1) // self.lanes
        until = (has_weight * self.ends[:, None]).max(axis=0)

        def has_ended(row: int) -> bool:
            drawn = self.drawn(np.full(self.lanes, row), every_lane)
            if stop == "first":
                return bool((drawn > whole).any())
            return bool(((drawn >= whole).all(axis=1) | (until <= row)).all())

        rows = bisect_left(range(LARGEST), True, key=has_ended) - (stop == "first")
        self.ends = self.ends.clip(max=rows)
        self.length = rows * self.lanes

    def drawn(self, rows: IntArray, lane: IntArray) -> IntArray:
        """Return how often each source was drawn before some rows of some lanes.

        Each row has to begin or end a window.
        """
        counts = np.empty((len(self.sources), len(rows)), dtype=np.int64)
        pieces = np.searchsorted(self.ends, rows)
        for number in np.unique(pieces).tolist():
            own = np.flatnonzero(pieces == number)
            counts[:, own] = self._pieces[number].drawn(rows[own], lane[own])
        return counts


@dataclass(frozen=True)
class MixOrder:
    """Order of an epoch of a mix, over all ranks.

    Indices are indices of the concatenation of the sources.

    A window has 8 rows of a lane. The sources of a window are put in an order that differs by
    window and lane. So ranks that take every W-th position draw independently of each other, for
    any W. Otherwise, with weights 3 and 1, a rank of four would draw from a single source. The
    samples of a source keep their order within a lane.

    With `shuffle`, each pass of a source has a random order. Without `shuffle`, all epochs are
    alike.
    """

    plan: MixPlan
    seed: int
    epoch: int
    shuffle: bool

    def __len__(self) -> int:
        return self.plan.length

    def __getitem__(self, positions: IntArray) -> IntArray:
        """Return the indices at positions."""
        sources, numbers = self._drawn(positions)
        indices = np.empty_like(positions)
        for source in np.unique(sources).tolist():
            own = np.flatnonzero(sources == source)
            indices[own] = self._indices_of(source, numbers[own])
        return indices

    def _drawn(self, positions: IntArray) -> tuple[IntArray, IntArray]:
        """Return the source at each position, and the sample's number.

        The number counts the samples of all passes over the source.
        """
        plan, each = self.plan, np.arange(len(positions))
        rows, lane = np.divmod(positions, plan.lanes)
        piece = np.searchsorted(plan.ends, rows, side="right")
        within = (rows - plan.starts[piece]) % _ROWS
        start = rows - within
        size = np.minimum(plan.ends[piece] - start, _ROWS)
        before = plan.drawn(start, lane)
        counts = plan.drawn(start + size, lane) - before
        # Each source has neighbouring slots of the window.
        key = batch_seed(self.seed, self.epoch if self.shuffle else 0, _OF_WINDOWS)
        turns = Permutation(LARGEST, key)[start * plan.lanes + lane]
        window = np.arange(_ROWS)[:, None]
        slots = (window * _STRIDE + turns) % size
        ends = counts.cumsum(axis=0)
        source = (ends <= slots[within, each]).sum(axis=0)
        end = ends[source, each]
        is_same = (slots < end) & (slots >= end - counts[source, each])
        draws = before[source, each] + (is_same & (window < within)).sum(axis=0)
        return source, draws * plan.lanes + lane

    def _indices_of(self, source: int, numbers: IntArray) -> IntArray:
        passes, within = np.divmod(numbers, self.plan.sources[source].length)
        for number in np.unique(passes).tolist() if self.shuffle else ():
            own = np.flatnonzero(passes == number)
            key = batch_seed(self.seed, source, number)
            order = _random_order(self.plan, source, key, self.epoch)
            if isinstance(order, BlockOrder):
                own = own[np.argsort(within[own])]
                within[own] = np.concatenate([*order.at(within[own])])
            else:
                within[own] = order[within[own]]
        return within + sum(each.length for each in self.plan.sources[:source])


@functools.lru_cache(maxsize=256)
def _random_order(
    plan: MixPlan, number: int, key: int, epoch: int
) -> Permutation | BlockOrder:
    """Return the order of a pass over a source.

    The number of blocks side by side is a multiple of the plan's lanes.
    """
    source = plan.sources[number]
    if source.blocks is None:
        return Permutation(source.length, key, epoch)
    blocks, lanes = source.blocks, plan.lanes
    at_once = blocks.at_once // lanes * lanes
    return BlockOrder(
        source.length, blocks.size, at_once, key, epoch, borders=blocks.borders
    )
