"""Datasets whose samples are bytes of a store, and the same with these bytes cached on a local disk."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from abc import abstractmethod
from collections.abc import Awaitable, Sequence
from typing import Any, NamedTuple

import numpy as np

from headrace._core.array_types import IntArray
from headrace._core.ranks.distributed import RankChoice
from headrace._core.shards.discovery import Shard
from headrace._core.store.disk_cache import DiskCache
from headrace._core.store.ranges import Ranges, read_ranges
from headrace._core.streams.kinds import (
    BYTES_AT_ONCE,
    Blocks,
    Capabilities,
    T_co,
    blocks_of,
    capabilities,
    propagate_epoch,
    sample_key,
)
from headrace._core.streams.map_style import AsyncDataset, RangedDataset, positions
from headrace.datasets.index_stream import IndexStream
from headrace.errors import ShardError

__all__ = ["Cacheable", "CachedDataset", "Extent", "IndexedShards", "RangedShards"]


NAME_SIZE = 16  # bytes
NAME_FORMAT = "headrace 2"  # another one would invalidate all existing entries
_UNKNOWN = bytes(NAME_SIZE)
CACHE_BLOCK = 64 << 10  # bytes; at most `LARGEST_GAP`, so that requests of one plan share no block
_ASKED = 256  # samples whose bytes decide on the sizes of blocks


class Extent(NamedTuple):
    """The bytes that a sample is made of. Equal extents have equal bytes, on every machine.

    Attributes:
        store: identifier of the store, without secrets; None for a store in this process's memory.
        key: key of the object.
        version: entity tag of the object, or the time of its last modification; None if unknown: a
            change of the object is not noticed then.
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
    """A map-style dataset whose samples are made of bytes that can be cached.

    Define `__len__`, `extent`, `read_bytes` and `sample_of`; `aget` is derived from them.
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def extent(self, index: int) -> Extent:
        """The bytes that the sample at `index` is made of; raises `IndexError` if it is out of range."""

    @abstractmethod
    def read_bytes(self, index: int) -> Awaitable[memoryview]:
        """Fetch the bytes of the sample at `index`."""

    @abstractmethod
    def sample_of(self, index: int, data: memoryview) -> T_co:
        """Make the sample at `index` of its bytes; raises if they are damaged."""

    async def aget(self, index: int) -> T_co:
        """Fetch the sample at `index`."""
        return self.sample_of(index, await self.read_bytes(index))

    def cache(
        self,
        folder: str | os.PathLike[str],
        max_bytes: int | None = None,
        *,
        version: str | int | None = None,
    ) -> CachedDataset[T_co]:
        """This dataset with its bytes cached in a folder of the local disk.

        All processes that use the folder read what any of them has fetched; two that want a sample
        at the same time fetch it twice. Results of `map` and `transform` are not cached: apply them
        after it, as ``dataset.cache(folder).map(fn)``. Several datasets may share a folder.

        An object that is overwritten is fetched again if the store reports entity tags and the
        dataset has listed them. Otherwise give another `version`; also where credentials decide
        which bytes come, since neither they nor headers such as `Authorization` or `Cookie`
        separate entries. Other `default_headers` do.

        Problems with the folder lose no sample: what is damaged is fetched again, and a full or
        read-only disk causes a warning and no caching.

        Args:
            folder: path of the folder; created if it does not exist, for this user only.
            max_bytes: size limit in bytes; what was written first is deleted first, a 64th at a
                time. None for no limit.
            version: distinguishes these bytes from earlier ones under the same keys.

        Raises:
            CacheFolderError: the folder belongs to another user, or others may write to it.
            TypeError: a subclass defines `aget`, which would not be called.
            ValueError: the store is in this process's memory, or `max_bytes` is not positive.
            OSError: the folder cannot be created.
        """
        lineage = type(self).__mro__
        first = {
            name: next(c for c in lineage if name in vars(c))
            for name in ("aget", "extent", "sample_of")
        }
        if lineage.index(first["aget"]) < min(
            lineage.index(first["extent"]), lineage.index(first["sample_of"])
        ):
            raise TypeError(
                f"{first['aget'].__name__} defines aget, which a cache does not call: it keeps what read_bytes "
                f"returns, and makes samples of it with sample_of. Define sample_of instead of aget."
            )
        # A subclass may change in `read_bytes` what the ranges have.
        reads: Any = type(self).read_bytes
        joined = capabilities(self).ranges and reads is RangedDataset.read_bytes
        kind: Any = CachedShards if joined else CachedDataset
        cached: CachedDataset[T_co] = kind(self, DiskCache(folder, max_bytes), version)
        return cached


class CachedDataset(AsyncDataset[T_co]):
    """A dataset whose bytes are cached on disk; made by its `cache`. A loader reads missing ranges by joined requests.

    Attributes:
        dataset: the dataset that fetches bytes and makes samples of them.

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
                f"{dataset!r} is in the memory of this process: a cache on disk would not make it faster"
            )
        self.dataset = dataset
        self._cache = cache
        self._version = version
        self._classes = getattr(dataset, "_classes", None)
        self._hash = hashlib.blake2b(ascii((NAME_FORMAT, version)).encode(), digest_size=NAME_SIZE)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.dataset, self._cache, self._version)

    def __len__(self) -> int:
        return len(self.dataset)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dataset!r}, {self._cache!r})"

    async def aget(self, index: int) -> T_co:
        """Read the sample at `index` from the cache, or fetch it; errors are those of the dataset."""
        dataset = self.dataset
        name = self._name(index)
        if not name:
            return dataset.sample_of(index, memoryview(b""))
        (data,) = await self._cache.read_many([name])
        if data is not None:
            with contextlib.suppress(
                Exception
            ):  # fresh bytes will show whether the cache was at fault
                return dataset.sample_of(index, data)
            self._cache.discard([name])
        try:
            data = await dataset.read_bytes(index)
            sample = dataset.sample_of(index, data)
        except ShardError:  # perhaps damaged in transit: read once more
            data = await dataset.read_bytes(index)
            sample = dataset.sample_of(index, data)
        # Before the sample is given: the last sample of an epoch is cached too.
        await self._cache.write([name], [data])
        return sample

    @functools.cached_property
    def _names(self) -> memoryview:
        """The names of entries, 0 for names that are not known yet.

        A name takes 5 to 40 µs, and a sample some 30 µs in each epoch: a name is computed once.
        """
        return memoryview(np.zeros(NAME_SIZE * len(self), np.uint8))  # type: ignore[arg-type]

    def _name(self, index: int) -> bytes:
        """Return the name of a sample's entry, empty if the sample has no bytes."""
        offset = NAME_SIZE * index
        name = bytes(self._names[offset : offset + NAME_SIZE]) if index >= 0 else _UNKNOWN
        if name == _UNKNOWN or not name:
            extent = self.dataset.extent(index)
            if extent.length == 0:
                return b""
            name = self._name_of(extent)
            offset %= len(self._names)
            self._names[offset : offset + NAME_SIZE] = name
        return name

    def _name_of(self, extent: Extent) -> bytes:
        digest = self._hash.copy()
        digest.update(ascii(tuple(extent)).encode())
        return digest.digest()

    def sample_key(self, index: int) -> str | None:
        """The dataset's name of the sample."""
        return sample_key(self.dataset, index)

    def set_epoch(self, epoch: int) -> None:
        """Set the dataset's epoch."""
        self._cache.begin_epoch()
        propagate_epoch(self.dataset, epoch)

    @property
    def blocks(self) -> Blocks | None:
        """The dataset's blocks."""
        return blocks_of(self.dataset)


