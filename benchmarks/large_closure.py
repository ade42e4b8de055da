"""What a large array in a transform costs: time to the first batch, and memory in all processes together.

A transform looks up rows in a global array of 480 MB; batches of 64, 2 workers, an async dataset
for headrace and the same samples as a map-style dataset for torch. Torch's workers are forks, which
share the trainer's memory; headrace copies the array once, into memory that its workers share. Each
loader runs in a process of its own. Claimed: the first batch comes within 2 s of the time that it
takes with a transform without the array (the copy itself takes 0.2 to 0.5 s), and all processes
together take at most 1.25 times the array's size more than with a transform without it. An epoch in
which nothing has changed compares the array with the copy: that time is printed too.

Memory is the proportional set size (PSS) of the trainer and all its descendants, so that what is
shared counts once.

    python benchmarks/large_closure.py
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import warnings
from typing import Any

import numpy as np
import torch
from harness import Figure, claim, describe_machine, interleave_figures, parse_arguments
from processes import proportional_size

import headrace as hr

BATCH, BATCHES = 64, 20
UNITS = (
    "ms to the first batch",
    "MB in all processes",
    "ms for iter() of the second epoch",
)
LOADERS = ("headrace", "torch")
ROWS = 1000

TABLE = np.zeros((ROWS, 1))  # made large by --large


class Numbers(hr.AsyncDataset[int]):
    def __len__(self) -> int:
        return BATCH * BATCHES

    async def aget(self, index: int) -> int:
        return index


class Looked(torch.utils.data.Dataset[float]):
    def __len__(self) -> int:
        return BATCH * BATCHES

    def __getitem__(self, index: int) -> float:
        return look_up(index)


def look_up(index: int) -> float:
    return float(TABLE[index % ROWS].sum())


def measure(name: str, megabytes: int) -> None:
    """Print the figures of one loader, in this process; its array is tiny if `megabytes` is 0."""
    global TABLE
    warnings.simplefilter("ignore")
    columns = max(1, megabytes * 1_000_000 // (8 * ROWS))
    TABLE = np.ones((ROWS, columns)) * np.arange(ROWS)[:, None]
    expected = [float(row) * columns for row in range(ROWS)]
    loader: Any
    began = time.perf_counter()
    if name == "headrace":
        loader = hr.DataLoader(Numbers(), BATCH, num_workers=2, transform=look_up)
    else:
        loader = torch.utils.data.DataLoader(
            Looked(), BATCH, num_workers=2, persistent_workers=True
        )
    first = memory = 0.0
    for number, batch in enumerate(loader):
        first = first or time.perf_counter() - began
        if batch.tolist() != [
            expected[index % ROWS]
            for index in range(number * BATCH, (number + 1) * BATCH)
        ]:
            raise RuntimeError(f"batch {number} is wrong: this run does not count")
    memory = proportional_size(os.getpid())
    began = time.perf_counter()
    iterator = iter(loader)
    again = time.perf_counter() - began
    for _ in iterator:
        pass
    print(first * 1e3, memory, again * 1e3)


def in_own_process(name: str, large: bool, megabytes: int) -> tuple[float, ...]:
    command = [sys.executable, __file__, "--loader", name, "--megabytes", str(megabytes)]
    command += ["--large"] if large else []
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return tuple(map(float, printed.split()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=480)
    parser.add_argument(
        "--loader", choices=LOADERS, help="measure this one, in this process"
    )
    parser.add_argument("--large", action="store_true", help="with the array")
    arguments = parse_arguments(parser, rounds=1, megabytes=24)
    megabytes = arguments.megabytes
    if arguments.loader:
        measure(arguments.loader, megabytes if arguments.large else 0)
        return
    print(f"a transform with an array of {megabytes} MB, 2 workers, batches of {BATCH}")
    print(describe_machine())
    contestants = {
        f"{name}, {'the array' if large else 'nothing'}": (
            lambda name=name, large=large: in_own_process(name, large, megabytes)
        )
        for name in LOADERS
        for large in (True, False)
    }
    tables = interleave_figures(contestants, rounds=arguments.rounds, units=UNITS)
    for table in tables:
        table.show(against="headrace, nothing")
    times, memory, _ = tables
    later = [
        each / 1e3
        for each in times.differences("headrace, the array", "headrace, nothing")
    ]
    more = [
        each / megabytes - 1
        for each in memory.differences("headrace, the array", "headrace, nothing")
    ]
    what = f"a transform with an array of {megabytes} MB"
    claim(
        f"first batch, {what}", Figure("s later than without the array", later, at_most=2)
    )
    claim(
        f"memory of all processes, {what}",
        Figure("arrays beside the trainer's own", more, at_most=1.25),
    )


if __name__ == "__main__":
    main()
