"""What a batch of many small tensors costs on its way from a worker: 114 of them, as a table's columns would be.

A torch map-style dataset, two workers, and a `collate_fn` that makes a dict of 114 float32 tensors
[32, 4] (58 kB in all). Torch gives each tensor a shared-memory file of its own, whose descriptor is
sent; headrace packs them into one slab. Claimed: 3 times torch's rate, and 0.4 of the limit, which
is two processes that only run the same `collate_fn`, with nothing sent.

Every value of every batch is checked, for both alike, within the clock.

    python benchmarks/many_tensors.py
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from harness import claim, describe_machine, interleave, parse_arguments

import headrace as hr

TENSORS = 114
SHAPE = (32, 4)
BATCH = 8
# Torch is given every eighth batch: its rate does not depend on how many there are.
TORCH_SHARE = 8

LIMIT, HEADRACE, TORCH = "two bare collate loops", "headrace", "torch"

Batch = dict[str, torch.Tensor]


class Numbers(torch.utils.data.Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def many(samples: list[int]) -> Batch:
    return {
        f"column {i}": torch.full(SHAPE, float(samples[0] + i)) for i in range(TENSORS)
    }


def read(loader: Any, batches: int) -> float:
    received = iter(loader)
    # The first is not counted: the workers are starting.
    right = is_right(next(received), 0)
    began = time.perf_counter()
    for number, batch in enumerate(received, 1):
        right += is_right(batch, number)
    elapsed = time.perf_counter() - began
    if right != batches:
        raise RuntimeError(
            f"{right} batches of {batches} are right: this run does not count"
        )
    return (batches - 1) / elapsed


def is_right(batch: Batch, number: int) -> bool:
    columns = torch.stack(list(batch.values())).flatten(1)
    expected = torch.arange(TENSORS, dtype=torch.float32).unsqueeze(1) + number * BATCH
    return columns.shape == (TENSORS, SHAPE[0] * SHAPE[1]) and bool(
        (columns == expected).all()
    )


def collate_on_demand(requests: Connection) -> None:
    torch.set_num_threads(1)
    requests.send("ready")
    while batches := requests.recv():
        for number in range(batches):
            many([number])
        requests.send("done")


class BareLoops:
    """Two processes that do a worker's work and send nothing."""

    def __enter__(self) -> BareLoops:
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(2)]
        self.ends = [ours for ours, _ in pipes]
        self.processes = [
            context.Process(target=collate_on_demand, args=(theirs,))
            for _, theirs in pipes
        ]
        for process in self.processes:
            process.start()
        for end in self.ends:
            end.recv()
        return self

    def __call__(self, batches: int) -> float:
        began = time.perf_counter()
        for end in self.ends:
            end.send(batches // 2)
        for end in self.ends:
            end.recv()
        return batches // 2 * 2 / (time.perf_counter() - began)

    def __exit__(self, *exc_info: object) -> None:
        for end in self.ends:
            end.send(0)
        for process in self.processes:
            process.join()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parse_arguments(parser, batches=32, rounds=1)
    options: dict[str, Any] = {
        "batch_size": BATCH,
        "num_workers": 2,
        "collate_fn": many,
        "multiprocessing_context": "spawn",
        "persistent_workers": True,
    }
    batches, few = arguments.batches, arguments.batches // TORCH_SHARE
    torch_loader = torch.utils.data.DataLoader(Numbers(BATCH * few), **options)
    with (
        BareLoops() as bare_loops,
        hr.DataLoader(Numbers(BATCH * batches), **options) as loader,
    ):
        rounds = interleave(
            {
                LIMIT: lambda: bare_loops(batches),
                HEADRACE: lambda: read(loader, batches),
                TORCH: lambda: read(torch_loader, few),
            },
            rounds=arguments.rounds,
            unit="batches/s",
        )
    print(f"{batches} batches of {TENSORS} tensors {list(SHAPE)}, 2 workers")
    print(describe_machine())
    rounds.show(against=LIMIT)
    claim(
        f"{TENSORS} small tensors from 2 workers",
        rounds.share(HEADRACE, TORCH, "× torch", at_least=3),
        rounds.share(HEADRACE, LIMIT, "of two loops that send nothing", at_least=0.4),
    )


if __name__ == "__main__":
    main()
