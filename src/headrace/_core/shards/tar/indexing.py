"""Indices of tar shards: loaded from beside the shards or from the local disk, otherwise built."""

from __future__ import annotations

import asyncio
import contextlib
import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from headrace._core.shards.chunks import ChunkReader, ReadAhead
from headrace._core.shards.compression import refuse_compressed
from headrace._core.shards.discovery import Shard
from headrace._core.shards.positions import PartPosition
from headrace._core.shards.shard_reader import Decoder, ShardReader
from headrace._core.shards.tar.format import TarParser
from headrace._core.shards.tar.index import IndexRow, TarIndex
from headrace._core.shards.tar.index_cache import IndexCache
from headrace._core.shards.tar.progress import Progress
from headrace._core.shards.tar.samples import SampleGrouper, SampleMembers
from headrace.errors import ObjectNotFoundError, StoreError

SUFFIX = ".index.npz"
PARALLEL_LOADS = 64  # small objects, of which a store serves many at a time
PARALLEL_BUILDS = 4  # whole shards
AHEAD = ReadAhead(shards_in_parallel=1, requests_per_shard=4, chunk_bytes=2 << 20)


async def load_indices(
    shards: Sequence[Shard], *, uniform: bool, save: bool, cache: IndexCache | None, progress: bool | None
) -> list[TarIndex]:
    """Load the index of each shard, or build it if there is none of the shard's version.

    Args:
        shards: uncompressed shards.
        uniform: whether the samples of a shard must have the same fields.
        save: whether to store indices beside their shards.
        cache: indices on this machine; None for none.
        progress: as for `Progress`.

    Raises:
        ShardError: a shard is compressed or corrupt.
        StoreError: a read failed.
    """
    for shard in shards:
        refuse_compressed(shard.name)
    with Progress("indexing shards", len(shards), progress) as shown:
        indexer = _Indexer(uniform, save, cache, shown)
        tasks = [asyncio.ensure_future(indexer.index(shard)) for shard in shards]
        try:
            return list(await asyncio.gather(*tasks))
        except BaseException:  # a cancellation too: no task outlives this call
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            raise


class _Indexer:
    def __init__(self, uniform: bool, save: bool, cache: IndexCache | None, progress: Progress) -> None:
        self._uniform = uniform
        self._save = save
        self._cache = cache
        self._progress = progress
        self._loads, self._builds = asyncio.Semaphore(PARALLEL_LOADS), asyncio.Semaphore(PARALLEL_BUILDS)

    async def index(self, shard: Shard) -> TarIndex:
        async with self._loads:
            shard = replace(shard, head=shard.head or await shard.store.head(shard.key))
            index = await self._load(shard)
        if index is None:
            # A few shards at a time: several processes that start together share the work.
            async with self._builds:
                if self._cache is None:
                    index = await self._build(shard)
                else:
                    index = await self._cache.get(shard, lambda: self._build(shard), uniform=self._uniform)
                if self._save:
                    await self._store(shard, index)
        self._progress.add(done=1)
        return index

    async def _load(self, shard: Shard) -> TarIndex | None:
        # With `save`, an index that is only on this machine does not count: it is to be stored beside the shard.
        if self._cache is not None and not self._save:
            index = await self._cache.find(shard, uniform=self._uniform)
            if index is not None:
                return index
        return await _load_beside(shard)

    async def _store(self, shard: Shard, index: TarIndex) -> None:
        try:
            await shard.store.put(shard.key + SUFFIX, index.dump())
        except StoreError as error:
            if self._save:  # the first failure warns, and no further index is stored
                self._save = False
                with contextlib.suppress(Warning):  # if a filter makes it an error: the index itself is complete
                    warnings.warn(f"cannot store indices beside their shards: {error}", RuntimeWarning, stacklevel=2)

    async def _build(self, shard: Shard) -> TarIndex:
        reader = ShardReader(shard, _IndexDecoder(shard.name, uniform=self._uniform), AHEAD, PartPosition(0))
        rows: list[IndexRow] = []
        reported = 0
        try:
            while not reader.ended:
                await reader.fill()
                rows.extend(reader.samples)
                if reader.error is not None:
                    raise reader.error
                self._progress.add(size=reader.chunks.bytes_read - reported)
                reported = reader.chunks.bytes_read
            return TarIndex.of(shard, rows)
        finally:
            await reader.aclose()


async def _load_beside(shard: Shard) -> TarIndex | None:
    """The index stored beside a shard; None if there is none of its version."""
    chunks = ChunkReader(Shard(shard.store, shard.key + SUFFIX), AHEAD)
    parts: list[memoryview] = []
    try:
        while (part := await chunks.read()) is not None:
            parts.append(part)
    except StoreError as error:
        # S3 refuses what does not exist, to those who may not list the bucket.
        if isinstance(error, ObjectNotFoundError) or error.status == 403:
            return None
        raise
    finally:
        await chunks.aclose()
    return TarIndex.load(shard, b"".join(parts))


class _IndexDecoder(Decoder):
    """Decoder that yields a row of the index for each sample."""

    def __init__(self, shard: str, *, uniform: bool) -> None:
        self._parser = TarParser(shard)
        self._grouper = SampleGrouper(shard, fields=None, uniform=uniform)
        self._checksums: dict[str, int] = {}

    def feed(self, data: Any) -> Iterator[IndexRow]:
        for member in self._parser.feed(data):
            assert member.data is not None
            self._checksums[member.name] = zlib.crc32(member.data)
            # Without its content: shards may be larger than memory.
            yield from self._row(self._grouper.add(member._replace(data=None)))

    def finish(self) -> Iterator[IndexRow]:
        self._parser.finish()
        yield from self._row(self._grouper.finish())

    def _row(self, sample: SampleMembers | None) -> Iterator[IndexRow]:
        if sample is not None:
            yield (
                sample.key,
                {
                    field: (member.data_offset, member.size, self._checksums.pop(member.name))
                    for field, member in sample.members.items()
                },
            )
