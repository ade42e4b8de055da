"""Datasets over stores with their bytes cached on disk, so that from the second epoch on no request is made."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import os
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from headrace._core.cache.disk_cache import DiskCache
from headrace._core.cache.entry import lazy_memory
from headrace._core.cache.get_many import get_many
from headrace._core.interface.joined_reads import ReadRange, Views
from headrace._core.interface.kinds import Capabilities, capabilities, sample_key
from headrace._core.interface.map_style import AsyncDataset
from headrace._core.interface.ranged import RangedDataset
from headrace._core.interface.traversal import propagate_epoch
from headrace._core.store.ranges import Ranges, read_ranges
from headrace.errors import ShardError

__all__ = ["Cacheable", "CachedDataset", "CachedRanges", "Extent"]

T_co = TypeVar("T_co", covariant=True)

ENTRY = 40  # bytes: a name and the fingerprint of the file that was validated
FORMAT = "headrace 1"  # of names; another would let nothing be found that is there


class Extent(NamedTuple):
    """Which bytes a sample is made of. Two that are equal have the same bytes, on every machine.

    Attributes:
        store: what tells the store from others, without secrets; None for one that is no place, but memory.
        key: the object's.
        version: its entity tag; None where it is not known: then a change of the object is not noticed.
        start: the first byte.
        length: how many; None for all there are.
        checksum: what they must be; None where it is not known.
    """

    store: str | None
    key: str
    version: str | None
    start: int
    length: int | None
    checksum: str | None = None


class Cacheable(AsyncDataset[T_co]):
    """A map-style dataset whose samples are made of bytes that can be cached: define `__len__` and these three.

    `aget` need not be defined: it is `sample_of` of what `read_bytes` gives.
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def extent(self, index: int) -> Extent:
        """Which bytes the sample at `index` is made of; raises `IndexError` if there is none."""

    @abstractmethod
    def read_bytes(self, index: int) -> Awaitable[memoryview]:
        """Fetch them; a coroutine, or what else can be awaited."""

    @abstractmethod
    def sample_of(self, index: int, data: memoryview) -> T_co:
        """Make the sample of them; raises where they are not what they must be."""

    async def aget(self, index: int) -> T_co:
        """Fetch the sample at `index`."""
        return self.sample_of(index, await self.read_bytes(index))

    def cache(  # type: ignore[override]  # which has no options of its own
        self,
        folder: str | os.PathLike[str],
        max_bytes: int | None = None,
        *,
        version: str | int | None = None,
    ) -> CachedDataset[T_co]:
        """This dataset with its bytes cached in a folder of the local disk.

        A sample that is there is read from there; one that is not is fetched once, whichever of the processes that name
        the folder wants it first, and however these end. What `map` and `transform` do is not cached, so put them
        behind: ``dataset.cache(folder).map(fn)``. Several datasets may share a folder.

        An object that is overwritten is another one where the store tells entity tags and the dataset has listed them.
        Where it does not, give another `version`.

        Nothing that goes wrong with the folder costs a sample: a file that is damaged is fetched again, and with a
        full or read-only disk there is a warning and no caching.

        Args:
            folder: where. It is made if it does not exist, for this user alone.
            max_bytes: the room that it may take, in bytes; what was read longest ago makes room. None for no bound.
            version: what tells these bytes from others that a store had under the same name.

        Raises:
            CacheFolderError: the folder belongs to another user, or others may write to it.
            TypeError: a subclass has an `aget` of its own, which would not be called.
            ValueError: the store is in this process's memory, or `max_bytes` is not positive.
            OSError: the folder cannot be made.
        """
        lineage = type(self).__mro__
        first = {name: next(c for c in lineage if name in vars(c)) for name in ("aget", "extent", "sample_of")}
        if lineage.index(first["aget"]) < min(lineage.index(first["extent"]), lineage.index(first["sample_of"])):
            raise TypeError(
                f"{first['aget'].__name__} defines aget, which a cache does not call: it keeps what read_bytes gives, "
                f"and makes samples of it by sample_of. Define that one in place of aget."
            )
        # Joined reads give the bytes of ranges; what another `read_bytes` makes of them cannot be read so.
        joined = capabilities(self).ranges and type(self).read_bytes is RangedDataset.read_bytes  # type: ignore[comparison-overlap]
        return (CachedRanges if joined else CachedDataset)(self, DiskCache(folder, max_bytes), version)


