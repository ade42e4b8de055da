"""Readers of `stored_formats.py`: each writes the samples in its format, or reads epochs of them from a store.

The program runs as a process of one reader, in that reader's environment, and answers as `format_readers.py` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from contents import check_set, content_of, numbers_of
from format_readers import answer, import_mosaic, in_batches
from getting import allow_http_for_litdata

BATCH, SIZE, SHARD = 64, 20_000, 256  # samples; bytes; samples
IN_FLIGHT = 64  # requests of the bare loop
BARE, OURS, WRITE = "bare GETs", "headrace", "write"


class Job(NamedTuple):
    """What a process does."""

    who: str  # WRITE, OURS, or the peer, which reads in its own way
    folder: Path  # to write into; of a reader, for its caches
    count: int  # samples
    endpoint: str  # of the store

    def images(self) -> list[bytes]:
        return [content_of(number, SIZE) for number in range(self.count)]

    def shards(self) -> Iterator[tuple[str, list[bytes]]]:
        """Their files' names, without endings, and images."""
        images = self.images()
        return ((f"{n:04d}", images[n * SHARD :][:SHARD]) for n in range(-(-self.count // SHARD)))

    @property
    def options(self) -> dict[str, Any]:
        """For obstore."""
        return {"endpoint": self.endpoint, "region": "us-east-1", "client_options": {"allow_http": True}}

    def read(self, dataset: Callable[[Any, Any], Any], of: Callable[[Any], Any], **options: Any) -> Any:
        """An epoch of headrace's loader; `dataset` is made of the module and the store."""
        import headrace as hr

        made = dataset(hr, hr.Store("s3://bucket", options=self.options))
        with hr.DataLoader(made, BATCH, collate_fn=lambda samples: [*map(of, samples)], **options) as loader:
            yield from loader

    def torch(self, dataset: Any, of: Callable[[Any], Any], **options: Any) -> Any:
        """A torch loader with a worker for each of two cores."""
        from torch.utils.data import DataLoader

        options |= {"num_workers": 2, "multiprocessing_context": "fork"}
        return DataLoader(dataset, BATCH, collate_fn=lambda samples: [*map(of, samples)], **options)

    def cold(self) -> str:
        """An empty folder."""
        return tempfile.mkdtemp(dir=self.folder)


def image_of(sample: Any) -> Any:
    return sample["image"]


def bytes_of(tensor: Any) -> bytes:
    return bytes(tensor.numpy().tobytes())


def mds(job: Job) -> Any:
    if job.who == OURS:
        return job.read(lambda hr, store: hr.MDSDataset(store).stream(shuffle=True), image_of)
    streaming = import_mosaic()[0]
    if job.who == WRITE:
        with streaming.MDSWriter(out=str(job.folder), columns={"image": "bytes"}, size_limit=SHARD * SIZE) as out:
            for image in job.images():
                out.write({"image": image})
        return
    remote = streaming.StreamingDataset(remote="s3://bucket", local=job.cold(), shuffle=True, batch_size=BATCH)
    for stream in remote.streams:
        stream._downloader.clean_up()  # otherwise the forked workers share its connection, and mix up the answers
    return job.torch(remote, image_of)


def litdata_sample(number: int) -> Any:
    return np.frombuffer(content_of(number, SIZE), np.uint8)


def litdata(job: Job) -> Any:
    if job.who == OURS:
        return job.read(lambda hr, store: hr.LitDataset(store).stream(shuffle=True), np.asarray)
    import litdata
    from litdata.streaming.resolver import Dir

    if job.who == WRITE:
        whole = {"chunk_bytes": SHARD * SIZE, "num_workers": 1}
        return litdata.optimize(litdata_sample, [*range(job.count)], str(job.folder), **whole)
    allow_http_for_litdata()
    options = {"endpoint_url": job.endpoint, "region_name": "us-east-1"}
    place = Dir(path=job.cold(), url="s3://bucket")
    remote = litdata.StreamingDataset(place, shuffle=True, storage_options=options)
    return litdata.StreamingDataLoader(remote, batch_size=BATCH, num_workers=2, collate_fn=list)


def zarr(job: Job) -> Any:
    import zarr

    if job.who == WRITE:
        shape = {"shape": (job.count, SIZE), "chunks": (BATCH // 4, SIZE), "dtype": "u1", "compressors": None}
        images = np.frombuffer(b"".join(job.images()), "u1")
        zarr.create_array(job.folder / "a.zarr", **shape)[:] = images.reshape(-1, SIZE)
        return
    if job.who == OURS:
        import headrace as hr

        order = hr.BlockShuffleSampler(job.count, block_size=BATCH // 4, blocks_at_once=16, seed=0)
        return job.read(lambda hr, store: hr.ZarrDataset("a.zarr", store=store), bytes_of, sampler=order)
    from obstore.store import from_url

    array = zarr.open_array(zarr.storage.ObjectStore(from_url("s3://bucket/a.zarr", **job.options), read_only=True))
    starts = np.random.default_rng(0).permutation(np.arange(0, job.count, BATCH)).tolist()
    return (list(np.ascontiguousarray(array[start : start + BATCH])) for start in starts)


def megatron(job: Job) -> Any:
    if job.who == OURS:
        of = lambda tokens: tokens.numpy().astype(np.uint16).tobytes()  # noqa: E731
        return job.read(lambda hr, store: hr.TokenDataset("*.bin", seq_len=None, store=store), of, shuffle=True)
    from megatron.core.datasets import indexed_dataset as own

    if job.who == WRITE:
        for name, images in job.shards():
            builder = own.IndexedDatasetBuilder(str(job.folder / f"{name}.bin"), dtype=np.uint16)
            for image in images:
                builder.add_document(np.frombuffer(image, np.uint16), [SIZE // 2])
            builder.finalize(str(job.folder / f"{name}.idx"))
        return
    from megatron.core.datasets.object_storage_utils import ObjectStorageConfig
    from torch.utils.data import ConcatDataset

    place = ObjectStorageConfig(path_to_idx_cache=job.cold())
    names = [f"s3://bucket/{name}" for name, _ in job.shards()]
    parts = [own.IndexedDataset(name, mmap=False, object_storage_config=place) for name in names]
    return job.torch(ConcatDataset(parts), lambda tokens: tokens.tobytes(), shuffle=True)


def lance(job: Job) -> Any:
    import lance
    import lance.torch.data
    import pyarrow

    if job.who == WRITE:
        table = pyarrow.table({"image": job.images()})
        return lance.write_dataset(table, job.folder / "a.lance", max_rows_per_file=SHARD)
    url, options = "s3://bucket/a.lance", {"aws_endpoint": job.endpoint, "allow_http": "true"}
    if job.who == OURS:
        return job.read(lambda hr, store: hr.LanceDataset(url, storage_options=options), image_of, shuffle=True)
    opened = lance.dataset(url, storage_options=options)
    batches = lance.torch.data.LanceDataset(opened, batch_size=BATCH, to_tensor_fn=lambda batch, **_: batch["image"])
    return ([each.as_buffer() for each in batch] for batch in batches)


def save_to_disk(job: Job) -> Any:
    if job.who == OURS:
        return job.read(lambda hr, store: hr.ArrowDataset("a/", shuffle=True, store=store), image_of)
    import datasets

    datasets.disable_progress_bars()
    if job.who == WRITE:
        made = datasets.Dataset.from_dict({"image": job.images()})
        return made.save_to_disk(str(job.folder / "a"), num_shards=-(-job.count // SHARD))
    options = {"storage_options": {"client_kwargs": {"endpoint_url": job.endpoint}}, "cache_dir": job.cold()}
    options |= {"data_files": "s3://bucket/a/*.arrow", "split": "train"}
    streamed = datasets.load_dataset("arrow", streaming=True, **options)
    return job.torch(streamed.shuffle(seed=0, buffer_size=SHARD), image_of)


def parquet(job: Job) -> Any:
    import pyarrow.dataset
    import pyarrow.fs
    import pyarrow.parquet

    half = job.count // 2
    if job.who == WRITE:
        options: dict[str, Any] = {"compression": "none", "use_dictionary": False, "row_group_size": BATCH}
        for name, images in job.shards():
            numbers = range(int(name) * SHARD, int(name) * SHARD + len(images))
            table = pyarrow.table({"number": numbers, "image": images})
            pyarrow.parquet.write_table(table, job.folder / f"{name}.parquet", **options)
        return
    if job.who == OURS:
        reading = {"columns": ["image"], "filters": [("number", "<", half)]}
        return job.read(lambda hr, store: hr.ParquetDataset(store, **reading), image_of)
    files = pyarrow.fs.S3FileSystem(anonymous=True, endpoint_override=job.endpoint, region="us-east-1")
    found = pyarrow.dataset.dataset([f"bucket/{name}.parquet" for name, _ in job.shards()], filesystem=files)
    chosen = found.to_batches(columns=["image"], filter=pyarrow.dataset.field("number") < half, batch_size=BATCH)
    return ([each.as_buffer() for each in batch["image"]] for batch in chosen)


def tfrecord(job: Job) -> Any:
    if job.who == OURS:
        make = {"decode": True, "shuffle": True}
        return job.read(
            lambda hr, store: hr.TFRecordDataset("*.tfrecord", store=store, **make), lambda s: s["image"][0]
        )
    import tfrecord

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
            yield from (bytes(each["image"]) for each in tfrecord.tfrecord_loader(str(file), None, {"image": "byte"}))

    return in_batches(records())


class Format(NamedTuple):
    """A format, and who else reads it."""

    run: Callable[[Job], Any]
    peer: str
    packages: tuple[str, ...]  # the peer's
    writes: bool = True  # whether they are needed to write it too
    share: float = 1.0  # of the samples that a filter leaves


FORMATS = {
    "MDS": Format(mds, "mosaicml-streaming", ("mosaicml-streaming",)),
    "LitData": Format(litdata, "litdata", ("litdata",)),
    "Zarr": Format(zarr, "zarr, batch by batch", ("zarr", "obstore"), writes=False),
    "Megatron": Format(megatron, "megatron-core", ("megatron-core", "boto3")),
    "Lance": Format(lance, "lance.torch, in order", ("pylance",), writes=False),
    "save_to_disk": Format(save_to_disk, "datasets", ("datasets", "s3fs")),
    "TFRecord": Format(tfrecord, "tfrecord, GETs in turn", ("tfrecord", "obstore")),
    "Parquet, filtered": Format(parquet, "pyarrow.dataset", ("pyarrow",), writes=False, share=0.5),
}


async def get_all(job: Job, data: Path) -> float:
    """Read the ranges that headrace has read, `IN_FLIGHT` at once, and compare their bytes with those of the files."""
    from obstore import get_range_async
    from obstore.store import from_url

    spans, store = deque(json.loads((data.parent / "spans.json").read_text())), from_url("s3://bucket", **job.options)
    stored = {key: memoryview((data / key).read_bytes()) for key in {key for key, _, _ in spans}}

    async def get() -> None:
        while spans:
            key, start, stop = spans.popleft()
            if memoryview(await get_range_async(store, key, start=start, end=stop)) != stored[key][start:stop]:
                raise RuntimeError(f"{key}: other bytes than were stored: this run does not count")

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
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_DEFAULT_REGION")
    os.environ |= {**dict.fromkeys(names, "us-east-1"), "AWS_ENDPOINT_URL": endpoint, "S3_ENDPOINT_URL": endpoint}
    job = Job(who, Path(data if who == WRITE else folder), int(count), endpoint)
    answer(lambda: contextlib.nullcontext(lambda: epoch(name, job, Path(data))))


if __name__ == "__main__":
    main(*sys.argv[1:])
