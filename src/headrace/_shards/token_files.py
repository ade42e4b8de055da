"""Headers of ``.npy`` files, and index files beside shards of tokens.

Megatron writes ``.idx``. datatrove writes ``.ds.index``.
"""

from __future__ import annotations

import io
import struct
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from headrace._base.array_types import AnyDType, IntArray
from headrace._shards.discovery import Shard, shard_errors
from headrace.errors import ObjectNotFoundError, ShardError, StoreError

_PARSERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
    (3, 0): np.lib.format.read_array_header_2_0,
}


class NpyLayout(NamedTuple):
    """Layout of the array in a file."""

    begin: int  # offset of the data
    dtype: AnyDType
    shape: tuple[int, ...]
    columns_first: bool


def npy_layout(first: bytes, shard: Shard, remedy: str = "") -> NpyLayout:
    """Return the layout of a file from the file's first bytes."""
    stream = io.BytesIO(first)
    with shard_errors(f"not a .npy file{remedy}", shard.name):
        version = np.lib.format.read_magic(stream)
        parse = _PARSERS.get(version)
        if parse is None:
            raise ValueError(f"version {version} is unknown")
        shape, columns_first, dtype = parse(stream)
        if min(shape, default=0) < 0:
            raise ValueError(f"its shape is {shape}")
    return NpyLayout(stream.tell(), dtype, shape, columns_first)


# Magic, version, type, number of sequences, number of bounds of documents.
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
_MEGATRON_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


class TokenIndex(NamedTuple):
    """Contents of an index file."""

    file: Shard
    dtype: AnyDType  # of the tokens
    tokens: int  # number of tokens
    # Ends of documents in tokens, after a 0. None if not asked for.
    ends: IntArray | None

    @property
    def bounds(self) -> IntArray | None:
        """First byte of each document, and the end of the last document."""
        return None if self.ends is None else self.ends * self.dtype.itemsize


async def read_index(shard: Shard, dtype: str | None, documents: bool) -> TokenIndex | None:
    """Read the index beside a shard of known size.

    None if there is no index, or if an index that is not needed is unusable.
    """
    key = shard.key.lower()
    if not key.endswith((".bin", ".ds")):
        return None
    read = _megatron if key.endswith(".bin") else _datatrove
    try:
        index = await read(shard, documents)
        kind = index.dtype.name
        if index.tokens * index.dtype.itemsize != shard.size:
            what = (
                f"{shard.size} bytes, but {index.tokens} tokens of {kind} by {index.file.name}, "
                f"which is of another shard"
            )
            raise shard.error(f"{what}, or one of the two is truncated")
    except ObjectNotFoundError:
        return None
    except (ShardError, StoreError):
        if documents or dtype is None:
            raise
        # The file may be another program's. Some stores refuse requests for missing objects.
        return None
    if dtype not in (None, kind):
        raise ValueError(
            f"dtype={dtype!r}, but {shard.name} is {kind!r} by {index.file.name}; leave dtype= out"
        )
    return index


async def _megatron(shard: Shard, documents: bool) -> TokenIndex:
    """Read an index of Megatron.

    The file has a header, the lengths of sequences in tokens, the bytes at which sequences begin,
    and the numbers of the sequences at which documents begin.
    """
    file = replace(shard, key=shard.key[:-4] + ".idx", head=None)
    begin = _MEGATRON_HEADER.size
    file, first = await file.read_version(begin)
    magic, version, code, sequences, bounds = _MEGATRON_HEADER.unpack(
        bytes(first[:begin]).ljust(begin, b"\0")
    )
    if magic != b"MMIDIDX\0\0" or version != 1 or code not in _MEGATRON_TYPES:
        what = (
            f"not an index of Megatron's tokens: it begins with {magic!r}, version {version}, "
            f"type {code}"
        )
        raise file.error(f"{what}; raw tokens need dtype=")
    pointers = begin + 4 * sequences
    orders = pointers + 8 * sequences
    # Indices of several modalities have a byte for each sequence.
    if file.size - orders - 8 * bounds not in (0, sequences):
        what = (
            f"{file.size} bytes are not those of {sequences} sequences and {bounds} bounds of "
            f"documents"
        )
        raise file.error(what)
    dtype = np.dtype(_MEGATRON_TYPES[code]).newbyteorder("<")
    width = dtype.itemsize
    # If documents are not asked for, only the last sequence of a large index is read.
    begun = 0 if documents else max(0, sequences - 1)
    data = await file.read(begin + 4 * begun, pointers)
    lengths = np.frombuffer(data, "<i4").astype(np.int64)
    starts = np.frombuffer(await file.read(pointers + 8 * begun, orders), "<i8")
    ends = np.concatenate(([0], starts // width + lengths))
    expected = ends[:-1] * width if documents else starts // width * width
    wrong = np.flatnonzero((lengths < 0) | (starts < 0) | (starts != expected))
    if len(wrong):
        number = begun + int(wrong[0])
        what = "does not begin where the one before it ends, or has a negative length"
        raise file.error(f"sequence {number} {what}", pointers + 8 * number)
    count = int(ends[-1])
    if not documents:
        return TokenIndex(file, dtype, count, None)
    order = np.frombuffer(await file.read(orders, orders + 8 * bounds), "<i8")
    if not bounds or order[0] != 0 or order[-1] != sequences or (order[1:] < order[:-1]).any():
        what = f"its documents are not all of its {sequences} sequences, in their order"
        raise file.error(what, orders)
    return TokenIndex(file, dtype, count, ends[order])


async def _datatrove(shard: Shard, documents: bool) -> TokenIndex:
    """Read an index of datatrove, which has the ends of documents in tokens.

    If documents are not asked for, only the last end of a large index is read.
    """
    file = replace(shard, key=shard.key + ".index", head=None)
    if documents:
        data = await file.store.read_all(file.key)
    else:
        data = (await file.read_end(8)).data[-8:]
    if len(data) % 8:
        raise file.error(f"truncated: {len(data)} bytes are not whole numbers of 64 bits")
    ends = np.concatenate(([0], np.frombuffer(data, "<i8")))
    wrong = np.flatnonzero(ends[1:] < ends[:-1])
    if len(wrong):
        raise file.error(f"document {wrong[0]} ends before it begins", 8 * int(wrong[0]))
    count = int(ends[-1])
    kind = {4 * count: "<u4", 2 * count: "<u2"}.get(shard.size)
    if kind is None:
        what = f"{count} tokens of 2 or 4 bytes by {file.name}"
        raise shard.error(f"{shard.size} bytes, but {what}")
    return TokenIndex(file, np.dtype(kind), count, ends if documents else None)
