"""Datasets of chunks written by LitData's `optimize`."""

from __future__ import annotations

import json
import marshal
import operator
import struct
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch

from headrace._base.array_types import ByteArray, IntArray
from headrace._shards.discovery import Shard, shard_errors
from headrace._shards.unpacked import UNPACKED_BYTES, check_unpacked, unpack
from headrace._store.listing import require_pyarrow
from headrace._store.store import StoreLike
from headrace.datasets import offset_tables as tables
from headrace.datasets.arrow import unpacked_size

# Types by LitData's numbers. Some types have two numbers.
_NUMPY_TYPES = (
    "i1",
    "i2",
    "i4",
    "i8",
    "u1",
    "u2",
    "u4",
    "u8",
    "f2",
    "f4",
    "f8",
    "c8",
    "c16",
    "b1",
)
_TORCH_TYPES = (
    "float32", "float32", "float64", "float64", "complex64", "complex64", "complex128",
    "complex128", "float16", "float16", "bfloat16", "uint8", "int8", "int16", "int16", "int32",
    "int32", "int64", "int64", "bool", "uint16",
)  # fmt: skip
_MEDIA = (
    "bytes",
    "file",
    "jpeg",
    "image",
    "tifffile",
    "video",
    "audio",
    "pdf",
    "nifti",
    "mesh",
)
# Header of frames: magic, version, flags, number of samples, samples in a frame, number of frames.
_FRAMES = struct.Struct("<8sHHIII")
_ARROW = b"LDARW01\0"  # end of a chunk with an Arrow table
_ROWS_AT_ONCE = 64  # rows of an Arrow table to convert to Python objects at once
_FRAME = np.dtype(
    [
        ("first", "<u4"),
        ("rows", "<u4"),
        ("start", "<u8"),
        ("stored", "<u4"),
        ("size", "<u4"),
    ]
)


