"""What keys cost: memory of a dataset of a million objects here and in each engine, listing, and the first batch.

The keys are as long as ImageNet's, with sizes and entity tags of 16 bytes, as a listing of S3 or a
table gives them. No object is read: the dataset gives its indices, and holds what an
`ObjectDataset` holds.

    python benchmarks/catalog_costs.py
"""

from __future__ import annotations

import argparse
import functools
import os
import resource
import time
from typing import Any

from harness import describe_machine, interleave, interleave_figures, parse_arguments
from processes import engines_of, private_size
from store import serve

import headrace as hr

BATCH = 256


class Indices(hr.AsyncDataset[int]):
    """The indices of a dataset, which it holds."""

    def __init__(self, objects: hr.ObjectDataset) -> None:
        self._objects = objects

    def __len__(self) -> int:
        return len(self._objects)

    async def aget(self, index: int) -> int:
        return index


def columns(keys: int) -> dict[str, list[Any]]:
    return {
        "key": [
            f"train/n{number // 1300:08d}/n{number // 1300:08d}_{number:07d}.JPEG"
            for number in range(keys)
        ],
        "size": [100_000 + number for number in range(keys)],
        "etag": [f'"{number:032x}"' for number in range(keys)],
    }


def opened(table: dict[str, list[Any]]) -> hr.ObjectDataset:
    store = hr.Store("s3://bucket", options={"skip_signature": True})
    return hr.ObjectDataset(
        store, keys=table["key"], sizes=table["size"], etags=table["etag"]
    )


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def read_table(table: dict[str, list[Any]], keys: int) -> float:
    began = cpu()
    if len(opened(table)) != keys:
        raise RuntimeError("keys are missing: this run does not count")
    return (cpu() - began) / keys * 1e6


def listing(store: Any, keys: int) -> tuple[float, float]:
    """CPU microseconds for a key, and keys a second."""
    began, used = time.perf_counter(), cpu()
    listed = len(hr.ObjectDataset(hr.Store(store.url, options=store.options)))
    if listed != keys:
        raise RuntimeError(
            f"{listed} of {keys} keys were listed: this run does not count"
        )
    return (cpu() - used) / keys * 1e6, keys / (time.perf_counter() - began)


def start(dataset: hr.ObjectDataset, engines: int) -> tuple[float, float]:
    """Milliseconds to the first batch, and memory of an engine that no other process shares, in MB."""
    began = time.perf_counter()
    with hr.DataLoader(
        Indices(dataset), BATCH, engines=engines, placement="process"
    ) as loader:
        if next(iter(loader)).tolist() != list(range(BATCH)):
            raise RuntimeError("the first batch is wrong: this run does not count")
        elapsed = (time.perf_counter() - began) * 1e3
        sizes = [private_size(pid) for pid in engines_of(os.getpid())]
    return elapsed, sum(sizes) / len(sizes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument(
        "--listed", type=int, default=40_000, help="keys of a listing; 1,000 are a page"
    )
    arguments = parse_arguments(parser, rounds=1, keys=20_000, listed=3_000)
    keys, listed = arguments.keys, arguments.listed
    print(describe_machine())
    table = columns(keys)
    small, large = opened(columns(1000)), opened(table)
    arrays = [each for each in (large._keys, large._etags) if each is not None]
    held = 8 * keys + sum(len(each._text) + 8 * len(each._offsets) for each in arrays)
    print(
        f"{held / keys:.1f} bytes a key, of which {len(large.keys[0])} are the key's own"
    )
    reading = interleave(
        {"table": functools.partial(read_table, table, keys)},
        rounds=arguments.rounds,
        unit="µs of CPU a key",
    )
    reading.show(against="table")
    starts = {
        f"{engines} engines, {name}": functools.partial(start, dataset, engines)
        for name, dataset in (("1,000 keys", small), (f"{keys:,} keys", large))
        for engines in (1, 2, 4)
    }
    units = ("ms to the first batch", "MB of each engine's own")
    for figures in interleave_figures(starts, rounds=arguments.rounds, units=units):
        figures.show(against="1 engines, 1,000 keys")
    with serve(listed, 8, latency=0.0) as store:
        print(f"listing {listed:,} keys; the store: {store.kind}")
        units = ("µs of CPU a key", "keys/s, on shared cores")
        for figures in interleave_figures(
            {"listing": functools.partial(listing, store, listed)},
            rounds=arguments.rounds,
            units=units,
        ):
            figures.show(against="listing")


if __name__ == "__main__":
    main()
