"""A plan of the requests for several batches of ranges, and their responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from headrace._core.store.ranges import Ranges, Span, plan_spans

if TYPE_CHECKING:
    from numpy.typing import NDArray

Batch = TypeVar("Batch")
_EMPTY = memoryview(b"")


class ReadPlan(Generic[Batch]):
    """Batches whose ranges are read by joint requests.

    A response is not divided before a batch is complete: a range of 4 KB is read in 2 µs.

    Args:
        batches: the caller's objects for the batches.
        wanted: for each batch, its ranges.

    Attributes:
        ranges: the ranges of all batches, concatenated; a range is referred to by its position here.
        spans: the requests, after `plan`, the one that the first batch needs first. Their members are positions.

    Example:
        >>> reads = ReadPlan(["first", "second"], [Ranges.of([(0, 2), (9_000_000, 9_000_001)]), Ranges.of([(2, 4)])])
        >>> reads.plan()
        >>> [(span.start, span.stop) for span in reads.spans]
        [(0, 4), (9000000, 9000001)]
        >>> reads.on_response(0, memoryview(b"abcd"))
        ['second']
        >>> [bytes(view) for view in reads.pop_batch(1)]
        [b'cd']
    """

    def __init__(self, batches: Sequence[Batch], wanted: Sequence[Ranges]) -> None:
        self.ranges = Ranges.joined(wanted)
        self.spans: list[Span] = []
        self._batches = batches
        sizes = [len(each.starts) for each in wanted]
        self._borders = np.cumsum([0, *sizes]).tolist()
        self._owners = np.repeat(np.arange(len(sizes)), sizes)
        self._missing = np.array(sizes, np.int64)  # ranges of each batch that have not arrived
        # Of each range the number of its response, and begin and end in it. Response 0 is that of ranges without one.
        self._responses: list[memoryview | None] = [_EMPTY]
        self._numbers, self._begins, self._ends = np.zeros((3, len(self._owners)), np.int64)
        self._unused = np.zeros(1, np.int64)  # ranges of each response that no batch has taken
        self._singles: dict[int, memoryview] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def plan(self, positions: Sequence[int] | None = None) -> None:
        """Plan the requests for all ranges, or for those at `positions`."""
        chosen = np.arange(len(self)) if positions is None else np.array(positions, np.int64)
        spans = plan_spans(self.ranges.at(chosen))
        self.spans = [span._replace(members=chosen[span.members]) for span in spans]
        self.spans.sort(key=lambda span: int(span.members.min()))
        for number, span in enumerate(self.spans, 1):
            self._numbers[span.members] = number
            self._begins[span.members] = self.ranges.starts[span.members] - span.start
            self._ends[span.members] = self.ranges.stops[span.members] - span.start
        self._responses += [None] * len(self.spans)
        self._unused = np.bincount(self._numbers, minlength=len(self._responses))

    def on_response(self, number: int, data: memoryview) -> list[Batch]:
        """Keep the response to a request; returns the batches that it completes."""
        self._responses[number + 1] = data
        return self.leave_out(self.spans[number].members)

    def put(self, ranges: Sequence[tuple[int, memoryview]]) -> list[Batch]:
        """As `on_response`, for ranges that were read in another way: their positions and bytes."""
        self._singles.update(ranges)
        return self.leave_out([position for position, _ in ranges])

    def put_empty(self, positions: Sequence[int] | None = None) -> list[Batch]:
        """As `on_response`, for those of the ranges that are empty and need no request."""
        empty = self.ranges.stops == self.ranges.starts
        return self.leave_out(np.flatnonzero(empty) if positions is None else [at for at in positions if empty[at]])

    def leave_out(self, positions: Sequence[int] | NDArray[np.intp]) -> list[Batch]:
        """Wait no longer for these ranges; returns the batches of which no other is missing."""
        arrived = np.bincount(self._owners[positions], minlength=len(self._missing))
        self._missing -= arrived
        complete = np.flatnonzero((arrived > 0) & (self._missing == 0))
        return [self._batches[owner] for owner in complete.tolist()]

    def locate(self, positions: Sequence[int] | NDArray[np.intp]) -> Iterator[tuple[Batch, int]]:
        """The batch of each position, and the slot in it."""
        owners = self._owners[positions].tolist()
        pairs = zip(owners, np.asarray(positions).tolist(), strict=True)
        return ((self._batches[owner], position - self._borders[owner]) for owner, position in pairs)

    def first(self, number: int) -> Batch:
        """The first batch that needs a request."""
        return self._batches[int(self._owners[self.spans[number].members].min())]

    def pop_batch(self, batch: int) -> list[memoryview]:
        """Remove and return the bytes of a batch, in the order of its ranges; empty where none have arrived."""
        first, stop = self._borders[batch], self._borders[batch + 1]
        numbers, responses = self._numbers[first:stop], self._responses
        cuts = zip(numbers.tolist(), self._begins[first:stop].tolist(), self._ends[first:stop].tolist(), strict=True)
        views = [_EMPTY if (whole := responses[number]) is None else whole[begin:end] for number, begin, end in cuts]
        taken = np.bincount(numbers, minlength=len(responses))
        self._unused -= taken
        for number in np.flatnonzero((taken > 0) & (self._unused == 0)).tolist():
            responses[number] = None
        if self._singles:
            views = [self._singles.pop(position, view) for position, view in enumerate(views, first)]
        return views
