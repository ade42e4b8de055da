"""Header of ``.npy`` files."""

from __future__ import annotations

import io

import numpy as np

from headrace._core.array_types import AnyDType
from headrace._core.shards.discovery import Shard, shard_errors


def npy_layout(
    first: bytes, shard: Shard, remedy: str = ""
) -> tuple[int, AnyDType, tuple[int, ...], bool]:
    """Return the layout of a file from the file's first bytes.

    Returns:
        The offset of the data, the dtype, the shape, and whether columns come first.
    """
    stream = io.BytesIO(first)
    with shard_errors(f"not a .npy file{remedy}", shard.name):
        version = np.lib.format.read_magic(stream)
        if version not in ((1, 0), (2, 0), (3, 0)):
            raise ValueError(f"version {version[0]}.{version[1]} is unknown")
        parse = (
            np.lib.format.read_array_header_1_0
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0
        )
        shape, fortran, dtype = parse(stream)
        if min(shape, default=0) < 0:
            raise ValueError(f"its shape is {shape}")
    return stream.tell(), dtype, shape, fortran
