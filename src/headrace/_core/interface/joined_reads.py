"""The protocol of datasets whose samples are byte ranges of objects, so that one request serves several samples."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, Protocol

from headrace._core.store.ranges import Ranges

Views = tuple[Sequence[int], Sequence[memoryview]]
"""Positions among the requested samples, and the bytes of each."""

ReadRange = Callable[[int, int, int], Awaitable[memoryview]]
"""Reads the bytes of an object, given by its number, from a start up to a stop."""


class JoinedReads(Protocol):
    """The methods of a dataset with the capability `ranges`; `RangedDataset` documents those that users define.

    A loader reads in layers of one signature, `ReadRange`: the store (`read_range`), hedging around it, and around both
    the cache (`cached_reads`, `read_missing`).
    """

    async def aget(self, index: object) -> object: ...

    def ranges(self, indices: Sequence[object]) -> Ranges: ...

    async def read_range(self, number: int, start: int, stop: int, *, index: object = None) -> memoryview: ...

    def sample_of(self, index: object, data: memoryview) -> object: ...

    def samples_of(self, indices: Sequence[object], data: Sequence[memoryview]) -> Any: ...

    async def cached_reads(self, indices: Sequence[object]) -> Sequence[memoryview | None]:
        """The bytes of the samples that are cached; None for others. Called only with that capability."""

    def read_missing(
        self, number: int, ranges: Ranges, indices: Sequence[object], read_range: ReadRange
    ) -> AsyncGenerator[Views, None]:
        """Read samples that are near each other in one object and not cached, some at a time, and cache them.

        Samples that are left out must be fetched with `aget`.

        Args:
            number: the object's number.
            ranges: the samples' ranges.
            indices: the samples' indices.
            read_range: makes each request: `read_range` of this dataset, hedged if the loader hedges.
        """
