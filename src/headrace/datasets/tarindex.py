"""Where the samples of tar shards are: an index beside each shard, made by reading it once."""

from __future__ import annotations

import asyncio
import io
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.datasets.codecs import Plain, codec_for
from headrace.datasets.reading import Chunks, ReadAhead, ShardReader
from headrace.datasets.shards import Shard
from headrace.datasets.tarformat import TarParser
from headrace.datasets.tarsamples import Group, Grouping
from headrace.errors import ObjectNotFoundError, ShardError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["ABSENT", "TarIndex", "load_indices"]

SUFFIX = ".index.npz"
VERSION = 1
ABSENT = -1  # the offset of a field that a sample does not have
LOADS = 64  # indices that are read at once: small objects, of which a store gives many at a time
BUILDS = 4  # shards that are read whole at once
AHEAD = ReadAhead(streams=1, ranges=4, chunk=2 << 20)


@dataclass(frozen=True, slots=True)
class TarIndex:
    """Where the samples of one shard are.

    Attributes:
        shard: the shard, with its size and version.
        fields: the names of fields, one for each column of the arrays below.
        keys: the samples' keys.
        offsets: where each field's content begins, int64, (samples, fields); -1 where a sample has no such field.
        sizes: its length in bytes, int64.
        checksums: its CRC-32, uint32.
    """

    shard: Shard
    fields: tuple[str, ...]
    keys: tuple[str, ...]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    checksums: NDArray[np.uint32]

    @classmethod
    def of(cls, shard: Shard, groups: Sequence[Group], checksums: Sequence[dict[str, int]]) -> TarIndex:
        """From the samples of a shard that has been read."""
        fields = tuple(dict.fromkeys(field for group in groups for field in group.members))
        shape = (len(groups), len(fields))
        offsets, sizes = np.full(shape, ABSENT, np.int64), np.zeros(shape, np.int64)
        sums = np.zeros(shape, np.uint32)
        column = {field: number for number, field in enumerate(fields)}
        for row, (group, summed) in enumerate(zip(groups, checksums, strict=True)):
            for field, member in group.members.items():
                at = row, column[field]
                offsets[at], sizes[at], sums[at] = member.data_offset, member.size, summed[field]
        return cls(shard, fields, tuple(group.key for group in groups), offsets, sizes, sums)

    def bounds(self, columns: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """From where to where each sample reaches with the fields of `columns`, int64, (samples,); 0 and 0 if empty."""
        offsets, sizes = self.offsets[:, list(columns)], self.sizes[:, list(columns)]
        there = (offsets != ABSENT) & (sizes > 0)
        limits = np.iinfo(np.int64)
        starts = np.where(there, offsets, limits.max).min(axis=1, initial=limits.max)
        stops = np.where(there, offsets + sizes, 0).max(axis=1, initial=0)
        return np.where(there.any(axis=1), starts, 0), stops

    def dump(self) -> bytes:
        """The index as the bytes of an ``.npz`` file: plain arrays, no pickle."""
        assert self.shard.head is not None
        stream = io.BytesIO()
        np.savez(
            stream,
            version=np.int64(VERSION),
            size=np.int64(self.shard.head.size),
            etag=_packed([self.shard.head.etag or ""]),
            fields=_packed(self.fields),
            keys=_packed(self.keys),
            offsets=self.offsets,
            sizes=self.sizes,
            checksums=self.checksums,
        )
        return stream.getvalue()

    @classmethod
    def load(cls, shard: Shard, data: bytes) -> TarIndex | None:
        """From what `dump` gave; None if it is damaged, of another version, or of another version of the shard."""
        assert shard.head is not None
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                if int(arrays["version"]) != VERSION or int(arrays["size"]) != shard.head.size:
                    return None
                if _unpacked(arrays["etag"])[0] != (shard.head.etag or ""):
                    return None
                fields, keys = _unpacked(arrays["fields"]), _unpacked(arrays["keys"])
                index = cls(shard, fields, keys, arrays["offsets"], arrays["sizes"], arrays["checksums"])
        except (OSError, ValueError, KeyError, IndexError, EOFError, zipfile.BadZipFile, zlib.error, TypeError):
            return None  # each is what numpy or zipfile says of some damaged file; the index is then made anew
        return index if index._is_sound() else None

    def _is_sound(self) -> bool:
        """Whether every range lies within the shard."""
        assert self.shard.head is not None
        shape = (len(self.keys), len(self.fields))
        kinds = ((self.offsets, np.int64), (self.sizes, np.int64), (self.checksums, np.uint32))
        if any(array.shape != shape or array.dtype != kind for array, kind in kinds):
            return False
        there = self.offsets != ABSENT
        limit = self.shard.head.size
        within = (self.offsets >= 0) & (self.sizes >= 0) & (self.sizes <= limit) & (self.offsets <= limit - self.sizes)
        return bool((within | ~there).all())


class _Summing:
    """A decoder for which a sample is its group of members, and the CRC-32 of each."""

    def __init__(self, shard: str, *, uniform: bool) -> None:
        self._parser = TarParser(shard)
        self._grouping = Grouping(shard, fields=None, uniform=uniform)
        self._sums: dict[str, int] = {}

    def feed(self, data: Any) -> Iterator[tuple[Group, dict[str, int]]]:
        for member in self._parser.feed(data):
            assert member.data is not None
            self._sums[member.name] = zlib.crc32(member.data)
            # The content itself is not kept: an index is of shards that are larger than memory.
            yield from self._summed(self._grouping.add(member._replace(data=None)))

    def finish(self) -> Iterator[tuple[Group, dict[str, int]]]:
        self._parser.finish()
        yield from self._summed(self._grouping.finish())

    def _summed(self, group: Group | None) -> Iterator[tuple[Group, dict[str, int]]]:
        if group is not None:
            yield group, {field: self._sums.pop(member.name) for field, member in group.members.items()}


async def load_indices(shards: Sequence[Shard], *, uniform: bool, save: bool) -> list[TarIndex]:
    """The index of each shard: read where there is one that fits, made otherwise.

    Args:
        shards: the shards, uncompressed.
        uniform: whether the samples of a shard must have the same fields.
        save: whether a new index is stored beside its shard.

    Raises:
        ShardError: a shard is compressed, or damaged.
        StoreError: reading or storing failed.
    """
    for shard in shards:
        if codec_for(shard.key) is not Plain:
            raise ShardError("a compressed shard cannot be read from its middle, so no index helps", shard=shard.name)
    loading, building = asyncio.Semaphore(LOADS), asyncio.Semaphore(BUILDS)

    async def one(shard: Shard) -> TarIndex:
        async with loading:
            head = shard.head or await shard.source.head(shard.key)
            known = replace(shard, head=head)
            index = await _stored(known)
        if index is None:
            async with building:
                index = await _built(known, uniform=uniform)
                if save:
                    await shard.source.put(shard.key + SUFFIX, index.dump())
        return index

    tasks = [asyncio.ensure_future(one(shard)) for shard in shards]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        raise


async def _stored(shard: Shard) -> TarIndex | None:
    beside = Shard(shard.source, shard.key + SUFFIX)
    chunks = Chunks(beside, AHEAD)
    parts: list[memoryview] = []
    try:
        while (part := await chunks.read()) is not None:
            parts.append(part)
    except ObjectNotFoundError:  # there is none yet
        return None
    finally:
        await chunks.aclose()
    return TarIndex.load(shard, b"".join(parts))


async def _built(shard: Shard, *, uniform: bool) -> TarIndex:
    reader = ShardReader(shard, _Summing(shard.name, uniform=uniform), AHEAD)
    groups: list[Group] = []
    sums: list[dict[str, int]] = []
    try:
        while True:
            block = await reader.block()
            for group, summed in block.samples:
                groups.append(group)
                sums.append(summed)
            if block.error is not None:
                raise block.error
            if block.end:
                return TarIndex.of(shard, groups, sums)
    finally:
        await reader.aclose()


def _packed(texts: Sequence[str]) -> NDArray[np.uint8]:
    """Texts in one array of bytes: a length and the bytes of each."""
    parts: list[bytes] = []
    for text in texts:
        data = text.encode("utf-8", "surrogateescape")
        parts.append(len(data).to_bytes(4, "little") + data)
    return np.frombuffer(b"".join(parts), dtype=np.uint8)


def _unpacked(array: Any) -> tuple[str, ...]:
    data = array.tobytes()
    texts: list[str] = []
    position = 0
    while position < len(data):
        stop = position + 4 + int.from_bytes(data[position : position + 4], "little")
        if stop > len(data):
            raise ValueError("a text ends behind its array")
        texts.append(data[position + 4 : stop].decode("utf-8", "surrogateescape"))
        position = stop
    return tuple(texts)
