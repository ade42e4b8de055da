"""The formats that `test_formats` and `test_mutations` read: files of their original writers, and what is in them.

An entry is a `Format` in `FORMATS`: at most about 40 samples in three shards or more, four if one
of them is empty."""

from __future__ import annotations

import fractions
import gzip
import io
import json
import re
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import zarr

import headrace as hr
from tests.fixtures.litdata import make as litdata
from tests.fixtures.mds import make as mds
from tests.unit.shards import tars
from tests.unit.shards.resuming import in_memory

FIXTURES = Path(__file__).parents[2] / "fixtures"


@dataclass(frozen=True)
class Format:
    """A format: its files, the dataset of a store that has nothing else, and what is in it.

    Attributes:
        files: by their keys.
        open: the map-style dataset.
        samples: all samples in order.
        checked: whether checksums show every changed byte; else only changed lengths are shown.
    """

    files: Mapping[str, bytes]
    open: Callable[[hr.Store], Any]
    samples: Sequence[Any]
    checked: bool = False


def files_in(folder: str) -> dict[str, bytes]:
    """The files of a folder of tests/fixtures, at any depth, without the script that made them."""
    files = sorted(
        path
        for path in (FIXTURES / folder).rglob("*")
        if path.is_file() and path.suffix != ".py"
    )
    return {
        path.relative_to(FIXTURES / folder).as_posix(): path.read_bytes()
        for path in files
    }


def plain(sample: Any) -> Any:
    """A sample as values that compare by content: of tensors and arrays type, shape and values; without its URL."""
    if isinstance(sample, torch.Tensor | np.ndarray | np.generic):
        return (
            type(sample).__name__,
            str(sample.dtype),
            tuple(sample.shape),
            repr(sample.tolist()),
        )
    if isinstance(sample, dict):
        return {key: plain(sample[key]) for key in sorted(sample) if key != "__url__"}
    if isinstance(sample, tuple | list):
        return [*map(plain, sample)]
    return bytes(sample) if isinstance(sample, memoryview | bytearray) else sample


def npy(array: np.ndarray, **options: Any) -> bytes:
    """The file of `numpy.save`."""
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


def _tokens() -> Format:
    shards = [
        np.random.default_rng(n).integers(0, 60_000, size).astype("<u2")
        for n, size in enumerate((420, 5, 231, 100))
    ]
    files = {
        "2.npy": npy(shards[2]),
        **{f"{n}.bin": shards[n].tobytes() for n in (0, 1, 3)},
    }
    windows = [
        shard[at : at + 33] for shard in shards for at in range(0, len(shard) - 32, 20)
    ]
    samples = [torch.from_numpy(window.astype(np.int64)) for window in windows]
    return Format(
        files, lambda store: hr.TokenDataset(store, seq_len=33, stride=20), samples
    )


def _documents(*shards: str) -> Format:
    """Of Megatron or datatrove, with the files that lie beside each."""
    files, tokens = (
        files_in("tokens"),
        json.loads((FIXTURES / "tokens/expected.json").read_text()),
    )
    samples = [
        torch.tensor(document, dtype=torch.int64)
        for shard in shards
        for document in tokens[shard]
    ]
    kept = {
        key: data
        for key, data in files.items()
        for shard in shards
        if key.startswith(shard.removesuffix("bin"))
    }
    return Format(kept, lambda store: hr.TokenDataset(store, seq_len=None), samples)


def _tar() -> Format:
    files, samples = {}, []
    for number, count in enumerate((7, 1, 9)):
        members: list[tuple[str, bytes]] = []
        for sample in range(count):
            fields = {
                "txt": b"%d" % (sample * 7919),
                "bin": bytes(range(sample, sample + 9 * number)),
            }
            members += [
                (f"{number}-{sample}.{field}", data) for field, data in fields.items()
            ]
            samples.append({"__key__": f"{number}-{sample}", **fields})
        files[f"{number}.tar"] = tars.members(*members)
    return Format(files, hr.TarDataset.index, samples)


