"""Map-style datasets one after the other, as one dataset."""

from __future__ import annotations

import asyncio
import bisect
import itertools
from abc import abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np

from headrace._core.interface.fetch_plan import ConcatComposition
from headrace._core.interface.joined_reads import ReadRange, Views
from headrace._core.interface.kinds import Capabilities, capabilities, fetch_all, sample_key
from headrace._core.interface.map_style import ComposedDataset, get_item
from headrace._core.store.ranges import Ranges
from headrace._core.text import dataset_repr


class Concatenation(ConcatComposition, ComposedDataset[object]):
    """Several datasets one after the other.

    Reads batches with `agets` if all parts can, and byte ranges if all parts can. Objects of byte ranges are numbered
    in turn: the first of each part, then the second of each.
    """

    def __init__(self, sources: Sequence[object]) -> None:
        self.sources = sources

    @abstractmethod
    def locate(self, index: Any) -> tuple[int, object]:
        """The number of a part, and the index in it; raises if `index` is out of range."""

    def _capabilities(self) -> Capabilities:
        parts = [capabilities(source) for source in self.sources]
        ranges = all(part.ranges for part in parts)
        return Capabilities(
            aget=True,
            agets=all(part.agets for part in parts),
            ranges=ranges,
            cached_reads=ranges and any(part.cached_reads for part in parts),
            set_epoch=True,
            sample_key=True,
        )

    async def aget(self, index: object) -> object:
        part, inner = self.locate(index)
        sample = await self.sources[part].aget(inner)
        return (part, sample) if self.numbered else sample

    async def agets(self, indices: Sequence[object]) -> list[object]:
        samples: list[object] = [None] * len(indices)

        async def fetch(part: int, slots: list[int], inner: list[object]) -> None:
            for slot, sample in zip(slots, await fetch_all(self.sources[part], inner), strict=True):
                samples[slot] = (part, sample) if self.numbered else sample

        await asyncio.gather(*itertools.starmap(fetch, self._by_part(indices)))
        return samples

    def __getitem__(self, index: object) -> object:
        part, inner = self.locate(index)
        return get_item(self.sources[part], inner)

    def sample_key(self, index: object) -> str | None:
        part, inner = self.locate(index)
        return sample_key(self.sources[part], inner)

    def _by_part(self, indices: Sequence[object]) -> list[tuple[int, list[int], list[object]]]:
        """For each part that has any of the samples: its number, their slots in `indices`, their indices in it."""
        parts: dict[int, tuple[int, list[int], list[object]]] = {}
        for slot, index in enumerate(indices):
            part, inner = self.locate(index)
            _, slots, inners = parts.setdefault(part, (part, [], []))
            slots.append(slot)
            inners.append(inner)
        return list(parts.values())

    # Byte ranges, see `JoinedReads`.

    def ranges(self, indices: Sequence[object]) -> Ranges:
        order: list[int] = []
        several: list[Ranges] = []
        for part, slots, inner in self._by_part(indices):
            ranges = self.sources[part].ranges(inner)
            order.extend(slots)
            several.append(ranges._replace(objects=ranges.objects * len(self.sources) + part))
        return Ranges.joined(several).at(np.argsort(order)) if several else Ranges.of([])

    async def read_range(self, number: int, start: int, stop: int, *, index: object = None) -> memoryview:
        number, part = divmod(number, len(self.sources))
        inner = None if index is None else self.locate(index)[1]
        data: memoryview = await self.sources[part].read_range(number, start, stop, index=inner)
        return data

    def sample_of(self, index: object, data: memoryview) -> object:
        part, inner = self.locate(index)
        sample = self.sources[part].sample_of(inner, data)
        return (part, sample) if self.numbered else sample

    def samples_of(self, indices: Sequence[object], data: Sequence[memoryview]) -> object:
        return list(map(self.sample_of, indices, data))

    async def cached_reads(self, indices: Sequence[object]) -> Sequence[memoryview | None]:
        views: list[memoryview | None] = [None] * len(indices)
        for part, slots, inner in self._by_part(indices):
            if capabilities(self.sources[part]).cached_reads:
                for slot, view in zip(slots, await self.sources[part].cached_reads(inner), strict=True):
                    views[slot] = view
        return views

    def read_missing(
        self, number: int, ranges: Ranges, indices: Sequence[object], read_range: ReadRange
    ) -> AsyncGenerator[Views, None]:
        count = len(self.sources)
        number, part = divmod(number, count)
        views: AsyncGenerator[Views, None] = self.sources[part].read_missing(
            number,
            ranges,
            [self.locate(index)[1] for index in indices],
            lambda number, start, stop: read_range(number * count + part, start, stop),
        )
        return views


class ConcatenatedDatasets(Concatenation):
    """Map-style datasets one after the other; made by `headrace.concat`."""

    def __init__(self, datasets: Sequence[object]) -> None:
        super().__init__(tuple(datasets))
        self._ends = list(itertools.accumulate(map(len, self.sources)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __repr__(self) -> str:
        return f"concat([{', '.join(map(dataset_repr, self.sources))}])"

    def locate(self, index: int) -> tuple[int, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} samples of {len(self.sources)} datasets")
        index %= len(self)
        part = bisect.bisect_right(self._ends, index)
        return part, index - (self._ends[part - 1] if part else 0)
