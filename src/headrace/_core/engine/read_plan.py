"""What is planned together for a dataset of ranges: whose they are, their requests, and what these have brought."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from headrace._core.store.ranges import Ranges, Span, plan_spans

if TYPE_CHECKING:
    from numpy.typing import NDArray

Batch = TypeVar("Batch")


class ReadPlan(Generic[Batch]):
    """Batches whose ranges were wanted at one time.

    Of what a request brings nothing is touched before a batch is complete: a range of 4 KB is read in 2 µs.

    Args:
        batches: whatever they are to the caller.
        wanted: for each batch, its ranges.

    Attributes:
        ranges: of all batches, one behind the other; known by their positions.
        spans: the requests, once there is a `plan`, the one that the first batch waits for first. Their members are
            positions.

    Example:
        >>> together = ReadPlan(["first", "second"], [Ranges.of([(0, 2), (9_000_000, 9_000_001)]), Ranges.of([(2, 4)])])
        >>> together.plan()
        >>> [(span.start, span.stop) for span in together.spans]
        [(0, 4), (9000000, 9000001)]
        >>> list(together.bring(0, memoryview(b"abcd")))
        [('first', 1), ('second', 1)]
        >>> [bytes(view) for view in together.take(1)]
        [b'cd']
    """

    def __init__(self, batches: Sequence[Batch], wanted: Sequence[Ranges]) -> None:
        self.ranges = Ranges.joined(wanted)
        self.spans: list[Span] = []
        self._batches = batches
        sizes = [len(each.starts) for each in wanted]
        self._borders = np.cumsum([0, *sizes]).tolist()
        self._owners = np.repeat(np.arange(len(sizes)), sizes)
        # Where the bytes of each range are: in the answer to a request, or in the first of these, which has none.
        self._data: list[memoryview | None] = [_NOTHING]
        self._places, self._begins, self._ends = np.zeros((3, len(self._owners)), np.int64)
        self._untaken = np.zeros(1, np.int64)
        self._singles: dict[int, memoryview] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def plan(self, positions: Sequence[int] | None = None) -> None:
        """Make requests: of all ranges, or of those at some positions."""
        chosen = np.arange(len(self)) if positions is None else np.array(positions, np.int64)
        spans = plan_spans(self.ranges.at(chosen))
        self.spans = [replace(span, members=chosen[span.members]) for span in spans]
        self.spans.sort(key=lambda span: int(span.members.min()))
        for place, span in enumerate(self.spans, 1):
            self._places[span.members] = place
            self._begins[span.members] = self.ranges.starts[span.members] - span.start
            self._ends[span.members] = self.ranges.stops[span.members] - span.start
        self._data += [None] * len(self.spans)
        self._untaken = np.bincount(self._places, minlength=len(self._data))

    def bring(self, number: int, data: memoryview) -> Iterator[tuple[Batch, int]]:
        """Keep what a request has brought; gives each batch that it served, and with how many ranges."""
        self._data[number + 1] = data
        return self._shares(self.spans[number].members)

    def put(self, position: int, data: memoryview) -> Batch:
        """Keep the bytes of one range, wherever they came from; returns its batch."""
        self._singles[position] = data
        return self._batches[int(self._owners[position])]

    def empty(self, positions: Sequence[int] | None = None) -> Iterator[tuple[Batch, int]]:
        """As `bring`, for those of the ranges that are empty and need no request."""
        empty = self.ranges.stops == self.ranges.starts
        return self._shares(np.flatnonzero(empty) if positions is None else [at for at in positions if empty[at]])

    def whose(self, positions: Sequence[int] | NDArray[np.intp]) -> Iterator[tuple[Batch, int]]:
        """Of the range at each position, the batch and the slot in it."""
        owners = self._owners[positions].tolist()
        pairs = zip(owners, np.asarray(positions).tolist(), strict=True)
        return ((self._batches[owner], position - self._borders[owner]) for owner, position in pairs)

    def first(self, number: int) -> Batch:
        """The first batch that waits for a request."""
        return self._batches[int(self._owners[self.spans[number].members].min())]

    def take(self, batch: int) -> list[memoryview]:
        """Give up the bytes of a batch, in the order of its ranges; empty where nothing has come."""
        first, stop = self._borders[batch], self._borders[batch + 1]
        places, data = self._places[first:stop], self._data
        cuts = zip(places.tolist(), self._begins[first:stop].tolist(), self._ends[first:stop].tolist(), strict=True)
        views = [_NOTHING if (whole := data[place]) is None else whole[begin:end] for place, begin, end in cuts]
        taken = np.bincount(places, minlength=len(data))
        self._untaken -= taken
        for place in np.flatnonzero((taken > 0) & (self._untaken == 0)).tolist():
            data[place] = None
        if self._singles:
            views = [self._singles.pop(position, view) for position, view in enumerate(views, first)]
        return views

    def _shares(self, positions: Sequence[int] | NDArray[np.intp]) -> Iterator[tuple[Batch, int]]:
        counts = np.bincount(self._owners[positions])
        owners = np.flatnonzero(counts)
        pairs = zip(owners.tolist(), counts[owners].tolist(), strict=True)
        return ((self._batches[owner], count) for owner, count in pairs)


_NOTHING = memoryview(b"")
