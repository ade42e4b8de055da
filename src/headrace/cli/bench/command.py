"""`headrace bench URL`: the latency and the throughput that a store gives this machine, and the best concurrency."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO
from urllib.parse import urlsplit

from headrace._core.store.store import Store
from headrace.cli.bench.limits import Ceiling
from headrace.cli.bench.plot import check_plot, write_plot
from headrace.cli.bench.progress import Progress
from headrace.cli.bench.reads import list_some
from headrace.cli.bench.results import Results
from headrace.cli.bench.search import FIRST, Search
from headrace.cli.bench.text import write_text
from headrace.cli.bench.trials import Trial, Trials
from headrace.cli.cgroups import CgroupLimits
from headrace.cli.checks.limits import available_memory
from headrace.telemetry.limits import usable_cores

__all__ = ["BenchOptions", "bench", "prepare"]

MOST = 2048  # fetches in flight: what one event loop can use
LEAST_SECONDS = 5.0  # if the import of PyTorch has taken nearly all of the time
LAST_TRIALS = 0.12  # share of the time for the two trials after the search


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Arguments of `headrace bench`.

    Attributes:
        url: the prefix that is listed and read.
        store_options: passed to the store; may hold secrets.
        seconds: for all of it, with the import of PyTorch.
        objects: how many are listed, at most.
        max_concurrency: the highest number of fetches in flight; None for what the machine allows.
        gpus: of a host that is to be fed.
        samples_per_gpu: samples that one takes in a second; None for the demand of MLPerf Storage.
        plot: the file of the plot.
        as_json: whether a JSON object is printed.
    """

    url: str
    store_options: Mapping[str, object]
    seconds: float
    objects: int
    max_concurrency: int | None
    gpus: int
    samples_per_gpu: float | None
    plot: Path | None
    as_json: bool


def prepare(options: BenchOptions) -> Store:
    """Check the arguments, and open the store; nothing is requested.

    Raises:
        MissingExtraError: a plot is asked for, and matplotlib is not installed.
        ValueError: the URL, the store's options or the plot's file make no sense.
    """
    if options.plot is not None:
        check_plot(options.plot)
    parts = urlsplit(options.url)
    if parts.scheme == "memory":
        raise ValueError("memory:// is the memory of one process, which no other can read")
    if parts.scheme not in ("", "file") and "://" in options.url and not parts.netloc:
        what = "host" if parts.scheme in ("http", "https") else "bucket"
        raise ValueError(f"{parts.scheme}:// is followed by no {what}: {parts.scheme}://{what}/prefix")
    store = Store(options.url, options=options.store_options)
    _ = store._client.store
    return store


def bench(store: Store, options: BenchOptions, progress: Progress, stream: TextIO | None = None) -> None:
    """Measure, and print the results; those so far when it is interrupted.

    Args:
        store: of `prepare`.
        options: the command's.
        progress: shows what is done.
        stream: where to; by default standard output.

    Raises:
        KeyboardInterrupt: it was interrupted; results so far have been printed.
        StoreError: the store cannot be listed or read; the message has no secrets.
        OSError: the plot cannot be written.
    """
    stream = stream or sys.stdout
    cores = min(usable_cores(), CgroupLimits.here().cores)
    results = Results(store.url, options.store_options, options.gpus, options.samples_per_gpu, cores)
    try:
        asyncio.run(_measure(store, options, results, progress))
    except KeyboardInterrupt:
        progress.close()
        if results.best is not None:
            _print(results, options, stream)
        raise
    progress.close()
    _print(results, options, stream)


async def _measure(store: Store, options: BenchOptions, results: Results, progress: Progress) -> None:
    until = max(progress.began + options.seconds, time.perf_counter() + LEAST_SECONDS)
    progress.show("listing")
    listing = results.listing = await list_some(store, options.objects, seconds=(until - time.perf_counter()) / 2)
    trials = results.trials = Trials(listing, until)
    ceiling = results.ceiling = _ceiling(options.max_concurrency, listing.mean_size)

    async def measure(concurrency: int, seconds: float) -> Trial:
        progress.show(f"{concurrency:,} in flight")
        trial = await trials.run(concurrency, seconds)
        progress.show(f"{concurrency:,} in flight: {trial.rate:,.0f} {results.unit}/s")
        return trial

    progress.show("latency")
    few = min(FIRST, ceiling.most)
    results.unloaded = await trials.run(few, options.seconds / 25, first_byte=True, strict=True)
    reserved = LAST_TRIALS * options.seconds
    search = results.search = Search(measure, ceiling.most, lambda: trials.seconds_left - reserved)
    await search.run()
    best = search.best
    if best is not None:
        progress.show("latency at the best setting")
        results.loaded = await trials.run(best, reserved / 4, first_byte=True)
        progress.show("reads of half the bytes")
        # With more in flight than the best setting, which may be just as many as the whole objects need.
        results.halves = await trials.run(min(2 * best, ceiling.most), reserved / 4, part=0.5)


def _print(results: Results, options: BenchOptions, stream: TextIO) -> None:
    if options.as_json:
        json.dump(results.to_dict(), stream, indent=2, ensure_ascii=False)
        stream.write("\n")
    else:
        write_text(results, stream)
    if options.plot is not None:
        write_plot(results, options.plot)


def _ceiling(wanted: int | None, read_bytes: float) -> Ceiling:
    """The highest number of fetches in flight that may be tried, and what would allow more."""
    ceilings = [Ceiling(MOST, "several engines: engines=2, with twice the concurrency")]
    if wanted is not None:
        ceilings.append(Ceiling(wanted, "a higher --max-concurrency"))
    try:
        import resource
    except ImportError:  # Windows
        pass
    else:
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if descriptors != resource.RLIM_INFINITY:
            ceilings.append(Ceiling(max(1, descriptors // 2), f"more descriptors: ulimit -n {4 * MOST}"))
    memory = min(CgroupLimits.here().memory_left, available_memory())
    if math.isfinite(memory):
        ceilings.append(Ceiling(max(1, int(memory / 4 / read_bytes)), "more memory"))
    return min(ceilings, key=lambda each: each.most)
