"""A store as zarr-python reads it, and reads that several samples share. Importing this imports zarr."""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.array import AsyncArray
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.errors import ArrayNotFoundError, NodeTypeValidationError
from zarr.storage import ObjectStore, StorePath

from headrace._core.shards.compression import check_content
from headrace._core.shards.discovery import Shard, shard_errors
from headrace._core.shards.unpacked import UnpackedShards, check_unpacked
from headrace._core.store.head import InitialRead
from headrace._core.store.store import Store
from headrace.errors import ObjectNotFoundError, ShardError, TruncatedShardError

_LARGEST_BLOCK, _MOST_CHUNKS = 1 << 30, 1 << 16  # bytes, and chunks, that are decoded with a sample
_ABSENT = (1 << 64) - 1  # in the index of a shard
_METADATA = ("zarr.json", ".zarray", ".zattrs", ".zgroup", ".zmetadata")


@dataclass(frozen=True)
class _Index:
    """The index of a shard, and the version of the object that it is of."""

    read: InitialRead

    @property
    def nbytes(self) -> int:
        return len(self.read.data)


def check_chunk(codec: str, data: memoryview, largest: int, shard: str) -> None:
    """Check what the header of a compressed chunk says before the codec allocates that.

    Args:
        codec: the name of the codec's class.
        data: the chunk.
        largest: bytes of a chunk, unpacked; 0 if unknown.
        shard: the name of the object.
    """
    size = 0
    if codec.startswith("Blosc"):
        size = int.from_bytes(data[4:8], "little")
        if len(data) != int.from_bytes(
            data[12:16], "little"
        ):  # numcodecs would read on beyond the end
            raise TruncatedShardError("this Blosc chunk is truncated, or corrupt", shard=shard)
    elif codec.startswith("LZ4"):
        size = int.from_bytes(data[:4], "little")
    elif codec.startswith("Zstd") and len(data) > 5:
        flags = data[4]  # of the header of a frame, RFC 8878
        begin = 5 + (not flags & 32) + (0, 1, 2, 4)[flags & 3]
        size = int.from_bytes(data[begin : begin + (flags >> 5 & 1, 2, 4, 8)[flags >> 6]], "little")
    check_unpacked(size, len(data), largest)


