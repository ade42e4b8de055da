"""What is planned together for a dataset of ranges: whose they are, their requests, and what these have brought."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from headrace.io.ranges import Ranges, Span, plan_spans

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Round"]


class Round:
    """Batches whose ranges were wanted at one time; each is known by its place among them.

    Nothing is done for a single range before its batch is complete: a range of 4 KB is read in 2 µs.

    Args:
        wanted: for each batch, its ranges.

    Attributes:
        spans: the requests, the one that the first batch waits for first.

    Example:
        >>> together = Round([Ranges.of([(0, 2), (9_000_000, 9_000_001)]), Ranges.of([(2, 4)])])
        >>> [(span.start, span.stop) for span in together.spans]
        [(0, 4), (9000000, 9000001)]
        >>> list(together.bring(0, memoryview(b"abcd")))
        [(0, 1), (1, 1)]
        >>> [bytes(view) for view in together.take(1)]
        [b'cd']
    """

    def __init__(self, wanted: Sequence[Ranges]) -> None:
        ranges = Ranges.joined(wanted)
        sizes = [len(each.starts) for each in wanted]
        self._borders = np.cumsum([0, *sizes]).tolist()
        self._owners = np.repeat(np.arange(len(sizes)), sizes)
        self.spans: list[Span] = sorted(plan_spans(ranges), key=lambda span: int(span.members.min()))
        # Empty ranges have no request: theirs is the one behind the last, which has come and has no bytes.
        self._spans_of = np.full(len(self._owners), len(self.spans))
        for number, span in enumerate(self.spans):
            self._spans_of[span.members] = number
        origins = np.array([*(span.start for span in self.spans), 0])[self._spans_of]
        empty = self._spans_of == len(self.spans)
        self._begins = np.where(empty, 0, ranges.starts - origins)
        self._ends = np.where(empty, 0, ranges.stops - origins)
        self._data: list[memoryview | None] = [*(None for _ in self.spans), memoryview(b"")]
        self._untaken = np.bincount(self._spans_of, minlength=len(self._data))

    def bring(self, number: int, data: memoryview) -> Iterator[tuple[int, int]]:
        """Keep what a request has brought; yields each batch that it served, and with how many ranges."""
        self._data[number] = data
        return self._shares(self._owners[self.spans[number].members])

    def without_bytes(self) -> Iterator[tuple[int, int]]:
        """As `bring`, for empty ranges, which need no request."""
        return self._shares(self._owners[self._spans_of == len(self.spans)])

    def members(self, number: int) -> Iterator[tuple[int, int]]:
        """Of each range that a request serves, the batch and the slot in it."""
        positions = self.spans[number].members.tolist()
        owners = self._owners[positions].tolist()
        return ((owner, position - self._borders[owner]) for owner, position in zip(owners, positions, strict=True))

    def take(self, batch: int) -> list[memoryview]:
        """Give up the bytes of a batch, in the order of its ranges; empty where a request has brought nothing."""
        mine = slice(self._borders[batch], self._borders[batch + 1])
        spans, data = self._spans_of[mine], self._data
        places = zip(spans.tolist(), self._begins[mine].tolist(), self._ends[mine].tolist(), strict=True)
        views = [_NOTHING if (whole := data[span]) is None else whole[begin:end] for span, begin, end in places]
        taken = np.bincount(spans, minlength=len(data))
        self._untaken -= taken
        for span in np.flatnonzero((taken > 0) & (self._untaken == 0)).tolist():
            data[span] = None
        return views

    def _shares(self, owners: NDArray[np.intp]) -> Iterator[tuple[int, int]]:
        counts = np.bincount(owners)
        batches = np.flatnonzero(counts)
        return zip(batches.tolist(), counts[batches].tolist(), strict=True)


_NOTHING = memoryview(b"")
