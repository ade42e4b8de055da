"""What the engine adds to a sample: a dataset whose `aget` returns at once, batches of 256, no transform.

Everything but the dataset is counted: planning, the fetch window, the helper thread, reorder,
handoff and `next()`. In the same run: the bare await of the same `aget`, and one asyncio task for
each sample, which is how such a loop is usually written.

    python benchmarks/engine_overhead.py
"""

from __future__ import annotations

import argparse
import asyncio
import time

import uvloop
from contents import check_order
from harness import claim, describe_machine, interleave, parse_arguments

import headrace as hr

BATCH = 256


class AtOnce(hr.AsyncDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    async def aget(self, index: int) -> int:
        return index


def with_headrace(loader: hr.DataLoader[int], length: int) -> float:
    began = time.perf_counter()
    count = sum(loader)
    elapsed = time.perf_counter() - began
    if count != length:
        raise RuntimeError(f"{count} samples came of {length}: this run does not count")
    return elapsed / length * 1e6


def with_bare_await(dataset: AtOnce, length: int) -> float:
    async def run() -> float:
        began = time.perf_counter()
        for index in range(length):
            await dataset.aget(index)
        return (time.perf_counter() - began) / length * 1e6

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


def with_a_task_each(dataset: AtOnce, length: int) -> float:
    async def run() -> float:
        began = time.perf_counter()
        for start in range(0, length, BATCH):
            await asyncio.gather(
                *(dataset.aget(index) for index in range(start, start + BATCH))
            )
        return (time.perf_counter() - began) / length * 1e6

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parse_arguments(parser, batches=20, rounds=1)
    length = BATCH * arguments.batches
    dataset = AtOnce(length)
    with hr.DataLoader(dataset, batch_size=BATCH) as loader:
        check_order((batch.tolist() for batch in loader), length)
    with hr.DataLoader(dataset, batch_size=BATCH, collate_fn=len) as loader:
        rounds = interleave(
            {
                "bare await": lambda: with_bare_await(dataset, length),
                "headrace": lambda: with_headrace(loader, length),
                "a task for each sample": lambda: with_a_task_each(dataset, length),
            },
            rounds=arguments.rounds,
            unit="µs a sample",
        )
    print(f"{length} samples in batches of {BATCH}")
    print(describe_machine())
    rounds.show(against="bare await")
    claim("cost of the engine", rounds.figure("headrace", at_most=1.5))


if __name__ == "__main__":
    main()
