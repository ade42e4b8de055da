"""Whether the trainer's memory stays what it is: its resident set over 5,000 batches of 4 MB, every byte read.

What is resident are the trainer's own pages and the slabs that it has touched. A slab stays mapped
and is used again; one that is no longer needed gives its memory back. So the resident set follows
what is in flight (the look-ahead is 17 batches here), up and down. Claimed: between the first and
the last tenth of the run it differs by 5 % at most.

Each placement runs in a process of its own, so that neither inherits the other's pages.

    python benchmarks/resident_memory.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from typing import Any

import torch
from harness import Figure, claim, describe_machine, parse_arguments

import headrace as hr

BATCH, SAMPLE = 4, 2**20
CONCURRENCY = 64  # of which follows the look-ahead
WARM_UP = 100  # batches until every slab that the look-ahead needs has been made
PLACEMENTS = ("thread", "process")


class Numbers(hr.AsyncDataset[int]):
    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return BATCH * self.batches

    async def aget(self, index: int) -> int:
        return index


def row(index: int) -> torch.Tensor:
    return torch.full((SAMPLE,), index % 256, dtype=torch.uint8)


def resident() -> float:
    """This process's resident set in MB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def measure(placement: str, batches: int) -> None:
    """Print the mean of each tenth of the run, in MB."""
    sizes = []
    options: dict[str, Any] = {
        "num_workers": 2,
        "concurrency": CONCURRENCY,
        "placement": placement,
    }
    with hr.DataLoader(Numbers(batches), BATCH, transform=row, **options) as loader:
        for number, batch in enumerate(loader):
            expected = torch.arange(number * BATCH, (number + 1) * BATCH) % 256
            if not torch.equal(
                batch, expected.to(torch.uint8)[:, None].expand(BATCH, SAMPLE)
            ):
                raise RuntimeError(f"batch {number} is wrong: this run does not count")
            if number >= WARM_UP:
                sizes.append(resident())
    tenth = len(sizes) // 10
    print(
        *(
            statistics.mean(sizes[start : start + tenth])
            for start in range(0, 10 * tenth, tenth)
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--placement", choices=PLACEMENTS, help="measure this one, in this process"
    )
    parser.add_argument("--batches", type=int, default=5000)
    arguments = parse_arguments(parser, batches=WARM_UP + 100)
    batches = arguments.batches
    if arguments.placement:
        measure(arguments.placement, batches)
        return
    print(
        f"{batches} batches of {BATCH * SAMPLE / 1e6:.0f} MB, 2 workers; mean resident set of each tenth of the run"
    )
    print(describe_machine())
    for placement in PLACEMENTS:
        command = [
            sys.executable,
            __file__,
            "--placement",
            placement,
            "--batches",
            str(batches),
        ]
        printed = subprocess.run(
            command, check=True, capture_output=True, text=True
        ).stdout
        tenths = [float(word) for word in printed.split()]
        print(f"{placement:8} {' '.join(f'{size:5.0f}' for size in tenths)}   [MB]")
        changed = abs(tenths[-1] / tenths[0] - 1) * 100
        claim(
            f"resident memory over {batches} batches of 4 MB, {placement}",
            Figure("% between the first and the last tenth", [changed], at_most=5),
        )


if __name__ == "__main__":
    main()
