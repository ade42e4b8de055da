"""Who can fetch objects of a store, each as its users write it: what `object_store.py` compares.

Everybody gives batches of `BATCH` in which `numbers_of` has looked at every byte. Who brings no HTTP client gets
obstore, one client for each process, and asks for ranges of a known length, as headrace and the bare loop do.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import multiprocessing
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import obstore
import torch
import uvloop
from contents import check_order, check_set, key_of, numbers_of
from harness import is_installed
from obstore.store import from_url
from store import BUCKET, Store

import headrace as hr

__all__ = ["BATCH", "FAMILIES", "Batches", "Epoch", "Family", "Setting", "rate"]

BATCH = 64
AHEAD = 4  # batches that are ready, where a loader has a setting for it

Batches = Iterable[Sequence[int]]
Epoch = Callable[[], Batches]
"""Starts an epoch; it may be called again, and keeps warm what the loader keeps between epochs."""


IN_A_PROCESS = "in a process of its own"


@dataclass(frozen=True)
class Setting:
    """How a loader is set.

    Attributes:
        in_flight: GETs at once, in all; 0 where the loader decides.
        workers: processes.
        variant: what else is said, in words.
    """

    in_flight: int
    workers: int = 0
    variant: str = ""

    def __str__(self) -> str:
        parts = [f"{self.in_flight} in flight" if self.in_flight else "", self.variant]
        if self.workers:
            parts.insert(0, f"{self.workers} {'worker' if self.workers == 1 else 'workers'}")
        return ", ".join(filter(None, parts))


@dataclass(frozen=True)
class Family:
    """A loader and how it may be set.

    Attributes:
        open: what starts an epoch of that many objects, until the context ends.
        settings: the first is the one at equal concurrency, where it has 64 in flight; the best of all is searched.
        package: the distribution that is needed, or "".
        in_order: whether samples come in the order that was asked for.
    """

    open: Callable[[Store, Setting, int], contextlib.AbstractContextManager[Epoch]]
    settings: Sequence[Setting]
    package: str = ""
    in_order: bool = True

    @property
    def is_there(self) -> bool:
        """Whether it is installed."""
        return not self.package or is_installed(self.package)


def collate_for(store: Store) -> Callable[[Sequence[Any]], list[int]]:
    """What looks at every byte of a batch, in whatever process."""
    return functools.partial(numbers_of, size=store.size)


def collate_samples_for(store: Store) -> Callable[[Sequence[hr.ObjectSample]], list[int]]:
    return lambda samples: numbers_of((sample.data for sample in samples), store.size)


class Getter:
    """An object by GET, blocking or not; each process has a client of its own."""

    def __init__(self, store: Store) -> None:
        self._place = store
        self._client: Any = None

    @property
    def client(self) -> Any:
        if self._client is None:
            self._client = from_url(self._place.url, **self._place.options)
        return self._client

    def __getstate__(self) -> dict[str, Any]:
        return {"_place": self._place, "_client": None}

    def __call__(self, number: int) -> Any:
        return obstore.get_range(self.client, key_of(number), start=0, length=self._place.size)

    async def aget(self, number: int) -> Any:
        return await obstore.get_range_async(self.client, key_of(number), start=0, length=self._place.size)


@contextlib.contextmanager
def bare_loop(store: Store, setting: Setting, count: int) -> Iterator[Epoch]:
    """As many coroutines as fetches in flight, each with one GET after the other: what obstore and the store can do."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        get, collate = Getter(store).aget, collate_for(store)

        async def run() -> list[list[int]]:
            numbers = iter(range(count))
            batches: list[list[int]] = []
            ready: list[Any] = []

            async def fetch() -> None:
                for number in numbers:
                    ready.append(await get(number))
                    if len(ready) == BATCH:
                        batches.append(collate(ready))
                        ready.clear()

            await asyncio.gather(*(fetch() for _ in range(setting.in_flight)))
            return [*batches, collate(ready)]

        yield lambda: runner.run(run())


@contextlib.contextmanager
def headrace(
    store: Store, setting: Setting, count: int, *, if_match: bool = True, hedge: Literal["auto"] | None = None
) -> Iterator[Epoch]:
    objects = hr.ObjectDataset(store.url, store_options=store.options, if_match=if_match)
    concurrency: int | Literal["auto"] = setting.in_flight or "auto"
    with hr.DataLoader(
        objects,
        batch_size=BATCH,
        sampler=range(count),
        collate_fn=collate_samples_for(store),
        concurrency=concurrency,
        hedge=hedge,
        placement="process" if setting.variant == IN_A_PROCESS else "thread",
    ) as loader:
        yield lambda: loader


