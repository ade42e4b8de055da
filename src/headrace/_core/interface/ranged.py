"""Map-style datasets whose samples are byte ranges of objects, so that a loader reads neighbours by one request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from headrace._core.interface.joined_reads import ReadRange, Views
from headrace._core.interface.kinds import Capabilities, capabilities, capabilities_by_methods
from headrace._core.interface.map_style import AsyncDataset
from headrace._core.store.ranges import Ranges, read_ranges
from headrace.errors import ShardError

T_co = TypeVar("T_co", covariant=True)


class RangedDataset(AsyncDataset[T_co]):
    """A map-style dataset of byte ranges: define `ranges`, `read_range`, `sample_of` and `__len__`; `aget` is derived.

    A loader takes the ranges of all batches that it has planned, reads those that lie near each other by one request,
    and passes each sample's own bytes to `sample_of`. If a joined request fails, or `sample_of` raises, the sample is
    fetched again by itself with `aget`, whose error names it. A subclass that defines `aget` is read only with that.

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

    def ranges(self, indices: Sequence[Any]) -> Ranges:
        """The byte ranges of the samples at `indices`; the dataset chooses the numbers of its objects.

        Raises:
            IndexError: an index is out of range.
        """
        # Not an abstract method: the error is raised where it is used, with the remedy.
        raise NotImplementedError(f"{type(self).__name__} must define `def ranges(self, indices)`")

    async def read_range(self, number: int, start: int, stop: int, *, index: Any = None) -> memoryview:
        """Read the bytes from `start` up to `stop` of an object; `index` is given if they are for one sample only."""
        # Not an abstract method: the error is raised where it is used, with the remedy.
        raise NotImplementedError(
            f"{type(self).__name__} must define `async def read_range(self, number, start, stop)`"
        )

    def sample_of(self, index: Any, data: memoryview) -> T_co:
        """Make the sample at `index` of its bytes; copy what is kept, since `data` may be part of a larger buffer."""
        # Not an abstract method: the error is raised where it is used, with the remedy.
        raise NotImplementedError(f"{type(self).__name__} must define `def sample_of(self, index, data)`")

    def samples_of(self, indices: Sequence[Any], data: Sequence[memoryview]) -> Sequence[T_co] | torch.Tensor:
        """Make the samples of a batch, if that is faster than one by one: a sequence of them, or one new tensor."""
        return [self.sample_of(index, each) for index, each in zip(indices, data, strict=True)]

    async def cached_reads(self, indices: Sequence[Any]) -> Sequence[memoryview | None]:
        """Nothing is cached."""
        return [None] * len(indices)

    def _capabilities(self) -> Capabilities:
        return capabilities_by_methods(self)._replace(ranges=type(self).aget is RangedDataset.aget)

    async def read_missing(
        self, number: int, ranges: Ranges, indices: Sequence[Any], read_range: ReadRange
    ) -> AsyncGenerator[Views, None]:
        """Read several samples of one object by one request; see `JoinedReads`."""
        start, stop = int(ranges.starts.min()), int(ranges.stops.max())
        data = await read_range(number, start, stop)
        bounds = zip((ranges.starts - start).tolist(), (ranges.stops - start).tolist(), strict=True)
        yield range(len(indices)), [data[begin:end] for begin, end in bounds]

    async def aget(self, index: Any) -> T_co:
        """Fetch the sample at `index`; read it again once if `sample_of` raises `ShardError`."""
        try:
            return self.sample_of(index, await self.read_bytes(index))
        except ShardError:
            return self.sample_of(index, await self.read_bytes(index))

    async def read_bytes(self, index: Any) -> memoryview:
        """Fetch the bytes of the sample at `index`."""
        number, start, stop = (int(column[0]) for column in self.ranges([index]))
        return await self.read_range(number, start, stop, index=index) if stop > start else memoryview(b"")

    async def agets(self, indices: Sequence[Any]) -> list[T_co]:
        """Fetch the samples at `indices`, in order; those near each other by one request."""
        if not capabilities(self).ranges:
            return list(await asyncio.gather(*map(self.aget, indices)))
        views = await read_ranges(self.ranges(indices), self.read_range)
        return [self.sample_of(index, view) for index, view in zip(indices, views, strict=True)]


def positions(indices: Sequence[Any], length: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Indices as an array of positions from 0; negative ones count from the end, as in a list.

    Raises:
        IndexError: an index is out of range for `length`.
        TypeError: an index is not an integer.

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
