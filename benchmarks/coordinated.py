"""The cost of `coordinated=True` for a step: two gloo ranks on this machine, a stream whose batches are ready at once.

Epochs with and without agreement alternate in one run, on the same two ranks; each epoch's samples
are checked. Claims nothing: the figures are shown.

    python benchmarks/coordinated.py
"""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp
from contents import check_order
from harness import claim, describe_machine, interleave, parse_arguments
from torch.utils.data import IterableDataset

import headrace as hr

RANKS = 2
TRAINING_STEP = 0.003  # seconds; a GPU computes, and the CPU waits
ALONE, TOGETHER = "alone", "coordinated"


class Numbers(hr.AsyncIterableDataset[int]):
    splits_by_rank = True

    def __init__(self, steps: int) -> None:
        self.steps = steps

    async def __aiter__(self) -> AsyncIterator[int]:
        for number in range(self.steps):
            yield number


class TorchNumbers(IterableDataset[int]):
    splits_by_rank = True

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.steps))


def microseconds(loader: hr.DataLoader[Any], training_step: float, steps: int) -> float:
    """Of a step, the first not counted."""
    iterator = iter(loader)
    received = [next(iterator).tolist()]
    dist.barrier()
    began = time.perf_counter()
    for batch in iterator:
        received.append(batch.tolist())
        time.sleep(training_step)
    elapsed = time.perf_counter() - began
    check_order(received, steps)
    return elapsed / (steps - 1) * 1e6


def rank(number: int, folder: str, steps: int, rounds: int) -> None:
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=number, world_size=RANKS
    )
    cases = (
        ("batches are ready, steps of 3 ms", Numbers(steps), TRAINING_STEP),
        ("an agreement for each step", TorchNumbers(steps), 0.0),
    )
    for name, dataset, step in cases:
        with (
            hr.DataLoader(dataset) as alone,
            hr.DataLoader(dataset, coordinated=True) as together,
        ):
            table = interleave(
                {
                    ALONE: functools.partial(microseconds, alone, step, steps),
                    TOGETHER: functools.partial(microseconds, together, step, steps),
                },
                rounds=rounds,
                unit="µs a step",
            )
        if number == 0:
            print(f"\n{name}")
            table.show(against=ALONE)
            claim(f"coordinated=True, {name}", table.share(TOGETHER, ALONE))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parse_arguments(parser, steps=20, rounds=1)
    print(f"{RANKS} ranks, {arguments.steps} steps an epoch")
    print(describe_machine(), flush=True)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank, (folder, arguments.steps, arguments.rounds), RANKS)


if __name__ == "__main__":
    main()
