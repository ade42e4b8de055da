"""Datasets whose every sample is one range of bytes of an object, so that a loader can read neighbours together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from headrace._core.interface.base import AsyncDataset, FirstSamples
from headrace._core.store.ranges import Ranges, read_ranges
from headrace.errors import ShardError

T_co = TypeVar("T_co", covariant=True)

Views = tuple[Sequence[int], Sequence[memoryview]]
"""Positions in the requested samples, and the bytes of each."""
ReadRange = Callable[[int, int, int], Awaitable[memoryview]]
"""Read the bytes of an object, given by its number, from a start to a stop."""


class RangedDataset(AsyncDataset[T_co]):
    """A map-style dataset of ranges: define `ranges`, `read_range`, `sample_of` and `__len__`; `aget` is there.

    A loader looks at the ranges of all batches that it has planned, reads those that lie near each other by one
    request, and gives `sample_of` each sample's own bytes. A sample whose joined read failed, or whose bytes
    `sample_of` refused, is fetched with `aget` by itself before that is an error: it then says which sample it is
    about. A subclass with an `aget` of its own is fetched from with that alone.

    Example:
        >>> class Letters(RangedDataset[str]):
        ...     def __len__(self): return 26
        ...     def ranges(self, indices):
        ...         starts = positions(indices, len(self))
        ...         return Ranges(np.zeros_like(starts), starts, starts + 1)
        ...     async def read_range(self, number, start, stop, *, index=None):
        ...         return memoryview(bytes(range(97 + start, 97 + stop)))
        ...     def sample_of(self, index, data): return bytes(data).decode()
        >>> Letters()[7], Letters().__getitems__([0, 25])
        ('h', ['a', 'z'])
    """

    @property
    def has_cache(self) -> bool:
        """As of `RangedView`."""
        return False

    def ranges(self, indices: Sequence[Any]) -> Ranges:
        """Where the samples at `indices` are; objects are numbered as the dataset likes.

        Raises:
            IndexError: there is no such sample.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `def ranges(self, indices)`")

    async def read_range(self, number: int, start: int, stop: int, *, index: Any = None) -> memoryview:
        """Read the bytes from `start` up to `stop` of an object, for the sample at `index` if for one alone."""
        raise NotImplementedError(
            f"{type(self).__name__} must define `async def read_range(self, number, start, stop)`"
        )

    def sample_of(self, index: Any, data: memoryview) -> T_co:
        """Make the sample at `index` of its bytes; `data` may be part of a larger buffer, so copy what is kept."""
        raise NotImplementedError(f"{type(self).__name__} must define `def sample_of(self, index, data)`")

    def samples_of(self, indices: Sequence[Any], data: Sequence[memoryview]) -> Sequence[T_co] | torch.Tensor:
        """Make the samples of a batch, where that is faster than one by one: all of them, or a new tensor of them."""
        return [self.sample_of(index, each) for index, each in zip(indices, data, strict=True)]

    async def cached_reads(self, indices: Sequence[Any]) -> Sequence[memoryview | None]:
        """As of `RangedView`: nothing is cached."""
        return [None] * len(indices)

    async def read_missing(
        self, number: int, ranges: Ranges, indices: Sequence[Any], read_range: ReadRange
    ) -> AsyncGenerator[Views, None]:
        """As of `RangedView`."""
        start, stop = int(ranges.starts.min()), int(ranges.stops.max())
        data = await read_range(number, start, stop)
        places = zip((ranges.starts - start).tolist(), (ranges.stops - start).tolist(), strict=True)
        yield range(len(indices)), [data[begin:end] for begin, end in places]

    async def aget(self, index: Any) -> T_co:
        """Fetch the sample at `index`; read a second time if `sample_of` finds it damaged (`ShardError`)."""
        try:
            return self.sample_of(index, await self.read_bytes(index))
        except ShardError:
            return self.sample_of(index, await self.read_bytes(index))

    async def read_bytes(self, index: Any) -> memoryview:
        """Fetch the bytes of the sample at `index`."""
        number, start, stop = (int(column[0]) for column in self.ranges([index]))
        return await self.read_range(number, start, stop, index=index) if stop > start else memoryview(b"")

    async def agets(self, indices: Sequence[Any]) -> list[T_co]:
        """Fetch the samples at `indices`, in their order, all at once: those near each other by one request."""
        if not reads_ranges(self):
            return list(await asyncio.gather(*map(self.aget, indices)))
        views = await read_ranges(self.ranges(indices), self.read_range)
        return [self.sample_of(index, view) for index, view in zip(indices, views, strict=True)]

    def take(self, count: int) -> FirstSamples[T_co]:
        """The first `count` samples of this dataset, or all where it has fewer."""
        return FirstRanges(self, count) if reads_ranges(self) else super().take(count)


