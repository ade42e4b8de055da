"""Datasets in Mosaic's streaming format (MDS)."""

from __future__ import annotations

import decimal
import json
from functools import lru_cache, partial
from typing import Any

import numpy as np

from headrace._base.array_types import AnyArray
from headrace._shards.unpacked import UNPACKED_BYTES
from headrace._store.store import StoreLike
from headrace.datasets import offset_tables as tables

# Name and encoding of each column, and the size in bytes if the size is fixed.
Columns = tuple[tuple[str, str, int | None], ...]

_TYPES = {
    f"{name}{8 * size}": f"{name[0]}{size}"
    for name in ("uint", "int", "float")
    for size in (1, 2, 4, 8)
}
del _TYPES["float8"]
_CODES = {8 * int(code[1]) + "uif".index(code[0]): code for code in _TYPES.values()}
_DECODERS: dict[str, tables.FieldDecoder] = {
    "bytes": bytes,
    "str": lambda data: bytes(data).decode(),
    "int": lambda data: int(_scalar("int64", data)),
    "str_int": lambda data: int(bytes(data)),
    "str_float": lambda data: float(bytes(data)),
    "str_decimal": lambda data: decimal.Decimal(bytes(data).decode()),
    "json": lambda data: json.loads(bytes(data)),
    "jpeg": bytes,
    "png": bytes,
    "pil": tables.raw_image,
    "jpeg_array": tables.several,
    "jpegarray": tables.several,
    "list[jpeg]": lambda data: tables.several(data[4:]),
    "list[png]": lambda data: tables.several(data[4:]),
    "list[pil]": lambda data: tables.several(data[4:], tables.raw_image),
}


class MDSDataset(tables.OffsetTableDataset[dict[str, Any]]):
    """The samples of a folder written by Mosaic's `MDSWriter`, map-style.

    A sample is a dict of the columns. Columns are decoded as by Mosaic, with arrays and scalars in
    NumPy's types. Images differ: ``jpeg`` and ``png`` stay bytes, for `headrace.decode.fields`, and
    ``pil`` is an array. Nothing is unpickled.

    Uncompressed shards are read by ranges. If a shard is compressed, all shards are fetched as a
    whole, and compressed shards are unpacked as a whole. A loader with ``shuffle=True`` and no
    sampler reads compressed shards side by side, as many as fit in `unpacked_bytes`. An order that
    is random over all shards unpacks a shard for almost each sample.

    The constructor requests the index and the beginning of each shard. In an async program, call
    the constructor in a thread.

    Args:
        url: the folder with the index.json. An index of several folders, merged by Mosaic, is read
            too.
        unpacked_bytes: bytes of unpacked shards kept by each process. A shard may unpack to
            `unpacked_bytes`, 256 MiB or 100 times the shard's size, whichever is largest.

    Raises:
        MissingExtraError: ``headrace[compression]`` is needed and not installed.
        ShardError: the index or a shard is corrupt, or the index and a shard do not match.
        StoreError: a request failed.
    """

    def __init__(self, url: StoreLike, *, unpacked_bytes: int = UNPACKED_BYTES) -> None:
        store, parsed = tables.read_index(
            url, lambda index: [*map(_parse_shard, index["shards"])]
        )
        self._columns = [columns for _, columns in parsed]
        super().__init__(store, [file for file, _ in parsed], unpacked_bytes)

    def decode(self, number: int, data: memoryview) -> dict[str, Any]:
        """Make a sample from the sample's bytes."""
        columns = self._columns[number]
        values = tables.decode_fields(
            data, [(name, _decoder(encoding), size) for name, encoding, size in columns]
        )
        return dict(zip([name for name, _, _ in columns], values, strict=True))


def _parse_shard(shard: Any) -> tuple[tables.TableFile, Columns]:
    if (shard["format"], shard["version"]) != ("mds", 2):
        kind = f"{shard['format']!r} in version {shard['version']!r}"
        raise ValueError(f"format {kind}; 'mds' in version 2 is read")
    raw, packed = shard["raw_data"], shard.get("zip_data")
    name, stored = (
        (packed["basename"], packed["bytes"]) if packed else (raw["basename"], None)
    )
    file = tables.checked(
        name, shard["samples"], raw["bytes"], packed and shard["compression"], stored
    )
    columns = tuple(
        zip(
            shard["column_names"],
            shard["column_encodings"],
            shard["column_sizes"],
            strict=True,
        )
    )
    for name, encoding, size in columns:
        if encoding == "pkl":
            raise ValueError(
                f"column {name!r} is pickled, which can run any code: write it in another encoding"
            )
        if size is not None and (type(size) is not int or size < 1):
            raise ValueError(f"column {name!r} has size {size!r}")
        _decoder(encoding)
    return file, columns


@lru_cache
def _decoder(encoding: str) -> tables.FieldDecoder:
    kind, _, options = encoding.partition(":")
    if kind == "ndarray":
        type, _, shape = options.partition(":")
        if type and type not in _TYPES:
            raise ValueError(
                f"encoding {encoding!r} is of an unknown type; {', '.join(_TYPES)} are read"
            )
        return partial(_array, type, tuple(map(int, shape.split(","))) if shape else None)
    if kind in _TYPES:
        return partial(_scalar, kind)
    if kind not in _DECODERS:
        raise ValueError(f"encoding {encoding!r} is unknown")
    return _DECODERS[kind]


def _scalar(type: str, data: memoryview) -> Any:
    (value,) = np.frombuffer(data, f"<{_TYPES[type]}")
    return value


def _array(type: str, shape: tuple[int, ...] | None, data: memoryview) -> AnyArray:
    code = _TYPES[type] if type else _CODES[data[0]]
    data = data if type else data[1:]
    if shape is None:
        count, width = data[0] >> 2, 1 << (data[0] & 3)
        shape = tuple(np.frombuffer(data[1 : 1 + count * width], f"<u{width}").tolist())
        data = data[1 + count * width :]
    return np.frombuffer(data, f"<{code}").reshape(shape).copy()
