"""Adapters between torch's dataset classes and async datasets.

Torch's classes (`Subset`, `ConcatDataset`, …) call `__getitem__`. For an async dataset,
`__getitem__` blocks. The compositions in this module translate indices and await `aget` of the
parts instead. Functions of `map` on a part run in the workers, as for `headrace.concat`.

Lightning, Ray Train and accelerate check `isinstance(loader.dataset, IterableDataset)`, and some
build a plain torch loader from the dataset. If torch's loader cannot read the dataset,
`loader.dataset` is an adapter. The adapter has the class of the dataset, and yields every sample
once in a torch loader.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Iterator, Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any

from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    IterableDataset,
    StackDataset,
    Subset,
    get_worker_info,
)

from headrace._ranks.rankinfo import reader_divides, reading_divided
from headrace._streams.blocking import SyncStream
from headrace._streams.composition import Composition, Functions, RowFunctions, plan
from headrace._streams.iterable_style import ConcatenatedStreams
from headrace._streams.kinds import (
    Capabilities,
    DatasetKind,
    capabilities,
    fetch_all,
    kind_of,
    sample_key,
)
from headrace._streams.map_style import AsyncDataset, IndexedParts, refuse_mixes


def unwrap(dataset: object) -> tuple[object, Functions]:
    """Return the source to fetch from, and the functions of `map`.

    A loader applies the functions to each sample.
    """
    return plan(as_async(dataset))


def as_async(dataset: Any) -> Any:
    """Return a torch composition of async datasets as an async dataset.

    Other datasets are returned unchanged. Only torch's own classes are replaced: a subclass may do
    more in `__getitem__`.
    """
    kind = type(dataset)
    if kind not in (Subset, ConcatDataset, StackDataset, ChainDataset):
        return dataset
    parts = [dataset.dataset] if kind is Subset else dataset.datasets
    # Only torch may consume the iterator of a chain.
    if not parts or not isinstance(parts, Sequence | dict):
        return dataset
    sources = list(map(as_async, parts.values() if isinstance(parts, dict) else parts))
    if not all(
        can.aiter if kind is ChainDataset else can.aget
        for can in map(capabilities, sources)
    ):
        return dataset
    if kind is ChainDataset:
        return ConcatenatedStreams(sources)
    if kind is Subset:
        return SubsetView(dataset, sources)
    if kind is ConcatDataset:
        return IndexedParts(sources)
    rows = StackedParts(sources)
    return (
        rows.map(functools.partial(_named, [*parts])) if isinstance(parts, dict) else rows
    )


def _named(names: Sequence[str], row: Sequence[object]) -> dict[str, object]:
    return dict(zip(names, row, strict=True))


def require_async(datasets: Sequence[object]) -> tuple[list[object], bool]:
    """Return the async datasets to combine, and whether all are streams.

    Raises:
        ValueError: there is no dataset.
        TypeError: a dataset is not async, or the datasets are of both kinds.
    """
    if not datasets:
        raise ValueError("no dataset was given")
    found = list(map(as_async, datasets))
    kinds = {kind_of(dataset): dataset for dataset in found}
    for kind, dataset in kinds.items():
        if not kind.is_async:
            name = type(dataset).__name__
            raise TypeError(
                f"{name} is not an async dataset; torch's own can be combined by torch.utils.data"
            )
    if len(kinds) > 1:
        raise TypeError("map-style datasets and streams cannot be combined")
    return found, next(iter(kinds)).is_iterable


class SubsetView(IndexedParts):
    """`Subset` of an async dataset.

    `indices` are read for each sample, because the user may change the indices.
    """

    blocks = None  # the samples of a subset need not be neighbours

    def __init__(self, subset: Subset[object], sources: Sequence[Any]) -> None:
        super().__init__(sources)
        self._subset = subset

    def __len__(self) -> int:
        return len(self._subset)

    def locate(self, index: Any) -> tuple[int, Any]:
        return 0, self._subset.indices[index]


class StackedParts(Composition, AsyncDataset[tuple[object, ...]]):
    """`StackDataset`: tuples of samples, one of each part, fetched concurrently."""

    def __init__(self, sources: Sequence[Any]) -> None:
        refuse_mixes(sources)
        self.sources = sources

    def __len__(self) -> int:
        return len(self.sources[0])

    def over(
        self, sources: Sequence[object], functions: Sequence[Functions]
    ) -> tuple[object, Functions]:
        return StackedParts(sources), (RowFunctions(functions),) if any(functions) else ()

    def _capabilities(self) -> Capabilities:
        agets = any(capabilities(source).agets for source in self.sources)
        return Capabilities(aget=True, agets=agets)

    async def aget(self, index: object) -> tuple[object, ...]:
        return tuple(
            await asyncio.gather(*(source.aget(index) for source in self.sources))
        )

    async def agets(self, indices: Sequence[object]) -> list[tuple[object, ...]]:
        columns = await asyncio.gather(
            *(fetch_all(source, indices) for source in self.sources)
        )
        return list(zip(*columns, strict=True))

    def sample_key(self, index: object) -> str | None:
        keys = [
            key
            for source in self.sources
            if (key := sample_key(source, index)) is not None
        ]
        return " + ".join(keys) or None


def torch_readable(dataset: object, kind: DatasetKind) -> Any:
    """Return the dataset, or an adapter for torch loaders.

    The adapter is returned if a torch loader would not read the dataset correctly.
    """
    if kind.is_iterable:
        if kind is DatasetKind.ITERABLE and isinstance(dataset, IterableDataset):
            return dataset
        return (_SizedStreamAdapter if hasattr(dataset, "__len__") else _StreamAdapter)(
            dataset
        )
    indexable = hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")
    return dataset if indexable else _MapAdapter(dataset)


def without_adapter(dataset: Any) -> Any:
    return dataset._adapted if issubclass(type(dataset), _Adapter) else dataset


class _Adapter:
    """A proxy with the attributes and the class of a dataset.

    Setting an attribute sets the attribute of the dataset.
    """

    def __init__(self, dataset: object) -> None:
        object.__setattr__(self, "_adapted", dataset)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._adapted)

    def __getattr__(self, name: str) -> Any:
        # Not set yet while the adapter is constructed or unpickled.
        if name == "_adapted":
            raise AttributeError(name)
        return getattr(self._adapted, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._adapted, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._adapted, name)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._adapted,)

    def __repr__(self) -> str:
        return repr(self._adapted)


class _MapAdapter(_Adapter, AsyncDataset[object]):
    """A map-style dataset with `__getitem__` added.

    The dataset has only `aget`. `AsyncDataset` supplies `__getitem__` and `__getitems__`.
    """

    async def aget(self, index: object) -> object:
        return await self._adapted.aget(index)

    def __len__(self) -> int:
        return len(self._adapted)


class _StreamAdapter(_Adapter, IterableDataset[object]):
    """A stream that yields each sample once in a torch loader.

    The number of workers does not matter. Streams of shards, and streams made by `split`, divide
    the shards or samples among the workers, also below `map`. Any other async stream is read only
    by the first worker, as headrace's loader reads the stream once: a second iterator need not
    yield the same samples.
    """

    def __init__(self, dataset: object, *, divided: bool = False) -> None:
        super().__init__(dataset)
        # In a spawned worker: True if the parent's reader divides the stream.
        object.__setattr__(self, "_divided", divided)

    def __reduce__(self) -> tuple[object, ...]:
        divided = get_spawning_popen() is not None and reader_divides()
        return functools.partial(type(self), divided=divided), (self._adapted,)

    def __aiter__(self) -> AsyncIterator[object]:
        return aiter(self._adapted)

    def __iter__(self) -> Iterator[object]:
        stream = self._adapted
        with reading_divided(self._divided):
            if not capabilities(stream).aiter:
                return iter(stream)
            source, functions = plan(stream)
            divides = getattr(source, "splits_over_workers", False)
            worker = get_worker_info()
            if divides or worker is None or worker.id == 0:
                return SyncStream(source, functions, whole=not divides)
            return iter(())


class _SizedStreamAdapter(_StreamAdapter):
    def __len__(self) -> int:
        return len(self._adapted)
