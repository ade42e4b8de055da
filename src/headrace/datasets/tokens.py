"""Fixed windows of tokens out of shards of integers, by number: what language models are trained on."""

from __future__ import annotations

import asyncio
import functools
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self

import anyio.to_thread
import numpy as np
import torch

from headrace._core.interface.background_loop import background_loop
from headrace._core.interface.ranged import RangedDataset, positions
from headrace._core.shards.discovery import Shard, Shards, find_shards
from headrace._core.store.head import Head
from headrace._core.store.ranges import Ranges
from headrace._core.store.store import StoreLike
from headrace.datasets.cached import Cacheable, Extent
from headrace.errors import ShardError

__all__ = ["TokenDataset", "WindowRange"]

_SUFFIXES = (".bin", ".npy", ".u16", ".u32")
_NPY_HEADER = 4096  # bytes; headers of one-dimensional arrays take 128
_HEADS = 64  # requests at once for sizes: small ones, of which a store gives many


class WindowRange(NamedTuple):
    """The bytes of a window.

    Attributes:
        shard: the shard's number.
        start: the first byte.
        stop: behind the last.
    """

    shard: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Tokens:
    """A shard whose layout is known: so many tokens of one type, from a byte on."""

    shard: Shard
    head: Head
    begin: int
    dtype: np.dtype[Any]
    count: int


class TokenDataset(RangedDataset[torch.Tensor], Cacheable[torch.Tensor]):
    """Windows of `seq_len` tokens, map-style: int64 tensors of shape (seq_len,), read by ranged requests.

    Window `w` of a shard is its tokens from ``w × stride`` on. Windows do not reach from one shard into the next; the
    tokens at a shard's end that fill no window are left out. Training usually takes ``seq_len=context + 1`` with
    ``stride=context``: inputs are ``window[:-1]``, targets ``window[1:]``.

    A loader reads windows of its look-ahead that lie near each other by one request. In an order that is random over
    many shards hardly any do: then draw from a few shards at a time (`headrace.BlockShuffleSampler`), with a look-ahead
    (`prefetch_factor`) of thousands of windows.

    Making one asks for the size of each shard, and of ``.npy`` shards for the header; in an async program use ``await
    TokenDataset.open(...)``.

    Args:
        shards: URLs or paths, as for `TarDataset`: ``.npy`` with one dimension, or raw integers in little-endian order.
        seq_len: tokens in a window.
        stride: tokens from the beginning of one window to that of the next; `seq_len` if not given.
        dtype: of raw shards, ``"uint16"`` or ``"uint32"``; the header of ``.npy`` has its own.
        store: their store, a `headrace.Store` or its URL. `shards` are then keys in it, or URLs under its URL. Without
            it, each URL's own store is opened with default options.

    Raises:
        ShardError: a shard is not such an array, or its size is no whole number of tokens.
        StoreError: the store refused or failed.
        ValueError: an argument makes no sense, or no shard is long enough for a window.

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
        dtype: Literal["uint16", "uint32"] = "uint16",
        store: StoreLike | None = None,
    ) -> None:
        self._seq_len = seq_len
        self._stride = seq_len if stride is None else stride
        if self._seq_len < 1 or self._stride < 1:
            raise ValueError(f"seq_len={seq_len} and stride={stride} must be at least 1")
        if dtype not in ("uint16", "uint32"):
            raise ValueError(f"dtype={dtype!r} must be 'uint16' or 'uint32'")
        found = find_shards(shards, suffixes=_SUFFIXES, store=store)
        self._shards = background_loop().run(_opened(found, np.dtype(dtype).newbyteorder("<")))
        windows = [max(0, (tokens.count - seq_len) // self._stride + 1) for tokens in self._shards]
        self._ends = np.cumsum(windows)
        self._begins = np.array([tokens.begin for tokens in self._shards], dtype=np.int64)
        self._sizes = np.array([tokens.dtype.itemsize for tokens in self._shards], dtype=np.int64)
        kinds = {tokens.dtype for tokens in self._shards}
        self._dtype = kinds.pop() if len(kinds) == 1 else None
        if not self._ends[-1]:
            raise ValueError(f"none of {len(found)} shards has the {seq_len} tokens of a window")

    @classmethod
    async def open(cls, shards: Shards, **options: Any) -> Self:
        """Make a dataset without blocking the caller's loop; arguments and errors are those of the class."""
        make = functools.partial(cls, shards, **options)
        return await anyio.to_thread.run_sync(make, abandon_on_cancel=True)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._shards)} shards, {len(self)} windows of {self._seq_len})"

    def ranges(self, indices: Sequence[int]) -> Ranges:
        """Where the windows at `indices` are; negative indices count from the end. Objects are numbered as shards.

        Raises:
            IndexError: there is no such window.
        """
        places = positions(indices, len(self))
        shards = np.searchsorted(self._ends, places, side="right")
        within = places - np.concatenate(([0], self._ends))[shards]
        starts = self._begins[shards] + within * self._stride * self._sizes[shards]
        return Ranges(shards, starts, starts + self._seq_len * self._sizes[shards])

    def range(self, index: int) -> WindowRange:
        """Where the window at `index` is read from; raises `IndexError` if there is none."""
        return WindowRange(*(int(column[0]) for column in self.ranges([index])))

    def extent(self, index: int) -> Extent:
        """Which bytes the window at `index` is, for a cache; raises `IndexError` if there is none."""
        where = self.range(index)
        tokens = self._shards[where.shard]
        shard = tokens.shard
        return Extent(shard.store.store_id, shard.key, tokens.head.etag, where.start, where.stop - where.start)

    def sample_key(self, index: int) -> str:
        """The shard and the bytes at `index`."""
        where = self.range(index)
        return f"{self._shards[where.shard].shard.key}[{where.start}:{where.stop}]"

    async def read_range(self, number: int, start: int, stop: int, *, index: Any = None) -> memoryview:
        """Read bytes of the shard of that number.

        Raises:
            StoreError: the store refused or failed, or the shard has changed since the dataset was made.
        """
        return await self._shards[number].shard.read(start, stop, index=index)

    def sample_of(self, index: int, data: memoryview) -> torch.Tensor:
        """The tokens in `data`, int64, of shape (seq_len,)."""
        dtype = self._dtype or self._shards[self.range(index).shard].dtype
        return torch.from_numpy(np.frombuffer(data, dtype=dtype).astype(np.int64))

    def samples_of(self, indices: Sequence[int], data: Sequence[memoryview]) -> Sequence[torch.Tensor] | torch.Tensor:
        """The windows of a batch, as a tensor of shape (len(data), seq_len)."""
        if self._dtype is None or type(self).sample_of is not TokenDataset.sample_of:
            return super().samples_of(indices, data)
        tokens = np.frombuffer(b"".join(data), self._dtype).reshape(len(data), self._seq_len)
        return torch.from_numpy(tokens.astype(np.int64))


