"""The contestants of `epoch_of_jpegs.py`: loaders that fetch, decode and augment JPEGs, as their documentation shows.

Each runs as a program of its own, with the interpreter in which it is installed: it reads one epoch
to start its workers and connections, then those that are timed. Its only argument is the job, as
JSON, and it prints a line of JSON for each epoch. All use `photo` to decode and augment, and
obstore with ranges of known length where they have no client of their own. The loop that takes the
batches adds up all pixels of each image, and compares the sums, the labels and the numbers with
those of the files after the clock has stopped.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import simplejpeg
import torch
from format_readers import import_mosaic
from getting import (
    BatchInThreads,
    Getter,
    OneAtATime,
    allow_http_for_litdata,
    raw_litdata,
)
from jpeg_decode import BATCH as LIMIT_BATCH
from jpeg_decode import BareLoops, cropped
from processes import descendants
from store import BUCKET, Store
from torch.utils.data import default_collate

import headrace as hr

__all__ = [
    "BATCH",
    "CLASSES",
    "CONTESTANTS",
    "Contestant",
    "Job",
    "number_of",
    "photo",
    "sums_of",
]

BATCH = 64
CLASSES = 10
WORKERS = 2
AHEAD = 4  # prefetched batches, if a loader has a setting for it
NUMBER = slice(24, 30)  # where a file has its number, in a comment after the JFIF header
TICKS = os.sysconf("SC_CLK_TCK")

Batches = Iterable[Sequence[torch.Tensor]]
Epoch = Callable[[], Batches]


@dataclass(frozen=True)
class Job:
    """What a contestant's program does.

    Attributes:
        contestant: its name.
        setting: its own options.
        stores: the arguments of each `Store`, by what is in it: photos, tar, mds.
        folder: has the files, the sums of their pixels, and is where it may write.
        images: how many there are.
        epochs: that are timed.
    """

    contestant: str
    setting: dict[str, Any]
    stores: dict[str, Any]
    folder: str
    images: int
    epochs: int = 1

    def store(self, name: str) -> Store:
        return Store(**self.stores[name])


@dataclass(frozen=True)
class Contestant:
    """A loader.

    Attributes:
        open: context manager that gives a function that starts an epoch.
        reads: photos (an object for each image), tar or mds (shards); empty for the limit.
        package: required distribution, or "".
        settings: those that the sweep tries.
    """

    open: Callable[[Job], contextlib.AbstractContextManager[Epoch]]
    reads: str = "photos"
    package: str = ""
    settings: Sequence[dict[str, Any]] = field(default_factory=lambda: [{}])


def number_of(data: Any) -> int:
    """The number that a file has in its comment."""
    return int(bytes(memoryview(data)[NUMBER]))


def photo(data: Any, label: int) -> tuple[torch.Tensor, int, int]:
    """Decode and augment: where to cut and whether to flip follow from the number of the image."""
    number = number_of(data)
    return cropped(simplejpeg.decode_jpeg(data, "RGB"), number), label, number


def sums_of(pixels: torch.Tensor) -> torch.Tensor:
    """A sum of all pixels of each image, in which a flip or another cut makes a difference."""
    return pixels.contiguous().flatten(1).view(torch.int64).sum(1)


class Photos(Getter):
    """The listed photos, by GETs through obstore; for loaders without a client of their own."""

    def __init__(self, store: Store) -> None:
        super().__init__(store.url, store.options)
        self.listed = [
            (each["path"], each["size"])
            for page in obstore.list(self.client)
            for each in page
        ]

    def __call__(self, number: int) -> tuple[Any, int]:
        key, size = self.listed[number]
        return obstore.get_range(self.client, key, start=0, length=size), int(key[0])

    async def aget(self, number: int) -> tuple[Any, int]:
        key, size = self.listed[number]
        return await obstore.get_range_async(self.client, key, start=0, length=size), int(
            key[0]
        )

    def decoded(self, number: int) -> tuple[torch.Tensor, int, int]:
        return photo(*self(number))


def decoded(sample: tuple[Any, int]) -> tuple[torch.Tensor, int, int]:
    return photo(*sample)


# The limit: two processes that decode from memory, and send nothing.


class FromMemory(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, files: list[bytes]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        return photo(self.files[index], 0)[0]


@contextlib.contextmanager
def decoding_alone(job: Job) -> Iterator[Callable[[], float]]:
    """Its epoch gives images a second, since it has no batches."""
    files = [
        file.read_bytes() for file in sorted(Path(job.folder, "photos").rglob("*.jpg"))
    ]
    with BareLoops(FromMemory(files[: len(files) // LIMIT_BATCH * LIMIT_BATCH])) as loops:
        yield loops


# headrace


def of_object(sample: hr.types.ObjectSample) -> tuple[torch.Tensor, int, int]:
    return photo(sample.data, sample.label)


def of_tar(sample: Any) -> tuple[torch.Tensor, int, int]:
    return photo(sample["jpg"], int(sample["cls"]))


@contextlib.contextmanager
def headrace_objects(job: Job) -> Iterator[Epoch]:
    store = job.store("photos")
    photos = hr.ObjectDataset(
        hr.Store(store.url, options=store.options), suffix=".jpg", labels="folder"
    )
    with hr.DataLoader(
        photos,
        BATCH,
        num_workers=WORKERS,
        persistent_workers=True,
        transform=of_object,
        **job.setting,
    ) as loader:
        yield lambda: loader


@contextlib.contextmanager
def headrace_shards(job: Job) -> Iterator[Epoch]:
    store = job.store("tar")
    options = {"shards_in_parallel", "requests_per_shard", "chunk_bytes"}
    ours = {name: value for name, value in job.setting.items() if name in options}
    theirs = {name: value for name, value in job.setting.items() if name not in options}
    shards = hr.TarDataset(hr.Store(store.url, options=store.options), **ours)
    with hr.DataLoader(
        shards,
        BATCH,
        num_workers=WORKERS,
        persistent_workers=True,
        transform=of_tar,
        **theirs,
    ) as loader:
        yield lambda: loader


# The others


@contextlib.contextmanager
def torch_loader(dataset: Any, workers: int, **options: Any) -> Iterator[Epoch]:
    """Torch's loader, its workers started once."""
    # Otherwise each worker imports them, which takes seconds.
    multiprocessing.set_forkserver_preload(["torch", "obstore.store", "simplejpeg"])
    warnings.filterwarnings(
        "ignore", message="This DataLoader will create", category=UserWarning
    )
    loader = torch.utils.data.DataLoader(
        dataset,
        num_workers=workers,
        prefetch_factor=AHEAD,
        persistent_workers=True,
        # By default a forkserver: the clients' threads do not survive a fork of this process.
        **{"batch_size": BATCH, "multiprocessing_context": "forkserver", **options},
    )
    try:
        yield lambda: loader
    finally:
        if loader._iterator is not None:
            loader._iterator._shutdown_workers()


