"""Readers of `stored_formats.py`: each writes the samples in its format, or reads epochs of them from a store.

The program runs as a process of one reader, in that reader's environment, and answers as
`format_readers.py` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import json
import os
import sys
import tempfile
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from contents import check_set, content_of, numbers_of
from format_readers import answer, import_mosaic, in_batches
from getting import allow_http_for_litdata

BATCH, SIZE, SHARD = 64, 20_000, 256  # samples; bytes; samples
IN_FLIGHT = 64  # requests of the bare loop
CLIP, CLIPS, PIXELS = 16, 64, (240, 320)  # frames; clips of a video; height and width
BARE, OURS, WRITE = "bare GETs", "headrace", "write"
ALONE = "its library, no loader"  # the least program that makes the same calls of it


class Job(NamedTuple):
    """What a process does."""

    who: str  # WRITE, OURS, or the peer, which reads in its own way
    folder: Path  # to write into; of a reader, for its caches
    count: int  # samples
    endpoint: str  # of the store
    data: Path  # what is in it, locally

    def images(self) -> list[bytes]:
        return [content_of(number, SIZE) for number in range(self.count)]

    def shards(self) -> Iterator[tuple[str, list[bytes]]]:
        """Their files' names, without endings, and images."""
        images = self.images()
        return (
            (f"{n:04d}", images[n * SHARD :][:SHARD])
            for n in range(-(-self.count // SHARD))
        )

    @property
    def options(self) -> dict[str, Any]:
        """For obstore."""
        return {
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "client_options": {"allow_http": True},
        }

    def read(
        self,
        dataset: Callable[[Any, Any], Any],
        of: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> Any:
        """An epoch of headrace's loader, of lists of what `of` gives; `dataset` is made of the module and the store."""
        import headrace as hr

        made = dataset(hr, hr.Store("s3://bucket", options=self.options))
        options = {
            "batch_size": BATCH,
            "collate_fn": of and (lambda samples: [*map(of, samples)]),
            **options,
        }
        with hr.DataLoader(made, **options) as loader:
            yield from loader

    def torch(self, dataset: Any, of: Callable[[Any], Any], **options: Any) -> Any:
        """A torch loader with a worker for each of two cores."""
        from torch.utils.data import DataLoader

        options |= {"num_workers": 2, "multiprocessing_context": "fork"}
        return DataLoader(
            dataset, BATCH, collate_fn=lambda samples: [*map(of, samples)], **options
        )

    def cold(self) -> str:
        """An empty folder."""
        return tempfile.mkdtemp(dir=self.folder)


def image_of(sample: Any) -> Any:
    return sample["image"]


def images_of(samples: Any) -> Any:
    return [*map(image_of, samples)]


def bytes_of(tensor: Any) -> bytes:
    return bytes(tensor.numpy().tobytes())


def mds(job: Job) -> Any:
    if job.who == OURS:
        return job.read(
            lambda hr, store: hr.MDSDataset(store).stream(shuffle=True), image_of
        )
    streaming = import_mosaic()[0]
    if job.who == WRITE:
        with streaming.MDSWriter(
            out=str(job.folder), columns={"image": "bytes"}, size_limit=SHARD * SIZE
        ) as out:
            for image in job.images():
                out.write({"image": image})
        return
    remote = streaming.StreamingDataset(
        remote="s3://bucket", local=job.cold(), shuffle=True, batch_size=BATCH
    )
    for stream in remote.streams:
        # otherwise the forked workers share its connection, and mix up the answers
        stream._downloader.clean_up()
    return job.torch(remote, image_of)


def litdata_sample(number: int) -> Any:
    return np.frombuffer(content_of(number, SIZE), np.uint8)


def litdata(job: Job) -> Any:
    if job.who == OURS:
        return job.read(
            lambda hr, store: hr.LitDataset(store).stream(shuffle=True), np.asarray
        )
    import litdata
    from litdata.streaming.resolver import Dir

    if job.who == WRITE:
        whole = {"chunk_bytes": SHARD * SIZE, "num_workers": 1}
        return litdata.optimize(
            litdata_sample, [*range(job.count)], str(job.folder), **whole
        )
    allow_http_for_litdata()
    options = {"endpoint_url": job.endpoint, "region_name": "us-east-1"}
    place = Dir(path=job.cold(), url="s3://bucket")
    remote = litdata.StreamingDataset(place, shuffle=True, storage_options=options)
    return litdata.StreamingDataLoader(
        remote, batch_size=BATCH, num_workers=2, collate_fn=list
    )


def zarr(job: Job) -> Any:
    import zarr

    if job.who == WRITE:
        shape = {
            "shape": (job.count, SIZE),
            "chunks": (BATCH // 4, SIZE),
            "dtype": "u1",
            "compressors": None,
        }
        images = np.frombuffer(b"".join(job.images()), "u1")
        zarr.create_array(job.folder / "a.zarr", **shape)[:] = images.reshape(-1, SIZE)
        return
    if job.who == OURS:
        import headrace as hr

        # Two groups of blocks are read at once.
        order = hr.BlockShuffleSampler(
            job.count, block_size=BATCH // 4, blocks_at_once=IN_FLIGHT // 2, seed=0
        )
        return job.read(
            lambda hr, store: hr.ZarrDataset("a.zarr", store=store),
            bytes_of,
            sampler=order,
        )
    from obstore.store import from_url

    source = zarr.storage.ObjectStore(
        from_url("s3://bucket/a.zarr", **job.options), read_only=True
    )
    if job.who == ALONE:

        async def read() -> list[Any]:
            array = await zarr.api.asynchronous.open_array(store=source, mode="r")
            starts = iter(
                np.random.default_rng(0)
                .permutation(np.arange(0, job.count, BATCH // 4))
                .tolist()
            )

            async def some() -> list[Any]:
                return [
                    list(await array.getitem(slice(start, start + BATCH // 4)))
                    for start in starts
                ]

            return [
                chunk
                for chunks in await asyncio.gather(*(some() for _ in range(IN_FLIGHT)))
                for chunk in chunks
            ]

        return asyncio.run(read())
    array = zarr.open_array(source)
    starts = np.random.default_rng(0).permutation(np.arange(0, job.count, BATCH)).tolist()
    return (list(np.ascontiguousarray(array[start : start + BATCH])) for start in starts)


def megatron(job: Job) -> Any:
    if job.who == OURS:
        of = lambda tokens: tokens.numpy().astype(np.uint16).tobytes()  # noqa: E731
        return job.read(
            lambda hr, store: hr.TokenDataset("*.bin", seq_len=None, store=store),
            of,
            shuffle=True,
        )
    from megatron.core.datasets import indexed_dataset as own

    if job.who == WRITE:
        for name, images in job.shards():
            builder = own.IndexedDatasetBuilder(
                str(job.folder / f"{name}.bin"), dtype=np.uint16
            )
            for image in images:
                builder.add_document(np.frombuffer(image, np.uint16), [SIZE // 2])
            builder.finalize(str(job.folder / f"{name}.idx"))
        return
    from megatron.core.datasets.object_storage_utils import ObjectStorageConfig
    from torch.utils.data import ConcatDataset

    place = ObjectStorageConfig(path_to_idx_cache=job.cold())
    names = [f"s3://bucket/{name}" for name, _ in job.shards()]
    parts = [
        own.IndexedDataset(name, mmap=False, object_storage_config=place)
        for name in names
    ]
    return job.torch(ConcatDataset(parts), lambda tokens: tokens.tobytes(), shuffle=True)


def lance_rows(url: str, options: dict[str, str], tables: bool) -> Any:
    """The dataset of docs/formats.md; with `tables`, an index is a list of indices."""
    import anyio.to_thread
    import lance

    import headrace as hr

    class Rows(hr.AsyncDataset[Any]):
        def __init__(self) -> None:
            self.table = lance.dataset(url, storage_options=options)

        def __len__(self) -> int:
            return int(self.table.count_rows())

        async def take(self, indices: list[int]) -> Any:
            return await anyio.to_thread.run_sync(self.table.take, indices)

        async def agets(self, indices: Sequence[int]) -> list[Any]:
            return list((await self.take(list(indices))).to_pylist())

        async def aget(self, index: Any) -> Any:
            return await self.take(index) if tables else (await self.agets([index]))[0]

    return Rows()


def lance(job: Job, *, shuffle: bool = True) -> Any:
    import lance
    import lance.torch.data
    import pyarrow
    from torch.utils.data import BatchSampler

    if job.who == WRITE:
        table = pyarrow.table({"image": job.images()})
        return lance.write_dataset(table, job.folder / "a.lance", max_rows_per_file=SHARD)
    url, options = (
        "s3://bucket/a.lance",
        {"aws_endpoint": job.endpoint, "allow_http": "true"},
    )
    if job.who == OURS and shuffle:
        return job.read(
            lambda hr, store: lance_rows(url, options, False), image_of, shuffle=True
        )
    if shuffle:
        remote = lance.torch.data.SafeLanceDataset(
            url, dataset_options={"storage_options": options}
        )
        loader = lance.torch.data.get_safe_loader
        return loader(remote, BATCH, 2, shuffle=True, collate_fn=images_of)
    # Batches of Arrow, of both.
    if job.who == OURS:
        whole: dict[str, Any] = {
            "batch_size": None,
            "sampler": BatchSampler(range(job.count), BATCH, drop_last=False),
        }
        batches = job.read(lambda hr, store: lance_rows(url, options, True), **whole)
    elif job.who == ALONE:
        opened = lance.dataset(url, storage_options=options)
        starts = range(0, job.count, BATCH)
        with ThreadPoolExecutor(IN_FLIGHT) as threads:
            batches = threads.map(
                lambda first: opened.take([*range(first, first + BATCH)]), starts
            )
    else:
        opened = lance.dataset(url, storage_options=options)
        batches = lance.torch.data.LanceDataset(
            opened, BATCH, to_tensor_fn=lambda batch, **_: batch
        )
    return ([each.as_buffer() for each in batch["image"]] for batch in batches)


def save_to_disk(job: Job) -> Any:
    if job.who == OURS:
        return job.read(
            lambda hr, store: hr.ArrowDataset("a/", store=store).stream(shuffle=True),
            image_of,
        )
    import datasets

    datasets.disable_progress_bars()
    if job.who == WRITE:
        made = datasets.Dataset.from_dict({"image": job.images()})
        return made.save_to_disk(str(job.folder / "a"), num_shards=-(-job.count // SHARD))
    options = {
        "storage_options": {"client_kwargs": {"endpoint_url": job.endpoint}},
        "cache_dir": job.cold(),
    }
    options |= {"data_files": "s3://bucket/a/*.arrow", "split": "train"}
    streamed = datasets.load_dataset("arrow", streaming=True, **options)
    return job.torch(streamed.shuffle(seed=0, buffer_size=SHARD), image_of)


def parquet(job: Job) -> Any:
    import pyarrow.dataset
    import pyarrow.fs
    import pyarrow.parquet

    half = job.count // 2
    if job.who == WRITE:
        options: dict[str, Any] = {
            "compression": "none",
            "use_dictionary": False,
            "row_group_size": BATCH,
        }
        for name, images in job.shards():
            numbers = range(int(name) * SHARD, int(name) * SHARD + len(images))
            table = pyarrow.table({"number": numbers, "image": images})
            pyarrow.parquet.write_table(table, job.folder / f"{name}.parquet", **options)
        return
    if job.who == OURS:
        reading = {"columns": ["image"], "filters": [("number", "<", half)]}
        return job.read(lambda hr, store: hr.ParquetDataset(store, **reading), image_of)
    files = pyarrow.fs.S3FileSystem(
        anonymous=True, endpoint_override=job.endpoint, region="us-east-1"
    )
    found = pyarrow.dataset.dataset(
        [f"bucket/{name}.parquet" for name, _ in job.shards()], filesystem=files
    )
    chosen = found.to_batches(
        columns=["image"], filter=pyarrow.dataset.field("number") < half, batch_size=BATCH
    )
    return ([each.as_buffer() for each in batch["image"]] for batch in chosen)


def tfrecord(job: Job) -> Any:
    import tfrecord

    def image_in(record: bytes) -> Any:
        return (
            tfrecord.example_pb2.Example.FromString(record)
            .features.feature["image"]
            .bytes_list.value[0]
        )

    if job.who == OURS:
        return job.read(
            lambda hr, store: hr.TFRecordDataset("*.tfrecord", store=store, shuffle=True),
            image_in,
        )
    if job.who == WRITE:
        for name, images in job.shards():
            writer = tfrecord.TFRecordWriter(str(job.folder / f"{name}.tfrecord"))
            for image in images:
                writer.write({"image": (image, "byte")})
            writer.close()
        return
    from obstore.store import from_url

    def records() -> Iterator[Any]:  # it reads files
        store, file = from_url("s3://bucket", **job.options), Path(job.cold(), "a")
        for name, _ in job.shards():
            file.write_bytes(store.get(f"{name}.tfrecord").bytes())
            yield from (
                bytes(each["image"])
                for each in tfrecord.tfrecord_loader(str(file), None, {"image": "byte"})
            )

    return in_batches(records())


def npy(job: Job) -> Any:
    if job.who == WRITE:
        for name, images in job.shards():
            np.save(
                job.folder / f"{name}.npy",
                np.frombuffer(b"".join(images), "u1").reshape(-1, SIZE),
            )
        return None
    if job.who == OURS:
        return job.read(
            lambda hr, store: hr.ArrayDataset("*.npy", store=store).stream(shuffle=True),
            bytes_of,
        )
    import fsspec
    from torch.utils.data import DataLoader

    class Files(list[str]):
        def __getitem__(self, number: Any) -> Any:
            with fsspec.open(super().__getitem__(number)) as file:
                return np.load(io.BytesIO(file.read()))

    files = Files(f"{job.endpoint}/bucket/{name}.npy" for name, _ in job.shards())
    arrays = DataLoader(
        files, None, shuffle=True, num_workers=2, multiprocessing_context="fork"
    )
    return (list(rows.numpy()) for array in arrays for rows in array.split(BATCH))


def datatrove(job: Job) -> Any:
    if job.who == OURS:
        of = lambda tokens: tokens.numpy().astype(np.uint16).tobytes()  # noqa: E731
        tokens = {"seq_len": SIZE // 2}
        return job.read(
            lambda hr, store: hr.TokenDataset("*.ds", store=store, **tokens).stream(
                shuffle=True
            ),
            of,
        )
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile
    from datatrove.utils.dataset import DatatroveFolderDataset

    if job.who == WRITE:
        for name, images in job.shards():
            file = TokenizedFile(str(job.folder), f"{name}.ds")
            for image in images:
                file.write(np.frombuffer(image, np.uint16).tolist(), None)
            file.close()
        return None

    class Windows(list[int]):
        @functools.cached_property
        def folder(self) -> Any:
            return DatatroveFolderDataset(
                "s3://bucket", SIZE // 2 - 1, "*.ds", shuffle=True
            )

        def __getitem__(self, number: Any) -> Any:
            # Opened in each worker: s3fs does not survive a fork.
            return self.folder[number]

    return job.torch(
        Windows(range(job.count)),
        lambda sample: sample["input_ids"].numpy().astype(np.uint16).tobytes(),
    )


@functools.cache
def hub_of(endpoint: str, data: Path) -> str:
    """The endpoint of a hub of 20 ms, in a thread of this process, that redirects to the store."""
    entries = [
        {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": ""}
        for path in data.iterdir()
    ]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            time.sleep(0.02)  # its latency
            found = (
                entries if "/tree/" in self.path else {"id": "org/name", "sha": "a" * 40}
            )
            body = b"" if "/resolve/" in self.path else json.dumps(found).encode()
            self.send_response(200 if body else 302)
            self.send_header(
                "Location", f"{endpoint}/bucket/{self.path.rpartition('/')[2]}"
            )
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    # As long as the process.
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def hub(job: Job) -> Any:
    if job.who == WRITE:
        return parquet(job)
    os.environ |= {
        "HF_ENDPOINT": hub_of(job.endpoint, job.data),
        "HF_HOME": str(job.folder),
    }
    if job.who == OURS:
        repository, of = (
            ("datasets/org/name", "*.parquet"),
            {"columns": ["image"], "shuffle": True},
        )
        return job.read(
            lambda hr, store: hr.ParquetDataset(hr.hub(*repository), **of), image_of
        )
    import datasets
    import huggingface_hub
    import pyarrow.dataset  # noqa: F401  # once, not in each worker

    datasets.disable_progress_bars()
    huggingface_hub.HfFileSystem.clear_instance_cache()
    files = {
        "data_files": "hf://datasets/org/name/*.parquet",
        "columns": ["image"],
        "cache_dir": job.cold(),
    }
    streamed = datasets.load_dataset("parquet", split="train", streaming=True, **files)
    return job.torch(streamed.shuffle(seed=0, buffer_size=SHARD), image_of)


@functools.cache
def clip_numbers(data: Path) -> dict[int, int]:
    """The number of each clip by the checksum of its frames [C, H, W], as PyAV decodes them of whole files."""
    import av

    frames: list[Any] = []
    for path in sorted(data.glob("*.mp4")):
        with av.open(str(path)) as file:
            frames += (
                frame.to_ndarray(format="rgb24").transpose(2, 0, 1)
                for frame in file.decode(video=0)
            )
    return {
        zlib.crc32(np.array(frames[at : at + CLIP])): at // CLIP
        for at in range(0, len(frames), CLIP)
    }


def video(job: Job) -> Any:
    """A clip with the right frames stands for the image of its number."""
    count = round(job.count * FORMATS["video"].share)
    if job.who == WRITE:
        import av

        noise = np.random.default_rng(0).integers(0, 255, (*PIXELS, 3), dtype=np.uint8)
        for number in range(count // CLIPS):
            with av.open(
                str(job.folder / f"{number:04d}.mp4"),
                "w",
                options={"movflags": "faststart"},
            ) as output:
                stream = output.add_stream(
                    "libx264",
                    rate=30,
                    width=PIXELS[1],
                    height=PIXELS[0],
                    pix_fmt="yuv420p",
                )
                stream.options, stream.codec_context.gop_size = {"preset": "veryfast"}, 30
                for at in range(CLIP * CLIPS):
                    picture = np.roll(
                        noise // 4 + (number + at // 8) % 192, (at, 2 * at), (0, 1)
                    )
                    output.mux(
                        stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24"))
                    )
                output.mux(stream.encode())
        return None
    known = clip_numbers(job.data)

    def check(batches: Any) -> Any:
        for batch in batches:
            yield [
                content_of(known[zlib.crc32(np.ascontiguousarray(frames))], SIZE)
                for frames in batch
            ]

    if job.who == OURS:
        import headrace as hr

        decoding: dict[str, Any] = {
            "transform": hr.decode.video(),
            "num_workers": 2,
            "shuffle": True,
        }
        return check(
            job.read(
                lambda hr, store: hr.VideoDataset(store, frames=CLIP),
                lambda clip: clip,
                **decoding,
            )
        )
    from obstore.store import from_url
    from torchcodec.decoders import VideoDecoder

    class Clips(list[int]):
        @functools.cached_property
        def store(self) -> Any:
            return from_url("s3://bucket", **job.options)

        def __getitem__(self, number: Any) -> Any:
            whole, first = (
                self.store.get(f"{number // CLIPS:04d}.mp4").bytes(),
                number % CLIPS * CLIP,
            )
            decoder = VideoDecoder(
                bytes(whole), num_ffmpeg_threads=1, seek_mode="approximate"
            )
            return decoder.get_frames_in_range(first, first + CLIP).data

    return check(job.torch(Clips(range(count)), lambda clip: clip, shuffle=True))


class Format(NamedTuple):
    """A format, and who else reads it."""

    run: Callable[[Job], Any]
    peer: str
    packages: tuple[str, ...]  # the peer's
    writes: bool = True  # whether they are needed to write it too
    share: float = 1.0  # of the samples that are read
    alone: bool = False  # whether there is a reader `ALONE`


FORMATS = {
    "MDS": Format(mds, "mosaicml-streaming", ("mosaicml-streaming",)),
    "LitData": Format(litdata, "litdata", ("litdata",)),
    "Zarr": Format(
        zarr, "zarr, batch by batch", ("zarr", "obstore"), writes=False, alone=True
    ),
    "Megatron": Format(megatron, "megatron-core", ("megatron-core", "boto3")),
    "Lance": Format(lance, "lance.torch, shuffled", ("pylance",), writes=False),
    "Lance, in order": Format(
        functools.partial(lance, shuffle=False),
        "lance.torch, in order",
        ("pylance",),
        writes=False,
        alone=True,
    ),
    "save_to_disk": Format(save_to_disk, "datasets", ("datasets", "s3fs")),
    "TFRecord": Format(tfrecord, "tfrecord, GETs in turn", ("tfrecord", "obstore")),
    "npy": Format(npy, "numpy, whole files", ("fsspec", "aiohttp"), writes=False),
    "datatrove": Format(datatrove, "datatrove", ("datatrove", "s3fs")),
    "hub": Format(
        hub, "datasets, streaming", ("datasets", "huggingface_hub"), writes=False
    ),
    "video": Format(
        video,
        "torchcodec, whole files",
        ("torchcodec", "av", "obstore"),
        writes=False,
        share=1 / 8,
    ),
    "Parquet, filtered": Format(
        parquet, "pyarrow.dataset", ("pyarrow",), writes=False, share=0.5
    ),
}


async def get_all(job: Job, data: Path) -> float:
    """Read the ranges that headrace has read, `IN_FLIGHT` at once, and compare their bytes with those of the files."""
    from obstore import get_range_async
    from obstore.store import from_url

    spans, store = (
        deque(json.loads((data.parent / "spans.json").read_text())),
        from_url("s3://bucket", **job.options),
    )
    stored = {
        key: memoryview((data / key).read_bytes()) for key in {key for key, _, _ in spans}
    }

    async def get() -> None:
        while spans:
            key, start, stop = spans.popleft()
            if (
                memoryview(await get_range_async(store, key, start=start, end=stop))
                != stored[key][start:stop]
            ):
                raise RuntimeError(
                    f"{key}: other bytes than were stored: this run does not count"
                )

    began = time.perf_counter()
    await asyncio.gather(*(get() for _ in range(IN_FLIGHT)))
    return time.perf_counter() - began


def epoch(name: str, job: Job, data: Path) -> float:
    """Samples a second of an epoch in which every byte is compared, from an empty cache and without a connection."""
    expected = int(job.count * FORMATS[name].share)
    if job.who == BARE:
        return expected / asyncio.run(get_all(job, data))
    began = time.perf_counter()
    batches = FORMATS[name].run(job)
    if job.who == WRITE:
        return 0.0
    numbers = [numbers_of(batch, SIZE) for batch in batches]
    elapsed = time.perf_counter() - began
    check_set(numbers, expected)
    return expected / elapsed


def main(name: str, who: str, folder: str, count: str, endpoint: str, data: str) -> None:
    names = (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
    )
    os.environ |= {
        **dict.fromkeys(names, "us-east-1"),
        "AWS_ENDPOINT_URL": endpoint,
        "S3_ENDPOINT_URL": endpoint,
    }
    job = Job(
        who, Path(data if who == WRITE else folder), int(count), endpoint, Path(data)
    )
    answer(lambda: contextlib.nullcontext(lambda: epoch(name, job, Path(data))))


if __name__ == "__main__":
    main(*sys.argv[1:])
