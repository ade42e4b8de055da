"""Loaders that fetch objects of a store, each used as its documentation shows; compared by `object_store.py`.

All give batches of `BATCH` in which `numbers_of` has compared every byte. Loaders without an HTTP
client of their own use obstore, one client per process, and request ranges of known length, as
headrace and the bare loop do.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import multiprocessing
import tempfile
import warnings
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any, Literal

import obstore
import torch
import uvloop
from contents import key_of, numbers_of
from contestants import BATCH, Batches, Epoch, Family, Setting
from getting import (
    BatchInThreads,
    GetRange,
    GetRangeIfMatch,
    OneAtATime,
    allow_http_for_litdata,
    raw_litdata,
)
from store import BUCKET, Store

import headrace as hr

__all__ = ["FAMILIES", "headrace"]

AHEAD = 4  # prefetched batches, if a loader has a setting for it

IN_A_PROCESS = "in a process of its own"
PROCESSES = 2  # of headrace's engines, and of torchdata's loaders


def collate_for(store: Store) -> Callable[[Sequence[Any]], list[int]]:
    """A collate function that compares every byte of a batch."""
    return functools.partial(numbers_of, size=store.size)


def getter(store: Store) -> GetRange:
    """GETs through obstore, for loaders without a client."""
    return GetRange(store.url, store.options, store.size)


def conditional_getter(store: Store) -> GetRangeIfMatch:
    """One that asks for the listed versions."""
    plain = getter(store)
    listed = (each for page in obstore.list(plain.client) for each in page)
    tags = {each["path"]: str(each["e_tag"]) for each in listed}
    return GetRangeIfMatch(plain.url, plain.options, plain.size, tags)


def collate_samples_for(
    store: Store,
) -> Callable[[Sequence[hr.types.ObjectSample]], list[int]]:
    return lambda samples: numbers_of((sample.data for sample in samples), store.size)


async def fetch_batches(
    get: Callable[[int], Awaitable[Any]],
    count: int,
    in_flight: int,
    put: Callable[[list[Any]], object],
) -> None:
    """As many coroutines as fetches in flight, each with one GET at a time; `put` is called with each batch."""
    numbers = iter(range(count))
    ready: list[Any] = []

    async def fetch() -> None:
        nonlocal ready
        for number in numbers:
            # before `ready` is looked up, which may be another list afterwards
            data = await get(number)
            ready.append(data)
            if len(ready) == BATCH:
                batch, ready = ready, []
                put(batch)

    await asyncio.gather(*(fetch() for _ in range(in_flight)))
    put(ready)


@contextlib.contextmanager
def bare_loop(
    store: Store, setting: Setting, count: int, *, if_match: bool = False
) -> Iterator[Epoch]:
    """The limit of obstore and store."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        get, collate = (
            (conditional_getter if if_match else getter)(store).aget,
            collate_for(store),
        )

        def epoch() -> Batches:
            batches: list[list[int]] = []
            runner.run(
                fetch_batches(
                    get,
                    count,
                    setting.in_flight,
                    lambda ready: batches.append(collate(ready)),
                )
            )
            return batches

        yield epoch


@contextlib.contextmanager
def bare_thread(store: Store, setting: Setting, count: int) -> Iterator[Epoch]:
    """The bare loop in a thread of its own; the caller's thread compares, as it does for a loader."""
    with ThreadPoolExecutor(1) as thread:
        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        get, collate = getter(store).aget, collate_for(store)

        def epoch() -> Batches:
            queue: SimpleQueue[list[Any] | None] = SimpleQueue()
            running = thread.submit(
                lambda: runner.run(
                    fetch_batches(get, count, setting.in_flight, queue.put)
                )
            )
            running.add_done_callback(lambda _: queue.put(None))
            while (ready := queue.get()) is not None:
                yield collate(ready)
            running.result()

        try:
            yield epoch
        finally:
            thread.submit(runner.close).result()


