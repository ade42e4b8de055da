"""`engines=`: the rate of several engines of one, with transforms that wait, and the time until the first batch.

A transform that sleeps stands for one that takes a core, so that a machine with few cores can show
how dealing scales. Rates are compared within each round; each epoch's samples are checked.

    python benchmarks/engines.py
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import time
from typing import Any

from contents import check_order
from harness import claim, describe_machine, interleave, parse_arguments

import headrace as hr

BATCH = 4
TRANSFORM = 0.01  # seconds
ENGINES = (1, 2, 4, 8)


class Numbers(hr.AsyncDataset[int]):
    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return self.batches * BATCH

    async def aget(self, index: int) -> int:
        return index


def wait(sample: int) -> int:
    time.sleep(TRANSFORM)
    return sample


def new(engines: int, batches: int) -> hr.DataLoader[Any]:
    dataset = Numbers(batches)
    return hr.DataLoader(
        dataset,
        BATCH,
        engines=engines,
        placement="process",
        transform=wait,
        concurrency=256,
    )


def rate(loader: hr.DataLoader[Any], batches: int) -> float:
    """Samples/s of the second half of an epoch: engines have started."""
    received, began = [], 0.0
    for number, batch in enumerate(loader):
        if number == batches // 2:
            began = time.perf_counter()
        received.append(batch.tolist())
    seconds = time.perf_counter() - began
    check_order(received, batches * BATCH)
    return batches * BATCH / 2 / seconds


def first_batch(engines: int, batches: int) -> float:
    """Seconds from making the loader."""
    began = time.perf_counter()
    with new(engines, batches) as loader:
        first = next(iter(loader)).tolist()
        seconds = time.perf_counter() - began
    check_order([first], BATCH)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=320)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engines", type=int, nargs="+", default=ENGINES)
    arguments = parse_arguments(parser, batches=32, rounds=1, engines=(1, 2))
    batches = arguments.batches
    names = {
        engines: f"{engines} engines" if engines > 1 else "1 engine"
        for engines in arguments.engines
    }
    print(describe_machine())
    with contextlib.ExitStack() as open_now:
        loaders = {
            engines: open_now.enter_context(new(engines, batches)) for engines in names
        }
        contestants = {
            name: functools.partial(rate, loaders[engines], batches)
            for engines, name in names.items()
        }
        rates = interleave(contestants, rounds=arguments.rounds, unit="samples/s")
    rates.show(against=names[min(names)])
    contestants = {
        name: functools.partial(first_batch, engines, batches)
        for engines, name in names.items()
    }
    starts = interleave(contestants, rounds=arguments.rounds, unit="s to the first batch")
    starts.show(against=names[min(names)])
    if {1, 8} <= set(names):
        claim(
            "8 engines, transforms that wait",
            rates.share(names[8], names[1], "of one engine", at_least=7),
        )
    if {1, 4} <= set(names):
        claim(
            "first batch of 4 engines",
            starts.share(names[4], names[1], "of one engine's time", at_most=1.5),
        )


if __name__ == "__main__":
    main()
