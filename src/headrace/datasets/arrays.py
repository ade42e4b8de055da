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

_PARSERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
    (3, 0): np.lib.format.read_array_header_2_0,
}


class ArrayRows(RangedShards[torch.Tensor]):
    """Samples of one shape in arrays. Each shard has one array.

    Args:
        shards: the shards.
        counts: number of samples in each shard.
        begins: offset of each array, in bytes.
        dtypes: type of each array.
        stride: number of items from the start of a sample to the start of the next sample.
        shape: shape of a sample; (-1,) for samples of different lengths.
        given: type of the tensors.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        counts: Sequence[int],
        begins: Sequence[int],
        dtypes: Sequence[AnyDType],
        stride: int,
        shape: tuple[int, ...],
        given: AnyDType,
    ) -> None:
        super().__init__(shards, counts)
        self._begins = np.array(begins, np.int64)
        self._dtypes = dtypes
        self._dtype = dtypes[0] if len({*dtypes}) == 1 else None
        self._sizes = np.array([dtype.itemsize for dtype in dtypes], np.int64)
        self._stride, self._shape, self._given = stride, shape, given

    def ranges(self, indices: Sequence[int]) -> Ranges:
        """Return the bytes of the samples at `indices`, by shard.

        Raises:
            IndexError: an index is out of range.
        """
        shards, rows, _ = self._rows(indices)
        sizes = self._sizes[shards]
        starts = self._begins[shards] + rows * self._stride * sizes
        return Ranges(shards, starts, starts + math.prod(self._shape) * sizes)

    def sample_of(self, index: int, data: memoryview) -> torch.Tensor:
        """Return the sample in `data`."""
        dtype = self._dtype or self._dtypes[self.range(index)[0]]
        return self._tensor(data, dtype, self._shape)

    def samples_of(
        self, indices: Sequence[int], data: Sequence[memoryview]
    ) -> Sequence[torch.Tensor] | torch.Tensor:
        """Return the samples of a batch, as one tensor if all have one type and shape."""
        own = type(self).sample_of is ArrayRows.sample_of
        if self._dtype is None or self._shape == (-1,) or not own:
            return super().samples_of(indices, data)
        return self._tensor(b"".join(data), self._dtype, (len(data), *self._shape))

    def _tensor(
        self, data: memoryview | bytes, dtype: AnyDType, shape: tuple[int, ...]
    ) -> torch.Tensor:
        return torch.from_numpy(
            np.frombuffer(data, dtype).reshape(shape).astype(self._given)
        )


class ArrayDataset(ArrayRows):
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
        self,
        shards: Shards,
        *,
        on_error: OnOpeningError = "raise",
        store: StoreLike | None = None,
    ) -> None:
        found = find_shards(shards, suffixes=(".npy",), store=store)
        files = open_each(found, _open_file, on_error=on_error)
        arrays, begins, dtypes, shapes = zip(*files, strict=True)
        row = shapes[0][1:]
        for shard, _, dtype, shape in files:
            if (dtype, shape[1:]) != (dtypes[0], row):
                first = f"{dtypes[0]} of {shapes[0]}"
                what = f"{dtype} of shape {shape}, but the first file has {first}"
                raise shard.error(what)
        counts = [shape[0] for shape in shapes]
        native = dtypes[0].newbyteorder("=")
        super().__init__(arrays, counts, begins, dtypes, math.prod(row), row, native)


async def _open_file(shard: Shard) -> tuple[Shard, int, AnyDType, tuple[int, ...]]:
    """Return a file, and the offset, type and shape of the array."""
    shard, first = await shard.read_version(4096)
    layout = npy_layout(bytes(first[:4096]), shard)
    begin, dtype, shape = layout.begin, layout.dtype, layout.shape
    try:
        torch.from_numpy(np.empty(0, dtype.newbyteorder("=")))
    except TypeError:
        raise shard.error(
            f"torch has no type for {dtype}; save a view or a copy of one"
        ) from None
    if layout.columns_first or not math.prod(shape[1:]) or not shape:
        what = (
            "columns come first; save numpy.ascontiguousarray(array)"
            if layout.columns_first
            else f"shape {shape} has no rows"
        )
        raise shard.error(what)
    if begin + dtype.itemsize * math.prod(shape) != shard.size:
        what = (
            f"{shard.size - begin:,} bytes, but the header has {dtype} of shape {shape}"
        )
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
