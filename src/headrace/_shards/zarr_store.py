"""Store for zarr-python, with reads that several samples share.

Importing this module imports zarr.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zarr.abc.store import (
    ByteRequest,
    OffsetByteRequest,
    RangeByteRequest,
    SuffixByteRequest,
)
from zarr.core.array import AsyncArray
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.errors import ArrayNotFoundError, NodeTypeValidationError
from zarr.storage import ObjectStore, StorePath

from headrace._shards.compression import check_content
from headrace._shards.discovery import Shard, shard_errors
from headrace._shards.unpacked import UnpackedShards, check_unpacked
from headrace._store.head import InitialRead
from headrace._store.store import Store
from headrace.errors import ObjectNotFoundError, ShardError, TruncatedShardError

# Maximum bytes and maximum chunks decoded with a sample.
_LARGEST_BLOCK, _MOST_CHUNKS = 1 << 30, 1 << 16
_METADATA = ("zarr.json", ".zarray", ".zattrs", ".zgroup", ".zmetadata")


@dataclass(frozen=True)
class _Index:
    """Index of a shard, and version of the shard's object."""

    read: InitialRead

    @property
    def nbytes(self) -> int:
        return len(self.read.data)


_Packed = dict[str, tuple[str, int]]


def check_chunk(codec: str, data: memoryview, largest: int, shard: str) -> None:
    """Check the size in the header of a compressed chunk, before the codec allocates the size.

    Args:
        codec: name of the codec's class.
        data: the chunk.
        largest: unpacked bytes of a chunk; 0 if unknown.
        shard: name of the object.
    """
    size = 0
    if codec.startswith("Blosc"):
        size = int.from_bytes(data[4:8], "little")
        # Blosc does not know the size of its input, and would read beyond the end.
        if len(data) != int.from_bytes(data[12:16], "little"):
            raise TruncatedShardError(
                "this Blosc chunk is truncated, or corrupt", shard=shard
            )
    elif codec.startswith("LZ4"):
        size = int.from_bytes(data[:4], "little")
    elif codec.startswith("Zstd") and len(data) > 5:
        flags = data[4]  # header of a frame, RFC 8878
        begin = 5 + (not flags & 32) + (0, 1, 2, 4)[flags & 3]
        size = int.from_bytes(
            data[begin : begin + (flags >> 5 & 1, 2, 4, 8)[flags >> 6]], "little"
        )
    check_unpacked(size, len(data), largest)


class ReadStore(ObjectStore[Any]):
    """Store of objects read by requests of headrace.

    The requests have headrace's retries, time-outs, errors and counts.

    With `must_exist`, a missing chunk is an error. `reads` keeps the indexes of shards, each with
    the object's version. Reads of the shard are conditional on the version. `packed` maps the
    beginning of an array's keys to the codec of the chunks, and the unpacked bytes of a chunk.
    """

    def __init__(
        self,
        source: Store,
        must_exist: bool,
        reads: UnpackedShards,
        packed: _Packed | None = None,
    ) -> None:
        self._source, self._must_exist, self._shared = source, must_exist, reads
        self.packed: _Packed = packed or {}
        super().__init__(source.backend(), read_only=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return ReadStore, (self._source, self._must_exist, self._shared, self.packed)

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        is_chunk = key.rpartition("/")[2] not in _METADATA
        name = self._source.name(key)
        try:
            data = await self.read(key, byte_range)
        except ObjectNotFoundError as error:
            if self._must_exist and is_chunk:
                what = (
                    "no such chunk, by zarr.json or .zarray; if it had only the fill value, "
                    "set missing='fill'"
                )
                raise ShardError(what, shard=name) from error
            return None
        if not is_chunk:
            check_content(data, name)
        for prefix, (codec, size) in self.packed.items() if is_chunk else ():
            if key.startswith(prefix):
                check_chunk(codec, data, size, name)
        return prototype.buffer.from_bytes(data)

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
    store: Any,
    prefix: str,
    folder: str,
    axis: int,
    windows: Mapping[int, int],
    cache_bytes: int,
    name: str,
) -> AsyncArray[Any]:
    """Open an array, and check the size of a decoded slice.

    The slice is a slice along `axis`, or a window in the slice. `windows` has the size of a window
    by axis. `prefix` is the URL of a `ReadStore`.
    """
    path = "/".join(filter(None, (folder, name.strip("/"))))
    where = prefix + path
    array: AsyncArray[Any]
    with shard_errors("zarr.json, or .zarray, is not of a Zarr array", where):
        try:
            try:  # a store that may not be listed answers 403 for missing keys
                array = await AsyncArray.open(
                    await StorePath.open(store, path), zarr_format=3
                )
            except ArrayNotFoundError:
                array = await AsyncArray.open(StorePath(store, path), zarr_format=2)
        except (ArrayNotFoundError, NodeTypeValidationError):
            what = (
                "zarr.json or .zarray is not there, or of a group; of a group, "
                "name arrays=[...] of it"
            )
            raise ObjectNotFoundError(what, url=where) from None
        across = [
            -(-size // chunk)
            for size, chunk in zip(array.shape, array.chunks, strict=True)
        ]
        nbytes = len(range(array.nbytes))  # a shape of 10**30 is an error
        metadata: Any = array.metadata
        if metadata.zarr_format == 3:
            codecs = metadata.codecs[::-1]  # in the order of decoding
        else:
            codecs = (metadata.compressor, *(metadata.filters or ()))
    if any(getattr(codec, "codec_id", None) == "pickle" for codec in codecs):
        raise ShardError(
            "this array is pickled, and unpickling would run its code; write it again",
            shard=where,
        )
    if isinstance(store, ReadStore):
        size = math.prod(array.chunks) * getattr(array.dtype, "itemsize", 0)
        store.packed[f"{path}/".lstrip("/")] = type(codecs[0]).__name__, size
    blocks = max(1, across[axis])
    for number, length in windows.items():
        if (
            number < 0
            or number == axis % array.ndim
            or not 0 < length <= array.shape[number]
            or length % array.chunks[number]
        ):
            raise ValueError(
                f"windows={windows} must be of axes from 0 on, other than {axis}, in multiples of "
                f"the chunks {array.chunks}, and within the shape {array.shape}, of {where}"
            )
        blocks *= array.shape[number] // length
    size, chunks = nbytes // blocks, math.prod(across) // blocks
    if size > max(_LARGEST_BLOCK, cache_bytes) or chunks > _MOST_CHUNKS:
        raise ShardError(
            f"by zarr.json or .zarray, {size:,} bytes in {chunks:,} chunks are decoded for one of "
            f"{array.shape}, which is too much: {_LARGEST_BLOCK:,} bytes, or "
            f"cache_bytes={cache_bytes:,}, and {_MOST_CHUNKS:,} chunks are the most",
            shard=where,
        )
    if applied := sorted({"scale_factor", "add_offset"} & {*array.attrs}):
        warnings.warn(
            f"{where} has {' and '.join(applied)}: samples are the values before them",
            stacklevel=2,
        )
    return array
