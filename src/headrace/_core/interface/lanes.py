"""Lanes: the equal parts, by shards, of a rank's part of a stream, each of which is read by one of several engines."""

from __future__ import annotations

from collections.abc import Iterator

from headrace._core.interface.traversal import child_datasets
from headrace._core.text import dataset_repr


def why_not_by_lanes(stream: object) -> str | None:
    """The reason why a stream is read as a whole; None if each lane can read a part of its shards.

    That is so of headrace's streams of shards, and of operations on them that do the same to a part of the samples as
    to all: `map`, `filter`, `shuffle`, `repeat`, `concat`, `batch_by_tokens`.

    Example:
        >>> from headrace import from_async_iterable
        >>> async def numbers():
        ...     yield 0
        >>> why_not_by_lanes(from_async_iterable(numbers).shuffle(2))
        'from_async_iterable(numbers) is not a stream of shards'
    """
    if not getattr(getattr(type(stream), "__aiter__", None), "__module__", "").startswith("headrace."):
        return f"{type(stream).__name__} has an __aiter__ of its own"
    if hasattr(stream, "most_lanes"):
        reason = getattr(stream, "not_by_shards", None)
        return None if reason is None else f"{dataset_repr(stream)}: {reason}"
    if not getattr(stream, "same_by_lanes", False):
        return f"{dataset_repr(stream)} is not a stream of shards"
    return next(filter(None, map(why_not_by_lanes, _parts(stream))), None)


def most_lanes(stream: object) -> int:
    """The number of lanes of a stream that is read by lanes, such that each has a shard of every part of the stream."""
    if hasattr(stream, "most_lanes"):
        return int(stream.most_lanes())
    return min(map(most_lanes, _parts(stream)))


def _parts(stream: object) -> Iterator[object]:
    for value in vars(stream).values():
        yield from child_datasets(value)
