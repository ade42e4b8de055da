"""Warnings of blocking calls in a long healthy run: there must be none, in a thread and in a process.

`aget` waits 20 ms, 100 are in flight: 5,000 objects/s, as far as the machine allows. Takes twice
the minutes; not part of run_all.py.

    python benchmarks/watchdog_run.py --minutes 10
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import time
from typing import Literal

from harness import Figure, claim, describe_machine, parse_arguments

import headrace as hr

LATENCY, IN_FLIGHT, BATCH = 0.02, 100, 50


class Waiting(hr.AsyncDataset[bytes]):
    def __len__(self) -> int:
        return 1_000_000_000

    async def aget(self, index: int) -> bytes:
        await asyncio.sleep(LATENCY)
        return b"%d" % index * 100


def first_and_length(samples: list[bytes]) -> tuple[bytes, int]:
    return samples[0], len(samples)


class Collected(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def run(
    placement: Literal["thread", "process"], seconds: float, collected: Collected
) -> tuple[int, float]:
    """Warnings, and objects a second."""
    collected.messages.clear()
    began = time.perf_counter()
    samples = 0
    with hr.DataLoader(
        Waiting(),
        batch_size=BATCH,
        concurrency=IN_FLIGHT,
        placement=placement,
        collate_fn=first_and_length,
    ) as loader:
        for first, size in loader:
            if first != b"%d" % samples * 100:
                raise RuntimeError(f"sample {samples} is wrong: this run does not count")
            samples += size
            if time.perf_counter() - began > seconds:
                break
    for message in collected.messages:
        print(message)
    return len(collected.messages), samples / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="for each placement")
    arguments = parse_arguments(parser, minutes=0.05)
    collected = Collected()
    logging.getLogger("headrace").addHandler(collected)
    print(describe_machine(), flush=True)
    placements: tuple[Literal["thread", "process"], ...] = ("thread", "process")
    for placement in placements:
        count, rate = run(placement, 60 * arguments.minutes, collected)
        claim(
            f"warnings of blocking calls in {arguments.minutes:g} minutes without one, placement {placement}",
            Figure("warnings", [count], at_most=0),
            Figure("objects/s", [rate], higher_is_better=True),
        )


if __name__ == "__main__":
    main()
