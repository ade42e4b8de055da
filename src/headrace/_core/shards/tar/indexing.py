"""Indices of tar shards: found beside the shards or on this machine, otherwise built."""

from __future__ import annotations

import asyncio
import contextlib
import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from headrace._core.shards.compression import Plain, codec_for
from headrace._core.shards.discovery import Shard
from headrace._core.shards.interleave import ChunkReader, ReadAhead, ShardReader
from headrace._core.shards.tar.format import TarParser
from headrace._core.shards.tar.index import TarIndex
from headrace._core.shards.tar.index_cache import IndexCache
from headrace._core.shards.tar.progress import Progress
from headrace._core.shards.tar.samples import SampleGrouper, SampleMembers
from headrace.errors import ObjectNotFoundError, ShardError, StoreError

SUFFIX = ".index.npz"
LOADS = 64  # indices that are read at once: small objects, of which a store gives many at a time
BUILDS = 4  # shards that are read whole at once
AHEAD = ReadAhead(shards_in_parallel=1, requests_per_shard=4, chunk_bytes=2 << 20)


async def load_indices(
    shards: Sequence[Shard], *, uniform: bool, save: bool, cache: IndexCache | None, progress: bool | None
) -> list[TarIndex]:
    """The index of each shard: read if there is one of this version, built otherwise.

    Args:
        shards: the shards, uncompressed.
        uniform: whether the samples of a shard must have the same fields.
        save: whether an index that is not beside its shard is stored there.
        cache: where indices are kept on this machine; None for nowhere.
        progress: as for `Progress`.

    Raises:
        ShardError: a shard is compressed, or damaged.
        StoreError: reading failed.
    """
    for shard in shards:
        if codec_for(shard.key) is not Plain:
            raise ShardError("a compressed shard cannot be read from its middle, so no index helps", shard=shard.name)
    with Progress("indexing shards", len(shards), progress) as shown:
        indexing = _Indexing(uniform, save, cache, shown)
        tasks = [asyncio.ensure_future(indexing.index(shard)) for shard in shards]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            raise


class _Indexing:
    """Finds or makes the indices of one dataset; arguments as for `load_indices`."""

    def __init__(self, uniform: bool, save: bool, cache: IndexCache | None, progress: Progress) -> None:
        self._uniform = uniform
        self._save = save
        self._cache = cache
        self._progress = progress
        self._loading, self._building = asyncio.Semaphore(LOADS), asyncio.Semaphore(BUILDS)

    async def index(self, shard: Shard) -> TarIndex:
        async with self._loading:
            shard = replace(shard, head=shard.head or await shard.store.head(shard.key))
            index = await self._found(shard)
        if index is None:
            # Shards are claimed a few at a time: several processes that begin together share the work.
            async with self._building:
                if self._cache is None:
                    index = await self._built(shard)
                else:
                    index = await self._cache.get(shard, lambda: self._built(shard), uniform=self._uniform)
                if self._save:
                    await self._store(shard, index)
        self._progress.add(done=1)
        return index

    async def _found(self, shard: Shard) -> TarIndex | None:
        """The index that is kept on this machine, or else beside the shard; only the latter with `save=True`."""
        if self._cache is not None and not self._save:
            index = await self._cache.find(shard, uniform=self._uniform)
            if index is not None:
                return index
        return await _beside(shard)

    async def _store(self, shard: Shard, index: TarIndex) -> None:
        try:
            await shard.store.put(shard.key + SUFFIX, index.dump())
        except StoreError as error:
            if self._save:  # the first failure is reported, and no further index is stored
                self._save = False
                what = f"indices cannot be stored beside their shards: {error}"
                with contextlib.suppress(Warning):  # as an error, by the user's filter: the index is there
                    warnings.warn(what, RuntimeWarning, stacklevel=2)

    async def _built(self, shard: Shard) -> TarIndex:
        """Read the whole shard."""
        reader = ShardReader(shard, _Summing(shard.name, uniform=self._uniform), AHEAD)
        groups: list[SampleMembers] = []
        sums: list[dict[str, int]] = []
        read = 0
        try:
            while True:
                block = await reader.block()
                for group, summed in block.samples:
                    groups.append(group)
                    sums.append(summed)
                if block.error is not None:
                    raise block.error
                self._progress.add(size=reader.chunks.done - read)
                read = reader.chunks.done
                if block.end:
                    return TarIndex.of(shard, groups, sums)
        finally:
            await reader.aclose()


async def _beside(shard: Shard) -> TarIndex | None:
    """The index that is stored beside a shard; None if there is none of its version."""
    beside = Shard(shard.store, shard.key + SUFFIX)
    chunks = ChunkReader(beside, AHEAD)
    parts: list[memoryview] = []
    try:
        while (part := await chunks.read()) is not None:
            parts.append(part)
    except ObjectNotFoundError:  # there is none yet
        return None
    finally:
        await chunks.aclose()
    return TarIndex.load(shard, b"".join(parts))


class _Summing:
    """A decoder for which a sample is its group of members, and the CRC-32 of each."""

    def __init__(self, shard: str, *, uniform: bool) -> None:
        self._parser = TarParser(shard)
        self._grouping = SampleGrouper(shard, fields=None, uniform=uniform)
        self._sums: dict[str, int] = {}

    def feed(self, data: Any) -> Iterator[tuple[SampleMembers, dict[str, int]]]:
        for member in self._parser.feed(data):
            assert member.data is not None
            self._sums[member.name] = zlib.crc32(member.data)
            # The content itself is not kept: an index is of shards that are larger than memory.
            yield from self._summed(self._grouping.add(member._replace(data=None)))

    def finish(self) -> Iterator[tuple[SampleMembers, dict[str, int]]]:
        self._parser.finish()
        yield from self._summed(self._grouping.finish())

    def _summed(self, group: SampleMembers | None) -> Iterator[tuple[SampleMembers, dict[str, int]]]:
        if group is not None:
            yield group, {field: self._sums.pop(member.name) for field, member in group.members.items()}
