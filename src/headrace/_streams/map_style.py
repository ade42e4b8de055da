"""Base classes of async map-style datasets, and compositions of datasets."""

from __future__ import annotations

import asyncio
import bisect
import functools
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, overload

import numpy as np
import torch
from torch.utils.data import Dataset

from headrace._base.array_types import IntArray, index_array
from headrace._base.text import (
    add_note,
    check_function,
    dataset_repr,
    function_name,
    is_async,
    short_repr,
)
from headrace._store.ranges import Ranges, read_ranges
from headrace._streams.blocking import background_loop
from headrace._streams.composition import (
    ConcatComposition,
    MapComposition,
    apply_functions,
    plan,
)
from headrace._streams.kinds import (
    Blocks,
    Capabilities,
    T_co,
    blocks_of,
    capabilities,
    capabilities_by_methods,
    fetch_all,
    sample_key,
    walk_datasets,
)
from headrace.errors import ShardError

U = TypeVar("U")


class AsyncDataset(Dataset[T_co]):
    """A map-style dataset that fetches with `await`.

    Subclasses define `aget` and `__len__`. A loader runs hundreds of `aget` coroutines concurrently
    on an event loop. `aget` should wait for I/O and compute little: CPU work (decoding,
    augmentation) belongs in the loader's `transform` or in `map`.

    Optional methods: `agets(indices)` is for stores that answer many keys in a single request.
    `agets` gets the indices of a whole batch and returns the samples in order.
    `sample_key(index)` names a sample (a path, an object's key) for errors.

    Open connections with `headrace.per_loop`: the connections are then closed when the loader
    closes. See docs/your-own-dataset.md.

    The dataset also works in a stock torch loader: `__getitem__` and `__getitems__` run the async
    methods on a background loop and wait.

    Example:
        >>> class Squares(AsyncDataset[int]):
        ...     def __len__(self): return 4
        ...     async def aget(self, index): return index * index
        >>> Squares()[3]
        9
    """

    async def aget(self, index: Any) -> T_co:
        """Fetch the sample at `index`."""
        # Not an abstract method: the error appears at the first use, with the remedy.
        raise NotImplementedError(
            f"{type(self).__name__} must define `async def aget(self, index)`"
        )

    @overload
    def map(self, fn: Callable[[T_co], Awaitable[U]]) -> AsyncDataset[U]: ...
    @overload
    def map(self, fn: Callable[[T_co], U]) -> AsyncDataset[U]: ...

    def map(self, fn: Callable[[T_co], Any]) -> AsyncDataset[Any]:
        """Apply `fn` to each sample.

        A function runs in the loader's CPU workers. The result is the same as with the loader's
        `transform`. The function also runs in the workers below `headrace.concat` and torch's
        compositions. If your own code calls `aget` of the mapped dataset, the function runs in
        place.

        A coroutine function runs on the loader's event loop, as a part of fetching a sample: for
        example, `fn` fetches the images that a row names. The loader's `concurrency`,
        `memory_budget` and `on_error` apply. Functions of earlier `map` calls then run on the event
        loop too: keep such functions cheap.

        Example:
            >>> class Rows(AsyncDataset[str]):
            ...     def __len__(self): return 2
            ...     async def aget(self, index): return "ab"[index]
            >>> async def fetch(row): return row + ".png"
            >>> Rows().map(fetch).map(str.upper)[1]
            'B.PNG'
        """
        return FetchedDataset(self, fn) if is_async(fn) else MappedDataset(self, fn)

    def __getitem__(self, index: Any) -> T_co:
        source, functions = plan(self)  # functions of `map` run on this thread
        sample: T_co = apply_functions(
            functions, background_loop().run(_aget(source, index))
        )
        return sample

    def __getitems__(self, indices: Sequence[Any]) -> list[T_co]:
        """Fetch the samples at `indices` concurrently.

        Torch's loader calls this method for a batch.
        """
        source, functions = plan(self)
        samples: Sequence[Any] = background_loop().run(fetch_all(source, indices))
        return [apply_functions(functions, each) for each in samples]


async def _aget(dataset: Any, index: Any) -> Any:
    # Called on the loop: `aget` may return any awaitable.
    return await dataset.aget(index)


