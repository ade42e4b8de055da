"""Datasets of bytes of a store, with a cache on disk."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from abc import abstractmethod
from collections.abc import Awaitable, Sequence
from typing import Any, NamedTuple

import numpy as np

from headrace._base.array_types import IntArray
from headrace._ranks.distributed import RankChoice
from headrace._shards.discovery import Shard
from headrace._shards.reading import names_digest
from headrace._shards.unpacked import loaded
from headrace._store.disk_cache import DiskCache, secure_folder
from headrace._streams.kinds import (
    BYTES_AT_ONCE,
    Blocks,
    Capabilities,
    T_co,
    blocks_of,
    capabilities,
    sample_key,
)
from headrace._streams.map_style import AsyncDataset, InParts, RangedDataset, positions
from headrace.datasets.index_stream import IndexStream

NAME_SIZE = 16  # bytes
NAME_FORMAT = "headrace 2"  # another format would invalidate all existing entries
# Bytes. At most `LARGEST_GAP`: two requests of one plan share no block.
CACHE_BLOCK = 64 << 10
_ASKED = 256  # samples from which the size of blocks is estimated


class Extent(NamedTuple):
    """The place and version of a range of bytes.

    Equal extents have equal bytes, on every machine.

    Attributes:
        store: identifier of the store, without secrets; None for a store in this process's memory.
        key: key of the object.
        version: entity tag of the object, or the time of the last modification. With None, a
            change of the object is not noticed.
        start: offset of the first byte.
        length: number of bytes; None for all to the end.
        checksum: expected checksum; None if unknown.
    """

    store: str | None
    key: str
    version: str | None
    start: int
    length: int | None
    checksum: str | None = None


class Cacheable(AsyncDataset[T_co]):
    """Base of map-style datasets with a cache on disk.

    Define `__len__`, `extent`, `read_bytes` and `sample_of`. The class derives `aget`.
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def extent(self, index: int) -> Extent:
        """Return the extent of the sample at `index`.

        Raises:
            IndexError: the index is out of range.
        """

    @abstractmethod
    def read_bytes(self, index: int) -> Awaitable[memoryview]:
        """Fetch the bytes of the sample at `index`."""

    @abstractmethod
    def sample_of(self, index: int, data: memoryview) -> T_co:
        """Make the sample at `index` from bytes.

        Damaged bytes raise an error.
        """

    async def aget(self, index: int) -> T_co:
        """Fetch the sample at `index`.

        As with a list, negative indices count from the end.

        Raises:
            IndexError: `index` is out of range.
            StoreError: the store refused or failed, on every attempt. Subclasses:
                `ObjectNotFoundError`, `ObjectChangedError` since the listing, `ChecksumError` and
                `StoreUnreachableError`.
        """
        return self.sample_of(index, await self.read_bytes(index))

    def cache(
        self,
        folder: str | os.PathLike[str],
        max_bytes: int | None = None,
        *,
        version: str | int | None = None,
    ) -> CachedDataset[T_co]:
        """Return this dataset with a cache on disk.

        The cache keeps objects, or blocks of 64 KiB of shards. All processes with the same folder
        share the cache. Two processes may fetch the same bytes at the same time. Several datasets
        may share a folder. Results of `map` and `transform` are not cached: apply functions after
        `cache`, as in ``dataset.cache(folder).map(fn)``.

        An overwritten object is fetched again if the store reports entity tags and the dataset has
        listed the tags. Otherwise give another `version`. Give a `version` too where credentials
        decide on the bytes: credentials and headers such as `Authorization` or `Cookie` do not
        separate entries. Other `default_headers` do.

        A problem with the folder loses no sample. Damaged entries are fetched again. On a full or
        read-only disk a warning is given, and nothing is cached.

        Args:
            folder: path of the folder; created if missing, for this user only.
            max_bytes: size limit in bytes; the oldest entries are deleted first. A log of up to
                16 MiB is beside the entries. None for no limit.
            version: distinguishes the bytes from earlier bytes under the same keys.

        Raises:
            CacheFolderError: the folder belongs to another user, or others may write there.
            TypeError: a subclass defines `aget`, but a cache does not call `aget`.
            ValueError: the store is in this process's memory, or `max_bytes` is not positive.
            OSError: the folder cannot be created.
        """
        self._refuse_own_aget("a cache")
        # Bytes from the `read_bytes` of a subclass may differ from the bytes of the ranges.
        reads: Any = type(self).read_bytes
        joined = capabilities(self).ranges and reads is RangedDataset.read_bytes
        kind: Any = _CachedShards if joined else CachedDataset
        cache = DiskCache(folder, max_bytes)
        secure_folder(cache.folder)
        cached: CachedDataset[T_co] = kind(self, cache, version)
        return cached

    def _refuse_own_aget(self, what: str) -> None:
        """Raise `TypeError` if a subclass defines `aget`, for what would not call the method."""
        kind = type(self)
        if kind.aget not in (Cacheable.aget, RangedDataset.aget):
            raise TypeError(
                f"{kind.__name__} defines aget, which {what} does not call; "
                "define sample_of instead"
            )


