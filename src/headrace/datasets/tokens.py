"""Windows or documents of tokens, for training language models."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple, get_args

import numpy as np

from headrace._base.array_types import AnyDType, IntArray
from headrace._shards.compression import refuse_compressed
from headrace._shards.discovery import (
    OnOpeningError,
    Shard,
    Shards,
    find_shards,
    open_each,
)
from headrace._store.ranges import Ranges
from headrace._store.store import StoreLike
from headrace.datasets.arrays import ArrayRows, npy_layout
from headrace.errors import ObjectNotFoundError, ShardError, StoreError

TokenType = Literal[
    "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"
]

_SUFFIXES = (".bin", ".ds", ".npy")
# Bytes read of each shard; the header of a one-dimensional array takes 128.
_BEGINNING = 4096
_VOCABULARY = 1 << 20  # largest vocabulary, in tokens
# Bytes: 256 numbers of 32 bits. The first two say the type, the third counts the tokens.
_LLMC_HEADER = 1024
_LLMC_TYPES = {(20240520, 1): "uint16", (20240801, 7): "uint32"}  # by kind and version
_LLMC_KINDS = {20240520, 20240522, 20240801}  # 20240522 has examples for evaluations

# Header of an index of Megatron: magic, version, type, number of sequences, number of bounds of
# documents.
_MEGATRON_HEADER = struct.Struct("<9sQBQQ")
_MEGATRON_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


class TokenDataset(ArrayRows):
    """Windows of `seq_len` tokens, or documents, map-style.

    A sample is an int64 tensor of one dimension, read by a ranged request.

    Window `w` of a shard starts at the shard's token ``w × stride``. Windows do not cross shards.
    Tokens at the end of a shard that do not fill a window are dropped. Training usually takes
    ``seq_len=context + 1`` with ``stride=context``: inputs are ``window[:-1]``, targets
    ``window[1:]``.

    With ``seq_len=None`` the samples are documents of different lengths. A document may be empty.
    Documents need Megatron's ``.bin`` or datatrove's ``.ds``, with the index beside each file. The
    index also has the type of the tokens. The format of a file is detected from the content and
    from files beside the shard.

    A loader with ``shuffle=True`` and no sampler reads blocks of neighbours, one request for each
    block, and divides the blocks among ranks (docs/shards.md). `headrace.BlockShuffleSampler` makes
    blocks of other sizes.

    The constructor requests the first bytes of each shard, and the shard's index. In an async
    program, call the constructor in a thread: ``await asyncio.to_thread(TokenDataset, ...)``.

    Args:
        shards: URLs or paths, as for `TarDataset`: one-dimensional ``.npy``, llm.c's ``.bin``,
            Megatron's ``.bin`` with ``.idx``, datatrove's ``.ds``, or raw little-endian integers,
            ``.bin`` or ``.npy``. Files or globs may have other endings, with `dtype`.
        seq_len: number of tokens in a window. None for documents. All sequences of a Megatron
            document are one sample. Modes of several modalities are not read.
        stride: number of tokens from the start of a window to the start of the next window. The
            default is `seq_len`.
        dtype: type of raw shards, such as ``"uint32"``. Shards with a header, of numpy or llm.c,
            have a type of their own. An index must agree with `dtype`. With None, ``.bin`` without
            an index is ``"uint16"``.
        on_error: how the constructor treats a broken or missing shard, as for `ParquetDataset`.
        store: store of all shards, as for `TarDataset`.

    Raises:
        EmptyListingError: a glob or a directory has no shard, or the file or directory does not
            exist.
        ShardError: a shard is not an array of tokens, is compressed, or is truncated within a
            token. Or an index is missing, malformed, or of another shard.
        StoreError: a request failed.
        ValueError: an invalid argument, no shard is long enough for a window, or an index
            contradicts `dtype`.

    Warns:
        UserWarning: raw tokens look like tokens of more bits than `dtype` has.

    Example:
        >>> import pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> np.arange(10, dtype=np.uint16).tofile(folder / "0.bin")
        >>> dataset = TokenDataset(folder / "0.bin", seq_len=5, stride=4)
        >>> [window.tolist() for window in (dataset[0], dataset[1])]
        [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]
    """

    def __init__(
        self,
        shards: Shards,
        *,
        seq_len: int | None,
        stride: int | None = None,
        dtype: TokenType | None = None,
        on_error: OnOpeningError = "raise",
        store: StoreLike | None = None,
    ) -> None:
        if seq_len is None and stride is not None:
            raise ValueError(f"stride={stride} is of windows, which need seq_len=")
        step = seq_len or 0 if stride is None else stride
        if seq_len is not None and (seq_len < 1 or step < 1):
            raise ValueError(f"seq_len={seq_len} and stride={stride} must be at least 1")
        if dtype is not None and dtype not in get_args(TokenType):
            raise ValueError(
                f"dtype={dtype!r} must be one of {', '.join(get_args(TokenType))}"
            )
        found = find_shards(shards, suffixes=_SUFFIXES, store=store)
        for shard in found:  # before any request
            refuse_compressed(shard.name)
            if dtype is None and not shard.key.lower().endswith(_SUFFIXES):
                ending = f"the ending of {shard.name} does not name a type"
                what = f"{ending}; give dtype='uint16' or dtype='uint32'"
                raise ValueError(what)
        open_one = partial(_open_file, raw=dtype, documents=seq_len is None)
        files = open_each(found, open_one, on_error=on_error)
        shards, begins, dtypes, counts, bounds = zip(*files, strict=True)
        # Bounds of the documents of all shards: for each shard, one bound more than documents. None
        # for windows.
        self._bounds = np.concatenate(bounds) if seq_len is None else None
        if seq_len is None:
            counts = tuple(len(each) - 1 for each in bounds)
        else:
            counts = tuple(max(0, (count - seq_len) // step + 1) for count in counts)
        shape = (-1 if seq_len is None else seq_len,)
        super().__init__(shards, counts, begins, dtypes, step, shape, np.dtype(np.int64))
        if not len(self):
            kind = (
                "a document" if seq_len is None else f"the {seq_len} tokens of a window"
            )
            raise ValueError(f"none of {len(files)} shards has {kind}")

    @property
    def lengths(self) -> IntArray:
        """Number of tokens of each sample.

        For a `headrace.BalancedBatchSampler`.
        """
        if self._bounds is None:
            return np.full(len(self), self._shape[0])
        # A difference of bounds between two shards is not a sample.
        between = self._ends + np.arange(len(self._ends))
        lengths = np.delete(np.diff(self._bounds), between[:-1])
        lengths //= (
            self._dtype.itemsize if self._dtype else np.repeat(self._sizes, self.counts)
        )
        return lengths

    def ranges(self, indices: Sequence[int]) -> Ranges:
        """Return the bytes of the samples at `indices`, by shard.

        Raises:
            IndexError: an index is out of range.
        """
        if self._bounds is None:
            return super().ranges(indices)
        shards, _, places = self._rows(indices)
        at = places + shards
        return Ranges(shards, self._bounds[at], self._bounds[at + 1])


async def _open_file(
    shard: Shard, raw: str | None, documents: bool
) -> tuple[Shard, int, AnyDType, int, IntArray | None]:
    """Find the type, number and first byte of a shard's tokens.

    The source is the shard's header, or the index beside the shard. Without both, the tokens are
    raw.
    """
    shard, data = await shard.read_version(_BEGINNING)
    first, key = bytes(data[:_BEGINNING]), shard.key.lower()
    size = shard.size
    begin, bounds = 0, None
    if first.startswith(np.lib.format.MAGIC_PREFIX) or (
        raw is None and key.endswith(".npy")
    ):
        layout = npy_layout(first, shard, " (raw tokens need dtype=)")
        begin, dtype, shape = layout.begin, layout.dtype, layout.shape
        if len(shape) != 1 or dtype.kind not in "ui":
            what = (
                f"an array of shape {shape} and type {dtype}; "
                "tokens are one-dimensional unsigned or signed integers"
            )
            raise shard.error(what)
        count = shape[0]
    elif first.startswith(b"LITPKDS"):
        what = "a packed dataset of lit-gpt; save its tokens, which begin at byte 24, as .npy"
        raise shard.error(what, offset=0)
    elif int.from_bytes(first[:4], "little") in _LLMC_KINDS:
        begin, dtype, count = _llmc_layout(first, shard)
    elif index := await _read_index(shard, raw, documents):
        dtype, count, bounds = index.dtype, index.tokens, index.bounds
    elif raw is None and key.endswith(".ds"):
        raise shard.error("its .index is missing; for windows, give dtype=")
    else:
        dtype = np.dtype(raw or "uint16").newbyteorder("<")
        count, rest = divmod(size, dtype.itemsize)
        if rest:
            what = (
                f"truncated: {size} bytes are not a whole number of {dtype.name} tokens"
            )
            raise shard.error(what)
        _check_width(first, dtype.itemsize, raw, shard)
    if begin + count * dtype.itemsize != size:
        there = (size - begin) // dtype.itemsize
        raise shard.error(f"{there} tokens, but {count} in the header", begin)
    if documents and bounds is None:
        formats = "as Megatron's .bin and datatrove's .ds have beside them"
        what = f"no index of its documents, {formats}; give seq_len="
        raise shard.error(what)
    return shard, begin, dtype, count, bounds


def _check_width(first: bytes, width: int, raw: str | None, shard: Shard) -> None:
    """Detect raw tokens that are read with too few bits.

    The upper halves of tokens of 32 or 64 bits are nearly 0.
    """
    if width not in (2, 4):
        return
    values = np.frombuffer(first[: len(first) // 8 * 8], f"<i{2 * width}")
    varied = len(values) >= 32 and (values % (1 << 16)).max() >= 16
    if not varied or values.min() <= -_VOCABULARY or values.max() >= _VOCABULARY:
        return
    what = f"these look like tokens of more bits, but are read as {8 * width}"
    if raw is None:
        raise shard.error(
            f"{what}; give dtype='int32' or 'int64', or 'uint16' if it is right"
        )
    warnings.warn(f"{what}: {shard.name}", UserWarning, stacklevel=1)


def _llmc_layout(first: bytes, shard: Shard) -> tuple[int, AnyDType, int]:
    kind, version, count = np.frombuffer(first[:12].ljust(12, b"\0"), "<u4").tolist()
    if len(first) < _LLMC_HEADER or (kind, version) not in _LLMC_TYPES:
        what = f"not a header of llm.c's tokens: kind {kind}, version {version}, {len(first)} bytes"
        raise shard.error(what)
    return _LLMC_HEADER, np.dtype(_LLMC_TYPES[kind, version]).newbyteorder("<"), count


class _TokenIndex(NamedTuple):
    """Contents of an index file."""

    dtype: AnyDType  # of the tokens
    tokens: int  # number of tokens
    # First byte of each document, and the end of the last document. None if not asked for.
    bounds: IntArray | None


async def _read_index(
    shard: Shard, dtype: str | None, documents: bool
) -> _TokenIndex | None:
    """Read the index beside a shard of known size.

    Megatron writes ``.idx``. datatrove writes ``.ds.index``. None if there is no index, or if an
    index that is not needed is unusable.
    """
    key = shard.key
    if key.lower().endswith(".bin"):
        read, file = _megatron, replace(shard, key=key[:-4] + ".idx", head=None)
    elif key.lower().endswith(".ds"):
        read, file = _datatrove, replace(shard, key=key + ".index", head=None)
    else:
        return None
    try:
        index = await read(file, shard.size, documents)
        kind = index.dtype.name
        if index.tokens * index.dtype.itemsize != shard.size:
            what = (
                f"{shard.size} bytes, but {index.tokens} tokens of {kind} by {file.name}, "
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
    return index


async def _megatron(file: Shard, size: int, documents: bool) -> _TokenIndex:
    """Read an index of Megatron.

    The file has a header, the lengths of sequences in tokens, the bytes at which sequences begin,
    and the numbers of the sequences at which documents begin.
    """
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
        return _TokenIndex(dtype, count, None)
    order = np.frombuffer(await file.read(orders, orders + 8 * bounds), "<i8")
    if (
        not bounds
        or order[0] != 0
        or order[-1] != sequences
        or (order[1:] < order[:-1]).any()
    ):
        what = f"its documents are not all of its {sequences} sequences, in their order"
        raise file.error(what, orders)
    return _TokenIndex(dtype, count, ends[order] * width)


async def _datatrove(file: Shard, size: int, documents: bool) -> _TokenIndex:
    """Read an index of datatrove, which has the ends of documents in tokens.

    The tokens have 2 or 4 bytes, by the `size` of the shard. If documents are not asked for, only
    the last end of a large index is read.
    """
    if documents:
        data = await file.store.read_all(file.key)
    else:
        file, data = await file.read_end(8)
        data = data[-8:]
    if len(data) % 8:
        raise file.error(f"truncated: {len(data)} bytes are not whole numbers of 64 bits")
    ends = np.concatenate(([0], np.frombuffer(data, "<i8")))
    wrong = np.flatnonzero(ends[1:] < ends[:-1])
    if len(wrong):
        raise file.error(f"document {wrong[0]} ends before it begins", 8 * int(wrong[0]))
    count = int(ends[-1])
    dtype = np.dtype("<u2" if 2 * count == size else "<u4")
    return _TokenIndex(dtype, count, ends * dtype.itemsize if documents else None)
