"""Order of an epoch without some samples, computed at any position."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from headrace._base.array_types import IntArray, index_array
from headrace._order.blocks import BlockOrder
from headrace._order.mixes import MixOrder
from headrace._random.permutation import BLOCK, Permutation

ALL_EPOCHS = (1 << 63) - 1


class Exclusion(NamedTuple):
    """Range of samples to leave out, from `start` up to `stop`.

    The range is a range of positions in the order of `epoch`. If `epoch` is `ALL_EPOCHS`, the range
    is a range of indices of the dataset.
    """

    epoch: int
    start: int
    stop: int


def excluded_indices(indices: Iterable[int]) -> list[Exclusion]:
    """Return exclusions of indices from all epochs, with neighbours joined."""
    ordered = np.unique(np.fromiter(indices, np.int64))
    ends = np.flatnonzero(np.diff(ordered) > 1) + 1
    bounds = pairwise([0, *ends.tolist(), len(ordered)])
    return [
        Exclusion(ALL_EPOCHS, int(ordered[a]), int(ordered[b - 1]) + 1)
        for a, b in bounds
        if b > a
    ]


def without(order: BaseOrder, epoch: int, exclusions: Sequence[Exclusion]) -> Order:
    """Return the order of an epoch without the excluded samples.

    Exclusions of indices need a pass over the order, of 30 ns for each sample.
    """
    ranges = [
        range(each.start, min(each.stop, len(order)))
        for each in exclusions
        if each.epoch == epoch
    ]
    left_out = [np.arange(each.start, each.stop) for each in ranges]
    indices = [
        np.arange(each.start, each.stop)
        for each in exclusions
        if each.epoch == ALL_EPOCHS
    ]
    if indices:
        wanted, first = np.unique(np.concatenate(indices)), 0
        for block in taken(order, range(len(order))):
            left_out.append(first + np.flatnonzero(np.isin(block, wanted)))
            first += len(block)
    if not left_out:
        return order
    return OrderWithout(order, np.unique(np.concatenate(left_out)))


class OrderWithout:
    """Order of an epoch without the samples at some positions."""

    def __init__(self, order: BaseOrder, left_out: IntArray) -> None:
        self._order, self._left_out = order, left_out
        # Number of samples that remain before each excluded position.
        self._before = left_out - np.arange(len(left_out))

    def __len__(self) -> int:
        return len(self._order) - len(self._left_out)

    def at(self, positions: IntArray) -> Iterator[IntArray]:
        """Yield the indices at ascending positions of remaining samples."""
        return taken(
            self._order,
            positions + np.searchsorted(self._before, positions, side="right"),
        )

    def whole(self, position: int) -> int:
        """Return a remaining sample's position in the whole order."""
        return position + int(np.searchsorted(self._before, position, side="right"))

    def left(self, position: int) -> int:
        """Return how many samples remain before a position.

        The position is a position in the whole order.
        """
        return position - int(np.searchsorted(self._left_out, position))


def taken(order: Order, positions: range | IntArray) -> Iterator[IntArray]:
    """Yield the indices at ascending positions of an order, in blocks."""
    if isinstance(order, BlockOrder):
        yield from order.at(positions)
        return
    for first in range(0, len(positions), BLOCK):
        part = index_array(positions[first : first + BLOCK])
        if isinstance(order, OrderWithout):
            yield from order.at(part)
        else:
            yield part if isinstance(order, range) else order[part]


BaseOrder: TypeAlias = Permutation | BlockOrder | MixOrder | range
Order: TypeAlias = BaseOrder | OrderWithout
"""Order of the samples of an epoch, over all ranks."""