@contextlib.contextmanager
def headrace(
    store: Store,
    setting: Setting,
    count: int,
    *,
    if_match: bool = True,
    hedge: Literal["auto"] | None = None,
    engines: int = 1,
    in_order: bool = True,
) -> Iterator[Epoch]:
    objects = hr.ObjectDataset(
        hr.Store(store.url, options=store.options, if_match=if_match)
    )
    concurrency: int | Literal["auto"] = setting.in_flight or "auto"
    with hr.DataLoader(
        objects,
        batch_size=BATCH,
        sampler=range(count),
        collate_fn=collate_samples_for(store),
        concurrency=concurrency,
        hedge=hedge,
        in_order=in_order,
        placement="process"
        if setting.variant == IN_A_PROCESS or engines > 1
        else "thread",
        engines=engines,
    ) as loader:
        yield lambda: loader


@contextlib.contextmanager
def torch_loader(
    dataset: Any,
    store: Store,
    workers: int,
    *,
    worker_init_fn: Callable[[int], None] | None = None,
) -> Iterator[Epoch]:
    """Torch's loader over a dataset, its workers started once."""
    # otherwise each worker imports them, which takes seconds
    multiprocessing.set_forkserver_preload(["torch", "obstore.store"])
    warnings.filterwarnings(
        "ignore", message="This DataLoader will create", category=UserWarning
    )
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=BATCH,
        collate_fn=collate_for(store),
        num_workers=workers,
        prefetch_factor=AHEAD // 2,
        # the clients' threads do not survive a fork of this process
        multiprocessing_context="forkserver",
        persistent_workers=True,
        worker_init_fn=worker_init_fn,
    )
    try:
        yield lambda: loader
    finally:
        if loader._iterator is not None:
            loader._iterator._shutdown_workers()


def torch_blocking(
    store: Store, setting: Setting, count: int
) -> contextlib.AbstractContextManager[Epoch]:
    return torch_loader(OneAtATime(getter(store), count), store, setting.workers)


