"""Header of ``.npy`` files."""

from __future__ import annotations

import io
from typing import Any, NamedTuple

import numpy as np

from headrace._base.array_types import AnyDType
from headrace._shards.discovery import Shard, shard_errors

_PARSERS: dict[tuple[int, int], Any] = {
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
