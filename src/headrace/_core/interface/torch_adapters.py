"""Adapters for datasets that torch's own loader cannot read; `loader.dataset` is one of them for such a dataset.

Lightning, Ray Train and accelerate ask `isinstance(loader.dataset, IterableDataset)`, and some build a plain torch
loader of it. An adapter has the class that they ask for, and yields every sample once in such a loader.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator
from multiprocessing.context import get_spawning_popen
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from headrace._core.interface.background_loop import SyncStream
from headrace._core.interface.fetch_plan import Functions, plan
from headrace._core.interface.iterable_style import (
    FilteredStream,
    MappedIterableDataset,
    RepeatedStream,
    ShuffledStream,
)
from headrace._core.interface.kinds import DatasetKind, capabilities
from headrace._core.interface.map_style import AsyncDataset
from headrace._core.interface.resumable import State
from headrace._core.rankinfo import reader_divides, reading_divided
from headrace._core.torchcompat.private import outside_workers


def torch_readable(dataset: object, kind: DatasetKind) -> Any:
    """The dataset itself if a torch loader reads it correctly; else an adapter that a torch loader can read."""
    if kind.is_iterable:
        if kind is DatasetKind.ITERABLE and isinstance(dataset, IterableDataset):
            return dataset
        return (_SizedStreamAdapter if hasattr(dataset, "__len__") else _StreamAdapter)(dataset)
    indexable = hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")
    return dataset if indexable else _MapAdapter(dataset)


def without_adapter(dataset: Any) -> Any:
    """The dataset that an adapter wraps; any other dataset itself."""
    return dataset._adapted if issubclass(type(dataset), _Adapter) else dataset


class _Adapter:
    """A proxy with a dataset's attributes and its class; attributes are set on the dataset."""

    def __init__(self, dataset: object) -> None:
        object.__setattr__(self, "_adapted", dataset)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._adapted)

    def __getattr__(self, name: str) -> Any:
        if name == "_adapted":  # not set yet while the adapter is constructed or unpickled
            raise AttributeError(name)
        return getattr(self._adapted, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._adapted, name, value)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._adapted,)

    def __repr__(self) -> str:
        return repr(self._adapted)

    def __str__(self) -> str:
        return str(self._adapted)


class _MapAdapter(_Adapter, AsyncDataset[object]):
    """A map-style dataset that has only `aget`, with `__getitem__` and `__getitems__` of `AsyncDataset`."""

    async def aget(self, index: object) -> object:
        return await self._adapted.aget(index)

    def __len__(self) -> int:
        return len(self._adapted)


class _StreamAdapter(_Adapter, IterableDataset[object]):
    """A stream that yields each sample once, for any number of workers of a torch loader.

    Streams of shards, and those made by `split`, divide themselves among the workers. Any other async stream is read by
    the first worker only, as headrace's loader reads it once: a second iterator need not yield the same samples.
    """

    def __init__(self, dataset: object, *, divided: bool = False) -> None:
        super().__init__(dataset)
        object.__setattr__(self, "_divided", divided)  # in a spawned worker: whether the parent's reader divides it

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
            if _splits_over_workers(stream):
                return SyncStream(*plan(stream))
            worker = get_worker_info()
            return _OnlyReader(*plan(stream)) if worker is None or worker.id == 0 else iter(())


class _SizedStreamAdapter(_StreamAdapter):
    def __len__(self) -> int:
        return len(self._adapted)


class _OnlyReader(SyncStream[object]):
    """Hides the torch worker from a stream, so that the stream yields all samples and not a worker's part."""

    def __init__(self, source: Any, functions: Functions) -> None:
        with outside_workers():
            super().__init__(source, functions)

    def __next__(self) -> object:
        with outside_workers():
            return super().__next__()

    def load_state_dict(self, state: State) -> None:
        with outside_workers():
            super().load_state_dict(state)


def _splits_over_workers(stream: object) -> bool:
    while isinstance(stream, MappedIterableDataset | FilteredStream | RepeatedStream | ShuffledStream):
        stream = stream.dataset
    return getattr(stream, "splits_over_workers", False)
