"""Torch's compositions (`Subset`, `ConcatDataset`, …) of async datasets as compositions of our own.

Torch's classes call `__getitem__`, which blocks for an async dataset. Here indices are translated, and `aget` of the
parts is awaited; functions of `map` on a part run in the workers, as for `headrace.concat` and `take`.
"""

from __future__ import annotations

import asyncio
import bisect
import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.utils.data import ChainDataset, ConcatDataset, IterableDataset, StackDataset, Subset

from headrace._core.interface.concatenation import Concatenation
from headrace._core.interface.fetch_plan import Functions, StackFunctions, plan
from headrace._core.interface.kinds import Capabilities, capabilities, fetch_all, kind_of, sample_key
from headrace._core.interface.map_style import ComposedDataset, Selection
from headrace._core.interface.multi_streams import ConcatenatedStreams


def unwrap(dataset: object) -> tuple[object, Functions]:
    """The source that a loader fetches from, and the functions of `map` that it applies to each sample."""
    return plan(as_async(dataset))


def as_async(dataset: object) -> object:
    """An async dataset with the samples of a torch composition of async datasets; any other dataset itself.

    Only torch's own classes are replaced: a subclass may do more in `__getitem__`.
    """
    replacement = _COMPOSITIONS.get(type(dataset))
    view = None if replacement is None else replacement(dataset)
    return dataset if view is None else view


def require_async(datasets: Sequence[object]) -> tuple[list[object], bool]:
    """The async datasets to combine, and whether they are streams.

    Raises:
        ValueError: `datasets` is empty.
        TypeError: a dataset is not async, or their kinds differ.
    """
    if not datasets:
        raise ValueError("no dataset was given")
    found = list(map(as_async, datasets))
    kinds = {kind_of(dataset): dataset for dataset in found}
    for kind, dataset in kinds.items():
        if not kind.is_async:
            name = type(dataset).__name__
            raise TypeError(f"{name} is not an async dataset; torch's own can be combined by torch.utils.data")
    if len(kinds) > 1:
        raise TypeError("map-style datasets and streams cannot be combined")
    return found, next(iter(kinds)).is_iterable


def require_stream(dataset: object, message: str) -> object:
    """The async stream; raises `TypeError` with `message` for a map-style dataset."""
    (stream,), is_stream = require_async([dataset])
    if not is_stream:
        raise TypeError(message)
    return stream


def _subset(dataset: Subset[object]) -> object:
    (source,) = _async_parts([dataset.dataset]) or (None,)
    return None if source is None else SubsetView(dataset, source)


def _concatenated(dataset: ConcatDataset[object]) -> object:
    sources = _async_parts(dataset.datasets)
    return None if sources is None else ConcatView(dataset, sources)


def _stacked(dataset: StackDataset[Any]) -> object:
    parts = dataset.datasets
    names = list(parts) if isinstance(parts, dict) else None
    sources = _async_parts(parts.values() if isinstance(parts, dict) else parts)
    return None if sources is None else StackView(dataset, names, sources)


def _chained(dataset: ChainDataset) -> object:
    if not isinstance(dataset.datasets, Sequence):
        return None  # an iterator, which only torch may consume
    sources = [as_async(part) for part in dataset.datasets]
    are_streams = all(isinstance(part, IterableDataset) for part in dataset.datasets)
    if not (sources and are_streams and all(capabilities(source).aiter for source in sources)):
        return None
    return ConcatenatedStreams(sources)


_COMPOSITIONS: dict[type, Callable[[Any], object]] = {
    Subset: _subset,
    ConcatDataset: _concatenated,
    StackDataset: _stacked,
    ChainDataset: _chained,
}


def _async_parts(datasets: Iterable[object]) -> list[object] | None:
    """The parts of a map-style composition; None unless all of them have `aget`."""
    sources = list(map(as_async, datasets))
    return sources if all(capabilities(source).aget for source in sources) else None


class SubsetView(Selection[object]):
    """`Subset`; its `indices` are read for each sample, since the user may change them."""

    def __init__(self, composed: Subset[object], source: object) -> None:
        super().__init__(source)
        self.composed = composed

    def __len__(self) -> int:
        return len(self.composed)

    def inner_index(self, index: Any) -> object:
        return self.composed.indices[index]


class ConcatView(Concatenation):
    """`ConcatDataset`."""

    def __init__(self, composed: ConcatDataset[object], sources: Sequence[object]) -> None:
        super().__init__(sources)
        self.composed = composed

    def __len__(self) -> int:
        return len(self.composed)

    def locate(self, index: Any) -> tuple[int, int]:
        ends = self.composed.cumulative_sizes
        if index < 0:
            if -index > ends[-1]:
                raise ValueError("absolute value of index should not exceed dataset length")  # torch's words
            index += ends[-1]
        part = bisect.bisect_right(ends, index)
        return part, index - ends[part - 1] if part else index


class StackView(ComposedDataset[object]):
    """`StackDataset`; the parts of a sample are fetched concurrently."""

    def __init__(self, composed: StackDataset[Any], names: list[str] | None, sources: Sequence[Any]) -> None:
        self.composed = composed
        self.sources = sources
        self._names = names
        self._finish: Callable[[Sequence[object]], object] = StackFunctions(names, [()] * len(sources))

    def __len__(self) -> int:
        return len(self.composed)

    @property
    def parts(self) -> Sequence[object]:
        return self.sources

    def over(self, sources: Sequence[object], functions: Sequence[Functions]) -> tuple[object, Functions]:
        other = copy.copy(self)
        other.sources = sources
        other._finish = tuple
        return other, (StackFunctions(self._names, functions),)

    def _capabilities(self) -> Capabilities:
        agets = any(capabilities(source).agets for source in self.sources)
        return Capabilities(aget=True, agets=agets, set_epoch=True, sample_key=True)

    async def aget(self, index: object) -> object:
        return self._finish(await asyncio.gather(*(source.aget(index) for source in self.sources)))

    async def agets(self, indices: Sequence[object]) -> object:
        columns = await asyncio.gather(*(fetch_all(source, indices) for source in self.sources))
        return list(map(self._finish, zip(*columns, strict=True)))

    def __getitem__(self, index: object) -> object:
        return self.__getitems__([index])[0]

    def sample_key(self, index: object) -> str | None:
        keys = [key for source in self.sources if (key := sample_key(source, index)) is not None]
        return " + ".join(keys) or None