class FetchedInThreads(BatchInThreads):
    """A batch's GETs in threads, then its images decoded in the worker."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return list(map(decoded, super().__getitems__(indices)))


def torch_blocking(job: Job) -> contextlib.AbstractContextManager[Epoch]:
    """The dataset as it is usually written, or one that fetches a batch in threads."""
    photos = Photos(job.store("photos"))
    workers, threads = (
        job.setting.get("num_workers", WORKERS),
        job.setting.get("threads", 0),
    )
    dataset = (
        FetchedInThreads(photos, job.images, threads)
        if threads
        else OneAtATime(photos.decoded, job.images)
    )
    return torch_loader(dataset, workers)


@contextlib.contextmanager
def torchdata_nodes(job: Job) -> Iterator[Epoch]:
    from torchdata import nodes

    photos = Photos(job.store("photos"))
    given = {"in_order": True, "prebatch": None, "method": "thread", **job.setting}
    node: Any = nodes.IterableWrapper(range(job.images))
    node = nodes.ParallelMapper(
        node,
        photos,
        num_workers=given["threads"],
        method="thread",
        prebatch=given["prebatch"],
        in_order=given["in_order"],
    )
    decoding: dict[str, Any] = {
        "num_workers": WORKERS,
        "method": given["method"],
        "in_order": given["in_order"],
    }
    if given["method"] == "process":
        decoding["multiprocessing_context"] = "spawn"
    if given.get("decode") == "batch":
        node = nodes.ParallelMapper(
            nodes.Batcher(node, BATCH, drop_last=False), decoded_batch, **decoding
        )
    else:
        node = nodes.ParallelMapper(node, decoded, **decoding)
        node = nodes.Mapper(nodes.Batcher(node, BATCH, drop_last=False), default_collate)
    loader = nodes.Loader(nodes.Prefetcher(node, AHEAD))
    yield lambda: loader


def decoded_batch(samples: Sequence[tuple[Any, int]]) -> Any:
    return default_collate([photo(data, label) for data, label in samples])


@contextlib.contextmanager
def spdl(job: Job) -> Iterator[Epoch]:
    from spdl.pipeline import PipelineBuilder, run_pipeline_in_subprocess

    photos = Photos(job.store("photos"))
    where = job.setting.get("where", "threads")
    with contextlib.ExitStack() as open_now:
        executor: Any = None
        if where == "threads":
            executor = open_now.enter_context(ThreadPoolExecutor(WORKERS))
        elif where == "processes":
            executor = ProcessPoolExecutor(
                WORKERS, multiprocessing.get_context("forkserver")
            )
            open_now.enter_context(executor)

        def builder() -> Any:
            made = PipelineBuilder().add_source(range(job.images))
            fetched = made.pipe(photos.aget, concurrency=job.setting["concurrency"])
            if job.setting.get("decode") == "batch":
                ready = fetched.aggregate(BATCH).pipe(
                    decoded_batch, concurrency=WORKERS, executor=executor
                )
            else:
                ready = fetched.pipe(decoded, concurrency=WORKERS, executor=executor)
                ready = ready.aggregate(BATCH).pipe(default_collate)
            return ready.add_sink(AHEAD)

        if where == "subprocess":
            batches = run_pipeline_in_subprocess(
                builder().get_config(), num_threads=WORKERS + 1, mp_context="forkserver"
            )
            yield lambda: batches
            return

        def epoch() -> Batches:
            pipeline = builder().build(num_threads=WORKERS + 1)
            with pipeline.auto_stop():
                yield from pipeline.get_iterator()

        yield epoch


@contextlib.contextmanager
def litdata(job: Job) -> Iterator[Epoch]:
    store, listed = job.store("photos"), Photos(job.store("photos")).listed
    options = dict(job.setting)
    workers, in_threads = (
        options.pop("num_workers", WORKERS),
        options.pop("decode", "worker") == "threads",
    )

    options["transform"] = without_label if in_threads else None
    with tempfile.TemporaryDirectory(dir=job.folder) as folder:
        raw = raw_litdata(store.endpoint, dict(listed), folder, **options)
        with torch_loader(
            Labelled(raw), workers, worker_init_fn=allow_http_for_litdata
        ) as epoch:
            yield epoch


def without_label(data: bytes) -> tuple[torch.Tensor, int, int]:
    return photo(data, 0)


class Labelled(torch.utils.data.Dataset[Any]):
    """The items of a raw dataset, each with the label of its path, and decoded if they are not yet."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def __len__(self) -> int:
        return len(self.raw)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        labels = [int(self.raw.items[index].path.split("/")[-2]) for index in indices]
        found = zip(self.raw.__getitems__(indices), labels, strict=True)
        return [
            (item[0], label, item[2]) if isinstance(item, tuple) else photo(item, label)
            for item, label in found
        ]