class RangedDataset(AsyncDataset[T_co]):
    """A map-style dataset of byte ranges.

    Subclasses define `ranges`, `read_range`, `sample_of` and `__len__`. `aget` is derived. If a
    subclass defines `aget`, loaders use only `aget`.

    A loader takes the ranges of all planned batches, reads neighbouring ranges with a single
    request, and passes the bytes of each sample to `sample_of`. If a joined request fails, or
    `sample_of` raises, the sample is fetched again alone with `aget`. The error of `aget` then
    names the sample.

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
        """Return the byte ranges of the samples at `indices`.

        The dataset chooses the numbers of objects.

        Raises:
            IndexError: an index is out of range.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define `def ranges(self, indices)`"
        )

    def range(self, index: Any) -> tuple[int, int, int]:
        """Return object, start and stop of the sample at `index`.

        Raises `IndexError` if there is no sample.
        """
        number, start, stop = (int(column[0]) for column in self.ranges([index]))
        return number, start, stop

    async def read_range(
        self, number: int, start: int, stop: int, *, index: Any = None
    ) -> memoryview:
        """Read the bytes of an object from `start` to `stop`.

        `index` is given if the bytes are for a single sample.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define `async def read_range(self, number, start, stop)`"
        )

    def sample_of(self, index: Any, data: memoryview) -> T_co:
        """Make the sample at `index` from bytes.

        `data` may be part of a larger buffer, so copy anything to keep.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define `def sample_of(self, index, data)`"
        )

    def samples_of(
        self, indices: Sequence[Any], data: Sequence[memoryview]
    ) -> Sequence[T_co] | torch.Tensor:
        """Make the samples of a batch, as sequence or tensor.

        Override this method if a batch is faster to make than sample by sample.
        """
        return list(map(self.sample_of, indices, data))

    def _capabilities(self) -> Capabilities:
        return capabilities_by_methods(self)._replace(
            ranges=type(self).aget is RangedDataset.aget
        )

    async def aget(self, index: Any) -> T_co:
        """Fetch the sample at `index`.

        If `sample_of` raises `ShardError`, the bytes are read again once.
        """
        try:
            return self.sample_of(index, await self.read_bytes(index))
        except ShardError:
            return self.sample_of(index, await self.read_bytes(index))

    async def read_bytes(self, index: Any) -> memoryview:
        """Fetch the bytes of the sample at `index`."""
        number, start, stop = self.range(index)
        if stop <= start:
            return memoryview(b"")
        return await self.read_range(number, start, stop, index=index)

    async def agets(self, indices: Sequence[Any]) -> Sequence[T_co]:
        """Fetch the samples at `indices`, in order.

        Neighbouring samples are read with a single request.
        """
        if not capabilities(self).ranges:
            return list(await asyncio.gather(*map(self.aget, indices)))
        views = await read_ranges(self.ranges(indices), self.read_range)
        return list(map(self.sample_of, indices, views))


def positions(indices: Sequence[Any], length: int) -> IntArray:
    """Return indices as an array of positions from 0.

    Negative indices count from the end. Errors are as for a list.
    """
    found = index_array(indices)
    if found.dtype.kind not in "iu":
        if len(found):
            raise TypeError(f"indices must be whole numbers, but got {indices[0]!r}")
        return np.empty(0, np.int64)
    wrong = (found < -length) | (found >= length)
    if wrong.any():
        raise IndexError(f"index {found[wrong][0]} is out of range for {length} samples")
    return np.where(found < 0, found + length, found).astype(np.int64, copy=False)


class _Applied(AsyncDataset[T_co]):
    """A dataset with a function of `map`."""

    def __init__(self, dataset: object, fn: Callable[[Any], Any]) -> None:
        self.dataset: Any = dataset
        self.fn = fn

    def __repr__(self) -> str:
        return f"{dataset_repr(self.dataset)}.map({function_name(self.fn)})"

    def sample_key(self, index: object) -> str | None:
        """Return the name of the sample at `index`."""
        return sample_key(self.dataset, index)


