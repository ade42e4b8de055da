"""Rows of arrays in ``.npy`` files."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from headrace._base.array_types import AnyDType
from headrace._shards.discovery import (
    OnOpeningError,
    Shard,
    Shards,
    find_shards,
    open_each,
    shard_errors,
)
from headrace._store.ranges import Ranges
from headrace._store.store import StoreLike
from headrace.datasets.cached import RangedShards

__all__ = ["ArrayDataset", "npy_layout"]

_PARSERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
    (3, 0): np.lib.format.read_array_header_2_0,
}


class ArrayDataset(RangedShards[torch.Tensor]):
    """Rows of arrays in ``.npy`` files, map-style.

    Sample i is ``array[i]``, a tensor of the array's type. Several files are concatenated along the
    first axis.

    A loader reads neighbouring rows by one request. With ``shuffle=True`` and no sampler, the order
    is random in blocks of neighbouring rows.

    The constructor requests the first bytes of each file. In an async program, call the constructor
    in a thread: ``await asyncio.to_thread(ArrayDataset, ...)``.

    Args:
        shards: URLs or paths of files, as for `TarDataset`. In a directory, the files ending in
            ``.npy``.
        on_error: how the constructor treats a broken or missing file, as for `ParquetDataset`.
        store: store of all files, as for `TarDataset`.

    Raises:
        EmptyListingError: a glob or a directory has no file, or the file or directory does not
            exist.
        ShardError: a file is not a ``.npy`` file, is compressed or truncated, stores columns first,
            has a type unknown to torch, or has rows of another type or shape than the first file.
        StoreError: a request failed.

    Example:
        >>> import pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> np.save(folder / "0.npy", np.arange(6.0).reshape(3, 2))
        >>> ArrayDataset(folder)[2]
        tensor([4., 5.], dtype=torch.float64)
    """

    def __init__(
        self, shards: Shards, *, on_error: OnOpeningError = "raise", store: StoreLike | None = None
    ) -> None:
        found = find_shards(shards, suffixes=(".npy",), store=store)
        files = open_each(found, _open_file, on_error=on_error)
        arrays, begins, dtypes, shapes = zip(*files, strict=True)
        self._dtype, self._shape = dtypes[0], shapes[0][1:]
        for shard, _, dtype, shape in files:
            if (dtype, shape[1:]) != (self._dtype, self._shape):
                what = (
                    f"{dtype} of shape {shape}, but the first file has {self._dtype} of {shapes[0]}"
                )
                raise shard.error(what)
        super().__init__(arrays, [shape[0] for shape in shapes])
        self._row_bytes = self._dtype.itemsize * math.prod(self._shape)
        self._begins = np.array(begins)

    def ranges(self, indices: Sequence[int]) -> Ranges:
        """Return the bytes of the rows at `indices`, by shard.

        Raises:
            IndexError: an index is out of range.
        """
        shards, rows, _ = self._rows(indices)
        starts = self._begins[shards] + rows * self._row_bytes
        return Ranges(shards, starts, starts + self._row_bytes)

    def sample_of(self, index: int, data: memoryview) -> torch.Tensor:
        """Return the row in `data`."""
        return self._tensor(data, self._shape)

    def samples_of(
        self, indices: Sequence[int], data: Sequence[memoryview]
    ) -> Sequence[torch.Tensor] | torch.Tensor:
        """Return the rows of a batch as a tensor."""
        if type(self).sample_of is not ArrayDataset.sample_of:
            return super().samples_of(indices, data)
        return self._tensor(b"".join(data), (len(data), *self._shape))

    def _tensor(self, data: memoryview | bytes, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.from_numpy(
            np.frombuffer(data, self._dtype).reshape(shape).astype(self._dtype.newbyteorder("="))
        )


async def _open_file(shard: Shard) -> tuple[Shard, int, AnyDType, tuple[int, ...]]:
    """Return a file, and the offset, type and shape of the array."""
    shard, first = await shard.read_version(4096)
    layout = npy_layout(bytes(first[:4096]), shard)
    begin, dtype, shape = layout.begin, layout.dtype, layout.shape
    try:
        torch.from_numpy(np.empty(0, dtype.newbyteorder("=")))
    except TypeError:
        raise shard.error(f"torch has no type for {dtype}; save a view or a copy of one") from None
    if layout.columns_first or not math.prod(shape[1:]) or not shape:
        what = (
            "columns come first; save numpy.ascontiguousarray(array)"
            if layout.columns_first
            else f"shape {shape} has no rows"
        )
        raise shard.error(what)
    if begin + dtype.itemsize * math.prod(shape) != shard.size:
        what = f"{shard.size - begin:,} bytes, but the header has {dtype} of shape {shape}"
        raise shard.error(what, begin)
    return shard, begin, dtype, shape


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
