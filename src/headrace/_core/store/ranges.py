"""Ranges that lie near each other in one object, read as one request: a pure planner and a thin executor.

Bytes between two ranges cost bandwidth, and a request costs latency and money; so neighbours are
joined where the gap is small, as long as the whole stays of a size that one request reads well.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

A = TypeVar("A")
T = TypeVar("T")

LARGEST_GAP = (
    64 * 2**10
)  # bytes; at 100 MB/s of one connection they take 0.7 ms, and a request to a store 10 to 30
LARGEST_SPAN = 4 * 2**20  # bytes; with 8 MiB a look-ahead in order had three requests in flight


class Ranges(NamedTuple):
    """Byte ranges of numbered objects.

    Attributes:
        objects: int64, (ranges,): the object's number.
        starts: int64, (ranges,): from 0.
        stops: int64, (ranges,): not before `starts`; a range may be empty.

    Example:
        >>> Ranges.of([(0, 100), (150, 250)]).stops.tolist()
        [100, 250]
    """

    objects: NDArray[np.int64]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]

    @classmethod
    def of(cls, pairs: Sequence[tuple[int, int]]) -> Ranges:
        """Of one object, from pairs of `start` and `stop`."""
        starts, stops = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        return cls(np.zeros(len(pairs), np.int64), starts, stops)

    def at(self, positions: NDArray[np.intp]) -> Ranges:
        """Some of them."""
        return Ranges(*(column[positions] for column in self))

    def check(self, count: int) -> None:
        """Raise ValueError if their number is another, or one starts before 0 or ends before its start."""
        objects, starts, stops = self
        if not len(objects) == len(starts) == len(stops) == count:
            raise ValueError(
                f"{count} ranges are {len(objects)} objects, {len(starts)} starts and {len(stops)} stops"
            )
        if ((starts < 0) | (stops < starts)).any():
            raise ValueError("a range must not begin before 0, or end before its beginning")


class Span(NamedTuple):
    """One request for several ranges."""

    object: int  # the object's number
    start: int  # its first byte
    stop: int  # after its last byte; gaps between the ranges are read too
    members: NDArray[np.intp]  # positions of the ranges it covers, in the order of their starts


def plan_spans(
    ranges: Ranges, *, gap: int = LARGEST_GAP, largest: int = LARGEST_SPAN
) -> list[Span]:
    """The requests that cover `ranges`, which may overlap, in the order of objects and of places in them.

    Between two neighbours at most `gap` bytes are read for nothing. A request for more than one
    range has at most `largest` bytes; a range is never divided.
    """
    objects, starts, stops = ranges
    ranges.check(len(starts))
    wanted = np.flatnonzero(stops > starts)
    if not len(wanted):
        return []
    # All objects on one line, too far from each other to be joined: one pass over it does for all
    # of them.
    numbers, places = np.unique(objects[wanted], return_inverse=True)
    apart = int(stops.max()) + gap + 1
    order = np.lexsort((starts[wanted], places))
    begins = places[order] * apart + starts[wanted][order]
    reach = np.maximum.accumulate(places[order] * apart + stops[wanted][order])
    borders = [0, *(np.flatnonzero(begins[1:] - reach[:-1] > gap) + 1).tolist(), len(order)]
    spans: list[Span] = []
    for first, end in itertools.pairwise(borders):
        while first < end:
            # At least the first range, with all that lie within it.
            limit = max(int(begins[first]) + largest, int(reach[first]))
            last = (
                end if reach[end - 1] <= limit else int(np.searchsorted(reach, limit, side="right"))
            )
            place = int(places[order[first]])
            origin = place * apart
            start, stop = int(begins[first]) - origin, int(reach[last - 1]) - origin
            spans.append(Span(int(numbers[place]), start, stop, wanted[order[first:last]]))
            first = last
    return spans


async def read_ranges(
    ranges: Ranges,
    read: Callable[[int, int, int], Awaitable[memoryview]],
    *,
    gap: int = LARGEST_GAP,
    largest: int = LARGEST_SPAN,
) -> list[memoryview]:
    """A view for each range, read by as few requests as `plan_spans` makes of them, all at once.

    `read` reads of an object, by its number, the bytes from a start to a stop. Views of one request
    share its memory.
    """
    views = [memoryview(b"")] * len(ranges.starts)

    async def fill(span: Span) -> None:
        data = await read(span.object, span.start, span.stop)
        for position in span.members.tolist():
            views[position] = data[
                ranges.starts[position] - span.start : ranges.stops[position] - span.start
            ]

    await map_all(fill, plan_spans(ranges, gap=gap, largest=largest))
    return views


async def map_all(
    function: Callable[[A], Awaitable[T]], items: Iterable[A], limit: int = 1 << 30
) -> list[T]:
    """Call `function` with all items at the same time, at most `limit` of them.

    The first error ends the others, and is raised as itself.
    """
    gate = asyncio.Semaphore(limit)

    async def call(item: A) -> T:
        async with gate:
            return await function(item)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call(item)) for item in items]
    except BaseExceptionGroup as errors:
        failure = errors.exceptions[0]
    else:
        return [task.result() for task in tasks]
    raise failure  # here, so that the group is not its context