class RangedView:
    """What has the methods of a `RangedDataset` and passes them on to one, or to several.

    A loader reads by layers with one signature, `ReadRange`: the store (`read_range`), hedging around it, and around
    both the cache (`cached_reads`, `read_missing`).
    """

    @property
    def has_cache(self) -> bool:
        """Whether `cached_reads` may find something."""
        return False

    def ranges(self, indices: Sequence[Any]) -> Ranges:
        """As of `RangedDataset`."""
        raise NotImplementedError

    async def read_range(self, number: int, start: int, stop: int, *, index: Any = None) -> memoryview:
        """As of `RangedDataset`."""
        raise NotImplementedError

    def sample_of(self, index: Any, data: memoryview) -> Any:
        """As of `RangedDataset`."""
        raise NotImplementedError

    def samples_of(self, indices: Sequence[Any], data: Sequence[memoryview]) -> Any:
        """As of `RangedDataset`."""
        return [self.sample_of(index, each) for index, each in zip(indices, data, strict=True)]

    async def cached_reads(self, indices: Sequence[Any]) -> Sequence[memoryview | None]:
        """The bytes of those samples that are cached; None for the others."""
        raise NotImplementedError

    def read_missing(
        self, number: int, ranges: Ranges, indices: Sequence[Any], read_range: ReadRange
    ) -> AsyncGenerator[Views, None]:
        """Read samples that are not cached and near each other in one object, in parts, and cache them.

        A sample that is left out must be fetched by itself.

        Args:
            number: the object's number.
            ranges: the samples' ranges.
            indices: the samples' indices.
            read_range: makes each request: `read_range` of this object, perhaps hedged.
        """
        raise NotImplementedError


class RangedSelection(RangedView):
    """Some samples of a `RangedDataset`.

    Attributes:
        ranged: the dataset.
    """

    ranged: Any

    def inner_index(self, index: Any) -> Any:
        """The index in `ranged`; raises `IndexError` if there is none."""
        raise NotImplementedError

    def ranges(self, indices: Sequence[Any]) -> Ranges:
        """Those of the samples that are selected."""
        ranges: Ranges = self.ranged.ranges([self.inner_index(index) for index in indices])
        return ranges

    async def read_range(self, number: int, start: int, stop: int, *, index: Any = None) -> memoryview:
        """Read from one of the dataset's objects."""
        data: memoryview = await self.ranged.read_range(number, start, stop, index=index)
        return data

    def sample_of(self, index: Any, data: memoryview) -> Any:
        """The sample that is selected, of its bytes."""
        return self.ranged.sample_of(self.inner_index(index), data)

    def samples_of(self, indices: Sequence[Any], data: Sequence[memoryview]) -> Any:
        """The samples that are selected, of their bytes."""
        return self.ranged.samples_of([self.inner_index(index) for index in indices], data)

    @property
    def has_cache(self) -> bool:
        """As of the dataset."""
        return bool(self.ranged.has_cache)

    async def cached_reads(self, indices: Sequence[Any]) -> Sequence[memoryview | None]:
        """As of the dataset."""
        views: Sequence[memoryview | None] = await self.ranged.cached_reads(list(map(self.inner_index, indices)))
        return views

    def read_missing(
        self, number: int, ranges: Ranges, indices: Sequence[Any], read_range: ReadRange
    ) -> AsyncGenerator[Views, None]:
        """As of the dataset."""
        views: AsyncGenerator[Views, None] = self.ranged.read_missing(
            number, ranges, list(map(self.inner_index, indices)), read_range
        )
        return views

    async def agets(self, indices: Sequence[Any]) -> Any:
        """Fetch them all at once."""
        return await self.ranged.agets([self.inner_index(index) for index in indices])


class FirstRanges(RangedSelection, FirstSamples[T_co]):
    """The first samples of a dataset of ranges; made by `take`."""

    def __init__(self, dataset: Any, count: int) -> None:
        super().__init__(dataset, count)
        self.ranged = dataset

    def inner_index(self, index: Any) -> Any:
        """As `take` counts."""
        return self._inner(index)

    def take(self, count: int) -> FirstSamples[T_co]:
        """The first `count` samples of these."""
        return FirstRanges(self, count)


def reads_ranges(dataset: Any) -> bool:
    """Whether a loader may read this dataset's ranges in place of calling its `aget`."""
    if isinstance(dataset, RangedView):
        return True
    return isinstance(dataset, RangedDataset) and type(dataset).aget is RangedDataset.aget


def positions(indices: Sequence[Any], length: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Indices as an array of positions from 0; as with a list, negative ones count from the end.

    Raises:
        IndexError: one is not within `length`.
        TypeError: one is not a whole number.

    Example:
        >>> positions([0, -1], 10).tolist()
        [0, 9]
    """
    found = np.asarray(indices)
    if found.dtype.kind not in "iu":
        if len(found):
            raise TypeError(f"indices must be whole numbers, but got {indices[0]!r}")
        return np.empty(0, np.int64)
    wrong = (found < -length) | (found >= length)
    if wrong.any():
        raise IndexError(f"index {found[wrong][0]} is out of range for {length} samples")
    return np.where(found < 0, found + length, found).astype(np.int64, copy=False)
