"""The formats that `test_formats` and `test_mutations` read: files of their original writers, and what is in them.

An entry is a `Format` in `FORMATS`: at most about 40 samples in three shards or more, four if one of them is empty.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr

import headrace as hr

FIXTURES = Path(__file__).parents[2] / "fixtures"


@dataclass(frozen=True)
class Format:
    """A format: its files, the dataset of a store that has nothing else, and what is in it.

    Attributes:
        files: by their keys.
        open: the dataset; map-style, or None for a format that is only a stream.
        samples: all samples in order.
        stream: the stream, with the options of `TarDataset`; None: ``open(store).stream(**options)``, if it has one.
        checked: whether checksums show every changed byte; else only changed lengths are shown.
    """

    files: Mapping[str, bytes]
    open: Callable[[hr.Store], Any] | None
    samples: Sequence[Any]
    stream: Callable[..., Any] | None = None
    checked: bool = False

    def as_stream(self, store: hr.Store, **options: Any) -> Any:
        assert self.stream is not None or self.open is not None
        return self.stream(store, **options) if self.stream else self.open(store).stream(**options)


def files_in(folder: str) -> dict[str, bytes]:
    """The files of a folder of tests/fixtures, at any depth, without the script that made them."""
    files = sorted(path for path in (FIXTURES / folder).rglob("*") if path.is_file() and path.suffix != ".py")
    return {path.relative_to(FIXTURES / folder).as_posix(): path.read_bytes() for path in files}


def plain(sample: Any) -> Any:
    """A sample as values that compare by content: of tensors and arrays type, shape and values; without its URL."""
    if isinstance(sample, torch.Tensor | np.ndarray):
        return type(sample).__name__, str(sample.dtype), tuple(sample.shape), repr(sample.tolist())
    if isinstance(sample, dict):
        return {key: plain(value) for key, value in sample.items() if key != "__url__"}
    if isinstance(sample, tuple | list):
        return [*map(plain, sample)]
    return bytes(sample) if isinstance(sample, memoryview | bytearray) else sample


def _tokens() -> Format:
    shards = [
        np.random.default_rng(n).integers(0, 60_000, size).astype("<u2") for n, size in enumerate((420, 5, 231, 100))
    ]
    npy = io.BytesIO()
    np.save(npy, shards[2])
    files = {"2.npy": npy.getvalue(), **{f"{n}.bin": shards[n].tobytes() for n in (0, 1, 3)}}
    windows = [shard[at : at + 33] for shard in shards for at in range(0, len(shard) - 32, 20)]
    samples = [torch.from_numpy(window.astype(np.int64)) for window in windows]
    return Format(files, lambda store: hr.TokenDataset(store, seq_len=33, stride=20), samples)


def _tar() -> Format:
    files, samples = {}, []
    for number, count in enumerate((7, 1, 9)):
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as archive:
            for sample in range(count):
                fields = {"txt": b"%d" % (sample * 7919), "bin": bytes(range(sample, sample + 9 * number))}
                for field, data in fields.items():
                    info = tarfile.TarInfo(f"{number}-{sample}.{field}")
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
                samples.append({"__key__": f"{number}-{sample}", **fields})
        files[f"{number}.tar"] = stream.getvalue()
    return Format(files, hr.TarDataset.index, samples)


def _zarr(**layout: Any) -> Format:
    values = np.arange(30 * 2 * 3, dtype=np.float32).reshape(30, 2, 3) ** 2
    files: dict[str, Any] = {}
    zarr.create_array(zarr.storage.MemoryStore(files), shape=values.shape, dtype="f4", **layout)[:] = values
    return Format({key: data.to_bytes() for key, data in files.items()}, hr.ZarrDataset, [*torch.from_numpy(values)])


FORMATS = {
    "zarr, sharded": _zarr(chunks=(2, 2, 3), shards=(12, 2, 3)),
    "zarr 2": _zarr(chunks=(8, 2, 3), zarr_format=2),
    "tokens": _tokens(),
    "tar index": _tar(),
}
