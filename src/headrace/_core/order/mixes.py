"""The order of a mix of map-style datasets, in which any position is computed."""

from __future__ import annotations

import bisect
import functools
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace._core.array_types import IntArray
from headrace._core.order.blocks import BlockOrder, ranks_of
from headrace._core.permutation import BLOCK, Permutation
from headrace._core.seeding import batch_seed
from headrace._core.streams.kinds import Blocks

ROWS = 8
"""Rows that are permuted together, a power of two. For one row a rank computes the window."""

FEWEST_ROWS = 16
"""Rows that the rarest source has in an epoch, at least; otherwise the mix has fewer lanes."""

_SCALE = 1 << 30  # sum of the shares as whole numbers: a share times an offset fits into 64 bits
_OF_WINDOWS = 3  # what is derived from a seed and an epoch; 1 and 2 are of `BlockOrder`


class _Pair(NamedTuple):
    """Draws that alternate: of each `total` draws, `first` are of the first part."""

    first: int
    total: int
    parts: tuple[_Part, _Part]

    def before(self, draws: int) -> tuple[int, int]:
        """How many of the first draws are of each part."""
        first = (draws * self.first + self.total // 2) // self.total
        return first, draws - first

    def number_of(self, part: int, number: int) -> int:
        """The number of the draw that is draw `number` of a part; both count from 0."""
        half = self.total // 2
        if part == 0:
            return -((half - (number + 1) * self.total) // self.first) - 1
        return (number * self.total + half) // (self.total - self.first)


_Part: TypeAlias = int | _Pair


class Shares:
    """A sequence of sources with every source's share in each prefix, to within 1.5 draws.

    Two sources alternate as evenly as whole numbers can: of the first i draws, i times the share
    of the first source, rounded, are of the first source. More sources are a binary tree of
    pairs, by Huffman's algorithm: frequent sources are near the root.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._count = len(weights)
        self._drawn = {source for source, weight in enumerate(weights) if weight}
        largest = max(weights)  # sums of weights may overflow
        total = math.fsum(weight / largest for weight in weights)
        heap: list[tuple[int, int, _Part]] = []
        for source in self._drawn:
            share = max(1, round(weights[source] / largest / total * _SCALE))
            heap.append((share, source, source))
        heapq.heapify(heap)
        for serial in itertools.count(self._count):
            second, _, other = heapq.heappop(heap)
            if not heap:
                break
            first, _, one = heapq.heappop(heap)
            pair = _Pair(first, first + second, (one, other))
            heapq.heappush(heap, (first + second, serial, pair))
        self._root = other

    def has(self, source: int) -> bool:
        """Whether a source has a share."""
        return source in self._drawn

    def before(self, draws: int) -> list[int]:
        """How many of the first draws are of each source."""
        counts = [0] * self._count
        pending = [(self._root, draws)]
        while pending:
            part, count = pending.pop()
            if isinstance(part, int):
                counts[part] = count
            else:
                pending.extend(zip(part.parts, part.before(count), strict=True))
        return counts

    def numbers(self, nths: Sequence[int]) -> list[int | None]:
        """For each source the number of its n-th draw, from 0; None for sources without a share."""
        found: list[int | None] = [None] * self._count
        pending: list[tuple[_Part, tuple[tuple[_Pair, int], ...]]] = [(self._root, ())]
        while pending:
            part, above = pending.pop()
            if isinstance(part, int):
                number = nths[part]
                for pair, side in reversed(above):
                    number = pair.number_of(side, number)
                found[part] = number
                continue
            for side, inner in enumerate(part.parts):
                pending.append((inner, (*above, (part, side))))
        return found

    def draws(self, start: int, offsets: IntArray) -> tuple[NDArray[np.int32], IntArray]:
        """The sources of the draws ``start + offsets``, and each draw's number of its source."""
        sources = np.empty(len(offsets), dtype=np.int32)
        counts = np.empty(len(offsets), dtype=np.int64)
        pending = [(self._root, start, offsets, np.arange(len(offsets)))]
        while pending:
            part, start, offsets, slots = pending.pop()
            if isinstance(part, int):
                sources[slots] = part
                counts[slots] = offsets + start
                continue
            first, total, inner = part
            before, rest = divmod(start * first + total // 2, total)
            scaled = offsets * first + rest
            of_first = scaled // total
            is_first = scaled - of_first * total >= total - first
            is_other = ~is_first
            of_other = offsets - of_first
            pending.append((inner[0], before, of_first[is_first], slots[is_first]))
            pending.append((inner[1], start - before, of_other[is_other], slots[is_other]))
        return sources, counts


class Source(NamedTuple):
    """A dataset in a mix."""

    name: str
    length: int
    blocks: Blocks | None = None  # None if the dataset is not read in blocks

    def random_order(self, lanes: int, key: int, epoch: int) -> Permutation | BlockOrder:
        """The order of one pass. Blocks are side by side in a multiple of `lanes`."""
        if self.blocks is None:
            return Permutation(self.length, key, epoch)
        at_once = self.blocks.at_once // lanes * lanes
        return BlockOrder(self.length, self.blocks.size, at_once, key, epoch)


class Piece(NamedTuple):
    """Rows for which the same weights hold."""

    row: int  # the first row
    shares: Shares
    before: tuple[int, ...]  # rows of each source before the first row


class MixPlan:
    """How often each source is drawn, and when an epoch ends: the same in all epochs.

    An epoch consists of rows of `lanes` samples. All samples of a row are of one source, as
    `Shares` says. Row number k of a source, from 0, has the samples ``k * lanes`` to
    ``(k + 1) * lanes`` in the source's own order. After the last sample its next pass begins.

    Args:
        sources: the datasets.
        schedule: numbers of samples of the mix, ascending from 0, and weights from the next row on.
        stop: whether an epoch ends with the first source that has ended, or with the last.

    Attributes:
        lanes: number of samples in a row: as many as blocks are side by side in every source that
            has blocks, but so few that each source has `FEWEST_ROWS` rows in an epoch.
        length: number of samples of an epoch.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        schedule: Sequence[tuple[int, Sequence[float]]],
        stop: Literal["first", "all"],
    ) -> None:
        self.sources = tuple(sources)
        self._schedule = schedule
        self._stop = stop
        self._set_lanes(1)
        at_once = (source.blocks.at_once for source in sources if source.blocks is not None)
        lanes = min(at_once, default=1)
        if lanes > 1:
            rarest = min(filter(None, self.rows_before(self.length)))
            most = rarest // FEWEST_ROWS
            if most < lanes:
                lanes = 3 << (most // 3).bit_length() - 1 if most >= 3 else max(1, most)
            self._set_lanes(lanes)

    def _set_lanes(self, lanes: int) -> None:
        self.lanes = lanes
        self.pieces: list[Piece] = []
        # Of several weights for one row, the last.
        by_row = {-(-step // lanes): weights for step, weights in self._schedule}
        before = (0,) * len(self.sources)
        for row, weights in by_row.items():
            if self.pieces:
                before = tuple(self.rows_before(row))
            self.pieces.append(Piece(row, Shares(weights), before))
        self.length = self._first_end() if self._stop == "first" else self._last_end()
        self.pieces = [piece for piece in self.pieces if piece.row * lanes < self.length]

    def rows_before(self, row: int) -> list[int]:
        """How many of the first rows are of each source."""
        piece = self.pieces[bisect.bisect_right(self.pieces, row, key=lambda piece: piece.row) - 1]
        in_piece = piece.shares.before(row - piece.row)
        return [sum(pair) for pair in zip(piece.before, in_piece, strict=True)]

    def _rows_of(self, nths: Sequence[int]) -> list[int | None]:
        """For each source the number of its n-th row, from 0; None if the source has fewer."""
        found: list[int | None] = [None] * len(nths)
        ends: list[float] = [piece.row for piece in self.pieces[1:]]
        for piece, end in zip(self.pieces, [*ends, math.inf], strict=True):
            # A row before this piece has a number below 0 here.
            in_piece = [nth - before for nth, before in zip(nths, piece.before, strict=True)]
            for source, number in enumerate(piece.shares.numbers(in_piece)):
                if number is not None and in_piece[source] >= 0 and piece.row + number < end:
                    found[source] = piece.row + number
        return found

    def _first_end(self) -> int:
        full = [source.length // self.lanes for source in self.sources]
        ends = []
        for source, row in zip(self.sources, self._rows_of(full), strict=True):
            if row is not None:
                ends.append(row * self.lanes + source.length % self.lanes)
        return min(ends)

    def _last_end(self) -> int:
        last = [-(-source.length // self.lanes) - 1 for source in self.sources]
        ends = []
        for source, row in enumerate(self._rows_of(last)):
            if row is not None:
                rest = self.sources[source].length - last[source] * self.lanes
                ends.append(row * self.lanes + rest)
                continue
            # The source does not end: it is not waited for from its last weight on.
            for piece, later in itertools.pairwise(self.pieces):
                if piece.shares.has(source):
                    ends.append(later.row * self.lanes)
        return max(ends)


class MixOrder:
    """The order of one epoch of a mix, over all ranks: indices of the concatenation of its sources.

    A window has `ROWS` rows of `MixPlan`. Position p of the window belongs to lane p mod `lanes`.
    The window's sources are permuted in each lane by itself: ranks that take every W-th position
    draw independently of each other, for any W. Without, a rank of four would draw from one source
    alone where weights are 3 and 1. The samples of a source keep their order within a lane: a rank
    reads lanes of its own in every source, if W divides `lanes`.

    With `shuffle`, each pass of a source has a random order of its own. Without, epochs are alike.
    """

    def __init__(self, plan: MixPlan, seed: int, epoch: int, *, shuffle: bool) -> None:
        self._plan = plan
        self._seed = seed
        self._epoch = epoch
        self._shuffle = shuffle
        self._key = np.uint64(batch_seed(seed, epoch if shuffle else 0, _OF_WINDOWS))
        lengths = [source.length for source in plan.sources]
        self._starts = [0, *itertools.accumulate(lengths[:-1])]
        self._ends = [*(piece.row * plan.lanes for piece in plan.pieces[1:]), plan.length]

    def __len__(self) -> int:
        return self._plan.length

    def blocks(self, start: int = 0, stop: int | None = None, step: int = 1) -> Iterator[IntArray]:
        """The indices at the positions ``range(start, stop, step)``, as arrays."""
        return self.at(range(len(self))[start:stop:step])

    def at(self, positions: range | IntArray) -> Iterator[IntArray]:
        """The indices at some positions, ascending, as arrays."""
        for sources, numbers in self._drawn(positions):
            indices = np.empty(len(sources), dtype=np.int64)
            for source in np.flatnonzero(np.bincount(sources)).tolist():
                own = np.flatnonzero(sources == source)
                indices[own] = self._indices_of(source, numbers[own])
            yield indices

    def drawn_before(self, position: int) -> list[int]:
        """How many of the samples before a position are of each source."""
        piece = self._plan.pieces[self._piece_of(position)]
        window = ROWS * self._plan.lanes
        first = piece.row * self._plan.lanes
        first += (position - first) // window * window
        counts = np.array(self._plan.rows_before(first // self._plan.lanes)) * self._plan.lanes
        for sources, _ in self._drawn(range(first, position)):
            counts += np.bincount(sources, minlength=len(counts))
        found: list[int] = counts.tolist()
        return found

    def _piece_of(self, position: int) -> int:
        return min(bisect.bisect_right(self._ends, position), len(self._ends) - 1)

    def _drawn(self, positions: range | IntArray) -> Iterator[tuple[IntArray, IntArray]]:
        """For positions the sources, and the samples' numbers over all passes of their source."""
        while len(positions):
            piece = self._piece_of(int(positions[0]))
            count = min(bisect.bisect_left(positions, self._ends[piece]), BLOCK)
            part, positions = positions[:count], positions[count:]
            if isinstance(part, range):
                part = np.arange(part.start, part.stop, part.step)
            yield self._drawn_in(self._plan.pieces[piece], self._ends[piece], part)

    def _drawn_in(self, piece: Piece, end: int, positions: IntArray) -> tuple[IntArray, IntArray]:
        lanes, first = self._plan.lanes, piece.row * self._plan.lanes
        windows, within = np.divmod(positions - first, ROWS * lanes)
        steps, lane = np.divmod(within, lanes)
        # A column is one lane of one window.
        columns = windows * lanes + lane
        if lanes == 1:
            columns, column = _distinct(columns)
        else:
            columns, column = np.unique(columns, return_inverse=True)
        windows, window = _distinct(columns // lanes)
        in_window = np.arange(ROWS, dtype=np.int32)
        rows = (windows - windows[0])[:, None] * ROWS + in_window
        start = int(windows[0]) * ROWS
        of_rows, before = piece.shares.draws(start, rows.reshape(-1))
        before += np.array(piece.before)[of_rows]
        sources = of_rows.reshape(rows.shape)[window]
        cells = (rows[window] + start) * lanes + (columns % lanes)[:, None] + first
        draws = _hashed(cells.view(np.uint64) + self._key)
        beyond = cells >= end  # comes last, and is not asked for
        draws[beyond] = np.iinfo(np.uint64).max
        sources[beyond] = len(self._plan.sources)
        permuted = np.take_along_axis(sources, ranks_of(draws), axis=1)
        # The samples of each source keep their order: its n-th step has its n-th row.
        row_at = np.empty_like(sources)
        row_of_source = np.sort(sources * ROWS + in_window, axis=1) & ROWS - 1
        step_of_source = np.sort(permuted * ROWS + in_window, axis=1) & ROWS - 1
        np.put_along_axis(row_at, step_of_source, row_of_source, axis=1)
        row = row_at[column, steps]
        numbers = before.reshape(rows.shape)[window[column], row] * lanes + lane
        return sources[column, row], numbers

    def _indices_of(self, source: int, numbers: IntArray) -> IntArray:
        passes, within = np.divmod(numbers, self._plan.sources[source].length)
        if not self._shuffle:
            return within + self._starts[source]
        indices = np.empty_like(within)
        ascending = np.argsort(numbers, kind="stable")
        bounds = np.flatnonzero(np.diff(passes[ascending])) + 1
        for own in np.split(ascending, bounds):
            key = batch_seed(self._seed, source, int(passes[own[0]]))
            order = _order_of(self._plan.sources[source], self._plan.lanes, key, self._epoch)
            if isinstance(order, Permutation):
                indices[own] = order[within[own]]
            else:
                indices[own] = np.concatenate(list(order.at(within[own])))
        return indices + self._starts[source]


_order_of = functools.lru_cache(maxsize=64)(Source.random_order)


def _distinct(ascending: IntArray) -> tuple[IntArray, IntArray]:
    """The distinct values, and for each value its place among them."""
    is_new = np.empty(len(ascending), dtype=bool)
    is_new[0] = True
    np.not_equal(ascending[1:], ascending[:-1], out=is_new[1:])
    return ascending[is_new], np.cumsum(is_new) - 1


def _hashed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A random number for each value, by splitmix64: https://prng.di.unimi.it/splitmix64.c."""
    values = values * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