class OneAtATime(torch.utils.data.Dataset[Any]):
    """A torch dataset as it is usually written: a blocking GET in `__getitem__`."""

    def __init__(self, get: Callable[[int], Any], count: int) -> None:
        self.get = get
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.get(index)


class BatchInThreads(OneAtATime):
    """The best that a torch dataset can do with a blocking client: the GETs of a batch at once, in threads."""

    pool: ThreadPoolExecutor | None = None

    def __init__(self, get: Callable[[int], Any], count: int, threads: int) -> None:
        super().__init__(get, count)
        self.threads = threads

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if self.pool is None:
            self.pool = ThreadPoolExecutor(self.threads)
        return list(self.pool.map(self.get, indices))


@contextlib.contextmanager
def torch_loader(
    dataset: Any, store: Store, workers: int, *, worker_init_fn: Callable[[int], None] | None = None
) -> Iterator[Epoch]:
    """Torch's loader over a dataset, its workers started once."""
    multiprocessing.set_forkserver_preload(["torch", "obstore.store"])  # else each worker takes seconds to import them
    warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=BATCH,
        collate_fn=collate_for(store),
        num_workers=workers,
        prefetch_factor=AHEAD // 2,
        multiprocessing_context="forkserver",  # the clients' threads do not survive a fork of this process
        persistent_workers=True,
        worker_init_fn=worker_init_fn,
    )
    try:
        yield lambda: loader
    finally:
        if loader._iterator is not None:
            loader._iterator._shutdown_workers()


def torch_blocking(store: Store, setting: Setting, count: int) -> contextlib.AbstractContextManager[Epoch]:
    return torch_loader(OneAtATime(Getter(store), count), store, setting.workers)