def _tables(
    kind: type[hr.ArrowDataset | hr.ParquetDataset],
    compressions: Sequence[str | None] = (None, None, "zstd", "lz4"),
    **written_as: Any,
) -> Format:
    """Streams and files of Arrow or Parquet, one with a dictionary, compressed ones, and one without rows."""
    files, samples = {}, []
    for number, (count, compression) in enumerate(
        zip((7, 0, 9, 10), compressions, strict=True)
    ):
        columns = {
            "id": [*range(number * 100, number * 100 + count)],
            "text": [f"{n % 3}" * 40 for n in range(count)],
        }
        table = pa.table(columns, pa.schema({"id": pa.int64(), "text": pa.string()}))
        samples += table.to_pylist()
        if number == 3:
            table = table.set_column(1, "text", table["text"].dictionary_encode())
        stream, options = (
            io.BytesIO(),
            pa.ipc.IpcWriteOptions(compression=compression, **written_as),
        )
        new = pa.ipc.new_file if number % 2 else pa.ipc.new_stream
        if kind is hr.ArrowDataset:
            with new(stream, table.schema, options=options) as writer:
                writer.write_table(table, 4)
            data = stream.getvalue()
        else:
            data = tars.parquet(table, row_group_size=4, compression=compression)
        files[f"{number}{kind._suffixes[0]}"] = data

    return Format(files, kind, samples)


def video_file(
    count: int,
    *,
    codec: str = "libx264",
    times: Sequence[int] | None = None,
    audio: int = 1,
    rotation: int = 0,
    options: Mapping[str, str] | None = None,
    movflags: str = "faststart",
    container: str = "mp4",
    pixels: str = "yuv420p",
) -> bytes:
    """A video of PyAV, of 30 frames a second (or at `times`, in 120ths), with key frames 12 apart and B-frames."""
    random = np.random.default_rng(count)
    noise = random.integers(0, 255, (48, 64, 3), dtype=np.uint8)
    flags = {"movflags": movflags} if movflags else {}
    with (
        tempfile.NamedTemporaryFile() as file,  # faststart reads it again by its name
        av.open(file.name, "w", format=container, options=flags) as output,
    ):
        video = output.add_stream(
            codec,
            rate=30,
            options={**(options or {})},
            width=64,
            height=48,
            pix_fmt=pixels,
        )
        video.codec_context.gop_size, video.codec_context.max_b_frames = 12, 2
        video.codec_context.time_base = fractions.Fraction(1, 120)
        if rotation:
            video.set_display_rotation(rotation)
        sounds = [output.add_stream("aac", rate=16_000) for _ in range(audio)]
        for number in range(count):
            picture = np.roll(noise, (2 * number, number), (0, 1))
            picture[:8, :8] = number % 256
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(
                format=pixels
            )
            frame.pts, frame.time_base = (
                times[number] if times else 4 * number,
                fractions.Fraction(1, 120),
            )
            output.mux(video.encode(frame))
            for sound in sounds if number % 2 else ():
                samples = random.standard_normal((1, 1024)).astype(np.float32) / 10
                wave = av.AudioFrame.from_ndarray(samples, format="fltp", layout="mono")
                wave.sample_rate, wave.pts = 16_000, number // 2 * 1024
                output.mux(sound.encode(wave))
        for stream in (video, *sounds):
            output.mux(stream.encode())
        output.close()
        return Path(file.name).read_bytes()


def _video() -> Format:
    """What the frames of clips are is tested in `test_video`."""
    counts, movflags = (20, 3, 30, 14), ("faststart", "", "", "faststart")
    files = {f"{n}.mp4": video_file(counts[n], movflags=movflags[n]) for n in range(4)}

    def clips(store: hr.Store) -> hr.VideoDataset:
        return hr.VideoDataset(store, frames=5, stride=4)

    return Format(files, clips, [*clips(in_memory(files))])


