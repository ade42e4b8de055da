"""Fixed windows of tokens in shards of integers, map-style, for training language models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from headrace._core.shards.compression import refuse_compressed
from headrace._core.shards.discovery import Shard, Shards, find_shards
from headrace._core.shards.npy import npy_layout
from headrace._core.store.ranges import Ranges, map_all
from headrace._core.store.store import StoreLike
from headrace._core.streams.blocking import background_loop
from headrace._core.streams.map_style import positions
from headrace.datasets.cached import RangedShards
from headrace.errors import ShardError

__all__ = ["TokenDataset"]

_RAW_TYPES = {".bin": None, ".u16": "uint16", ".u32": "uint32"}  # by the endings of names; .bin may be either
_SUFFIXES = (*_RAW_TYPES, ".npy")
_BEGINNING = 4096  # bytes read of each shard; the header of a one-dimensional array takes 128
_LLMC_HEADER = 1024  # bytes: 256 numbers of 32 bits, of which the first says the type and the third counts the tokens
_LLMC_TYPES = {20240520: "uint16", 20240801: "uint32"}
_PARALLEL_HEADS = 64  # small requests, of which a store serves many at a time


@dataclass(frozen=True, slots=True)
class _TokenFile:
    """A shard with its layout: `count` tokens of type `dtype`, from byte `begin` on."""

    shard: Shard
    begin: int
    dtype: np.dtype[np.generic]
    count: int


class TokenDataset(RangedShards[torch.Tensor]):
    """Windows of `seq_len` tokens, map-style: int64 tensors of shape (seq_len,), read by ranged requests.

    Window `w` of a shard starts at its token ``w × stride``. Windows do not cross shards; tokens at the end of a shard
    that do not fill a window are dropped. Training usually takes ``seq_len=context + 1`` with ``stride=context``:
    inputs are ``window[:-1]``, targets ``window[1:]``.

    A loader reads windows of its look-ahead that are near each other by one request. In an order that is random over
    many shards hardly any are: then draw from a few shards at a time (`headrace.BlockShuffleSampler`), with a
    look-ahead (`prefetch_factor`) of thousands of windows.

    The constructor requests the first bytes of each shard; in an async program call it in a thread, as
    ``await asyncio.to_thread(TokenDataset, ...)``.

    Args:
        shards: URLs or paths, as for `TarDataset`: one-dimensional ``.npy``, or raw little-endian integers, ``.bin``,
            ``.u16`` or ``.u32``; of a file or a glob also with another ending, which needs `dtype`.
        seq_len: tokens in a window.
        stride: tokens from the start of a window to that of the next; by default `seq_len`.
        dtype: type of raw shards, ``"uint16"`` or ``"uint32"``; those with a header, of numpy or llm.c, have their own.
            None: by the ending of each name, where ``.bin`` is ``"uint16"``. Megatron's int32 is ``"uint32"``.
        store: store of all shards, a `headrace.Store` or its URL. `shards` are then keys in it, or URLs under its URL.
            By default each URL's own store is opened with default options.

    Raises:
        EmptyListingError: a glob or a directory has no shard, or there is no such file or directory.
        ShardError: a shard is not such an array, is compressed, or is truncated within a token.
        StoreError: a request failed.
        ValueError: an invalid argument, no shard is long enough for a window, or the ending of a name contradicts
            `dtype`.

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
        seq_len: int,
        stride: int | None = None,
        dtype: Literal["uint16", "uint32"] | None = None,
        store: StoreLike | None = None,
    ) -> None:
        self._seq_len = seq_len
        self._stride = seq_len if stride is None else stride
        if self._seq_len < 1 or self._stride < 1:
            raise ValueError(f"seq_len={seq_len} and stride={stride} must be at least 1")
        if dtype not in (None, "uint16", "uint32"):
            raise ValueError(f"dtype={dtype!r} must be 'uint16' or 'uint32'")
        found = find_shards(shards, suffixes=_SUFFIXES, store=store)
        types = [(shard, _raw_type(shard, dtype)) for shard in found]  # before any request
        files = background_loop().run(map_all(_open_file, types, _PARALLEL_HEADS))
        super().__init__(
            [file.shard for file in files], [max(0, (file.count - seq_len) // self._stride + 1) for file in files]
        )
        if not len(self):
            raise ValueError(f"none of {len(found)} shards has the {seq_len} tokens of a window")
        self._begins = np.array([file.begin for file in files], dtype=np.int64)
        self._dtypes = tuple(file.dtype for file in files)
        self._sizes = np.array([dtype.itemsize for dtype in self._dtypes], dtype=np.int64)
        self._dtype = self._dtypes[0] if len(set(self._dtypes)) == 1 else None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._shards)} shards, {len(self)} windows of {self._seq_len})"

    def ranges(self, indices: Sequence[int]) -> Ranges:
        """The bytes of the windows at `indices`; negative indices count from the end. Objects are numbered as shards.

        Raises:
            IndexError: there is no such window.
        """
        places = positions(indices, len(self))
        shards = np.searchsorted(self._ends, places, side="right")
        within = places - np.concatenate(([0], self._ends))[shards]
        starts = self._begins[shards] + within * self._stride * self._sizes[shards]
        return Ranges(shards, starts, starts + self._seq_len * self._sizes[shards])

    def sample_key(self, index: int) -> str:
        """The shard and the byte range of the window at `index`."""
        number, start, stop = self.range(index)
        return f"{self._shards[number].key}[{start}:{stop}]"

    def sample_of(self, index: int, data: memoryview) -> torch.Tensor:
        """The tokens in `data`, int64, of shape (seq_len,)."""
        dtype = self._dtype or self._dtypes[self.range(index)[0]]
        return torch.from_numpy(np.frombuffer(data, dtype=dtype).astype(np.int64))

    def samples_of(self, indices: Sequence[int], data: Sequence[memoryview]) -> Sequence[torch.Tensor] | torch.Tensor:
        """The windows of a batch, as a tensor of shape (len(data), seq_len)."""
        if self._dtype is None or type(self).sample_of is not TokenDataset.sample_of:
            return super().samples_of(indices, data)
        tokens = np.frombuffer(b"".join(data), self._dtype).reshape(len(data), self._seq_len)
        return torch.from_numpy(tokens.astype(np.int64))