def torch_threads(store: Store, setting: Setting, count: int) -> contextlib.AbstractContextManager[Epoch]:
    dataset = BatchInThreads(Getter(store), count, setting.in_flight // setting.workers)
    return torch_loader(dataset, store, setting.workers)


@contextlib.contextmanager
def torchdata_nodes(store: Store, setting: Setting, count: int) -> Iterator[Epoch]:
    from torchdata import nodes

    prebatch = 4 if setting.variant else None
    node: Any = nodes.IterableWrapper(range(count))
    node = nodes.ParallelMapper(node, Getter(store), num_workers=setting.in_flight, method="thread", prebatch=prebatch)
    node = nodes.Prefetcher(nodes.Mapper(nodes.Batcher(node, BATCH, drop_last=False), collate_for(store)), AHEAD)
    loader = nodes.Loader(node)
    yield lambda: loader


@contextlib.contextmanager
def spdl(store: Store, setting: Setting, count: int) -> Iterator[Epoch]:
    from spdl.pipeline import PipelineBuilder

    get = Getter(store)
    in_threads = setting.variant == "threads"

    def epoch() -> Batches:
        builder = PipelineBuilder().add_source(range(count))
        builder.pipe(get if in_threads else get.aget, concurrency=setting.in_flight)
        builder.aggregate(BATCH).pipe(collate_for(store)).add_sink(AHEAD)
        pipeline = builder.build(num_threads=setting.in_flight if in_threads else 4)
        with pipeline.auto_stop():
            yield from pipeline.get_iterator()

    yield epoch


@contextlib.contextmanager
def grain(store: Store, setting: Setting, count: int) -> Iterator[Epoch]:
    import grain

    options = grain.ReadOptions(num_threads=setting.in_flight, prefetch_buffer_size=2 * setting.in_flight)
    fetched = grain.MapDataset.range(count).map(Getter(store)).to_iter_dataset(options)
    batches = fetched.batch(BATCH, batch_fn=collate_for(store))
    yield lambda: batches


def read_all(reader: Any) -> bytes:
    return reader.read()


class FromS3:
    """`S3MapDataset` of s3torchconnector, made in the process that uses it: its objects cannot cross to another."""

    def __init__(self, store: Store, count: int) -> None:
        self.store = store
        self.count = count
        self._dataset: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_dataset": None}

    def __call__(self, number: int) -> bytes:
        if self._dataset is None:
            from s3torchconnector import S3ClientConfig, S3MapDataset

            self._dataset = S3MapDataset.from_objects(
                [f"s3://{BUCKET}/{key_of(number)}" for number in range(self.count)],
                region="us-east-1",
                endpoint=self.store.endpoint,
                transform=read_all,
                s3client_config=S3ClientConfig(unsigned=True, force_path_style=True),
            )
        return self._dataset[number]


def s3torchconnector(store: Store, setting: Setting, count: int) -> contextlib.AbstractContextManager[Epoch]:
    threads = setting.in_flight // setting.workers
    get = FromS3(store, count)
    dataset = OneAtATime(get, count) if threads == 1 else BatchInThreads(get, count, threads)
    return torch_loader(dataset, store, setting.workers)


@contextlib.contextmanager
def litdata(store: Store, setting: Setting, count: int) -> Iterator[Epoch]:
    from litdata import StreamingRawDataset
    from litdata.raw.indexer import FileIndexer, FileMetadata

    logging.getLogger("litdata").setLevel(logging.ERROR)  # it says that objects of 56 KB are small

    class Known(FileIndexer):
        """The files without a listing, which LitData would make with s3fs before the first epoch."""

        def build_or_load_index(self, *_: Any, **__: Any) -> list[FileMetadata]:
            return [FileMetadata(f"s3://{BUCKET}/{key_of(number)}", store.size) for number in range(count)]

        def __reduce__(self) -> Any:
            return FileIndexer, ()  # workers get the dataset, and it has its files by then

    with tempfile.TemporaryDirectory(prefix="headrace-litdata-") as folder:
        dataset = StreamingRawDataset(
            f"s3://{BUCKET}/",
            cache_dir=folder,
            indexer=Known(),
            storage_options={
                "endpoint_url": store.endpoint,
                "region_name": "us-east-1",
                "aws_access_key_id": "none",
                "aws_secret_access_key": "none",
            },
            max_concurrent_downloads=setting.in_flight // setting.workers,
            max_prefetch=setting.in_flight // setting.workers,
        )
        with torch_loader(dataset, store, setting.workers, worker_init_fn=let_litdata_speak_http) as epoch:
            yield epoch


def let_litdata_speak_http(worker: int) -> None:
    """LitData gives obstore the endpoint, but no option to speak anything but HTTPS to it."""
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True


def rate(store: Store, family: Family, epoch: Epoch, count: int) -> float:
    """Objects a second of one epoch, from `iter()` to its last batch.

    Raises:
        RuntimeError: an object did not come, or not from the store; the run does not count.
    """
    gets = store.gets()
    began = time.perf_counter()
    batches = list(epoch())
    elapsed = time.perf_counter() - began
    (check_order if family.in_order else check_set)(batches, count)
    if (made := store.gets() - gets) < count:
        raise RuntimeError(f"{made} GETs were made for {count} objects, the rest was kept: this run does not count")
    return count / elapsed


def _in_flight(*counts: int) -> list[Setting]:
    return [Setting(count) for count in counts]


OURS = (
    *_in_flight(64, 256, 512, 1024),
    *(Setting(count, variant=IN_A_PROCESS) for count in (512, 1024)),
    Setting(0, variant="auto"),
)
FAMILIES: dict[str, Family] = {
    "bare obstore loop": Family(bare_loop, _in_flight(64, 256, 512, 1024), in_order=False),
    "headrace": Family(headrace, OURS),
    "headrace, if_match=False": Family(functools.partial(headrace, if_match=False), OURS),
    "torch, 2 workers": Family(torch_blocking, [Setting(2, 2)]),
    "torch, 16 workers": Family(torch_blocking, [Setting(16, 16)]),
    "torch, threads in workers": Family(
        torch_threads, [Setting(64, 2), Setting(128, 2), Setting(256, 4), Setting(512, 8), Setting(1024, 16)]
    ),
    "torchdata.nodes": Family(
        torchdata_nodes,
        [*_in_flight(64, 256, 1024), *(Setting(count, variant="prebatch") for count in (256, 512))],
        "torchdata",
    ),
    "SPDL": Family(spdl, [*_in_flight(64, 256, 1024), Setting(256, variant="threads")], "spdl-core", in_order=False),
    "Grain": Family(grain, _in_flight(64, 256, 1024), "grain"),
    "s3torchconnector": Family(
        s3torchconnector, [Setting(64, 2), Setting(16, 16), Setting(256, 4), Setting(512, 8)], "s3torchconnector"
    ),
    "LitData, raw": Family(litdata, [Setting(64, 1), Setting(256, 1), Setting(256, 2), Setting(1024, 4)], "litdata"),
}
