"""A `TensorDataset` that is shuffled: a million rows of 16 floats and a label, batches of 64 and of 1,024.

Headrace makes a batch by one indexed read of each tensor, torch by one read a sample. Claimed: 5 times torch's rate at
64 and 20 times at 1,024, with the same batches bit for bit (checked first: same seed, whole epochs, with a short last
batch, with a `Subset`). The limit is the bare `index_select` with the indices given as tensors.

No workers: everything is in the caller's thread. The first batch, which draws the order, is not counted.

    python benchmarks/tensor_dataset.py
"""

from __future__ import annotations

import argparse
import itertools
import time
from typing import Any

import torch
from harness import Rounds, claim, describe_machine, interleave, parse_arguments
from torch.utils.data import Subset, TensorDataset

import headrace as hr

ROWS = 1_000_000
SIZES = {64: 5, 1024: 20}  # a batch, and how many times torch's rate is aimed at
SAMPLES = {"limit": 600_000, "headrace": 300_000, "torch": 40_000}  # in one turn: about 0.1 s each

LIMIT, HEADRACE, TORCH = "bare index_select", "headrace", "torch"


def iterate(loader_class: Any, dataset: Any, batch: int) -> Any:
    return iter(loader_class(dataset, batch, shuffle=True, generator=torch.Generator().manual_seed(7)))


def check_same_batches(dataset: TensorDataset) -> None:
    part = TensorDataset(*(tensor[:20_011] for tensor in dataset.tensors))
    for case in (part, Subset(part, range(500, 5_007))):
        for size in SIZES:
            pairs = itertools.zip_longest(
                iterate(hr.DataLoader, case, size), iterate(torch.utils.data.DataLoader, case, size)
            )
            for ours, theirs in pairs:
                if type(ours) is not type(theirs) or not all(map(torch.equal, ours, theirs)):
                    raise RuntimeError("the batches differ from torch's: this run does not count")


def read(loader_class: Any, dataset: TensorDataset, size: int, samples: int) -> float:
    received = iterate(loader_class, dataset, size)
    next(received)
    batches = samples // size
    wrong = 0
    began = time.perf_counter()
    for rows, labels in itertools.islice(received, batches):
        wrong += len(rows) != size or len(labels) != size
    elapsed = time.perf_counter() - began
    if wrong:
        raise RuntimeError(f"{wrong} batches of {batches} are not of {size} samples: this run does not count")
    return batches * size / elapsed


def index_select(dataset: TensorDataset, size: int, samples: int) -> float:
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(7))[: samples // size * size].split(size)
    began = time.perf_counter()
    for indices in order:
        [tensor.index_select(0, indices) for tensor in dataset.tensors]
    return len(order) * size / (time.perf_counter() - began)


def compare(dataset: TensorDataset, size: int, rounds: int) -> Rounds:
    return interleave(
        {
            LIMIT: lambda: index_select(dataset, size, SAMPLES["limit"]),
            HEADRACE: lambda: read(hr.DataLoader, dataset, size, SAMPLES["headrace"]),
            TORCH: lambda: read(torch.utils.data.DataLoader, dataset, size, SAMPLES["torch"]),
        },
        rounds=rounds,
        unit="samples/s",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    arguments = parse_arguments(parser, rounds=1)
    rows = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(rows, torch.arange(ROWS))
    check_same_batches(dataset)
    compared = {size: compare(dataset, size, arguments.rounds) for size in SIZES}
    print(f"{ROWS} × 16 floats and a label, shuffled, in the caller's thread; the batches are torch's, bit for bit")
    print(describe_machine())
    for size, rounds in compared.items():
        print(f"\nbatches of {size}")
        rounds.show(against=LIMIT)
        figure = rounds.share(HEADRACE, TORCH, "× torch", at_least=SIZES[size])
        claim(f"`TensorDataset`, batches of {size}", figure)


if __name__ == "__main__":
    main()