def _raw_type(shard: Shard, dtype: str | None) -> str | None:
    """The type of the tokens in a raw shard, by `dtype` and the ending of its name; None if it must have a header.

    Raises:
        ShardError: the ending is that of a compression.
        ValueError: the ending contradicts `dtype`, or is unknown and there is no `dtype`.
    """
    refuse_compressed(shard.name)
    key = shard.key.lower()
    if key.endswith(".npy"):
        return dtype
    for ending, named in _RAW_TYPES.items():
        if key.endswith(ending):
            if named is not None and dtype not in (None, named):
                raise ValueError(f"dtype={dtype!r}, but {shard.name} is {named!r} by its ending {ending}")
            return named or dtype or "uint16"
    if dtype is None:
        raise ValueError(f"the ending of {shard.name} does not name a type; give dtype='uint16' or dtype='uint32'")
    return dtype


async def _open_file(shard_and_type: tuple[Shard, str | None]) -> _TokenFile:
    """Find the layout of a shard: of numpy or llm.c by its first bytes, else raw."""
    shard, raw = shard_and_type
    read = await shard.read_start(_BEGINNING)
    first, size = bytes(read.data[:_BEGINNING]), read.head.size
    if raw is None or first.startswith(np.lib.format.MAGIC_PREFIX):
        begin, dtype, shape, _ = npy_layout(first, shard, "; raw tokens need dtype=")
        if len(shape) != 1 or dtype.kind not in "ui":
            what = f"an array of shape {shape} and type {dtype}; tokens are one-dimensional unsigned or signed integers"
            raise ShardError(what, shard=shard.name)
        count = shape[0]
    elif len(first) >= _LLMC_HEADER and (kind := _LLMC_TYPES.get(int.from_bytes(first[:4], "little"))):
        begin, dtype, count = _LLMC_HEADER, np.dtype(kind).newbyteorder("<"), int.from_bytes(first[8:12], "little")
    else:
        begin, dtype = 0, np.dtype(raw).newbyteorder("<")
        count, rest = divmod(size, dtype.itemsize)
        if rest:
            what = f"truncated: {size} bytes are not a whole number of {dtype.name} tokens"
            raise ShardError(what, shard=shard.name)
    if begin + count * dtype.itemsize != size:
        there = (size - begin) // dtype.itemsize
        raise ShardError(f"{there} tokens, but {count} in the header", shard=shard.name, offset=begin)
    return _TokenFile(replace(shard, head=read.head), begin, dtype, count)
