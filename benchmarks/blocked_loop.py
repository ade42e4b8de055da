"""What the detection of blocking calls costs: CPU time of a sample, with and without it, in turn.

The dataset's `aget` waits 5 ms; 64 are in flight. The figure is CPU time of the process, which
other programs on the machine disturb less than the rate.

    python benchmarks/blocked_loop.py
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable

from contents import check_order
from harness import Figure, claim, describe_machine, interleave_figures, parse_arguments

import headrace as hr
from headrace._eventloop.watchdog import LoopWatch

BATCH = 64


class Waiting(hr.AsyncDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    async def aget(self, index: int) -> int:
        await asyncio.sleep(0.005)
        return index


def epoch(
    loader: hr.DataLoader[int], length: int, begin: Callable[[LoopWatch], None]
) -> tuple[float, float]:
    """Microseconds of CPU for a sample, and samples a second."""
    LoopWatch.begin = begin  # type: ignore[method-assign]
    began, cpu = time.perf_counter(), time.process_time()
    count = sum(loader)
    cpu, elapsed = time.process_time() - cpu, time.perf_counter() - began
    if count != length:
        raise RuntimeError(f"{count} samples came of {length}: this run does not count")
    return cpu / length * 1e6, length / elapsed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parse_arguments(parser, batches=20, rounds=1)
    length = BATCH * arguments.batches
    watched = LoopWatch.begin

    def unwatched(watch: LoopWatch) -> None:
        watch._sessions += 1

    with hr.DataLoader(Waiting(length), batch_size=BATCH, concurrency=64) as loader:
        check_order((batch.tolist() for batch in loader), length)
    with hr.DataLoader(
        Waiting(length), batch_size=BATCH, collate_fn=len, concurrency=64
    ) as loader:
        cpu, rate = interleave_figures(
            {
                "without": lambda: epoch(loader, length, unwatched),
                "with": lambda: epoch(loader, length, watched),
            },
            rounds=arguments.rounds,
            units=("µs of CPU for a sample", "samples/s"),
        )
    print(describe_machine())
    cpu.show(against="without")
    rate.show(against="without")
    more = [100 * (ratio - 1) for ratio in cpu.ratios("with", "without")]
    claim(
        "CPU time of the detection of blocking calls",
        Figure("% more for a sample", more, at_most=1),
    )


if __name__ == "__main__":
    main()