class CachedDataset(AsyncDataset[T_co]):
    """A dataset with a cache on disk.

    Attributes:
        dataset: the dataset without a cache; fetches bytes and makes samples.

    Example:
        >>> import pathlib, tempfile
        >>> from headrace.datasets.objects import ObjectDataset
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> (folder / "data").mkdir(); _ = (folder / "data/7.bin").write_bytes(b"seven")
        >>> dataset = ObjectDataset(folder / "data").cache(folder / "cache")
        >>> bytes(dataset[0].data)
        b'seven'
    """

    def __init__(
        self, dataset: Cacheable[T_co], cache: DiskCache, version: str | int | None = None
    ) -> None:
        if len(dataset) and dataset.extent(0).store is None:
            raise ValueError(
                f"{dataset!r} is in the memory of this process: a cache on disk would not be faster"
            )
        self.dataset = dataset
        self._cache = cache
        self._version = version
        self._classes = getattr(dataset, "_classes", None)

    def __len__(self) -> int:
        return len(self.dataset)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dataset!r}, {self._cache!r})"

    async def aget(self, index: int) -> T_co:
        """Read a sample from the cache or the store.

        Errors are errors of the dataset.
        """
        dataset = self.dataset
        extent = dataset.extent(index)
        if extent.length == 0:
            return dataset.sample_of(index, memoryview(b""))
        name = self._name_of(extent)
        (data,) = await self._cache.read_many([name])
        if data is not None:
            # Fresh bytes will show whether the cache was at fault.
            with contextlib.suppress(Exception):
                return dataset.sample_of(index, data)
            await self._cache.discard([name])

        async def fetch() -> tuple[memoryview, T_co]:
            data = await dataset.read_bytes(index)
            return data, dataset.sample_of(index, data)

        sample: T_co
        data, sample = await loaded(fetch)
        # Before the sample is given: the last sample of an epoch is cached too.
        await self._cache.write([name], [data])
        return sample

    def _name_of(self, extent: Extent) -> bytes:
        text = ascii((NAME_FORMAT, self._version)) + ascii(tuple(extent))
        return hashlib.blake2b(text.encode(), digest_size=NAME_SIZE).digest()

    def sample_key(self, index: int) -> str | None:
        """Return the name of the sample in the dataset."""
        return sample_key(self.dataset, index)

    @property
    def blocks(self) -> Blocks | None:
        """Blocks of the dataset for a random order."""
        return blocks_of(self.dataset)


