"""What exporters of metrics and the progress line cost.

Contestants, in turn, on the same loader, whose samples are there at once: nothing,
`hr.telemetry.prometheus`, and `hr.progress` as in a terminal (a line every 0.5 s). Reading the
metrics, once after each epoch, is not in the figure, which is CPU time of the process. The budget
at 10,000 objects/s is 100 µs for an object.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import prometheus_client
from contents import check_order
from harness import Figure, claim, describe_machine, interleave, parse_arguments

import headrace as hr

BATCH = 64
BUDGET = BATCH / 10_000 * 1e6  # µs of a batch


class AtOnce(hr.AsyncDataset[int]):
    def __init__(self, batches: int) -> None:
        self.length = batches * BATCH

    def __len__(self) -> int:
        return self.length

    async def aget(self, index: int) -> int:
        return index


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


Loader = hr.DataLoader[int]


@contextlib.contextmanager
def nothing(loader: Loader) -> Iterator[Iterable[int]]:
    yield loader


@contextlib.contextmanager
def prometheus(loader: Loader) -> Iterator[Iterable[int]]:
    registry = prometheus_client.CollectorRegistry()
    with hr.telemetry.prometheus(loader, registry=registry):
        yield loader
        prometheus_client.generate_latest(registry)


@contextlib.contextmanager
def progress(loader: Loader) -> Iterator[Iterable[int]]:
    yield hr.progress(loader, file=Terminal())


def cpu_of_a_batch(block: Any, batches: int) -> float:
    """Microseconds of CPU for a batch of a loader's second epoch."""
    dataset = AtOnce(batches)
    with hr.DataLoader(dataset, BATCH, collate_fn=len, concurrency=64) as loader:
        sum(loader)  # the engine has started
        watched: AbstractContextManager[Iterable[int]] = block(loader)
        with watched as source:
            cpu = time.process_time()
            count = sum(source)
            cpu = time.process_time() - cpu
    if count != dataset.length:
        raise RuntimeError(f"{count} samples came of {dataset.length}: this run does not count")
    return cpu / batches * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parse_arguments(parser, batches=20, rounds=1)
    print(describe_machine())
    dataset = AtOnce(arguments.batches)
    for block in (nothing, prometheus, progress):
        with hr.DataLoader(dataset, BATCH, concurrency=64) as loader, block(loader) as source:
            check_order((batch.tolist() for batch in source), dataset.length)  # type: ignore[attr-defined]
    blocks = {"nothing": nothing, "Prometheus": prometheus, "progress line": progress}
    table = interleave(
        {
            name: lambda block=block: cpu_of_a_batch(block, arguments.batches)
            for name, block in blocks.items()
        },  # type: ignore[misc]
        rounds=arguments.rounds,
        unit="µs of CPU for a batch of 64",
    )
    table.show(against="nothing")
    for name in list(blocks)[1:]:
        shares = [100 * added / BUDGET for added in table.differences(name, "nothing")]
        claim(name, Figure("% of the time at 10,000 objects/s", shares, at_most=1))


if __name__ == "__main__":
    main()
