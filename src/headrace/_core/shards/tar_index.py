"""The positions of a tar shard's samples: built by reading the shard once, or loaded from beside it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace._core.shards.compression import refuse_compressed
from headrace._core.shards.discovery import Shard
from headrace._core.shards.reading import PartReader, ReadAhead, ShardReader
from headrace._core.shards.tar import TarSamples
from headrace._core.store.ranges import map_all
from headrace.errors import ObjectNotFoundError, StoreError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

SUFFIX = ".index.npz"
VERSION = 2
ABSENT = -1  # the offset of a field that a sample lacks
PARALLEL_LOADS = 64  # small objects, of which a store serves many at a time
PARALLEL_BUILDS = 4  # whole shards
AHEAD = ReadAhead(shards_in_parallel=1, requests_per_shard=4, chunk_bytes=2 << 20)

IndexRow = tuple[str, Mapping[str, tuple[int, int, int]]]
"""A sample's key, and for each field the offset and size of its content in bytes, and its CRC-32."""


@dataclass(frozen=True, slots=True)
class TarIndex:
    """Positions of the samples of one shard."""

    shard: Shard  # the shard, with size and version
    fields: tuple[str, ...]  # names of the columns of the arrays below
    keys: tuple[str, ...]  # keys of the samples
    offsets: NDArray[np.int64]  # positions of the contents, int64, (samples, fields); `ABSENT` for a missing field
    sizes: NDArray[np.int64]  # their lengths in bytes, int64
    checksums: NDArray[np.uint32]  # their CRC-32, uint32

    @classmethod
    def of(cls, shard: Shard, rows: Sequence[IndexRow]) -> TarIndex:
        """Make an index of all samples of a shard."""
        fields = tuple(dict.fromkeys(field for _, members in rows for field in members))
        shape = (len(rows), len(fields))
        offsets, sizes = np.full(shape, ABSENT, np.int64), np.zeros(shape, np.int64)
        checksums = np.zeros(shape, np.uint32)
        columns = {field: number for number, field in enumerate(fields)}
        for row, (_, members) in enumerate(rows):
            for field, values in members.items():
                at = row, columns[field]
                offsets[at], sizes[at], checksums[at] = values
        return cls(shard, fields, tuple(key for key, _ in rows), offsets, sizes, checksums)

    def bounds(self, columns: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Start and stop of each sample's bytes with the fields of `columns`, int64, (samples,); 0 and 0 if empty."""
        offsets, sizes = self.offsets[:, list(columns)], self.sizes[:, list(columns)]
        there = (offsets != ABSENT) & (sizes > 0)
        limits = np.iinfo(np.int64)
        starts = np.where(there, offsets, limits.max).min(axis=1, initial=limits.max)
        stops = np.where(there, offsets + sizes, 0).max(axis=1, initial=0)
        return np.where(there.any(axis=1), starts, 0), stops

    def dump(self) -> bytes:
        """Serialize as an ``.npz`` file: plain arrays, no pickle."""
        assert self.shard.head is not None
        stream = io.BytesIO()
        np.savez(
            stream,
            version=np.int64(VERSION),
            size=np.int64(self.shard.head.size),
            etag=_pack_texts([self.shard.head.etag or ""]),
            fields=_pack_texts(self.fields),
            keys=_pack_texts(self.keys),
            offsets=self.offsets,
            sizes=self.sizes,
            checksums=self.checksums,
        )
        return stream.getvalue()

    @classmethod
    def load(cls, shard: Shard, data: Buffer) -> TarIndex | None:
        """Read the output of `dump`; None if it is corrupt, of another format or of another version of the shard."""
        assert shard.head is not None
        limit = shard.head.size
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                if sum(each.file_size for each in arrays.zip.infolist()) > len(memoryview(data)):
                    return None  # compressed, as `dump` does not
                if int(arrays["version"]) != VERSION or int(arrays["size"]) != limit:
                    return None
                if _unpack_texts(arrays["etag"], 1) != (shard.head.etag or "",):
                    return None
                offsets, sizes, checksums = arrays["offsets"], arrays["sizes"], arrays["checksums"]
                keys, fields = (
                    _unpack_texts(arrays[name], length)
                    for name, length in zip(("keys", "fields"), offsets.shape, strict=True)
                )
        except Exception:  # numpy and zipfile raise many kinds for corrupt files
            return None
        kinds = ((offsets, np.int64), (sizes, np.int64), (checksums, np.uint32))
        if any(array.shape != offsets.shape or array.dtype != kind for array, kind in kinds):
            return None
        within = (offsets >= 0) & (sizes >= 0) & (sizes <= limit) & (offsets <= limit - sizes)
        if not (within | (offsets == ABSENT)).all():
            return None
        return cls(shard, fields, keys, offsets, sizes, checksums)


def _pack_texts(texts: Sequence[str]) -> NDArray[np.uint8]:
    """Texts in one array of bytes, separated by zeros, which no name of a member has."""
    return np.frombuffer("\0".join(texts).encode("utf-8", "surrogateescape"), dtype=np.uint8)


def _unpack_texts(array: Any, count: int) -> tuple[str, ...]:
    texts = array.tobytes().decode("utf-8", "surrogateescape").split("\0") if count else []
    if len(texts) != count:
        raise ValueError(f"{len(texts)} texts in place of {count}")
    return tuple(texts)


async def load_indices(shards: Sequence[Shard], *, uniform: bool, save: bool) -> list[TarIndex]:
    """Load the index of each shard from beside it, or build it if there is none of the shard's version."""
    for shard in shards:
        refuse_compressed(shard.name)
    builds = asyncio.Semaphore(PARALLEL_BUILDS)
    refused: list[StoreError] = []  # why indices could not be stored

    async def one(shard: Shard) -> TarIndex:
        shard = replace(shard, head=shard.head or await shard.store.head(shard.key))
        index = await _load(shard)
        if index is not None and not (uniform and (index.offsets == ABSENT).any()):
            return index
        async with builds:
            index = await _build(shard, uniform)
            try:
                if save and not refused:
                    await shard.store.put(shard.key + SUFFIX, index.dump())
            except StoreError as error:
                refused.append(error)
        return index

    indices = await map_all(one, shards, PARALLEL_LOADS)
    if refused:
        with contextlib.suppress(Warning):  # if a filter makes it an error: the indices are complete
            what = f"cannot store indices beside their shards: {refused[0]}"
            warnings.warn(what, RuntimeWarning, stacklevel=2)
    return indices


async def _load(shard: Shard) -> TarIndex | None:
    """The index stored beside a shard; None if there is none of its version."""
    try:
        data = await shard.store.read_all(shard.key + SUFFIX)
    except StoreError as error:
        # S3 refuses what does not exist, to those who may not list the bucket.
        if isinstance(error, ObjectNotFoundError) or error.status == 403:
            return None
        raise
    return TarIndex.load(shard, data)


async def _build(shard: Shard, uniform: bool) -> TarIndex:
    decoder = IndexDecoder(shard.name, uniform=uniform)
    reader = PartReader([0], [shard], lambda position, shard, _: ShardReader(shard, decoder, AHEAD, position))
    try:
        return TarIndex.of(shard, [row async for row in reader])
    finally:
        await reader.aclose()


class IndexDecoder(TarSamples):
    """Decoder that yields a row of the index for each sample; without contents: shards may be larger than memory."""

    def _content(self, data: memoryview, offset: int) -> tuple[int, int, int]:
        return offset, len(data), zlib.crc32(data)

    def _sample(self, key: str, contents: dict[str, Any]) -> IndexRow:
        return key, contents
