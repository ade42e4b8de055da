"""Datasets of ranges one behind the other, seen as one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np

from headrace._core.interface.ranged import Looks, Members, RangedView, Request
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

    def at_hand(self, indices: Sequence[Any]) -> Looks:
        """As of the parts."""
        if all(source.at_hand([]) is None for source in self.sources):
            return None
        # One by one: a part that has nothing at hand is asked for nothing.
        found = [self.find(index) for index in indices]
        return [look for part, inner in found for look in self.sources[part].at_hand([inner]) or [None]]

    def read_members(
        self, number: int, ranges: Ranges, indices: Sequence[Any], request: Request
    ) -> AsyncGenerator[Members, None]:
        """As of the part."""
        number, part = divmod(number, len(self.sources))
        members: AsyncGenerator[Members, None] = self.sources[part].read_members(
            number, ranges, [self.find(index)[1] for index in indices], request
        )
        return members

    def sample_of(self, index: Any, data: memoryview) -> Any:
        """The part's sample."""
        part, inner = self.find(index)
        return self.sources[part].sample_of(inner, data)
