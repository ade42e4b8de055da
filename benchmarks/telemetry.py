"""What a trace costs.

The samples are there at once, in a thread of this process, so that the time of a batch is that of
the engine alone. The figure is CPU time of the process, which other programs on the machine disturb
less than its rate; since they only add to it, the lowest figures of many short rounds count. The
budget at 10,000 objects/s is 100 µs for an object. With `--rate` also objects/s of a dataset that
waits 5 ms, with and without a trace.

    python benchmarks/telemetry.py
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

from contents import check_order
from harness import (
    Figure,
    Rounds,
    claim,
    describe_machine,
    interleave_figures,
    parse_arguments,
)

import headrace as hr

BATCH = 64
BUDGET = BATCH / 10_000 * 1e6  # µs of a batch


class Waiting(hr.AsyncDataset[int]):
    def __init__(self, batches: int, seconds: float) -> None:
        self.length = batches * BATCH
        self.seconds = seconds

    def __len__(self) -> int:
        return self.length

    async def aget(self, index: int) -> int:
        if self.seconds:
            await asyncio.sleep(self.seconds)
        return index


def epoch(loader: hr.DataLoader[int], length: int) -> tuple[float, float]:
    """Microseconds of CPU for a batch, and objects a second."""
    began, cpu = time.perf_counter(), time.process_time()
    count = sum(loader)
    cpu, elapsed = time.process_time() - cpu, time.perf_counter() - began
    if count != length:
        raise RuntimeError(f"{count} samples came of {length}: this run does not count")
    return cpu / (length // BATCH) * 1e6, length / elapsed


def within(
    block: Callable[[], AbstractContextManager[Any]], dataset: Waiting, **options: Any
) -> tuple[float, float]:
    """The figures of an epoch, the second of its loader, with all of it inside the block."""
    with (
        block(),
        hr.DataLoader(
            dataset, BATCH, collate_fn=len, concurrency=64, **options
        ) as loader,
    ):
        epoch(loader, dataset.length)
        return epoch(loader, dataset.length)


def added(table: Rounds, name: str, to: str, *, at_most: float) -> Figure:
    """The share of the budget that one adds to the other.

    Stated is the difference of the least disturbed rounds, since what other programs do only adds
    CPU time; the range is that of the same difference in each eighth of the rounds.
    """

    def share(rounds: slice) -> float:
        return (
            100
            * (min(table.values[name][rounds]) - min(table.values[to][rounds]))
            / BUDGET
        )

    rounds = len(table.values[name])
    each = max(1, rounds // 8)
    parts = [share(slice(start, start + each)) for start in range(0, rounds, each)]
    return Figure(
        "% of the time at 10,000 objects/s",
        parts,
        at_most=at_most,
        stated=share(slice(None)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument(
        "--rate", action="store_true", help="also the rate, with and without a trace"
    )
    arguments = parse_arguments(parser, batches=20, rounds=1)
    print(describe_machine())
    with tempfile.TemporaryDirectory() as folder:

        def traced() -> AbstractContextManager[Path]:
            return hr.trace(f"{folder}/epoch.json.gz")

        dataset = Waiting(arguments.batches, 0.0)
        for block in (contextlib.nullcontext, traced):
            with block(), hr.DataLoader(dataset, BATCH, concurrency=64) as loader:
                check_order((batch.tolist() for batch in loader), dataset.length)
        cpu, _ = interleave_figures(
            {
                "without": lambda: within(contextlib.nullcontext, dataset),
                "with a trace": lambda: within(traced, dataset),
            },
            rounds=arguments.rounds,
            units=("µs of CPU for a batch of 64", "objects/s"),
        )
        cpu.show(against="without")
        claim(
            "a trace, CPU time of its thread included",
            added(cpu, "with a trace", "without", at_most=3),
        )
        if arguments.rate:
            placements: tuple[Literal["thread", "process"], ...] = ("thread", "process")
            waiting = Waiting(arguments.batches // 2, 0.005)
            for placement in placements:
                _, rate = interleave_figures(
                    {
                        "without": lambda: within(
                            contextlib.nullcontext,
                            waiting,
                            placement=placement,  # noqa: B023
                        ),
                        "with a trace": lambda: within(
                            traced,
                            waiting,
                            placement=placement,  # noqa: B023
                        ),
                    },
                    rounds=max(5, arguments.rounds // 2),
                    units=(
                        "µs of CPU of this process for a batch",
                        f"objects/s, placement {placement}",
                    ),
                )
                rate.show(against="without")
                claim(
                    f"rate with a trace, placement {placement}",
                    rate.share("with a trace", "without", at_least=0.97),
                )


if __name__ == "__main__":
    main()
