"""A store as zarr-python reads it, and reads that several samples share. Importing this imports zarr."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.array import AsyncArray
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.errors import ArrayNotFoundError, NodeTypeValidationError
from zarr.storage import ObjectStore, StorePath

from headrace._core.shards.compression import check_content
from headrace._core.shards.discovery import Shard
from headrace._core.shards.unpacked import UnpackedShards
from headrace._core.store.head import InitialRead
from headrace._core.store.store import Store
from headrace.errors import HeadraceError, ObjectNotFoundError, ShardError, TruncatedShardError

_LARGEST_BLOCK, _MOST_CHUNKS = 8 << 30, 1 << 16  # bytes, and chunks, that are decoded with a sample
_METADATA = ("zarr.json", ".zarray", ".zattrs", ".zgroup", ".zmetadata")


@dataclass(frozen=True)
class _Index:
    """The index of a shard, and the version of the object that it is of."""

    read: InitialRead

    @property
    def nbytes(self) -> int:
        return len(self.read.data)


class ReadStore(ObjectStore[Any]):
    """Objects by requests of headrace, with its retries, time-outs, errors and counts.

    With `must_exist`, a chunk that is not there is an error. The indexes of shards are kept in `reads`, and with them
    the object's version, on which reads of the shard are conditional. Chunks below the keys in `blosc` have its header,
    whose length is checked: numcodecs reads on beyond the end of a truncated one.
    """

    def __init__(self, source: Store, must_exist: bool, reads: UnpackedShards, blosc: tuple[str, ...] = ()) -> None:
        self._source, self._must_exist, self._shared, self.blosc = source, must_exist, reads, blosc
        super().__init__(source.backend(), read_only=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return ReadStore, (self._source, self._must_exist, self._shared, self.blosc)

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        is_chunk = key.rpartition("/")[2] not in _METADATA
        try:
            data = await self._read(key, byte_range)
        except ObjectNotFoundError as error:
            if self._must_exist and is_chunk:
                what = "no such chunk, by zarr.json or .zarray; if it had only the fill value, set missing='fill'"
                raise ShardError(what, shard=self._source.name(key)) from error
            return None
        if not is_chunk:
            check_content(data, self._source.name(key))
        if is_chunk and key.startswith(self.blosc) and len(data) != int.from_bytes(data[12:16], "little"):
            raise TruncatedShardError("this Blosc chunk is truncated, or corrupt", shard=self._source.name(key))
        return prototype.buffer.from_bytes(data)

    async def _read(self, key: str, wanted: ByteRequest | None) -> memoryview:
        store = self._source
        if isinstance(wanted, SuffixByteRequest):
            suffix = wanted.suffix

            async def read_index() -> _Index:
                return _Index(await store.read_end(key, suffix))

            found: _Index = await self._shared.get(key, read_index)
            return found.read.data[-suffix:]
        if isinstance(wanted, RangeByteRequest):
            index: _Index | None = self._shared.peek(key)
            return await Shard(store, key, index.read.head if index else None).read(wanted.start, wanted.end)
        return (await store.read_all(key))[wanted.offset if isinstance(wanted, OffsetByteRequest) else 0 :]


async def open_array(store: Any, prefix: str, folder: str, axis: int, name: str) -> AsyncArray[Any]:
    """Open an array, and check what is decoded for a slice along `axis`; `prefix` is the URL of a `ReadStore`."""
    path = "/".join(filter(None, (folder, name.strip("/"))))
    where = prefix + path
    try:
        array: AsyncArray[Any]
        try:  # a store whose keys may not be listed answers 403 for keys that are not there
            array = await AsyncArray.open(StorePath(store, path), zarr_format=3)
        except ArrayNotFoundError:
            array = await AsyncArray.open(StorePath(store, path), zarr_format=2)
        across = [-(-size // chunk) for size, chunk in zip(array.shape, array.chunks, strict=True)]
        nbytes = array.nbytes  # of a shape of 10**30 an AttributeError of zarr's
        # Of format 2, or of format 3; in the order of decoding.
        codecs = [getattr(array.metadata, "compressor", None), *(getattr(array.metadata, "filters", None) or ())]
        codecs = [*getattr(array.metadata, "codecs", ())][::-1] or codecs
    except HeadraceError:
        raise
    except (ArrayNotFoundError, NodeTypeValidationError):
        what = "zarr.json or .zarray is not there, or of a group; of a group, name arrays=[...] of it"
        raise ObjectNotFoundError(what, url=where) from None
    except Exception as error:  # zarr's, of any kind
        raise ShardError(f"zarr.json, or .zarray, is not of a Zarr array: {error!r}", shard=where) from error
    if any(getattr(codec, "codec_id", None) == "pickle" for codec in codecs):
        raise ShardError("this array is pickled, and unpickling would run its code; write it again", shard=where)
    if isinstance(store, ReadStore) and type(codecs[0]).__name__ in ("Blosc", "BloscCodec"):
        store.blosc += (f"{path}/".lstrip("/"),)
    blocks = max(1, across[axis])
    size, chunks = nbytes // blocks, math.prod(across) // blocks
    if size > _LARGEST_BLOCK or chunks > _MOST_CHUNKS:
        what = f"by zarr.json or .zarray, {size:,} bytes in {chunks:,} chunks are decoded for one of {array.shape}"
        raise ShardError(f"{what}, which is too much", shard=where)
    if applied := sorted({"scale_factor", "add_offset"} & {*array.attrs}):
        warnings.warn(f"{where} has {' and '.join(applied)}: samples are the values before them", stacklevel=2)
    return array