def webdataset(job: Job) -> contextlib.AbstractContextManager[Epoch]:
    """Through one `curl` for each shard, and half of the shards in each worker."""
    import webdataset as wds

    store = job.store("tar")
    found = Getter(store.url, store.options).client
    urls = [
        f"{store.http_url}/{each['path']}"
        for page in obstore.list(found)
        for each in page
    ]
    samples = wds.WebDataset(urls, shardshuffle=False, empty_check=False).map(of_tar)
    batches = samples.batched(BATCH, collation_fn=default_collate)
    return torch_loader(batches, job.setting.get("num_workers", WORKERS), batch_size=None)


@contextlib.contextmanager
def mosaic(job: Job) -> Iterator[Epoch]:
    """Through a cache with room for less than an epoch, so that each epoch downloads its shards."""
    streaming = import_mosaic()[0]
    os.environ |= {
        "S3_ENDPOINT_URL": job.store("mds").endpoint,
        "AWS_ACCESS_KEY_ID": "none",
        "AWS_SECRET_ACCESS_KEY": "none",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    options = dict(job.setting)
    workers = options.pop("num_workers", WORKERS)
    size = sum(file.stat().st_size for file in Path(job.folder, "mds").iterdir())
    streaming.base.util.clean_stale_shared_memory()
    with tempfile.TemporaryDirectory(dir=job.folder) as folder:
        dataset = streaming.StreamingDataset(
            remote=f"s3://{BUCKET}",
            local=folder,
            shuffle=False,
            batch_size=BATCH,
            cache_limit=size * 5 // 8,
            **options,
        )
        for stream in dataset.streams:
            # otherwise the forked workers share its connection, and mix up the answers
            stream._downloader.clean_up()
        with torch_loader(
            OfMosaic(dataset), workers, multiprocessing_context="fork"
        ) as epoch:
            yield epoch


class OfMosaic(torch.utils.data.IterableDataset[Any]):
    """Decodes what a `StreamingDataset` yields."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return map(of_mds, self.samples)


def of_mds(sample: Any) -> tuple[torch.Tensor, int, int]:
    return photo(sample["jpg"], int(sample["cls"]))


def write_mds(job: Job) -> str:
    """Make the shards of the MDS store, from the files; returns the package's version."""
    streaming = import_mosaic()[0]
    out = Path(job.folder, "mds")
    columns = {"jpg": "bytes", "cls": "int"}
    with streaming.MDSWriter(
        out=str(out), columns=columns, size_limit=job.setting["bytes"]
    ) as shards:
        for file in sorted(
            Path(job.folder, "photos").rglob("*.jpg"), key=lambda file: file.name
        ):
            shards.write({"jpg": file.read_bytes(), "cls": int(file.parent.name)})
    return str(streaming.__version__)


@contextlib.contextmanager
def ray_data(job: Job) -> Iterator[Epoch]:
    os.environ |= {"AWS_ALLOW_HTTP": "true", "RAY_DATA_DISABLE_PROGRESS_BARS": "1"}
    import ray
    import ray.data
    from pyarrow.fs import S3FileSystem

    store, listed = job.store("photos"), Photos(job.store("photos")).listed
    files = S3FileSystem(
        anonymous=True, endpoint_override=store.endpoint, region="us-east-1"
    )
    ray.init(
        num_cpus=job.setting["num_cpus"],
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=2_000_000_000,
    )
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    try:
        if job.setting["read"] == "download":
            from ray.data.expressions import download

            rows = [{"path": f"s3://{BUCKET}/{key}"} for key, _ in listed]
            read = ray.data.from_items(rows, override_num_blocks=job.setting["blocks"])
            read = read.with_column("bytes", download("path", filesystem=files))
        else:
            read = ray.data.read_binary_files(
                [f"{BUCKET}/{key}" for key, _ in listed],
                filesystem=files,
                include_paths=True,
                override_num_blocks=job.setting["blocks"],
                ray_remote_args={"num_cpus": job.setting["cpus_of_a_read"]},
            )
        made = read.map_batches(of_rows, batch_size=BATCH)

        def epoch() -> Batches:
            for batch in made.iter_torch_batches(
                batch_size=BATCH, prefetch_batches=AHEAD
            ):
                yield batch["pixels"], batch["label"], batch["number"]

        yield epoch
    finally:
        ray.shutdown()


def of_rows(rows: dict[str, Any]) -> dict[str, Any]:
    made = [
        photo(data, int(path.split("/")[-2]))
        for data, path in zip(rows["bytes"], rows["path"], strict=True)
    ]
    pixels, labels, numbers = default_collate(made)
    return {"pixels": pixels.numpy(), "label": labels.numpy(), "number": numbers.numpy()}


def cpu_of(pid: int | None) -> float:
    """CPU seconds of a process and those that it has started, also of those that have ended."""
    found = 0
    for each in descendants(pid) if pid else ():
        with contextlib.suppress(OSError):  # it has ended
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            found += sum(map(int, fields[11:15]))
    return found / TICKS


def timed(
    job: Job,
    contestant: Contestant,
    epoch: Epoch,
    expected: Any,
    requests_at_first: float,
) -> dict[str, float]:
    """The figures of one epoch.

    Args:
        job: of this program.
        contestant: of this program.
        epoch: starts one.
        expected: the sums of the pixels of each image.
        requests_at_first: of the epoch before; 0 if this is the first.

    Raises:
        RuntimeError: an image is missing, twice there, wrong, has another's label, or was not read
            from the store.
    """
    ours = cpu_of(os.getpid())
    if contestant.open is decoding_alone:
        rate = float(epoch())  # type: ignore[arg-type]
        return {
            "rate": rate,
            "cpu": (cpu_of(os.getpid()) - ours) / job.images * 1e6,
            "cpu_of_store": 0,
            "requests": 0,
        }
    store = job.store(contestant.reads)
    requests, its = store.gets(), cpu_of(store.pid)
    found, first = [], 0.0
    began = time.perf_counter()
    for pixels, labels, numbers in epoch():
        first = first or time.perf_counter() - began
        found.append((sums_of(pixels), labels, numbers))
    elapsed = time.perf_counter() - began
    ours, its, requests = (
        cpu_of(os.getpid()) - ours,
        cpu_of(store.pid) - its,
        store.gets() - requests,
    )
    sums, labels, numbers = (
        torch.cat([batch[column] for batch in found]).numpy() for column in range(3)
    )
    # an epoch may have a part of the images
    if not len(set(numbers.tolist())) == len(numbers) == job.images:
        raise RuntimeError(
            f"{len(numbers)} of {job.images} images came, or not each once: this run does not count"
        )
    if not np.array_equal(labels, numbers % CLASSES):
        raise RuntimeError("labels are wrong: this run does not count")
    if not np.array_equal(sums, expected[numbers]):
        raise RuntimeError("pixels are wrong: this run does not count")
    if requests < (
        job.images if contestant.reads == "photos" else 0.9 * requests_at_first
    ):
        raise RuntimeError(
            f"{requests} requests were made, the rest was cached: this run does not count"
        )
    return {
        "rate": job.images / elapsed,
        "first": first,
        "cpu": ours / job.images * 1e6,
        "cpu_of_store": its / job.images * 1e6,
        "requests": requests,
    }


def given(*settings: dict[str, Any], **common: Any) -> list[dict[str, Any]]:
    return [{**common, **setting} for setting in settings]


LIMIT, OURS, OURS_ON_SHARDS = (
    "decoding alone, from memory",
    "headrace, objects",
    "headrace, tar shards",
)
TORCH = "torch DataLoader, 2 workers"
# Each one's settings for the sweep, the likely best first: a quick run takes that one.
CONTESTANTS = {
    LIMIT: Contestant(decoding_alone, reads=""),
    OURS: Contestant(
        headrace_objects,
        settings=given(
            {"concurrency": "auto"},
            {"concurrency": 128},
            {"concurrency": 256},
            {"concurrency": 128, "placement": "thread"},
            hedge="auto",
        ),
    ),
    OURS_ON_SHARDS: Contestant(
        headrace_shards,
        reads="tar",
        settings=given({}, {"placement": "thread"}, {"shards_in_parallel": 8}),
    ),
    TORCH: Contestant(torch_blocking),
    "torch DataLoader, best": Contestant(
        torch_blocking,
        settings=given(
            {"num_workers": 16},
            {"num_workers": 32},
            {"num_workers": 2, "threads": 64},
            {"num_workers": 4, "threads": 64},
            {"num_workers": 8, "threads": 32},
            {"num_workers": 16, "threads": 16},
        ),
    ),
    "torchdata.nodes": Contestant(
        torchdata_nodes,
        package="torchdata",
        settings=given(
            {"threads": 128, "prebatch": 4, "decode": "batch"},
            {"threads": 256, "prebatch": 4, "decode": "batch"},
            {"threads": 128, "prebatch": 4, "decode": "batch", "in_order": False},
            {"threads": 256, "prebatch": 4},
            {"threads": 128},
            {"threads": 128, "prebatch": 4, "decode": "batch", "method": "process"},
        ),
    ),
    "SPDL": Contestant(
        spdl,
        package="spdl-core",
        settings=given(
            {"concurrency": 128},
            {"concurrency": 256},
            {"concurrency": 128, "decode": "batch"},
            {"concurrency": 128, "where": "processes", "decode": "batch"},
            {"concurrency": 128, "where": "subprocess"},
            {"concurrency": 128, "where": "subprocess", "decode": "batch"},
        ),
    ),
    "LitData, raw": Contestant(
        litdata,
        package="litdata",
        settings=given(
            {"hedge_delay": 0.12},
            {"hedge_delay": 0.12, "max_prefetch": 64, "max_concurrent_downloads": 128},
            {"hedge_delay": 0.12, "decode": "threads"},
            {"hedge_delay": 0.12, "num_workers": 4},
            {"hedge_delay": 0.12, "num_workers": 8},
            {"hedge_delay": 0.12, "num_workers": 16},
            {},
        ),
    ),
    "Ray Data": Contestant(
        ray_data,
        package="ray",
        settings=given(
            {"read": "download", "blocks": 8, "num_cpus": 2},
            {"read": "download", "blocks": 16, "num_cpus": 4},
            {"read": "files", "blocks": 16, "num_cpus": 4, "cpus_of_a_read": 0.25},
            {"read": "download", "blocks": 16, "num_cpus": 8},
        ),
    ),
    "WebDataset, tar shards": Contestant(
        webdataset,
        reads="tar",
        package="webdataset",
        settings=given({}, {"num_workers": 4}, {"num_workers": 8}),
    ),
    "Mosaic MDS, shards": Contestant(
        mosaic,
        reads="mds",
        package="mosaicml-streaming",
        settings=given(
            {"predownload": 64},
            {"predownload": 128},
            {"predownload": 128, "num_workers": 4},
            {"predownload": 128, "num_workers": 8},
        ),
    ),
}


def main() -> None:
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    job = Job(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    if job.contestant == "write mds":
        print(json.dumps({"version": write_mds(job)}), file=lines, flush=True)
        return
    contestant = CONTESTANTS[job.contestant]
    expected = np.load(Path(job.folder, "sums.npy"))
    with contestant.open(job) as epoch:
        requests = 0.0
        for number in range(job.epochs + 1):
            figures = timed(job, contestant, epoch, expected, requests)
            requests = figures["requests"]
            if number:
                print(json.dumps(figures), file=lines, flush=True)


if __name__ == "__main__":
    main()
