"""Slices of Zarr arrays."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from headrace._base.array_types import AnyArray
from headrace._extras import require
from headrace._shards.discovery import map_shards, shard_errors, split_url
from headrace._shards.unpacked import UnpackedShards
from headrace._store.ranges import Ranges
from headrace._store.store import Store, StoreLike, as_store
from headrace._streams.kinds import Blocks
from headrace._streams.map_style import RangedDataset, positions

if TYPE_CHECKING:
    from zarr.abc.store import Store as ZarrStore
    from zarr.core.array import AsyncArray


class ZarrDataset(RangedDataset[Any]):
    """Slices of Zarr arrays along an axis, map-style.

    zarr-python reads the arrays: format 2 or 3, sharded or not. A sample is a tensor, a `str` or
    nested lists of `str` for strings of any length (`bytes` for types of bytes), or a NumPy array
    for other types that torch lacks (dates). With several `arrays` a sample is a dict.
    ``scale_factor`` and other conventions of attributes are not applied.

    Neighbours along the axis share chunks. Decoded chunks are kept, up to `cache_bytes`. So each
    chunk is fetched and decoded once in the order of the array, and in the order of a loader with
    ``shuffle=True`` and no sampler. Chunks are decoded in threads. `concurrency` counts reads of
    chunks, and `hedge` has no effect.

    Args:
        url: URL, path or `headrace.Store` of an array or a group. Or a store of zarr, such as the
            ``store`` of an Icechunk session. A store of zarr makes its own requests, retries and
            counts.
        arrays: names of arrays in the group. A single name gives the array itself as the sample, a
            list gives dicts.
        axis: the axis of samples, in all arrays. The arrays must have the same length along the
            axis.
        windows: sizes of windows by axis, such as ``{1: 256, 2: 256}``. A sample is then a window
            of a slice, and the dataset has all windows of a regular grid. For ``axis=0`` and
            windows of axes 1 and 2, a grid of ``n1 * n2`` windows, the sample at an index is window
            ``numpy.unravel_index(index % (n1 * n2), (n1, n2))`` of slice ``index // (n1 * n2)``.
            Only the chunks of the window are read. So sizes are multiples of the chunks of each
            array. A rest at the end of an axis is left out. The windows of a chunk along `axis` are
            neighbours, and should fit in `cache_bytes`.
        missing: how to treat an object that does not exist. ``"error"`` raises an error. ``"fill"``
            gives the array's fill value: most writers leave out chunks with only the fill value.
            Chunks that a writer left out of a shard always have the fill value. A store of zarr
            decides itself. Icechunk knows its chunks.
        cache_bytes: bytes of decoded chunks kept by each process, beside the chunks under way. Of
            strings of variable length only the references are counted, not the text.
            Decoding for a single sample may take `cache_bytes` or 1 GiB, whichever is more.
        store: store of the arrays, a `headrace.Store` or its URL. `url` is then a key in the store,
            or a URL under the store's URL.

    Attributes:
        block_size: number of samples in a chunk along `axis`, of the array with the largest
            samples.

    Raises:
        IndexError: an array lacks the axis.
        MissingExtraError: zarr is not installed.
        ObjectNotFoundError: there is no array.
        ShardError: metadata are damaged, or the array needs the pickle codec. While reading: a
            chunk is missing or damaged.
        StoreError: a request failed.
        ValueError: an invalid argument, or arrays of different lengths. Or windows that are larger
            than an array, or no multiples of the chunks.

    Example:
        >>> import pathlib, tempfile, zarr
        >>> folder = pathlib.Path(tempfile.mkdtemp()) / "images.zarr"
        >>> zarr.create_array(folder, shape=(100, 8, 8), chunks=(16, 8, 8), dtype="uint8")[:] = 7
        >>> dataset = ZarrDataset(folder)
        >>> len(dataset), dataset.block_size, dataset[99].shape
        (100, 16, torch.Size([8, 8]))
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | Store | ZarrStore,
        *,
        arrays: str | Sequence[str] | None = None,
        axis: int = 0,
        windows: Mapping[int, int] = {},
        missing: Literal["error", "fill"] = "error",
        cache_bytes: int = 256 << 20,
        store: StoreLike | None = None,
    ) -> None:
        if missing not in ("error", "fill"):
            raise ValueError(f"missing={missing!r} must be 'error' or 'fill'")
        require("zarr.abc.store", "ZarrDataset", "zarr", "zarr")
        from headrace._shards.zarr_store import ReadStore, open_array

        self._reads = UnpackedShards(cache_bytes)
        source: Any = url
        self._path = self._prefix = ""
        if isinstance(url, Store):
            url, store = "", url
        if isinstance(url, str | os.PathLike):
            if store is None:
                store, url = split_url(os.fspath(url))
            opened = as_store(store)
            self._path, self._prefix = opened.key_of(url), opened.name("")
            source = ReadStore(opened, missing != "fill", self._reads)
        self._axis = axis
        self._windows = {**windows}
        self._names = None if arrays is None or isinstance(arrays, str) else list(arrays)
        folder = self._path.strip("/")
        opened_as = partial(
            open_array, source, self._prefix, folder, axis, windows, cache_bytes
        )
        names = [str(arrays or "")] if self._names is None else self._names
        self._arrays: list[AsyncArray[Any]] = map_shards(opened_as, names)
        lengths = {
            array.path: (
                array.shape[axis],
                *(array.shape[number] // size for number, size in windows.items()),
            )
            for array in self._arrays
        }
        if len({*lengths.values()}) != 1:
            raise ValueError(
                f"arrays must have the same length along axis {axis}, and as many windows, but "
                f"have {lengths}"
            )
        self._length, *self._grid = lengths[self._arrays[0].path]
        self._count = math.prod(self._grid)
        self.block_size = (
            max(self._arrays, key=lambda array: array.nbytes).chunks[axis] * self._count
        )
        step = math.gcd(*(array.chunks[axis] for array in self._arrays))
        # A chunk may be longer than the array, and than an integer of NumPy.
        self._step = min(step, max(1, self._length))

    def __len__(self) -> int:
        return self._length * self._count

    @property
    def blocks(self) -> Blocks:
        """Sizes of blocks for a random order.

        As many chunks are read side by side as are kept.
        """
        stored = sum(array.nbytes for array in self._arrays)
        return Blocks.within(self._reads.limit, stored, len(self), self.block_size)

    def sample_key(self, index: int) -> str:
        """Return the array or group, and the index."""
        return f"{self._prefix}{self._path}[{index}]"

    def ranges(self, indices: Sequence[int]) -> Ranges:
        """Return the samples at `indices` as positions in blocks.

        The neighbours in a block share a chunk of each array.
        """
        places, windows = np.divmod(positions(indices, len(self)), self._count)
        blocks, rows = np.divmod(places, self._step)
        return Ranges(blocks * self._count + windows, rows, rows + 1)

    async def read_range(
        self, number: int, start: int, stop: int, *, index: Any = None
    ) -> Any:
        """Read neighbouring samples in a block, as views of arrays."""
        number, window = divmod(number, self._count)
        first = number * self._step + start
        places = [divmod(first, array.chunks[self._axis]) for array in self._arrays]
        keys = [(each, block, window) for each, (block, _) in enumerate(places)]
        chunks = await asyncio.gather(
            *(self._reads.get(key, partial(self._read_block, *key)) for key in keys)
        )
        return [
            [
                chunk[row + number, ...]
                for chunk, (_, row) in zip(chunks, places, strict=True)
            ]
            for number in range(stop - start)
        ]

    def sample_of(self, index: int, data: Any) -> Any:
        """Return the sample in `data`."""
        sample = [_tensor(row) for row in data[0]]
        if self._names is None:
            return sample[0]
        return dict(zip(self._names, sample, strict=True))

    async def _read_block(self, number: int, block: int, window: int) -> AnyArray:
        """Read a window of the samples of a chunk, along the first axis."""
        array = self._arrays[number]
        sizes = {self._axis: array.chunks[self._axis], **self._windows}
        places: Any = (block, *np.unravel_index(window, self._grid))
        selection = [slice(None)] * array.ndim
        for (axis, size), place in zip(sizes.items(), places, strict=True):
            selection[axis] = slice(place * size, (place + 1) * size)
        what = (
            f"samples from {selection[self._axis].start:,} on: a chunk, or zarr.json or .zarray, "
            "is damaged"
        )
        # zarr, the codecs and icechunk raise errors of their own.
        with shard_errors(what, self._prefix + array.path):
            values = await array.getitem(tuple(selection))
        return np.moveaxis(np.asarray(values), self._axis, 0)


def _tensor(row: Any) -> Any:
    """Return a copy as a tensor, as Python's strings, or as NumPy's type.

    A view would keep the whole chunk in memory, and torch would pickle the whole chunk.
    """
    type = row.dtype if row.dtype.isnative else row.dtype.newbyteorder("=")
    row = np.array(row, type, order="C")
    try:
        return torch.from_numpy(row)
    except TypeError:
        return row.tolist() if row.dtype.kind in "OSTU" else row[()]
