"""The base class of async map-style datasets, and the datasets that its methods make."""

from __future__ import annotations

import copy
import os
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, TypeVar

from torch.utils.data import Dataset

from headrace._core.interface.background_loop import read_blocking
from headrace._core.interface.fetch_plan import Composition, Functions, MapComposition, apply_functions, plan
from headrace._core.interface.joined_reads import ReadRange, Views
from headrace._core.interface.kinds import Capabilities, capabilities, check_times, fetch_all, sample_key
from headrace._core.interface.traversal import propagate_epoch
from headrace._core.store.ranges import Ranges
from headrace._core.text import dataset_repr, function_name

T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")


class AsyncDataset(Dataset[T_co]):
    """A map-style dataset that fetches with `await`: subclass it, define `aget` and `__len__`.

    A loader runs `aget` as a coroutine on its event loop, hundreds concurrently. It should wait for I/O and compute
    little: CPU work (decoding, augmentation) belongs in the loader's `transform` or in `map`.

    Optional methods: `agets(indices)` for stores that answer many keys in one request; it gets the indices of a whole
    batch and returns their samples in order. `sample_key(index)` names a sample (a path, an object's key) for errors.

    A dataset that is an async context manager is entered before its first `aget`, on the loop that it is read on, and
    exited when the loader closes: open and close connections there. See docs/connections.md.

    The dataset also works in a stock torch loader: `__getitem__` and `__getitems__` run the async methods on a
    background loop and wait.

    Example:
        >>> class Squares(AsyncDataset[int]):
        ...     def __len__(self): return 4
        ...     async def aget(self, index): return index * index
        >>> Squares()[3]
        9
    """

    async def aget(self, index: Any) -> T_co:
        """Fetch the sample at `index`."""
        # Not an abstract method: the error is raised where it is used, with the remedy.
        raise NotImplementedError(f"{type(self).__name__} must define `async def aget(self, index)`")

    def map(self, fn: Callable[[T_co], U]) -> MappedDataset[U]:
        """This dataset with `fn` applied to each sample, in the loader's CPU workers; the same as its `transform`.

        It runs there also below `take`, `repeat`, `headrace.concat` and torch's compositions. Only code of yours that
        calls `aget` of the mapped dataset runs `fn` in place.
        """
        return MappedDataset(self, fn)

    def take(self, count: int) -> FirstSamples[T_co]:
        """The first `count` samples of this dataset; all of them if it has fewer.

        Raises:
            ValueError: `count` is negative.
        """
        return FirstSamples(self, count)

    def repeat(self, times: int) -> RepeatedSamples[T_co]:
        """This dataset several times in one epoch: each sample has `times` indices.

        For an endless epoch, give the loader an endless sampler, as
        ``RandomSampler(dataset, replacement=True, num_samples=10**12)``.

        Args:
            times: number of repetitions.

        Raises:
            ValueError: `times` is negative.

        Example:
            >>> from headrace.testing import SlowDataset
            >>> len(SlowDataset(3, 0.0).repeat(4)), SlowDataset(3, 0.0).repeat(4)[10]
            (12, 1)
        """
        return RepeatedSamples(self, times)

    def cache(self, folder: str | os.PathLike[str], **options: Any) -> Any:
        """This dataset with its bytes cached on disk; only for datasets over stores, see `headrace.datasets.cached`.

        Raises:
            TypeError: this dataset has no bytes to cache.
        """
        raise TypeError(
            f"{type(self).__name__} cannot be cached: cache() keeps the bytes of an ObjectDataset, a TokenDataset or "
            f"TarDataset.index(...). Call it on one of these, before map, take or concat: "
            f"dataset.cache(folder).map(fn)."
        )

    def __getitem__(self, index: Any) -> T_co:
        return read_blocking(self, lambda: self.aget(index))

    def __getitems__(self, indices: Sequence[Any]) -> list[T_co]:
        """The samples at `indices`, fetched concurrently; torch's loader calls this for a batch."""
        return read_blocking(self, lambda: fetch_all(self, indices))


class ComposedDataset(Composition, AsyncDataset[T_co]):
    """A map-style dataset made of others; its functions run on the thread that asks for a sample, not on a loop."""

    def set_epoch(self, epoch: int) -> None:
        for part in self.parts:
            propagate_epoch(part, epoch)

    def __getitems__(self, indices: Sequence[object]) -> list[T_co]:
        source, functions = plan(self)
        samples = read_blocking(source, lambda: fetch_all(source, indices))
        return [apply_functions(functions, sample) for sample in samples]


def get_item(dataset: Any, index: object) -> Any:
    """One sample, read on the background loop; functions of `map` run on this thread."""
    if isinstance(dataset, AsyncDataset):
        return dataset[index]
    return read_blocking(dataset, lambda: dataset.aget(index))