class ReadStore(ObjectStore[Any]):
    """Objects by requests of headrace, with its retries, time-outs, errors and counts.

    With `must_exist`, a chunk that is not there is an error. The indexes of shards are kept in
    `reads`, and with them the object's version, on which reads of the shard are conditional.
    `packed` has, by the beginning of the keys of chunks that are no shards, the codec and the bytes
    unpacked.
    """

    def __init__(
        self, source: Store, must_exist: bool, reads: UnpackedShards, packed: Any = None
    ) -> None:
        self._source, self.must_exist, self._shared, self.packed = (
            source,
            must_exist,
            reads,
            packed or {},
        )
        super().__init__(source.backend(), read_only=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return ReadStore, (self._source, self.must_exist, self._shared, self.packed)

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        is_chunk = key.rpartition("/")[2] not in _METADATA
        try:
            data = await self.read(key, byte_range)
        except ObjectNotFoundError as error:
            if self.must_exist and is_chunk:
                raise self.missing(key) from error
            return None
        if not is_chunk:
            check_content(data, self._source.name(key))
        for prefix, (codec, size) in self.packed.items() if is_chunk else ():
            if key.startswith(prefix):
                check_chunk(codec, data, size, self._source.name(key))
        return prototype.buffer.from_bytes(data)

    async def check_inner(self, array: AsyncArray[Any], axis: int, block: int) -> None:
        """Raise `ShardError` if a shard lacks a chunk of a block along an axis, for which zarr gives fill values."""
        assert array.shards is not None
        codec = array.metadata.codecs[0]
        inside = [shard // chunk for shard, chunk in zip(array.shards, array.chunks, strict=True)]
        counts = [-(-size // chunk) for size, chunk in zip(array.shape, array.chunks, strict=True)]
        shards = [range(-(-count // step)) for count, step in zip(counts, inside, strict=True)]
        shards[axis] = range(block // inside[axis], block // inside[axis] + 1)
        size = 16 * math.prod(inside)
        stored = size + 4 * (len(codec.index_codecs) - 1)  # and a CRC-32C
        at_end = codec.index_location.value == "end"
        for place in itertools.product(*shards):
            key = f"{array.path}/{array.metadata.encode_chunk_key(place)}".lstrip("/")
            data = await self.read(
                key, SuffixByteRequest(stored) if at_end else RangeByteRequest(0, stored)
            )
            held = [
                slice(count - step * number)
                for count, step, number in zip(counts, inside, place, strict=True)
            ]
            held[axis] = slice(block % inside[axis], block % inside[axis] + 1)
            if (
                np.frombuffer(data[:size], "<u8").reshape(*inside, 2)[tuple(held)] == _ABSENT
            ).any():
                raise self.missing(key)

    def missing(self, key: str) -> ShardError:
        what = "no such chunk, by zarr.json or .zarray; if it had only the fill value, set missing='fill'"
        return ShardError(what, shard=self._source.name(key))

    async def read(self, key: str, wanted: ByteRequest | None) -> memoryview:
        store = self._source
        if isinstance(wanted, SuffixByteRequest):
            suffix = wanted.suffix

            async def read_index() -> _Index:
                return _Index(await store.read_end(key, suffix))

            found: _Index = await self._shared.get(key, read_index)
            return found.read.data[-suffix:]
        if isinstance(wanted, RangeByteRequest):
            index: _Index | None = self._shared.peek(key)
            return await Shard(store, key, index.read.head if index else None).read(
                wanted.start, wanted.end
            )
        return (await store.read_all(key))[
            wanted.offset if isinstance(wanted, OffsetByteRequest) else 0 :
        ]


async def open_array(
    store: Any, prefix: str, folder: str, axis: int, cache_bytes: int, name: str
) -> AsyncArray[Any]:
    """Open an array, and check what is decoded for a slice along `axis`; `prefix` is the URL of a `ReadStore`."""
    path = "/".join(filter(None, (folder, name.strip("/"))))
    where = prefix + path
    array: AsyncArray[Any]
    with shard_errors("zarr.json, or .zarray, is not of a Zarr array", where):
        try:
            try:  # a store whose keys may not be listed answers 403 for keys that are not there
                array = await AsyncArray.open(await StorePath.open(store, path), zarr_format=3)
            except ArrayNotFoundError:
                array = await AsyncArray.open(StorePath(store, path), zarr_format=2)
        except (ArrayNotFoundError, NodeTypeValidationError):
            what = "zarr.json or .zarray is not there, or of a group; of a group, name arrays=[...] of it"
            raise ObjectNotFoundError(what, url=where) from None
        across = [-(-size // chunk) for size, chunk in zip(array.shape, array.chunks, strict=True)]
        nbytes = array.nbytes  # of a shape of 10**30 an AttributeError of zarr's
        # Of format 2, or of format 3; in the order of decoding.
        codecs = [
            getattr(array.metadata, "compressor", None),
            *(getattr(array.metadata, "filters", None) or ()),
        ]
        codecs = [*getattr(array.metadata, "codecs", ())][::-1] or codecs
    if any(getattr(codec, "codec_id", None) == "pickle" for codec in codecs):
        raise ShardError(
            "this array is pickled, and unpickling would run its code; write it again", shard=where
        )
    if isinstance(store, ReadStore):
        size = math.prod(array.chunks) * getattr(array.dtype, "itemsize", 0)
        store.packed[f"{path}/".lstrip("/")] = type(codecs[0]).__name__, size
    blocks = max(1, across[axis])
    size, chunks = nbytes // blocks, math.prod(across) // blocks
    if size > max(_LARGEST_BLOCK, cache_bytes) or chunks > _MOST_CHUNKS:
        what = f"by zarr.json or .zarray, {size:,} bytes in {chunks:,} chunks are decoded for one of {array.shape}"
        limit = f"{_LARGEST_BLOCK:,} bytes, or cache_bytes={cache_bytes:,}, and {_MOST_CHUNKS:,} chunks are the most"
        raise ShardError(f"{what}, which is too much: {limit}", shard=where)
    if applied := sorted({"scale_factor", "add_offset"} & {*array.attrs}):
        warnings.warn(
            f"{where} has {' and '.join(applied)}: samples are the values before them", stacklevel=2
        )
    return array
