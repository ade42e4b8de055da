"""Index files beside shards of tokens.

Megatron writes ``.idx``. datatrove writes ``.ds.index`` and ``.ds.metadata``.
"""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np

from headrace._core.array_types import AnyDType, IntArray
from headrace._core.shards.discovery import Shard
from headrace.errors import ObjectNotFoundError, ShardError, StoreError

# Magic, version, type, number of sequences, number of bounds of documents.
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
_MEGATRON_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_DATATROVE_TYPES = {2: "uint16", 4: "uint32"}  # by bytes of a token
_METADATA = 4096  # maximum bytes of a name, two numbers and a comment


# The dtype of the tokens, the number of tokens, and, if asked for, the bounds of documents: the
# first byte of each document, and the end of the last document.
TokenIndex = tuple[AnyDType, int, IntArray | None]


async def read_index(
    shard: Shard, size: int, dtype: str | None, documents: bool
) -> TokenIndex | None:
    """Read the index beside a shard of `size` bytes.

    None if there is no index, or if an index that is not needed is unusable.
    """
    key = shard.key.lower()
    if not key.endswith((".bin", ".ds")):
        return None
    try:
        file, kind, count, ends = await (_megatron if key.endswith(".bin") else _datatrove)(
            shard, size, documents
        )
        if count * (width := np.dtype(kind).itemsize) != size:
            what = (
                f"{size} bytes, but {count} tokens of {kind} by {file.name}, "
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
            f"dtype={dtype!r}, but {shard.name} is {kind!r} by {file.name}; leave dtype= out"
        )
    return np.dtype(kind).newbyteorder("<"), count, None if ends is None else ends * width


# The file, the dtype of the tokens, the number of tokens, and, if asked for, the ends of documents
# in tokens, after a 0.
_Contents = tuple[Shard, str, int, IntArray | None]


async def _megatron(shard: Shard, size: int, documents: bool) -> _Contents:
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
    kind = _MEGATRON_TYPES[code]
    width = np.dtype(kind).itemsize
    if not documents:  # only the last sequence of a large index is read
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
        what = (
            f"sequence {wrong[0]} does not begin where the one before it ends, or has a "
            f"negative length"
        )
        raise file.error(what, pointers + 8 * int(wrong[0]))
    order = np.frombuffer(await file.read(orders, orders + 8 * bounds), "<i8")
    if not bounds or order[0] != 0 or order[-1] != sequences or (order[1:] < order[:-1]).any():
        what = f"its documents are not all of its {sequences} sequences, in their order"
        raise file.error(what, orders)
    return file, kind, int(ends[-1]), ends[order]


async def _datatrove(shard: Shard, size: int, documents: bool) -> _Contents:
    """Read the metadata and, if needed, the index of datatrove.

    The first line of the metadata has the name of the tokenizer, ``|`` and the bytes of a token.
    The second line has the number of tokens. The index has the ends of documents in tokens.
    """
    metadata, index = (
        replace(shard, key=shard.key + ending, head=None) for ending in (".metadata", ".index")
    )
    file, width, count, ends = metadata, 0, 0, None
    try:
        _, data = await metadata.read_version(_METADATA)
        first, tokens = bytes(data[:_METADATA]).split(b"\n")[:2]
        width, count = int(first.rpartition(b"|")[2]), int(tokens)
    except ObjectNotFoundError:
        pass  # `DocumentTokenizer` writes the metadata only on request
    except ValueError:
        raise file.error(
            "not the bytes of a token and the number of tokens, of datatrove"
        ) from None
    # If documents are not asked for, only the last end of a large index is read, to find the dtype.
    if documents or not width:
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