class MappedDataset(MapComposition, ComposedDataset[T_co]):
    """A map-style dataset with a function applied to each sample; made by `AsyncDataset.map`."""

    def __init__(self, dataset: object, fn: Callable[[Any], T_co]) -> None:
        self.dataset = dataset
        self.fn = fn

    def __repr__(self) -> str:
        return f"{dataset_repr(self.dataset)}.map({function_name(self.fn)})"

    def __len__(self) -> int:
        return len(self.dataset)

    async def aget(self, index: object) -> T_co:
        """Fetch a sample, and apply the function in place; loaders call `aget` of the inner source, see `plan`."""
        sample: T_co = self.fn(await self.dataset.aget(index))
        return sample

    def __getitem__(self, index: object) -> T_co:
        sample: T_co = self.fn(get_item(self.dataset, index))
        return sample

    def sample_key(self, index: object) -> str | None:
        return sample_key(self.dataset, index)

    def _capabilities(self) -> Capabilities:
        return Capabilities(aget=True, set_epoch=True, sample_key=True)


class Selection(ComposedDataset[T_co]):
    """Samples of one dataset, found by an index map; reads batches and byte ranges as the dataset does."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    @abstractmethod
    def inner_index(self, index: Any) -> object:
        """The index in `dataset`; raises `IndexError` if it is out of range."""

    @property
    def parts(self) -> Sequence[object]:
        return (self.dataset,)

    def over(self, sources: Sequence[object], functions: Sequence[Functions]) -> tuple[object, Functions]:
        if sources[0] is self.dataset:
            return self, functions[0]
        other = copy.copy(self)
        other.dataset = sources[0]
        return other, functions[0]

    def _capabilities(self) -> Capabilities:
        return capabilities(self.dataset)._replace(aget=True, set_epoch=True, sample_key=True)

    def _inner_indices(self, indices: Sequence[object]) -> list[object]:
        return [self.inner_index(index) for index in indices]

    async def aget(self, index: object) -> T_co:
        sample: T_co = await self.dataset.aget(self.inner_index(index))
        return sample

    async def agets(self, indices: Sequence[object]) -> list[T_co]:
        return await fetch_all(self.dataset, self._inner_indices(indices))

    def __getitem__(self, index: object) -> T_co:
        sample: T_co = get_item(self.dataset, self.inner_index(index))
        return sample

    def sample_key(self, index: object) -> str | None:
        return sample_key(self.dataset, self.inner_index(index))

    # Byte ranges, see `JoinedReads`.

    def ranges(self, indices: Sequence[object]) -> Ranges:
        ranges: Ranges = self.dataset.ranges(self._inner_indices(indices))
        return ranges

    async def read_range(self, number: int, start: int, stop: int, *, index: object = None) -> memoryview:
        data: memoryview = await self.dataset.read_range(
            number, start, stop, index=None if index is None else self.inner_index(index)
        )
        return data

    def sample_of(self, index: object, data: memoryview) -> object:
        return self.dataset.sample_of(self.inner_index(index), data)

    def samples_of(self, indices: Sequence[object], data: Sequence[memoryview]) -> object:
        return self.dataset.samples_of(self._inner_indices(indices), data)

    async def cached_reads(self, indices: Sequence[object]) -> Sequence[memoryview | None]:
        views: Sequence[memoryview | None] = await self.dataset.cached_reads(self._inner_indices(indices))
        return views

    def read_missing(
        self, number: int, ranges: Ranges, indices: Sequence[object], read_range: ReadRange
    ) -> AsyncGenerator[Views, None]:
        views: AsyncGenerator[Views, None] = self.dataset.read_missing(
            number, ranges, self._inner_indices(indices), read_range
        )
        return views


class FirstSamples(Selection[T_co]):
    """The first samples of a map-style dataset; made by `take`."""

    def __init__(self, dataset: Any, count: int) -> None:
        if count < 0:
            raise ValueError(f"count={count} must not be negative")
        super().__init__(dataset)
        self._length = min(count, len(dataset))

    def __repr__(self) -> str:
        return f"{dataset_repr(self.dataset)}.take({self._length})"

    def __len__(self) -> int:
        return self._length

    def inner_index(self, index: int) -> int:
        if not -self._length <= index < self._length:
            raise IndexError(f"index {index} is out of range for the first {self._length} samples")
        return index % self._length


class RepeatedSamples(Selection[T_co]):
    """A map-style dataset several times; made by `repeat`."""

    def __init__(self, dataset: object, times: int) -> None:
        check_times(times)
        super().__init__(dataset)
        self._times = times

    def __repr__(self) -> str:
        return f"{dataset_repr(self.dataset)}.repeat({self._times})"

    def __len__(self) -> int:
        return self._times * len(self.dataset)

    def inner_index(self, index: int) -> int:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} samples, each of them {self._times} times")
        return index % len(self.dataset)
