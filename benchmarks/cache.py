"""Cost of the disk cache: its later epochs against the same bytes as plain files, read by `FileDataset`.

2,000 objects of 56 KB. The first epoch of a cached `ObjectDataset` fetches them from a local object
store into a folder; later epochs read them from there.
`FileDataset` reads the same bytes from plain files. Both go through a `DataLoader` with 64
fetches in flight, without workers, in shuffled order; every sample's bytes are checked.

Then an object store of 20 ms that answers 500 requests a second: an epoch without a cache, the
first with one, and the second, by a SHA-256 of all batches within the clock. It needs nginx with
its Lua module.

    python benchmarks/cache.py
    python benchmarks/cache.py --limited 100000 --limited-rounds 2     # 11 GB of disk, 15 minutes
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import random
import statistics
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

from harness import Figure, Rounds, claim, describe_machine, interleave, parse_arguments
from servers import ObjectServer
from store import nginx_is_installed, serve

import headrace as hr

OBJECT_SIZE = 56_000  # bytes: a JPEG of 500 × 375 pixels
CONCURRENCY = 64
EPOCHS = 5  # of 0.15 s each
LATENCY, RATE = 0.02, 500.0  # seconds; requests a second


def gathered(samples: list[Any]) -> list[tuple[str, Any]]:
    return [(sample.key, sample.data) for sample in samples]


def epoch(loader: hr.DataLoader[Any], checksums: dict[str, int]) -> float:
    """Samples a second; what the comparison of bytes takes is not counted."""
    began = time.perf_counter()
    batches = list(loader)
    elapsed = time.perf_counter() - began
    found = {key: zlib.crc32(data) for batch in batches for key, data in batch}
    if found != checksums:
        raise RuntimeError(
            "samples are missing or have wrong bytes: this run does not count"
        )
    return len(found) / elapsed


def fresh(dataset: Any, options: dict[str, Any], checksums: dict[str, int]) -> float:
    """The rate of a loader of its own, in `EPOCHS` epochs after one that warms it up.

    The malloc arena of a thread is chosen when it starts, and makes a difference of a tenth; so
    each round has new threads.
    """
    with hr.DataLoader(dataset, **options) as loader:
        epoch(loader, checksums)
        return statistics.harmonic_mean([epoch(loader, checksums) for _ in range(EPOCHS)])


def behind_a_limit(count: int, rounds: int, where: str | None) -> None:
    """Three epochs in one order, each round with an empty cache."""
    rates: dict[str, list[float]] = {
        "no cache": [],
        "first epoch": [],
        "second epoch": [],
    }
    fewer = []
    with serve(count, OBJECT_SIZE, latency=LATENCY, rate=RATE) as store:
        for _ in range(rounds):
            with tempfile.TemporaryDirectory(dir=where) as folder:
                objects = hr.ObjectDataset(hr.Store(store.url, options=store.options))
                datasets = objects, objects.cache(folder)
                options: dict[str, Any] = {
                    "batch_size": 64,
                    "shuffle": True,
                    "seed": 0,
                    "collate_fn": gathered,
                }
                plain, cached = (
                    hr.DataLoader(each, concurrency=CONCURRENCY, **options)
                    for each in datasets
                )
                gets, digests = [store.gets()], []
                with plain, cached:
                    for name, loader in zip(rates, (plain, cached, cached), strict=True):
                        loader.set_epoch(0)
                        began, digest, found = time.perf_counter(), hashlib.sha256(), 0
                        for batch in loader:
                            for key, data in batch:
                                digest.update(key.encode() + data)
                                found += 1
                        rates[name].append(found / (time.perf_counter() - began))
                        gets.append(store.gets())
                        digests.append(digest.digest())
            if len({*digests}) != 1 or found != count:
                raise RuntimeError(
                    "epochs with other bytes, or in another order: this run does not count"
                )
            _, first, second = (
                after - before - 1 for before, after in itertools.pairwise(gets)
            )
            fewer.append(first / max(1, second))
    print(
        f"\n{count} objects of {OBJECT_SIZE} bytes, {LATENCY * 1000:.0f} ms, {RATE:.0f} requests/s; {store.kind}"
    )
    epochs = Rounds("samples/s", rates)
    epochs.show(against="no cache")
    first_epoch = epochs.share(
        "first epoch", "no cache", "of no cache, first epoch", at_least=0.95
    )
    second_epoch = epochs.share(
        "second epoch", "no cache", "× no cache, second epoch", at_least=5
    )
    claim(
        "disk cache behind a limit",
        first_epoch,
        second_epoch,
        Figure("× fewer GETs", fewer, at_least=50),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--objects", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--folder",
        help="where both are; a new one in the place for temporary files by default",
    )
    parser.add_argument(
        "--limited",
        type=int,
        default=5000,
        help="objects of the store that limits requests",
    )
    parser.add_argument("--limited-rounds", type=int, default=1)
    arguments = parse_arguments(parser, objects=200, rounds=1, limited=200)
    source = random.Random(7)
    contents = {
        f"{i:06d}.bin": source.randbytes(OBJECT_SIZE) for i in range(arguments.objects)
    }
    checksums = {key: zlib.crc32(data) for key, data in contents.items()}
    with (
        tempfile.TemporaryDirectory(dir=arguments.folder) as name,
        ObjectServer({f"train/{key}": data for key, data in contents.items()}) as server,
    ):
        folder = Path(name)
        (folder / "files").mkdir()
        for key, data in contents.items():
            (folder / "files" / key).write_bytes(data)
        objects = hr.ObjectDataset(
            hr.Store(f"{server.url}/train", options=server.store_options)
        )
        options: dict[str, Any] = {
            "batch_size": 50,
            "shuffle": True,
            "collate_fn": gathered,
            "concurrency": CONCURRENCY,
            "memory_budget": None,
        }
        bound = 2 * arguments.objects * OBJECT_SIZE
        files, cached = (
            hr.FileDataset(folder / "files"),
            objects.cache(folder / "cache", max_bytes=bound),
        )
        with hr.DataLoader(cached, **options) as loader:
            first = epoch(loader, checksums)
            counts = loader.stats().requests
        rounds = interleave(
            {
                "FileDataset": lambda: fresh(files, options, checksums),
                "cache": lambda: fresh(cached, options, checksums),
            },
            rounds=arguments.rounds,
            unit="samples/s",
        )
        requests = server.requests()["GET"]
    if (requests, counts.cache_misses) != (arguments.objects, arguments.objects):
        raise RuntimeError(
            f"{requests} requests for {arguments.objects} objects: this run does not count"
        )
    print(f"{arguments.objects} objects of {OBJECT_SIZE} bytes, {CONCURRENCY} in flight")
    print(describe_machine())
    rounds.show(against="FileDataset")
    print(f"the first epoch, into the cache: {first:,.0f} samples/s")
    claim(
        "second epoch from the disk cache",
        rounds.share("cache", "FileDataset", at_least=0.9),
    )
    if nginx_is_installed():
        behind_a_limit(arguments.limited, arguments.limited_rounds, arguments.folder)
    else:
        print(
            "nginx with its Lua module is not installed: there is no store with a limit"
        )


if __name__ == "__main__":
    main()