class CachedShards(CachedDataset[T_co]):
    """Samples of shards whose bytes are cached in blocks.

    A block is the bytes of a shard between two multiples of `CACHE_BLOCK`. Datasets of the same
    shards share blocks.
    """

    dataset: RangedShards[T_co]

    def __init__(
        self, dataset: RangedShards[T_co], cache: DiskCache, version: str | int | None = None
    ) -> None:
        super().__init__(dataset, cache, version)
        self.ranges, self.sample_of = dataset.ranges, dataset.sample_of
        self.samples_of = dataset.samples_of
        self._shards: dict[int, bytes] = {}  # the part of names that the blocks of a shard share

    def _capabilities(self) -> Capabilities:
        return Capabilities(aget=True, ranges=True)

    async def aget(self, index: int) -> T_co:
        """Read the sample at `index` from cached blocks; missing blocks are fetched."""
        number, start, stop = self.dataset.range(index)
        data = memoryview(b"")
        if stop > start:
            data = await self.read_range(number, start, stop, index=index)
        try:
            return self.sample_of(index, data)
        except Exception:  # fresh bytes show whether the cache was at fault
            sample: T_co = await self.dataset.aget(index)
        self._cache.discard(self._blocks(number, start, stop))
        await self.read_range(number, start, stop)  # so that other processes find fresh blocks
        return sample

    def _blocks(self, number: int, start: int, stop: int) -> list[bytes]:
        """Return the names of the blocks that have some bytes of a shard."""
        if (shard := self._shards.get(number)) is None:
            extent = self.dataset.extent_of(number, 0, self.dataset.shard_size(number))
            shard = self._shards[number] = self._name_of(extent)[4:]
        blocks = range(start // CACHE_BLOCK, -(-stop // CACHE_BLOCK))
        return [block.to_bytes(4, "little") + shard for block in blocks]

    async def read_range(
        self, number: int, start: int, stop: int, *, index: Any = None
    ) -> memoryview:
        """Read bytes of a shard from cached blocks; missing blocks are fetched."""
        names = self._blocks(number, start, stop)
        views: Any = await self._cache.read_many(names)
        missing = [place for place, view in enumerate(views) if view is None]
        begin = start % CACHE_BLOCK
        if not missing:
            data = views[0].obj
        else:
            starts = np.array(missing) * CACHE_BLOCK + (start - begin)
            stops = np.minimum(starts + CACHE_BLOCK, self.dataset.shard_size(number))
            wanted = Ranges(np.full_like(starts, number), starts, stops)
            read = functools.partial(self.dataset.read_range, index=index)
            fetched = await read_ranges(wanted, read, largest=1 << 40)
            if [*map(len, fetched)] != (stops - starts).tolist():
                raise ValueError("read_range gave another number of bytes than were asked for")
            for place, view in zip(missing, fetched, strict=True):
                views[place] = view
            data = b"".join(views)
            await self._cache.write([names[place] for place in missing], fetched)
        return memoryview(data)[begin : begin + stop - start].toreadonly()


class IndexedShards(AsyncDataset[T_co]):
    """Map-style dataset of the samples of shards, one shard after the other: define `sample_key` and `blocks`.

    Args:
        shards: the shards, or parts of them, with size and version.
        counts: number of samples in each of these.
    """

    blocks: Any

    def __init__(self, shards: Sequence[Shard], counts: Sequence[int]) -> None:
        self._shards = tuple(shards)
        self._ends = np.cumsum(counts, dtype=np.int64)
        self._firsts = self._ends - np.asarray(counts, np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of samples in each shard."""
        return tuple(np.diff(self._ends, prepend=0).tolist())

    def stream(
        self,
        *,
        shuffle: bool = False,
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> IndexStream[T_co]:
        """The same samples as a stream, for operations of streams. All ranks get the same number of samples.

        Args:
            shuffle: whether the order is random, in blocks as that of a loader of this dataset.
            seed: seed of the order, combined with the epoch; None for that of the loader, else 0.
            rank: the part to read; by default the rank of `headrace.get_rank_info` when reading
                starts.
            world_size: number of ranks.

        Raises:
            TypeError: a subclass defines `aget`, which would not be called.

        Example:
            >>> dataset = TokenDataset("s3://bucket/tokens", 2048)  # doctest: +SKIP
            >>> dataset.stream(shuffle=True).take(100)  # doctest: +SKIP
        """
        if isinstance(self, RangedDataset) and type(self).aget is not RangedDataset.aget:
            name = type(self).__name__
            raise TypeError(
                f"{name} defines aget, which a stream does not call; define sample_of instead"
            )
        return IndexStream(self, self._shards, RankChoice(rank, world_size), shuffle, seed)

    def locate(self, index: int) -> tuple[int, int]:
        """The number of the shard of a sample, and its row there; raises `IndexError` if there is none."""
        length = len(self)
        if not -length <= index < length:
            raise IndexError(f"index {index} is out of range for {self!r}")
        number = int(np.searchsorted(self._ends, index % length, side="right"))
        return number, index % length - int(self._firsts[number])

    def _rows(self, indices: Sequence[int]) -> tuple[IntArray, IntArray, IntArray]:
        """For each sample the number of its shard, its row there, and its position in the dataset.

        Raises `IndexError` if there is no such sample.
        """
        places = positions(indices, len(self))
        shards = np.searchsorted(self._ends, places, side="right")
        return shards, places - self._firsts[shards], places


class RangedShards(IndexedShards[T_co], RangedDataset[T_co], Cacheable[T_co]):
    """Map-style dataset whose samples are byte ranges of shards: define `ranges` and `sample_of`."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._shards)} shards, {len(self)} samples)"

    def sample_key(self, index: int) -> str:
        """The shard and the byte range of the sample at `index`."""
        number, start, stop = self.range(index)
        return f"{self._shards[number].key}[{start}:{stop}]"

    @functools.cached_property
    def blocks(self) -> Blocks:
        """The sizes of blocks for a random order, by the bytes of some samples."""
        some = range(0, len(self), -(-len(self) // _ASKED) or 1)
        ranges = self.ranges(some)
        return Blocks.within(
            BYTES_AT_ONCE, int((ranges.stops - ranges.starts).sum()) // max(1, len(some))
        )

    def extent(self, index: int) -> Extent:
        """The bytes of the sample at `index`, for a cache; raises `IndexError` if there is none."""
        return self.extent_of(*self.range(index))

    def extent_of(self, number: int, start: int, stop: int) -> Extent:
        """Return bytes of the shard with that number as an extent."""
        shard = self._shards[number]
        version = None if shard.head is None else shard.head.version
        return Extent(shard.store.store_id, shard.key, version, start, stop - start)

    def shard_size(self, number: int) -> int:
        """Return the number of bytes that `read_range` can read of a shard."""
        return self._shards[number].size

    async def read_range(
        self, number: int, start: int, stop: int, *, index: Any = None
    ) -> memoryview:
        """Read bytes of the shard with that number; raises `StoreError`, as if it has changed since it was opened."""
        return await self._shards[number].read(start, stop, index=index)
