"""An order without some of its samples, in which any position is still computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from headrace._core.array_types import IntArray
from headrace._core.order.blocks import BlockOrder
from headrace._core.order.mixes import MixOrder
from headrace._core.permutation import BLOCK, Permutation

ALL_EPOCHS = (1 << 63) - 1


class Exclusion(NamedTuple):
    """Samples that are left out: of one epoch, the positions from one up to another in its order; of all, indices."""

    epoch: int
    start: int
    stop: int


def excluded_indices(indices: Iterable[int]) -> list[Exclusion]:
    """Exclusions of indices from all epochs, neighbours in one."""
    ordered = np.unique(np.fromiter(indices, np.int64))
    ends = np.flatnonzero(np.diff(ordered) > 1) + 1
    bounds = pairwise([0, *ends.tolist(), len(ordered)])
    return [
        Exclusion(ALL_EPOCHS, int(ordered[a]), int(ordered[b - 1]) + 1) for a, b in bounds if b > a
    ]


def without(order: BaseOrder, epoch: int, exclusions: Sequence[Exclusion]) -> Order:
    """The order of an epoch without the exclusions; those of indices take a pass over it, of 30 ns for each sample."""
    ranges = [
        range(each.start, min(each.stop, len(order))) for each in exclusions if each.epoch == epoch
    ]
    left_out = [np.arange(each.start, each.stop) for each in ranges]
    indices = [np.arange(each.start, each.stop) for each in exclusions if each.epoch == ALL_EPOCHS]
    if indices:
        wanted, first = np.unique(np.concatenate(indices)), 0
        for block in taken(order, range(len(order))):
            left_out.append(first + np.flatnonzero(np.isin(block, wanted)))
            first += len(block)
    if not left_out:
        return order
    return OrderWithout(order, np.unique(np.concatenate(left_out)))


class OrderWithout:
    def __init__(self, order: BaseOrder, left_out: IntArray) -> None:
        self._order, self._left_out = order, left_out
        self._before = left_out - np.arange(len(left_out))  # samples that are left before each

    def __len__(self) -> int:
        return len(self._order) - len(self._left_out)

    def at(self, positions: IntArray) -> Iterator[IntArray]:
        """The indices at ascending positions of what is left."""
        return taken(
            self._order, positions + np.searchsorted(self._before, positions, side="right")
        )

    def whole(self, position: int) -> int:
        """The position in the whole order, of one in what is left."""
        return position + int(np.searchsorted(self._before, position, side="right"))

    def left(self, position: int) -> int:
        """The number of samples that are left before a position of the whole order."""
        return position - int(np.searchsorted(self._left_out, position))


def taken(order: Order, positions: range | IntArray) -> Iterator[IntArray]:
    """The indices at ascending positions of an order, in blocks."""
    if isinstance(order, BlockOrder):
        yield from order.at(positions)
        return
    for first in range(0, len(positions), BLOCK):
        part = positions[first : first + BLOCK]
        if isinstance(part, range):
            part = np.arange(part.start, part.stop, part.step)
        if isinstance(order, OrderWithout):
            yield from order.at(part)
        else:
            yield part if isinstance(order, range) else order[part]


BaseOrder: TypeAlias = Permutation | BlockOrder | MixOrder | range
Order: TypeAlias = BaseOrder | OrderWithout
"""An order of the samples of one epoch, over all ranks."""
