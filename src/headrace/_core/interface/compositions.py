"""Torch's compositions (`Subset`, `ConcatDataset`, …) of async datasets: fetched from on the loop, as their parts are.

Torch's classes know `__getitem__` only, which for an async dataset waits. A loader sees through them instead: indices
are translated, and the parts' own `aget` is awaited. What `map` queued on a part stays CPU work for the pool.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

from torch.utils.data import ChainDataset, ConcatDataset, IterableDataset, StackDataset, Subset

from headrace._core.interface.base import split_maps
from headrace._core.interface.concatenation import RangedConcatenation
from headrace._core.interface.kinds import get_all, propagate_epoch, sample_key
from headrace._core.interface.ranged import RangedSelection, reads_ranges

Maps = tuple[Callable[[Any], Any], ...]


def unwrap(dataset: Any) -> tuple[Any, Maps]:
    """Take a dataset apart into where samples are fetched, and the CPU work queued for each of them.

    Args:
        dataset: any dataset. Only exactly torch's classes are seen through: a subclass may do more in `__getitem__`.

    Returns:
        An async dataset where `dataset` is one or is composed of nothing else, otherwise the dataset itself; and the
        functions that are applied to a sample, one after the other.
    """
    dataset, maps = split_maps(dataset)
    composed = _COMPOSED.get(type(dataset))
    seen_through = composed(dataset) if composed is not None else None
    if seen_through is None:
        return dataset, maps
    source, inner = seen_through
    return source, (*inner, *maps)


def _subset(dataset: Subset[Any]) -> tuple[Any, Maps] | None:
    source, maps = unwrap(dataset.dataset)
    if not hasattr(source, "aget"):
        return None
    if reads_ranges(source):
        return _PartOfRanges(dataset, source), maps
    return (_PartAtOnce if hasattr(source, "agets") else _Part)(dataset, source), maps


def _concatenated(dataset: ConcatDataset[Any]) -> tuple[Any, Maps] | None:
    sources, maps = _take_all_apart(dataset.datasets)
    if not all(hasattr(source, "aget") for source in sources):
        return None
    row = _RowOfRanges if all(map(reads_ranges, sources)) else _Row
    if any(maps):
        return row(dataset, sources, tagged=True), (_ByTag(maps),)
    return row(dataset, sources, tagged=False), ()


def _stacked(dataset: StackDataset[Any]) -> tuple[Any, Maps] | None:
    names = list(dataset.datasets) if isinstance(dataset.datasets, dict) else None
    sources, maps = _take_all_apart(
        dataset.datasets.values() if isinstance(dataset.datasets, dict) else dataset.datasets
    )
    if not all(hasattr(source, "aget") for source in sources):
        return None
    at_once = any(hasattr(source, "agets") for source in sources)
    return (_StackAtOnce if at_once else _Stack)(dataset, sources), (_Unstack(names, maps),)


def _chained(dataset: ChainDataset) -> tuple[Any, Maps] | None:
    if not isinstance(dataset.datasets, Sequence):
        return None  # torch reads it once; it is not ours to look into
    sources, maps = _take_all_apart(dataset.datasets)
    parts_are_streams = all(isinstance(part, IterableDataset) for part in dataset.datasets)
    if not (sources and parts_are_streams and all(hasattr(source, "__aiter__") for source in sources)):
        return None
    if any(maps):
        return _Chain(sources, tagged=True), (_ByTag(maps),)
    return _Chain(sources, tagged=False), ()


_COMPOSED: dict[type, Callable[[Any], tuple[Any, Maps] | None]] = {
    Subset: _subset,
    ConcatDataset: _concatenated,
    StackDataset: _stacked,
    ChainDataset: _chained,
}


def _take_all_apart(datasets: Iterable[Any]) -> tuple[list[Any], list[Maps]]:
    apart = [unwrap(dataset) for dataset in datasets]
    return [source for source, _ in apart], [maps for _, maps in apart]


def _applied(maps: Maps, sample: Any) -> Any:
    for function in maps:
        sample = function(sample)
    return sample


class _View:
    """An async face of a composed dataset.

    Attributes:
        composed: torch's object, looked at anew for each sample: it is the user's, who may change it.
        sources: the parts, to fetch from.
    """

    def __init__(self, composed: Any, sources: list[Any]) -> None:
        self.composed = composed
        self.sources = sources

    def __len__(self) -> int:
        return len(self.composed)

    def set_epoch(self, epoch: int) -> None:
        for source in self.sources:
            propagate_epoch(source, epoch)


class _Part(_View):
    """`Subset`."""

    def __init__(self, composed: Subset[Any], source: Any) -> None:
        super().__init__(composed, [source])

    async def aget(self, index: Any) -> Any:
        return await self.sources[0].aget(self.composed.indices[index])

    def sample_key(self, index: Any) -> str | None:
        return sample_key(self.sources[0], self.composed.indices[index])


class _PartAtOnce(_Part):
    async def agets(self, indices: Sequence[Any]) -> Any:
        positions = self.composed.indices
        return await self.sources[0].agets([positions[index] for index in indices])


class _PartOfRanges(RangedSelection, _Part):
    def __init__(self, composed: Subset[Any], source: Any) -> None:
        super().__init__(composed, source)
        self.ranged = source

    def inner_index(self, index: Any) -> Any:
        return self.composed.indices[index]


class _Row(_View):
    """`ConcatDataset`.

    Args:
        composed: torch's object.
        sources: its parts.
        tagged: whether a sample comes with its part's number, for `_ByTag`.
    """

    def __init__(self, composed: ConcatDataset[Any], sources: list[Any], *, tagged: bool) -> None:
        super().__init__(composed, sources)
        self._tagged = tagged

    def find(self, index: Any) -> tuple[int, int]:
        ends = self.composed.cumulative_sizes
        if index < 0:
            if -index > ends[-1]:
                raise ValueError("absolute value of index should not exceed dataset length")  # torch's words
            index += ends[-1]
        part = bisect.bisect_right(ends, index)
        return part, index - ends[part - 1] if part else index

    async def aget(self, index: Any) -> Any:
        part, index = self.find(index)
        sample = await self.sources[part].aget(index)
        return (part, sample) if self._tagged else sample

    def sample_key(self, index: Any) -> str | None:
        part, index = self.find(index)
        return sample_key(self.sources[part], index)


class _RowOfRanges(RangedConcatenation, _Row):
    """`ConcatDataset` of datasets of ranges."""

    def sample_of(self, index: Any, data: memoryview) -> Any:
        sample = super().sample_of(index, data)
        return (self.find(index)[0], sample) if self._tagged else sample


class _Stack(_View):
    """`StackDataset`: the parts of a sample are fetched at once, and put together by `_Unstack`."""

    async def aget(self, index: Any) -> Any:
        return await asyncio.gather(*(source.aget(index) for source in self.sources))

    def sample_key(self, index: Any) -> str | None:
        keys = [key for source in self.sources if (key := sample_key(source, index)) is not None]
        return " + ".join(keys) or None


class _StackAtOnce(_Stack):
    async def agets(self, indices: Sequence[Any]) -> Any:
        columns = await asyncio.gather(*(get_all(source, indices) for source in self.sources))
        return list(zip(*columns, strict=True))


class _Chain(_View):
    """`ChainDataset`."""

    def __init__(self, sources: list[Any], *, tagged: bool) -> None:
        super().__init__(None, sources)
        self._tagged = tagged

    async def __aiter__(self) -> AsyncIterator[Any]:
        for part, source in enumerate(self.sources):
            stream = aiter(source)
            async with contextlib.aclosing(stream) if hasattr(stream, "aclose") else contextlib.nullcontext():
                async for sample in stream:
                    yield (part, sample) if self._tagged else sample


class _ByTag:
    """Applies to a sample what was queued on its part."""

    def __init__(self, maps: list[Maps]) -> None:
        self._maps = maps

    def __call__(self, tagged: tuple[int, Any]) -> Any:
        part, sample = tagged
        return _applied(self._maps[part], sample)


class _Unstack:
    """Applies to each part of a sample what was queued on it, and makes torch's dict or tuple of them."""

    def __init__(self, names: list[str] | None, maps: list[Maps]) -> None:
        self._names = names
        self._maps = maps

    def __call__(self, parts: Sequence[Any]) -> Any:
        done = tuple(_applied(maps, part) for maps, part in zip(self._maps, parts, strict=True))
        return done if self._names is None else dict(zip(self._names, done, strict=True))