class CachedDataset(AsyncDataset[T_co]):
    """A dataset whose bytes are cached on disk; made by its `cache`.

    Args:
        dataset: where bytes come from, and what makes samples of them.
        cache: where they stay.
        version: part of their names.

    Attributes:
        dataset: as given.

    Example:
        >>> import pathlib, tempfile
        >>> from headrace.datasets.objects import ObjectDataset
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> (folder / "data").mkdir(); _ = (folder / "data/7.bin").write_bytes(b"seven")
        >>> dataset = ObjectDataset(folder / "data").cache(folder / "cache")
        >>> bytes(dataset[0].data)
        b'seven'
    """

    def __init__(self, dataset: Cacheable[T_co], cache: DiskCache, version: str | int | None = None) -> None:
        if len(dataset) and dataset.extent(0).store is None:
            raise ValueError(f"{dataset!r} is in the memory of this process: there is nothing that a disk could save")
        self.dataset = dataset
        self._cache = cache
        self._version = version
        self._restart()

    def _restart(self) -> None:
        self._begun = hashlib.sha256(ascii((FORMAT, self._version)).encode())
        # Of each entry its name, which takes 2 µs to compute, of some 30 µs that a sample takes; and, in the same CPU
        # cache line, the fingerprint of the file that was validated.
        known = lazy_memory(ENTRY * (len(self.dataset) + 1))
        self._known, self._validated = known, memoryview(known).cast("q")

    def __getstate__(self) -> dict[str, Any]:
        return {"dataset": self.dataset, "_cache": self._cache, "_version": self._version}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._restart()

    def __len__(self) -> int:
        return len(self.dataset)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dataset!r}, {self._cache!r})"

    async def aget(self, index: int) -> T_co:
        """Read the sample at `index` from the cache, or fetch it; errors are those of the dataset."""
        dataset = self.dataset
        name, slot = self._entry(index)
        if not name:
            return dataset.sample_of(index, _NOTHING)
        fetch, accept = functools.partial(dataset.read_bytes, index), functools.partial(dataset.sample_of, index)
        try:
            return await self._cache.get(name, fetch, accept, self._validated, slot)
        except ShardError:  # damaged on the way, perhaps: read a second time, as without a cache
            return await self._cache.fetch(name, fetch, accept)

    def _entry(self, index: int) -> tuple[bytes, int]:
        """The entry's name, empty where there are no bytes, and its slot in `_validated`."""
        at = ENTRY * index
        name = self._known[at : at + 32] if index >= 0 else b""
        if name == _UNKNOWN or not name:
            extent = self.dataset.extent(index)
            if extent.length == 0:
                return b"", 0
            name = self._named(extent)
            at %= ENTRY * len(self.dataset)
            self._known[at : at + 32] = name
        return name, (at + 32) // 8

    def _named(self, extent: Extent) -> bytes:
        name = self._begun.copy()
        name.update(ascii(tuple(extent)).encode())
        return name.digest()

    def sample_key(self, index: int) -> str | None:
        """What the dataset calls that sample."""
        return sample_key(self.dataset, index)

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset, if it wants to know."""
        propagate_epoch(self.dataset, epoch)


class CachedRanges(CachedDataset[T_co]):
    """A `RangedDataset` whose bytes are cached on disk: those that are not there are read by joined requests."""

    dataset: Any  # a RangedDataset

    def _capabilities(self) -> Capabilities:
        return Capabilities(aget=True, agets=True, ranges=True, cached_reads=True, set_epoch=True, sample_key=True)

    def ranges(self, indices: Sequence[int]) -> Ranges:
        """Those of the dataset."""
        ranges: Ranges = self.dataset.ranges(indices)
        return ranges

    async def read_range(self, number: int, start: int, stop: int, *, index: Any = None) -> memoryview:
        """Read from the dataset's store, not from the cache."""
        data: memoryview = await self.dataset.read_range(number, start, stop, index=index)
        return data

    def sample_of(self, index: int, data: memoryview) -> T_co:
        """The dataset's sample."""
        sample: T_co = self.dataset.sample_of(index, data)
        return sample

    def samples_of(self, indices: Sequence[int], data: Sequence[memoryview]) -> Any:
        """The dataset's samples."""
        return self.dataset.samples_of(indices, data)

    async def cached_reads(self, indices: Sequence[int]) -> Sequence[memoryview | None]:
        """Read from the disk."""
        names, slots = zip(*map(self._entry, indices), strict=True)
        return await self._cache.read_many(names, self._validated, slots)

    def read_missing(
        self, number: int, ranges: Ranges, indices: Sequence[int], read_range: ReadRange
    ) -> AsyncGenerator[Views, None]:
        """Read and cache each; wait for those that another task or process is reading."""

        async def read(chosen: list[int], others: list[int]) -> list[memoryview]:
            # A range that another task reads is not read as a gap, either: the object's number changes after it.
            borders = np.zeros(len(indices), np.int64)
            borders[others] = 1
            wanted = Ranges(np.cumsum(borders)[chosen], ranges.starts[chosen], ranges.stops[chosen])
            return await read_ranges(wanted, lambda _, start, stop: read_range(number, start, stop))

        return self._read_and_cache(indices, read)

    def _read_and_cache(
        self, indices: Sequence[int], read: Callable[[list[int], list[int]], Awaitable[list[memoryview]]]
    ) -> AsyncGenerator[Views, None]:
        def accept(found: tuple[list[int], list[memoryview]]) -> tuple[list[int], list[memoryview]]:
            good: tuple[list[int], list[memoryview]] = [], []
            for position, view in zip(*found, strict=True):
                try:
                    self.sample_of(indices[position], view)
                except Exception:  # `aget` reads it again by itself, and its error names the sample
                    continue
                good[0].append(position)
                good[1].append(view)
            return good

        return get_many(self._cache, [self._entry(index)[0] for index in indices], read, accept)

    async def agets(self, indices: Sequence[int]) -> list[T_co]:
        """Fetch the samples at `indices`, in order; those that are not cached by joined requests."""
        views = list(await self.cached_reads(indices)) if len(indices) else []
        ranges = self.ranges(indices)
        missing = [slot for slot, view in enumerate(views) if view is None and ranges.stops[slot] > ranges.starts[slot]]

        async def read(chosen: list[int], _: list[int]) -> list[memoryview]:
            return await read_ranges(ranges.at(np.asarray([missing[each] for each in chosen])), self.read_range)

        with contextlib.suppress(Exception):  # `aget` reads what is still missing, and its error names the sample
            async with contextlib.aclosing(self._read_and_cache([indices[slot] for slot in missing], read)) as groups:
                async for positions, found in groups:
                    for position, view in zip(positions, found, strict=True):
                        views[missing[position]] = view
        return list(await asyncio.gather(*map(self._sample, indices, views)))

    async def _sample(self, index: int, view: memoryview | None) -> T_co:
        if view is not None:
            with contextlib.suppress(Exception):  # as above
                return self.sample_of(index, view)
        return await self.aget(index)


_UNKNOWN = bytes(32)
_NOTHING = memoryview(b"")