class LitDataset(tables.OffsetTableDataset[Any]):
    """The samples of a folder of LitData's chunks, map-style.

    A sample is as returned by the function of `optimize`. Media (``jpeg``, ``image``, ``video``, …)
    are bytes, for `map`. Raw PIL images are arrays. Nothing is unpickled.

    Chunks are read by ranges. If chunks are compressed, or have Arrow tables, all chunks are read
    as a whole, as by `headrace.MDSDataset`. LitData keeps dicts in Arrow tables if the dicts have
    only text, numbers and bytes. All rows of a chunk then have all keys of the chunk, with None for
    missing values. Encrypted chunks, and chunks compressed sample by sample, are refused.

    The constructor requests the index and the beginning of each chunk. In an async program, call
    the constructor in a thread.

    Args:
        url: the folder with the index.json.
        seq_len: number of tokens in a sample, for chunks of LitData's `TokensLoader`. A sample is
            then an int64 tensor. Samples do not cross chunks.
        unpacked_bytes: bytes of unpacked chunks kept by each process. A chunk may unpack to
            `unpacked_bytes`, 256 MiB or 100 times the chunk's size, whichever is largest.

    Raises:
        MissingExtraError: ``headrace[compression]`` is not installed, or ``headrace[parquet]`` for
            Arrow tables.
        ShardError: the index or a chunk is corrupt or refused, or the index and a chunk do not
            match.
        StoreError: a request failed.
        ValueError: `seq_len` is missing, or the chunks are not of tokens.
    """

    def __init__(
        self,
        url: StoreLike,
        *,
        seq_len: int | None = None,
        unpacked_bytes: int = UNPACKED_BYTES,
    ) -> None:
        store, (files, self._config) = tables.read_index(url, _parse)
        self._dims: dict[str, int] = self._config["dims"]
        if bool(self._dims) is (seq_len is None) or (
            seq_len is not None and operator.index(seq_len) < 1
        ):
            what = f"seq_len={seq_len}: chunks of tokens need one, and others have none"
            raise ValueError(f"{what} ({store.name('index.json')})")
        self._seq_len = seq_len or 0
        counts = (
            [self._dims[file.key] // self._seq_len for file in files] if seq_len else ()
        )
        self._of_arrow: set[str] = set()  # names of chunks with an Arrow table
        super().__init__(store, files, unpacked_bytes, counts)
        self._whole |= bool(self._of_arrow)

    def decode(self, number: int, data: memoryview) -> Any:
        """Make a sample from the sample's bytes."""
        formats = self._config["data_format"]
        if self._seq_len:
            return torch.as_tensor(_decoder(formats[0])(data)).to(torch.int64)
        if self._files[number].key in self._of_arrow:
            return marshal.loads(data)  # bytes made by `_rows_of_arrow`
        fields = [
            (f"leaf {leaf}, {format}", _decoder(format), None)
            for leaf, format in enumerate(formats)
        ]
        return _assemble(
            self._config["data_spec"], iter(tables.decode_fields(data, fields))
        )

    def _table(self, file: tables.TableFile, data: memoryview, shard: Shard) -> IntArray:
        begin = file.begin
        is_arrow = len(data) == begin < file.size and data[begin - 4 :] == begin.to_bytes(
            4, "little"
        )
        if is_arrow and not self._seq_len:
            require_pyarrow("reading rows of Arrow tables")
            self._of_arrow.add(file.key)
            return np.empty(0, np.int64)
        offsets = super()._table(file, data, shard)
        if not self._seq_len:
            return offsets
        tokens, size = self._dims[file.key], int(offsets[-1] - offsets[0])
        width = self._config["width"]
        if tokens * width != size:
            raise shard.error(
                f"{size:,} bytes are not the {tokens:,} tokens of its index"
            )
        first, step = int(offsets[0]), self._seq_len * width
        return np.arange(first, first + size + 1, step, dtype=np.int64)

    def _unpack(
        self, file: tables.TableFile, shard: Shard, data: memoryview
    ) -> tuple[ByteArray, IntArray]:
        if file.key in self._of_arrow:
            return _rows_of_arrow(file, shard, data, self._unpacked.limit)
        if self._config["framed"]:
            return _rows_of_frames(file, shard, data, self._unpacked.limit)
        return super()._unpack(file, shard, data)


def _rows_of_frames(
    file: tables.TableFile, shard: Shard, data: memoryview, largest: int
) -> tuple[ByteArray, IntArray]:
    """Unpack the frames of a chunk."""
    with shard_errors("no chunk of compressed frames", shard.name):
        magic, version, _, rows, _, count = _FRAMES.unpack_from(data)
        if (magic, version, rows) != (b"LDFZ01\0\0", 1, file.rows):
            what = f"{magic!r} in version {version} of {rows:,} samples"
            raise ValueError(f"{what}, and {file.rows:,} in its index")
        offsets = np.frombuffer(data, "<u4", rows + 1, _FRAMES.size).astype(np.int64)
        frames = np.frombuffer(data, _FRAME, count, _FRAMES.size + 4 * rows + 4)
        size = sum(frames["size"].tolist())
        check_unpacked(size, len(data), largest)
        tables.check_offsets(offsets, 0, size, shard)
        unpacked = [
            unpack(data[start : start + stored], "zstd", size, shard, largest)
            for _, _, start, stored, size in frames.tolist()
        ]
        return np.concatenate(unpacked), offsets


def _rows_of_arrow(
    file: tables.TableFile, shard: Shard, data: memoryview, largest: int
) -> tuple[ByteArray, IntArray]:
    """Convert the rows of the Arrow table at the end of a chunk to strings of bytes."""
    import pyarrow

    with shard_errors("no Arrow table that can be read", shard.name):
        if data[-8:] != _ARROW:
            raise ValueError(f"it ends with {bytes(data[-8:])!r}")
        begin = len(data) - 12 - struct.unpack_from("<I", data, len(data) - 12)[0]
        stored = data[begin + 8 * (bytes(data[begin : begin + 6]) == b"ARROW1") : -12]
        for message in pyarrow.ipc.MessageReader.open_stream(stored):
            check_unpacked(
                unpacked_size(message.metadata, memoryview(message.body)),
                len(data),
                largest,
            )
        table = pyarrow.ipc.open_stream(stored).read_all()
        # Without the check, wrong offsets would lead outside the table's memory.
        table.validate(full=True)
        if table.num_rows != file.rows:
            raise ValueError(f"{table.num_rows:,} rows, and {file.rows:,} in its index")
        # marshal raises a `ValueError` for anything but plain values and bytes. Every Python reads
        # version 2.
        rows = [
            marshal.dumps(row, 2)
            for batch in table.to_batches(max_chunksize=_ROWS_AT_ONCE)
            for row in batch.to_pylist()
        ]
    return np.frombuffer(b"".join(rows), np.uint8), np.cumsum([0, *map(len, rows)])


def _parse(index: Any) -> tuple[list[tables.TableFile], dict[str, Any]]:
    config, files = index["config"], list[tables.TableFile]()
    loader, level = (
        config.get("item_loader") or "PyTreeLoader",
        config.get("compression_level") or "chunk",
    )
    compression = config["compression"]
    if (
        config.get("encryption")
        or loader not in ("PyTreeLoader", "TokensLoader")
        or level not in ("chunk", "batch")
    ):
        raise ValueError(
            f"chunks of {loader} with compression_level={level!r}, encrypted or not, are not read"
        )
    config["framed"] = bool(compression) and level == "batch"
    for chunk in index["chunks"]:
        name, rows, size = chunk["filename"], chunk["chunk_size"], chunk["chunk_bytes"]
        files.append(
            tables.checked(
                name, rows, size, compression, size if config["framed"] else None
            )
        )
    config["dims"], config["width"] = {}, 0
    if loader == "TokensLoader":
        config["dims"] = {
            chunk["filename"]: operator.index(chunk["dim"]) for chunk in index["chunks"]
        }
        (leaf,) = config["data_format"]
        if not leaf.startswith("no_header_") or min(config["dims"].values()) < 0:
            raise ValueError(f"chunks of {leaf!r} are not of tokens")
        config["width"] = _decoder(leaf)(memoryview(b"")).itemsize  # bytes of a token
    else:
        config["data_spec"] = json.loads(config["data_spec"])[1]
        leaves = iter(config["data_format"])
        _assemble(config["data_spec"], leaves)
        if (more := next(leaves, None)) is not None:
            raise ValueError(f"leaf {more!r} has no place in a sample")
    return files, config


def _assemble(spec: Any, leaves: Iterator[Any]) -> Any:
    """Build nested dicts, lists and tuples of leaves, as described by the index."""
    if spec["type"] is None:
        return next(leaves)
    parts = [_assemble(child, leaves) for child in spec["children_spec"]]
    if spec["type"] == "builtins.dict":
        return dict(zip(json.loads(spec["context"]), parts, strict=True))
    if spec["type"] not in _SEQUENCES:
        raise ValueError(
            f"samples with {spec['type']!r} are not read; dict, list and tuple are"
        )
    return _SEQUENCES[spec["type"]](parts)


@lru_cache
def _decoder(format: str) -> tables.FieldDecoder:
    kind, _, number = format.partition(":")
    if kind == "pickle":
        raise ValueError(
            f"leaf {format!r} is pickled, which can run any code: write it in another type"
        )
    if kind in ("no_header_tensor", "no_header_numpy"):
        if int(number) >= len(_NUMPY_TYPES if kind.endswith("numpy") else _TORCH_TYPES):
            raise ValueError(f"leaf {format!r} is of an unknown type")
        return partial(_values, kind, int(number), None)
    if kind not in _DECODERS and kind not in _MEDIA:
        raise ValueError(
            f"leaf {format!r} is unknown; {', '.join((*_DECODERS, *_MEDIA))} are read"
        )
    return bytes if kind in _MEDIA else _DECODERS[kind]


def _values(
    kind: str, number: int, shape: tuple[int, ...] | None, data: memoryview
) -> Any:
    copied = bytearray(data)
    if kind.endswith("numpy"):
        found: Any = np.frombuffer(copied, f"<{_NUMPY_TYPES[number]}")
    else:
        dtype = getattr(torch, _TORCH_TYPES[number])
        found = (
            torch.frombuffer(copied, dtype=dtype)
            if copied
            else torch.empty(0, dtype=dtype)
        )
    return found if shape is None else found.reshape(shape)


def _with_header(kind: str, data: memoryview) -> Any:
    order = "<" if kind == "numpy" else ">"
    number, rank = struct.unpack_from(f"{order}II", data)
    return _values(
        kind, number, struct.unpack_from(f"{order}{rank}I", data, 8), data[8 + 4 * rank :]
    )


_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "builtins.list": list,
    "builtins.tuple": tuple,
}
_DECODERS: dict[str, tables.FieldDecoder] = {
    "str": lambda data: bytes(data).decode(),
    "text": lambda data: bytes(data).decode(),
    "int": lambda data: struct.unpack("<q", data)[0],
    "float": lambda data: struct.unpack("<d", data)[0],
    "bool": lambda data: {b"\0": False, b"\1": True}[bytes(data)],
    "pil": tables.raw_image,
    "jpeg_array": tables.several,
    "tensor": partial(_with_header, "tensor"),
    "numpy": partial(_with_header, "numpy"),
}
