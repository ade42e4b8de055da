"""Ranges that lie near each other in one object, read as one request: a pure planner and a thin executor.

Bytes between two ranges cost bandwidth, and a request costs latency and money; so neighbours are joined where the gap
is small, as long as the whole stays of a size that one request reads well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

__all__ = ["Range", "Span", "plan_spans", "read_ranges"]

LARGEST_GAP = 64 * 2**10  # bytes; at 100 MB/s of one connection they take 0.7 ms, and a request to a store 10 to 30
LARGEST_SPAN = 8 * 2**20  # bytes; as the parts of a large object


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes that somebody wants of an object: `length` of them, from `start` on."""

    start: int
    length: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.length < 0:
            raise ValueError(f"a range must not begin or end before zero, but got {self}")

    @property
    def stop(self) -> int:
        """The first byte behind it."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Span:
    """One request for several ranges.

    Attributes:
        start: its first byte.
        length: how many bytes it reads, those between the ranges included.
        members: which of the ranges it covers, by their position in what was asked for.
    """

    start: int
    length: int
    members: tuple[int, ...]


def plan_spans(ranges: Sequence[Range], *, gap: int = LARGEST_GAP, largest: int = LARGEST_SPAN) -> list[Span]:
    """The requests that cover `ranges`, in the order of their place in the object.

    Args:
        ranges: of one object, in any order; they may overlap or be equal. Empty ones need no request.
        gap: the most bytes that are read for nothing between two neighbours.
        largest: the most bytes of a request that covers more than one range; a range is never divided.

    Example:
        >>> plan_spans([Range(900, 50), Range(0, 100), Range(150, 100)], gap=64)
        [Span(start=0, length=250, members=(1, 2)), Span(start=900, length=50, members=(0,))]
    """
    spans: list[Span] = []
    order = sorted((i for i, wanted in enumerate(ranges) if wanted.length), key=lambda i: ranges[i].start)
    start = stop = 0
    members: list[int] = []
    for i in order:
        wanted = ranges[i]
        joined = max(stop, wanted.stop)
        if members and wanted.start - stop <= gap and (joined - start <= largest or joined == stop):
            members.append(i)
            stop = joined
            continue
        if members:
            spans.append(Span(start, stop - start, tuple(members)))
        start, stop, members = wanted.start, wanted.stop, [i]
    if members:
        spans.append(Span(start, stop - start, tuple(members)))
    return spans


async def read_ranges(
    ranges: Sequence[Range],
    read: Callable[[int, int], Awaitable[memoryview]],
    *,
    gap: int = LARGEST_GAP,
    largest: int = LARGEST_SPAN,
) -> list[memoryview]:
    """Read ranges of one object, by as few requests as `plan_spans` makes of them, all at once.

    Args:
        ranges: what is wanted, in any order.
        read: reads so many bytes from a start on, e.g. `StoreReader.read` of a key.
        gap: as for `plan_spans`.
        largest: as for `plan_spans`.

    Returns:
        A view for each range, in the order of `ranges`; those of one request share its memory.
    """
    spans = plan_spans(ranges, gap=gap, largest=largest)
    views = [memoryview(b"")] * len(ranges)

    async def fill(span: Span) -> None:
        data = await read(span.start, span.length)
        for i in span.members:
            offset = ranges[i].start - span.start
            views[i] = data[offset : offset + ranges[i].length]

    try:
        async with asyncio.TaskGroup() as group:
            for span in spans:
                group.create_task(fill(span))
    except BaseExceptionGroup as errors:
        failure = errors.exceptions[0]  # one error is raised as itself; it has ended the others
    else:
        return views
    raise failure