async def _opened(shards: Sequence[Shard], dtype: np.dtype[Any]) -> list[_Tokens]:
    limit = asyncio.Semaphore(_HEADS)

    async def one(shard: Shard) -> _Tokens:
        async with limit:
            return await (_open_npy(shard) if shard.key.endswith(".npy") else _open_raw(shard, dtype))

    return list(await asyncio.gather(*map(one, shards)))


async def _open_raw(shard: Shard, dtype: np.dtype[Any]) -> _Tokens:
    head = shard.head or await shard.store.head(shard.key)
    count, rest = divmod(head.size, dtype.itemsize)
    if rest:
        raise ShardError(f"{head.size} bytes are no whole number of {dtype.name}: it is cut short", shard=shard.name)
    return _Tokens(replace(shard, head=head), head, 0, dtype, count)


async def _open_npy(shard: Shard) -> _Tokens:
    read = await shard.read_start(_NPY_HEADER)
    stream = io.BytesIO(read.data)
    try:
        version = np.lib.format.read_magic(stream)
        parse = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = parse(stream)
    except ValueError as error:
        raise ShardError(f"this is not .npy: {error}", shard=shard.name) from None
    if len(shape) != 1 or dtype.kind not in "ui":
        raise ShardError(f"an array of shape {shape} and type {dtype} is no row of tokens", shard=shard.name)
    begin = stream.tell()
    if begin + shape[0] * dtype.itemsize != read.head.size:
        what = f"its header tells of {shape[0]} tokens, and it has {(read.head.size - begin) // dtype.itemsize}"
        raise ShardError(what, shard=shard.name, offset=begin)
    return _Tokens(replace(shard, head=read.head), read.head, begin, dtype, shape[0])
