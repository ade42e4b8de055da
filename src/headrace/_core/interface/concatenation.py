"""Datasets of ranges one behind the other, seen as one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np

from headrace._core.interface.ranged import RangedView, ReadRange, Views
from headrace._core.store.ranges import Ranges


class RangedConcatenation(RangedView):
    """Several datasets of ranges in a row; objects are numbered by turns, the first of each part, then the second.

    Mixed into a class that has both attributes.

    Attributes:
        sources: the parts, a sequence.
        find: of an index, the number of the part and the index in it; raises if there is no such sample.
    """

    sources: Any
    find: Any

    def ranges(self, indices: Sequence[Any]) -> Ranges:
        """Those of the parts."""
        found = [self.find(index) for index in indices]
        order: list[int] = []
        several: list[Ranges] = []
        for part in {part for part, _ in found}:
            slots = [slot for slot, (its, _) in enumerate(found) if its == part]
            inner = self.sources[part].ranges([found[slot][1] for slot in slots])
            order.extend(slots)
            several.append(inner._replace(objects=inner.objects * len(self.sources) + part))
        return Ranges.joined(several).at(np.argsort(order)) if several else Ranges.of([])

    async def read_range(self, number: int, start: int, stop: int, *, index: Any = None) -> memoryview:
        """Read from one of a part's objects."""
        number, part = divmod(number, len(self.sources))
        inner = None if index is None else self.find(index)[1]
        data: memoryview = await self.sources[part].read_range(number, start, stop, index=inner)
        return data

    @property
    def has_cache(self) -> bool:
        """Whether one of the parts has."""
        return any(source.has_cache for source in self.sources)

    async def cached_reads(self, indices: Sequence[Any]) -> Sequence[memoryview | None]:
        """As of the parts."""
        views: list[memoryview | None] = [None] * len(indices)
        found = [self.find(index) for index in indices]
        for part in {part for part, _ in found if self.sources[part].has_cache}:
            slots = [slot for slot, (its, _) in enumerate(found) if its == part]
            inner = await self.sources[part].cached_reads([found[slot][1] for slot in slots])
            for slot, view in zip(slots, inner, strict=True):
                views[slot] = view
        return views

    def read_missing(
        self, number: int, ranges: Ranges, indices: Sequence[Any], read_range: ReadRange
    ) -> AsyncGenerator[Views, None]:
        """As of the part."""
        count = len(self.sources)
        number, part = divmod(number, count)
        views: AsyncGenerator[Views, None] = self.sources[part].read_missing(
            number,
            ranges,
            [self.find(index)[1] for index in indices],
            lambda number, start, stop: read_range(number * count + part, start, stop),
        )
        return views

    def sample_of(self, index: Any, data: memoryview) -> Any:
        """The part's sample."""
        part, inner = self.find(index)
        return self.sources[part].sample_of(inner, data)
