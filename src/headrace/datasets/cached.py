"""Datasets over stores with their bytes cached on disk, so that from the second epoch on no request is made."""

from __future__ import annotations

import functools
import hashlib
import os
from abc import abstractmethod
from collections.abc import Awaitable
from typing import Any, NamedTuple, TypeVar

from headrace.datasets.base import AsyncDataset, sample_key, tell_epoch
from headrace.errors import ShardError
from headrace.io.cache import DiskCache
from headrace.io.cachefile import Look, lazy_memory

__all__ = ["Cacheable", "CachedDataset", "Extent"]

T_co = TypeVar("T_co", covariant=True)

ENTRY = 40  # bytes: a name and a mark
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
        return CachedDataset(self, DiskCache(folder, max_bytes), version)


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
        >>> dataset = ObjectDataset((folder / "data").as_uri()).cache(folder / "cache")
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
        # What is known of each entry: its name, which takes 2 µs to put together, of some 30 that a sample takes; and
        # beside it, in the same line of the processor's cache, which file was checked.
        known = lazy_memory(ENTRY * (len(self.dataset) + 1))
        self._known, self._marks = known, memoryview(known).cast("q")

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
        dataset, cache = self.dataset, self._cache
        at = ENTRY * index
        name = self._known[at : at + 32] if index >= 0 else b""
        if name == _UNKNOWN or not name:
            extent = dataset.extent(index)
            if extent.length == 0:
                return dataset.sample_of(index, _NOTHING)
            name = self._named(extent)
            at %= ENTRY * len(dataset)
            self._known[at : at + 32] = name
        found = await cache.look(name, self._marks, (at + 32) // 8)
        if isinstance(found, memoryview):
            try:
                sample = dataset.sample_of(index, found)
            except Exception:
                found = cache.reject(name)
            else:
                cache.hit()
                return sample
        fetch, accept = functools.partial(dataset.read_bytes, index), functools.partial(dataset.sample_of, index)
        try:
            return await cache.fetch(name, found, fetch, accept)
        except ShardError:  # damaged on the way, perhaps: read a second time, as without a cache
            return await cache.fetch(name, Look.ABSENT, fetch, accept)

    def _named(self, extent: Extent) -> bytes:
        name = self._begun.copy()
        name.update(ascii(tuple(extent)).encode())
        return name.digest()

    def sample_key(self, index: int) -> str | None:
        """What the dataset calls that sample."""
        return sample_key(self.dataset, index)

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset, if it wants to know."""
        tell_epoch(self.dataset, epoch)


_UNKNOWN = bytes(32)
_NOTHING = memoryview(b"")