class MappedDataset(MapComposition, _Applied[T_co]):
    def __init__(self, dataset: object, fn: Callable[[Any], T_co]) -> None:
        check_function("the function of map", fn)
        super().__init__(dataset, fn)

    async def aget(self, index: object) -> T_co:
        """Fetch a sample, and apply the function in place.

        Loaders call `aget` of the inner source instead, see `plan`.
        """
        sample: T_co = self.fn(await self.dataset.aget(index))
        return sample


class FetchedDataset(_Applied[T_co]):
    """A dataset with a coroutine function applied to each row."""

    def __init__(self, dataset: object, fn: Callable[[Any], Awaitable[T_co]]) -> None:
        super().__init__(dataset, fn)
        # `rows` has no functions left. A loader reads the rows of many batches together.
        rows, functions = plan(dataset)
        self._functions: tuple[tuple[bool, Callable[[Any], Any]], ...] = ()
        if isinstance(rows, FetchedDataset):
            rows, self._functions = rows.rows, rows._functions
        self.rows: Any = rows
        self._functions += (*((False, function) for function in functions), (True, fn))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def blocks(self) -> Blocks | None:
        return blocks_of(self.rows)

    def _capabilities(self) -> Capabilities:
        can = capabilities(self.rows)
        return Capabilities(aget=True, agets=can.agets or can.ranges)

    async def fetch(self, row: Any) -> T_co:
        """Apply the functions to a row."""
        sample, function = row, self.fn
        try:
            for awaited, function in self._functions:
                sample = await function(sample) if awaited else function(sample)
        except Exception as error:
            add_note(error, f"headrace: in map({function_name(function)})")
            raise
        fetched: T_co = sample
        return fetched

    async def aget(self, index: object) -> T_co:
        return await self.fetch(await self.rows.aget(index))

    async def agets(self, indices: Sequence[object]) -> list[T_co]:
        return await asyncio.gather(*map(self.fetch, await fetch_all(self.rows, indices)))


class _OfPart(NamedTuple):
    """Samples of a part among some indices."""

    number: int  # of the part
    slots: list[int]  # places of the samples among the indices
    indices: list[object]  # within the part


class InParts:
    """Samples of several parts in succession.

    `_ends` has, for each part, the number of samples up to the end of the part.
    """

    _ends: Any

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def locate(self, index: Any) -> tuple[int, Any]:
        """Return the number of a part, and the index there.

        Raises:
            IndexError: the index is out of range.
        """
        length = len(self)
        if not -length <= index < length:
            raise IndexError(
                f"index {index} is out of range for {length} samples of {self!r}"
            )
        index %= length
        part = bisect.bisect_right(self._ends, index)
        return part, index - int(self._ends[part - 1] if part else 0)


