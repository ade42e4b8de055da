"""The index files beside shards of tokens: Megatron's ``.idx`` and datatrove's ``.ds.index`` and ``.ds.metadata``."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np

from headrace._core.array_types import AnyDType, IntArray
from headrace._core.shards.discovery import Shard
from headrace.errors import ObjectNotFoundError, ShardError, StoreError

_MEGATRON_HEADER = struct.Struct(
    "<9sQBQQ"
)  # magic, version, type, number of sequences, number of bounds of documents
_MEGATRON_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_DATATROVE_TYPES = {2: "uint16", 4: "uint32"}  # by bytes of a token
_METADATA = 4096  # bytes, at most: a name, two numbers and a comment


# The type of the tokens, their number, and, if asked for, the bytes at which documents begin and
# the last ends.
TokenIndex = tuple[AnyDType, int, IntArray | None]


async def read_index(
    shard: Shard, size: int, dtype: str | None, documents: bool
) -> TokenIndex | None:
    """Read the index beside a shard of `size` bytes; None if there is none, or an unusable one that is not needed."""
    key = shard.key.lower()
    if not key.endswith((".bin", ".ds")):
        return None
    try:
        file, kind, count, ends = await (_megatron if key.endswith(".bin") else _datatrove)(
            shard, size, documents
        )
        if count * (width := np.dtype(kind).itemsize) != size:
            what = f"{size} bytes, but {count} tokens of {kind} by {file.name}, which is of another shard"
            raise shard.error(f"{what}, or one of the two is truncated")
    except ObjectNotFoundError:
        return None
    except (ShardError, StoreError):
        if documents or dtype is None:
            raise
        return None  # it may be another program's; and some stores refuse what they do not have
    if dtype not in (None, kind):
        raise ValueError(
            f"dtype={dtype!r}, but {shard.name} is {kind!r} by {file.name}; leave dtype= out"
        )
    return np.dtype(kind).newbyteorder("<"), count, None if ends is None else ends * width


# The file, the type of the tokens, their number, and, if asked for, the ends of documents, after a
# 0.
_Contents = tuple[Shard, str, int, IntArray | None]


async def _megatron(shard: Shard, size: int, documents: bool) -> _Contents:
    """A header, lengths of sequences in tokens, the bytes at which they begin, and at which of them documents begin."""
    file = replace(shard, key=shard.key[:-4] + ".idx", head=None)
    begin = _MEGATRON_HEADER.size
    file, first = await file.read_version(begin)
    magic, version, code, sequences, bounds = _MEGATRON_HEADER.unpack(
        bytes(first[:begin]).ljust(begin, b"\0")
    )
    if magic != b"MMIDIDX\0\0" or version != 1 or code not in _MEGATRON_TYPES:
        what = f"not an index of Megatron's tokens: it begins with {magic!r}, version {version}, type {code}"
        raise file.error(f"{what}; raw tokens need dtype=")
    pointers = begin + 4 * sequences
    orders = pointers + 8 * sequences
    if file.size - orders - 8 * bounds not in (
        0,
        sequences,
    ):  # those of several modalities have a byte for each
        what = f"{file.size} bytes are not those of {sequences} sequences and {bounds} bounds of documents"
        raise file.error(what)
    kind = _MEGATRON_TYPES[code]
    width = np.dtype(kind).itemsize
    if not documents:  # of a large index only the last sequence is read
        if not sequences:
            return file, kind, 0, None
        (pointer,) = np.frombuffer(await file.read(orders - 8, orders), "<i8").tolist()
        (length,) = np.frombuffer(await file.read(pointers - 4, pointers), "<i4").tolist()
        if pointer % width or pointer < 0 or length < 0:
            raise file.error(f"a sequence of {length} tokens begins at byte {pointer}", orders - 8)
        return file, kind, pointer // width + length, None
    lengths = np.frombuffer(await file.read(begin, pointers), "<i4")
    ends = np.zeros(sequences + 1, np.int64)
    np.cumsum(lengths, dtype=np.int64, out=ends[1:])
    starts = np.frombuffer(await file.read(pointers, orders), "<i8")
    wrong = np.flatnonzero((lengths < 0) | (starts != ends[:-1] * width))
    if len(wrong):
        what = f"sequence {wrong[0]} does not begin where the one before it ends, or has a negative length"
        raise file.error(what, pointers + 8 * int(wrong[0]))
    order = np.frombuffer(await file.read(orders, orders + 8 * bounds), "<i8")
    if not bounds or order[0] != 0 or order[-1] != sequences or (order[1:] < order[:-1]).any():
        what = f"its documents are not all of its {sequences} sequences, in their order"
        raise file.error(what, orders)
    return file, kind, int(ends[-1]), ends[order]


async def _datatrove(shard: Shard, size: int, documents: bool) -> _Contents:
    """Lines with the name of the tokenizer, ``|`` and the bytes of a token, and with the number of tokens; and ends."""
    metadata, index = (
        replace(shard, key=shard.key + ending, head=None) for ending in (".metadata", ".index")
    )
    file, width, count, ends = metadata, 0, 0, None
    try:
        _, data = await metadata.read_version(_METADATA)
        first, tokens = bytes(data[:_METADATA]).split(b"\n")[:2]
        width, count = int(first.rpartition(b"|")[2]), int(tokens)
    except ObjectNotFoundError:
        pass  # DocumentTokenizer writes it if asked to
    except ValueError:
        raise file.error(
            "not the bytes of a token and the number of tokens, of datatrove"
        ) from None
    if (
        documents or not width
    ):  # of a large index only the last end is read, and only to find the type
        file = index
        data = (
            await index.store.read_all(index.key)
            if documents
            else (await index.read_end(8)).data[-8:]
        )
        if len(data) % 8:
            raise file.error(f"truncated: {len(data)} bytes are not whole numbers of 64 bits")
        ends = np.concatenate(([0], np.frombuffer(data, "<i8")))
        wrong = np.flatnonzero(ends[1:] < ends[:-1])
        if len(wrong):
            raise file.error(f"document {wrong[0]} ends before it begins", 8 * int(wrong[0]))
        if width and count != ends[-1]:
            raise file.error(
                f"the last document ends at {ends[-1]}, but {count} tokens by .metadata"
            )
        count = int(ends[-1])
        width = width or size // max(count, 1) or 2
    if width not in _DATATROVE_TYPES:
        raise file.error(f"tokens of {width} bytes, but datatrove's have 2 or 4")
    return file, _DATATROVE_TYPES[width], count, ends if documents else None