class _CachedShards(CachedDataset[T_co]):
    """Samples of shards, with a cache of blocks.

    A block is the bytes of a shard between two multiples of `CACHE_BLOCK`. Datasets of the same
    shards share blocks.
    """

    dataset: RangedShards[T_co]

    def __init__(
        self,
        dataset: RangedShards[T_co],
        cache: DiskCache,
        version: str | int | None = None,
    ) -> None:
        super().__init__(dataset, cache, version)
        self.ranges, self.sample_of = dataset.ranges, dataset.sample_of
        self.samples_of = dataset.samples_of
        # For each shard the common part of the names of blocks.
        self._shards: dict[int, bytes] = {}

    def _capabilities(self) -> Capabilities:
        return Capabilities(aget=True, ranges=True)

    async def aget(self, index: int) -> T_co:
        """Read the sample at `index` from blocks; fetch missing blocks."""
        number, start, stop = self.dataset.range(index)
        data = memoryview(b"")
        if stop > start:
            data = await self.read_range(number, start, stop, index=index)
        try:
            return self.sample_of(index, data)
        except Exception:  # fresh bytes will show whether the cache was at fault
            sample: T_co = await self.dataset.aget(index)
        await self._cache.discard(self._blocks(number, start, stop))
        # Other processes will find fresh blocks.
        await self.read_range(number, start, stop)
        return sample

    def _blocks(self, number: int, start: int, stop: int) -> list[bytes]:
        """Return the names of the blocks of a byte range."""
        if (shard := self._shards.get(number)) is None:
            extent = self.dataset.extent_of(number, 0, self.dataset.shard_size(number))
            shard = self._shards[number] = self._name_of(extent)[4:]
        blocks = range(start // CACHE_BLOCK, -(-stop // CACHE_BLOCK))
        return [block.to_bytes(4, "little") + shard for block in blocks]

    async def read_range(
        self, number: int, start: int, stop: int, *, index: Any = None
    ) -> memoryview:
        """Read bytes of a shard from blocks; fetch missing blocks."""
        if stop > (size := self.dataset.shard_size(number)):  # an error of the dataset
            return await self.dataset.read_range(number, start, stop, index=index)
        names = self._blocks(number, start, stop)
        views: Any = await self._cache.read_many(names)
        missing = [place for place, view in enumerate(views) if view is None]
        begin = start % CACHE_BLOCK
        if missing:
            # One request, from the first missing block to the last.
            low, high = missing[0], missing[-1] + 1
            first = start - begin + low * CACHE_BLOCK
            last = min(start - begin + high * CACHE_BLOCK, size)
            fetched = await self.dataset.read_range(number, first, last, index=index)
            if len(fetched) != last - first:
                raise ValueError(
                    "read_range gave another number of bytes than were asked for"
                )
            views[low:high] = [
                fetched[place : place + CACHE_BLOCK]
                for place in range(0, len(fetched), CACHE_BLOCK)
            ]
            await self._cache.write(names[low:high], views[low:high])
        data = views[0] if len(views) == 1 else memoryview(b"".join(views))
        return data[begin : begin + stop - start].toreadonly()


class IndexedShards(InParts, AsyncDataset[T_co]):
    """Base of map-style datasets of shards.

    The samples are in the order of the shards. Define `sample_key` and `blocks`.

    Args:
        shards: the shards, or parts of shards, with size and version.
        counts: number of samples in each shard.
    """

    blocks: Any

    def __init__(self, shards: Sequence[Shard], counts: Sequence[int] | IntArray) -> None:
        self._shards = shards
        self._ends = np.cumsum(counts, dtype=np.int64)
        self._firsts = self._ends - np.asarray(counts, np.int64)

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of samples in each shard."""
        return tuple(np.diff(self._ends, prepend=0).tolist())

    @functools.cached_property
    def _digest(self) -> str:
        """Checksum of the shards' names, sizes and numbers of samples."""
        sizes = (
            None if shard.head is None else shard.head.size for shard in self._shards
        )
        names = (shard.name for shard in self._shards)
        return names_digest(map(str, zip(names, sizes, self.counts, strict=True)))

    def stream(
        self,
        *,
        shuffle: bool = False,
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> IndexStream[T_co]:
        """Return the same samples as a stream, for operations of streams.

        All ranks get the same number of samples.

        Args:
            shuffle: whether the order is random, in blocks, like the order in a loader.
            seed: seed of the order, combined with the epoch; None for the seed of the loader, or 0
                without a loader.
            rank: rank of the reader; by default the rank of `headrace.get_rank_info` at the start
                of reading.
            world_size: number of ranks.

        Raises:
            TypeError: a subclass defines `aget`, but a stream does not call `aget`.

        Example:
            >>> dataset = TokenDataset("s3://bucket/tokens", 2048)  # doctest: +SKIP
            >>> dataset.stream(shuffle=True).take(100)  # doctest: +SKIP
        """
        if isinstance(self, Cacheable):
            self._refuse_own_aget("a stream")
        return IndexStream(self, RankChoice(rank, world_size), shuffle, seed)

    def _rows(self, indices: Sequence[int]) -> tuple[IntArray, IntArray, IntArray]:
        """Return shard numbers, rows in shards, and positions in the dataset.

        Raises:
            IndexError: an index is out of range.
        """
        places = positions(indices, len(self))
        shards = np.searchsorted(self._ends, places, side="right")
        return shards, places - self._firsts[shards], places


class RangedShards(IndexedShards[T_co], RangedDataset[T_co], Cacheable[T_co]):
    """Base of map-style datasets of byte ranges of shards.

    Define `ranges` and `sample_of`.
    """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._shards)} shards, {len(self)} samples)"

    def sample_key(self, index: int) -> str:
        """Return key and byte range of the sample at `index`."""
        number, start, stop = self.range(index)
        return f"{self._shards[number].key}[{start}:{stop}]"

    @functools.cached_property
    def blocks(self) -> Blocks:
        """Sizes of blocks for a random order, estimated from some samples."""
        some = range(0, len(self), -(-len(self) // _ASKED) or 1)
        ranges = self.ranges(some)
        nbytes = int((ranges.stops - ranges.starts).sum())
        return Blocks.within(BYTES_AT_ONCE, nbytes, len(some))

    def extent(self, index: int) -> Extent:
        """Return the extent of the sample at `index`.

        Raises:
            IndexError: the index is out of range.
        """
        return self.extent_of(*self.range(index))

    def extent_of(self, number: int, start: int, stop: int) -> Extent:
        """Return the extent of a range of a shard."""
        shard = self._shards[number]
        version = None if shard.head is None else shard.head.version
        return Extent(shard.store.store_id, shard.key, version, start, stop - start)

    def shard_size(self, number: int) -> int:
        """Return the number of readable bytes of a shard."""
        return self._shards[number].size

    async def read_range(
        self, number: int, start: int, stop: int, *, index: Any = None
    ) -> memoryview:
        """Read bytes of a shard.

        Raises:
            StoreError: a request failed, or the shard has changed since it was opened.
        """
        return await self._shards[number].read(start, stop, index=index)