def torch_threads(
    store: Store, setting: Setting, count: int
) -> contextlib.AbstractContextManager[Epoch]:
    dataset = BatchInThreads(getter(store), count, setting.in_flight // setting.workers)
    return torch_loader(dataset, store, setting.workers)


@contextlib.contextmanager
def torchdata_nodes(
    store: Store, setting: Setting, count: int | range
) -> Iterator[Epoch]:
    from torchdata import nodes

    prebatch = 4 if setting.variant else None
    node: Any = nodes.IterableWrapper(range(count) if isinstance(count, int) else count)
    node = nodes.ParallelMapper(
        node,
        getter(store),
        num_workers=setting.in_flight,
        method="thread",
        prebatch=prebatch,
    )
    node = nodes.Prefetcher(
        nodes.Mapper(nodes.Batcher(node, BATCH, drop_last=False), collate_for(store)),
        AHEAD,
    )
    loader = nodes.Loader(node)
    yield lambda: loader


@contextlib.contextmanager
def torchdata_processes(store: Store, setting: Setting, count: int) -> Iterator[Epoch]:
    """A loader in each of two processes, of every second object; the parent takes what comes."""
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        lines = []
        for part in range(PROCESSES):
            line, its = context.Pipe()
            process = context.Process(
                target=serve_part,
                args=(its, store, setting, range(part, count, PROCESSES)),
            )
            process.start()
            its.close()
            stack.callback(process.join)
            stack.callback(line.close)
            lines.append(line)

        def epoch() -> Batches:
            for line in lines:
                line.send(None)
            left = list(lines)
            while left:
                for line in wait(left):
                    assert isinstance(line, Connection)
                    if (batch := line.recv()) is None:
                        left.remove(line)
                    else:
                        yield batch

        yield epoch


def serve_part(line: Connection, store: Store, setting: Setting, numbers: range) -> None:
    """An epoch of these objects for each message."""
    half = replace(setting, in_flight=setting.in_flight // PROCESSES)
    with torchdata_nodes(store, half, numbers) as epoch, contextlib.suppress(EOFError):
        while True:
            line.recv()
            for batch in epoch():
                line.send(batch)
            line.send(None)


@contextlib.contextmanager
def spdl(store: Store, setting: Setting, count: int) -> Iterator[Epoch]:
    from spdl.pipeline import PipelineBuilder

    get = getter(store)
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

    options = grain.ReadOptions(
        num_threads=setting.in_flight, prefetch_buffer_size=2 * setting.in_flight
    )
    fetched = grain.MapDataset.range(count).map(getter(store)).to_iter_dataset(options)
    batches = fetched.batch(BATCH, batch_fn=collate_for(store))
    yield lambda: batches


def read_all(reader: Any) -> bytes:
    return reader.read()


class FromS3:
    """`S3MapDataset` of s3torchconnector, created in the process that uses it, since it cannot be pickled."""

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


def s3torchconnector(
    store: Store, setting: Setting, count: int
) -> contextlib.AbstractContextManager[Epoch]:
    threads = setting.in_flight // setting.workers
    get = FromS3(store, count)
    dataset = (
        OneAtATime(get, count) if threads == 1 else BatchInThreads(get, count, threads)
    )
    return torch_loader(dataset, store, setting.workers)


@contextlib.contextmanager
def litdata(store: Store, setting: Setting, count: int) -> Iterator[Epoch]:
    at_once = setting.in_flight // setting.workers
    files = {key_of(number): store.size for number in range(count)}
    with tempfile.TemporaryDirectory(prefix="headrace-litdata-") as folder:
        dataset = raw_litdata(
            store.endpoint,
            files,
            folder,
            max_concurrent_downloads=at_once,
            max_prefetch=at_once,
        )
        with torch_loader(
            dataset, store, setting.workers, worker_init_fn=allow_http_for_litdata
        ) as epoch:
            yield epoch


def _in_flight(*counts: int) -> list[Setting]:
    return [Setting(count) for count in counts]


OURS = (
    *_in_flight(64, 256, 512, 1024),
    *(Setting(count, variant=IN_A_PROCESS) for count in (512, 1024)),
    Setting(0, variant="auto"),
)
FAMILIES: dict[str, Family] = {
    "bare obstore loop": Family(
        bare_loop, _in_flight(64, 256, 512, 1024), in_order=False
    ),
    "bare obstore loop, If-Match": Family(
        functools.partial(bare_loop, if_match=True),
        _in_flight(256, 512, 1024),
        in_order=False,
    ),
    "bare obstore loop, in a thread": Family(
        bare_thread, _in_flight(512, 1024), in_order=False
    ),
    "headrace": Family(headrace, OURS),
    "headrace, if_match=False": Family(functools.partial(headrace, if_match=False), OURS),
    "headrace, 2 engines": Family(
        functools.partial(headrace, engines=PROCESSES), _in_flight(512, 1024)
    ),
    "headrace, if_match=False, 2 engines": Family(
        functools.partial(headrace, if_match=False, engines=PROCESSES),
        _in_flight(512, 1024),
    ),
    "torch, 2 workers": Family(torch_blocking, [Setting(2, 2)]),
    "torch, 16 workers": Family(torch_blocking, [Setting(16, 16)]),
    "torch, threads in workers": Family(
        torch_threads,
        [
            Setting(64, 2),
            Setting(128, 2),
            Setting(256, 4),
            Setting(512, 8),
            Setting(1024, 16),
        ],
    ),
    "torchdata.nodes": Family(
        torchdata_nodes,
        [
            *_in_flight(64, 256, 1024),
            *(Setting(count, variant="prebatch") for count in (256, 512)),
        ],
        "torchdata",
    ),
    "torchdata.nodes, 2 processes": Family(
        torchdata_processes,
        [Setting(count, variant="prebatch") for count in (256, 512, 1024)],
        "torchdata",
        in_order=False,
    ),
    "SPDL": Family(
        spdl,
        [*_in_flight(64, 256, 1024), Setting(256, variant="threads")],
        "spdl-core",
        in_order=False,
    ),
    "Grain": Family(grain, _in_flight(64, 256, 1024), "grain"),
    "s3torchconnector": Family(
        s3torchconnector,
        [Setting(64, 2), Setting(16, 16), Setting(256, 4), Setting(512, 8)],
        "s3torchconnector",
    ),
    "LitData, raw": Family(
        litdata,
        [Setting(64, 1), Setting(256, 1), Setting(256, 2), Setting(1024, 4)],
        "litdata",
    ),
}