def _lerobot() -> Format:
    """Two episodes, which need the first file of each folder; what samples are is tested in `test_lerobot`."""
    whole = files_in("lerobot/set").items()
    files = {path: data for path, data in whole if not re.search("file-00[12]", path)}
    episodes = "meta/episodes/chunk-000/file-000.parquet"
    table = pq.read_table(io.BytesIO(files[episodes]))
    used = [name for name in table.column_names if not name.startswith("stats/")]
    files[episodes] = tars.parquet(table.select(used)[:2])

    def opened(store: hr.Store) -> hr.LeRobotDataset:
        times = {"observation.images.front": [-0.1, 0.0], "action": [0.0, 0.1]}
        return hr.LeRobotDataset(store, times, return_uint8=True)

    return Format(files, opened, [*opened(in_memory(files))])


def _zarr(**layout: Any) -> Format:
    values = np.arange(30 * 2 * 3, dtype=np.float32).reshape(30, 2, 3) ** 2
    files: dict[str, Any] = {}
    zarr.create_array(
        zarr.storage.MemoryStore(files), shape=values.shape, dtype="f4", **layout
    )[:] = values
    return Format(
        {key: data.to_bytes() for key, data in files.items()},
        hr.ZarrDataset,
        [*torch.from_numpy(values)],
    )


def _arrays() -> Format:
    parts = np.split(
        np.arange(40 * 2 * 3, dtype=np.float16).reshape(40, 2, 3), [17, 17, 30]
    )
    files = {f"{number}.npy": npy(part) for number, part in enumerate(parts)}
    return Format(files, hr.ArrayDataset, [*torch.from_numpy(np.concatenate(parts))])


def tfrecords(data: bytes) -> list[bytes]:
    """The records of an unpacked file, which is right."""
    records = []
    while data:
        end = 12 + int.from_bytes(data[:8], "little")
        records.append(data[12:end])
        data = data[end + 4 :]
    return records


def _tfrecord() -> Format:
    files, unpack = files_in("tfrecord"), {"gz": gzip.decompress, "zlib": zlib.decompress}
    unpacked = [
        unpack.get(key.rsplit(".", 1)[1], bytes)(data) for key, data in files.items()
    ]
    samples = [record for data in unpacked for record in tfrecords(data)]
    return Format(files, hr.TFRecordDataset.index, samples, checked=True)


def _litdata_tokens() -> Format:
    files = files_in("litdata/tokens")
    chunks, samples, number = json.loads(files["index.json"])["chunks"], [], 1
    for chunk in chunks:
        tokens = np.concatenate(
            [litdata.tokens(number + n) for n in range(chunk["chunk_size"])]
        ).astype(np.int64)
        number += chunk["chunk_size"]
        samples += torch.from_numpy(tokens[: len(tokens) // 33 * 33]).split(33)
    return Format(files, lambda store: hr.LitDataset(store, seq_len=33), samples)


FORMATS = {
    "litdata": Format(
        files_in("litdata/raw"), hr.LitDataset, [*map(litdata.sample, range(18))]
    ),
    "litdata frames": Format(
        files_in("litdata/frames"), hr.LitDataset, [*map(litdata.sample, range(18))]
    ),
    "litdata arrow": Format(
        files_in("litdata/arrow"), hr.LitDataset, [*map(litdata.row, range(18))]
    ),
    "litdata tokens": _litdata_tokens(),
    "mds": Format(files_in("mds/raw"), hr.MDSDataset, [*mds.samples(18)]),
    "mds zstd": Format(files_in("mds/zstd"), hr.MDSDataset, [*mds.samples(18)]),
    "tfrecord": _tfrecord(),
    "npy rows": _arrays(),
    "zarr, sharded": _zarr(chunks=(2, 2, 3), shards=(12, 2, 3)),
    "zarr 2": _zarr(chunks=(8, 2, 3), zarr_format=2),
    "tokens": _tokens(),
    "megatron": _documents("int32.bin", "int64.bin", "sentences.bin", "uint16.bin"),
    "datatrove": _documents("2.ds", "4.ds", "bare2.ds", "bare4.ds"),
    "tar index": _tar(),
    "video": _video(),
    "arrow": _tables(hr.ArrowDataset),
    "arrow before 0.15": _tables(
        hr.ArrowDataset,
        [None] * 4,
        metadata_version=pa.ipc.MetadataVersion.V4,
        use_legacy_format=True,
    ),
    "parquet": _tables(hr.ParquetDataset),
    "lerobot": _lerobot(),
}
