"""What an index of 10,000 shards with 10,000,000 samples costs: a start, memory, a position, the state.

The shards are not there, and nothing listens at the address of their store: a dataset opens by its
index alone. Prints the time of a start; the size of a pickled dataset; the memory of eight
processes that unpickle the dataset and look up samples, beside the size of the index; the time to a
position in the order of an epoch; and the size of the loader's state.

    python benchmarks/index_start.py
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import pickle
import tempfile
import time
from pathlib import Path

import numpy as np
from harness import Figure, claim, describe_machine, parse_arguments

import headrace as hr
from headrace._shards.index_file import IndexedShard, IndexFile

SAMPLE_BYTES = 100_000
PROCESSES = 8
URL = "http://127.0.0.1:9"  # a port on which nothing listens


def write_index(path: Path, shards: int, samples: int) -> None:
    """Write an index of shards that are nowhere."""
    begins, end = np.arange(samples) * SAMPLE_BYTES, samples * SAMPLE_BYTES
    none = np.empty(0, np.uint32)
    parts = []
    for number in range(shards):
        name = f"{URL}/{number:05d}.tar"
        row = IndexedShard(
            name, "tar", end + 1024, f'"{number:032x}"', None, samples, end, None, ""
        )
        parts.append(IndexFile(name, IndexFile.of_shard(row, begins, none, "")))
    path.write_bytes(IndexFile.joined(f"{URL}/", parts))


def private_bytes() -> int:
    """Memory of this process alone, without pages of files, which processes share."""
    with open("/proc/self/smaps_rollup") as file:
        fields = dict(line.split(":", 1) for line in file if ":" in line)
    return int(fields["Private_Dirty"].split()[0]) << 10


def use(pickled: bytes, length: int) -> int:
    """Open a dataset and look up samples all over the index; returns the private memory used."""
    hr.TarDataset  # imported now  # noqa: B018
    indices = np.random.default_rng(0).integers(0, length, (100, 1_000))
    before = private_bytes()
    dataset: hr.datasets.RangedShards[object] = pickle.loads(pickled)
    for batch in indices:
        dataset.ranges(batch)
    return private_bytes() - before


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=1_000, help="of each shard")
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parse_arguments(parser, shards=100, repetitions=2)
    describe_machine()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.index"
        write_index(path, arguments.shards, arguments.samples)
        size = path.stat().st_size
        starts = []
        for _ in range(arguments.repetitions):
            began = time.perf_counter()
            dataset = hr.TarDataset.index(index=path)
            starts.append(time.perf_counter() - began)
        print(f"index: {size:,} bytes, {size / len(dataset):.1f} for a sample")
        claim("start by an index", Figure("s", starts, at_most=0.1))
        pickled = pickle.dumps(dataset)
        print(f"pickled dataset: {len(pickled):,} bytes")
        with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
            private = pool.starmap(use, [(pickled, len(dataset))] * PROCESSES)
        memory = Figure("× the index", [(size + sum(private)) / size], at_most=1.2)
        claim(f"memory of {PROCESSES} processes", memory)
        loader = hr.DataLoader(dataset, 64, shuffle=True, seed=0)
        positions = []
        for cursor in np.random.default_rng(0).integers(0, len(dataset), 100).tolist():
            began = time.perf_counter()
            next(loader.sampler.indices_from(cursor))
            positions.append(1e3 * (time.perf_counter() - began))
        claim("a position in the order", Figure("ms", positions, at_most=1.0))
        claim(
            "state", Figure("bytes", [len(json.dumps(loader.state_dict()))], at_most=1000)
        )


if __name__ == "__main__":
    main()