class IndexedParts(InParts, ConcatComposition, AsyncDataset[Any]):
    """Samples of datasets in succession; made by `headrace.concat`.

    Batches are read with `agets` if all parts have `agets`, and byte ranges if all parts have byte
    ranges. The objects of byte ranges are numbered in turn: the first object of each part, then the
    second of each part.
    """

    def __init__(self, sources: Sequence[Any]) -> None:
        self.sources = tuple(sources)
        refuse_mixes(self.sources)
        self._ends = list(itertools.accumulate(map(len, self.sources)))
        # A mapped dataset has no classes: the function may have changed the labels.
        known = {getattr(source, "_classes", None) for source in self.sources} - {None}
        if len(known) > 1:
            what = (
                "the same label means different classes; give folders the same classes="
            )
            raise ValueError(f"{what}: {short_repr(known)}")
        self._classes = next(iter(known), None)

    @functools.cached_property
    def blocks(self) -> Blocks | None:
        """Smallest blocks of the parts, if all have blocks."""
        found: list[Any] = [blocks_of(source) for source in self.sources]
        if None in found:
            return None
        at_once = min(blocks.at_once for blocks in found)
        if all(blocks.borders is None for blocks in found):
            return Blocks(min(blocks.size for blocks in found), at_once)
        parts = zip(found, self.sources, strict=True)
        counts = [blocks.counts(len(source)) for blocks, source in parts]
        content = " ".join(blocks.content for blocks in found)
        joined = Blocks.whole(0, 0, np.concatenate(counts).tolist(), content)
        return joined._replace(
            at_once=at_once, ahead=min(blocks.ahead or at_once for blocks in found)
        )

    def _capabilities(self) -> Capabilities:
        parts = [capabilities(source) for source in self.sources]
        return Capabilities(
            aget=True,
            agets=all(part.agets for part in parts),
            ranges=all(part.ranges for part in parts),
        )

    def _by_part(self, indices: Sequence[object]) -> list[_OfPart]:
        """Group `indices` by part."""
        parts: dict[int, _OfPart] = {}
        for slot, index in enumerate(indices):
            number, inner = self.locate(index)
            part = parts.setdefault(number, _OfPart(number, [], []))
            part.slots.append(slot)
            part.indices.append(inner)
        return list(parts.values())

    async def aget(self, index: object) -> object:
        part, inner = self.locate(index)
        sample = await self.sources[part].aget(inner)
        return (part, sample) if self.numbered else sample

    async def agets(self, indices: Sequence[object]) -> Sequence[object]:
        parts = self._by_part(indices)
        fetches = (fetch_all(self.sources[part.number], part.indices) for part in parts)
        columns: list[Sequence[object]] = await asyncio.gather(*fetches)
        if len(parts) == 1 and not self.numbered:
            return columns[0]
        samples: list[object] = [None] * len(indices)
        for part, column in zip(parts, columns, strict=True):
            for slot, sample in zip(part.slots, column, strict=True):
                samples[slot] = (part.number, sample) if self.numbered else sample
        return samples

    def sample_key(self, index: object) -> str | None:
        part, inner = self.locate(index)
        return sample_key(self.sources[part], inner)

    # Byte ranges, see `RangedDataset`.

    def ranges(self, indices: Sequence[object]) -> Ranges:
        order: list[int] = []
        several: list[Ranges] = []
        for part in self._by_part(indices):
            ranges: Ranges = self.sources[part.number].ranges(part.indices)
            objects = ranges.objects * len(self.sources) + part.number
            order.extend(part.slots)
            several.append(ranges._replace(objects=objects))
        if not several:
            return Ranges.of([])
        return Ranges(*map(np.concatenate, zip(*several, strict=True))).at(
            np.argsort(order)
        )

    async def read_range(
        self, number: int, start: int, stop: int, *, index: object = None
    ) -> memoryview:
        number, part = divmod(number, len(self.sources))
        inner = None if index is None else self.locate(index)[1]
        data: memoryview = await self.sources[part].read_range(
            number, start, stop, index=inner
        )
        return data

    def sample_of(self, index: object, data: memoryview) -> object:
        part, inner = self.locate(index)
        sample = self.sources[part].sample_of(inner, data)
        return (part, sample) if self.numbered else sample

    def samples_of(self, indices: Sequence[object], data: Sequence[memoryview]) -> object:
        if len(self.sources) > 1:
            return list(map(self.sample_of, indices, data))
        return self.sources[0].samples_of(
            [self.locate(index)[1] for index in indices], data
        )


class MixedParts(IndexedParts):
    """A mix of map-style datasets.

    The mix is the concatenation of the datasets, with an order for loaders.

    Attributes:
        names: names of the datasets.
        schedule: pairs of a number of samples of the mix, ascending from 0, and the weights from
            this number on.
        seed: seed of the order; None for the seed of the loader.
        stop: whether an epoch ends with the first dataset to end, or with the last.
    """

    def __init__(
        self,
        sources: Sequence[Any],
        shown: str,
        names: Sequence[str],
        schedule: Sequence[tuple[int, Sequence[float]]],
        seed: int | None,
        stop: Literal["first", "all"],
    ) -> None:
        super().__init__(sources)
        self._shown = shown
        self.names = names
        self.schedule = schedule
        self.seed = seed
        self.stop = stop

    def __repr__(self) -> str:
        return self._shown


def refuse_mixes(sources: Sequence[Any]) -> None:
    """Raise `TypeError` if some datasets contain a mix."""
    for part in itertools.chain.from_iterable(map(walk_datasets, sources)):
        if isinstance(part, MixedParts):
            raise TypeError(
                f"{part!r} as a part of another dataset would lose its weights: mix last, and "
                f"give one mix() all datasets and weights multiplied"
            )
