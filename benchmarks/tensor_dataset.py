"""A `TensorDataset` that is shuffled: a million rows of 16 floats and a label, batches of 64 and of 1,024.

Headrace makes a batch by one indexed read of each tensor, torch by one read a sample. Claimed: 5
times torch's rate at 64 and 20 times at 1,024, with the same batches bit for bit (checked first:
same seed, whole epochs, with a short last batch, with a `Subset`). The limit is the bare
`index_select` with the indices given as tensors.

Then the same rows from a dataset that is not a `TensorDataset`, batches of 1 and of 64: both
loaders read them one by one, and what differs is what a loader does for each batch. Nothing is
claimed. The limit is a loop that reads and collates.

No workers: everything is in the caller's thread. The first batch, which draws the order, is not
counted.

    python benchmarks/tensor_dataset.py
"""

from __future__ import annotations

import argparse
import itertools
import time
from typing import Any

import torch
from harness import Rounds, claim, describe_machine, interleave, parse_arguments
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

import headrace as hr

ROWS = 1_000_000
SIZES = {64: 5, 1024: 20}  # a batch, and how many times torch's rate is aimed at
# In one turn: about 0.1 s each.
SAMPLES = {"limit": 600_000, "headrace": 300_000, "torch": 40_000}
ONE_BY_ONE = {1: 4_000, 64: 40_000}  # a batch, and the samples in one turn

LIMIT, LOOP, HEADRACE, TORCH = "bare index_select", "bare loop", "headrace", "torch"


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The samples of a `TensorDataset`, which a loader does not know as such."""

    def __init__(self, rows: TensorDataset) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rows[index]


def iterate(loader_class: Any, dataset: Any, batch: int) -> Any:
    return iter(
        loader_class(
            dataset, batch, shuffle=True, generator=torch.Generator().manual_seed(7)
        )
    )


def check_same_batches(dataset: TensorDataset) -> None:
    part = TensorDataset(*(tensor[:20_011] for tensor in dataset.tensors))
    for case in (part, Subset(part, range(500, 5_007)), Rows(part)):
        for size in (*SIZES, *ONE_BY_ONE):
            pairs = itertools.zip_longest(
                iterate(hr.DataLoader, case, size),
                iterate(torch.utils.data.DataLoader, case, size),
            )
            for ours, theirs in pairs:
                if type(ours) is not type(theirs) or not all(
                    map(torch.equal, ours, theirs)
                ):
                    raise RuntimeError(
                        "the batches differ from torch's: this run does not count"
                    )


def read(loader_class: Any, dataset: Dataset[Any], size: int, samples: int) -> float:
    received = iterate(loader_class, dataset, size)
    next(received)
    batches = samples // size
    wrong = 0
    began = time.perf_counter()
    for rows, labels in itertools.islice(received, batches):
        wrong += len(rows) != size or len(labels) != size
    elapsed = time.perf_counter() - began
    if wrong:
        raise RuntimeError(
            f"{wrong} batches of {batches} are not of {size} samples: this run does not count"
        )
    return batches * size / elapsed


def index_select(dataset: TensorDataset, size: int, samples: int) -> float:
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(7))[
        : samples // size * size
    ].split(size)
    began = time.perf_counter()
    for indices in order:
        [tensor.index_select(0, indices) for tensor in dataset.tensors]
    return len(order) * size / (time.perf_counter() - began)


def compare(dataset: TensorDataset, size: int, rounds: int) -> Rounds:
    return interleave(
        {
            LIMIT: lambda: index_select(dataset, size, SAMPLES["limit"]),
            HEADRACE: lambda: read(hr.DataLoader, dataset, size, SAMPLES["headrace"]),
            TORCH: lambda: read(
                torch.utils.data.DataLoader, dataset, size, SAMPLES["torch"]
            ),
        },
        rounds=rounds,
        unit="samples/s",
    )


def read_in_loop(dataset: Rows, size: int, samples: int) -> float:
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(7))[
        : samples // size * size
    ].tolist()
    began = time.perf_counter()
    for first in range(0, len(order), size):
        default_collate([dataset[index] for index in order[first : first + size]])
    return len(order) / (time.perf_counter() - began)


def compare_one_by_one(dataset: Rows, size: int, rounds: int) -> Rounds:
    samples = ONE_BY_ONE[size]
    return interleave(
        {
            LOOP: lambda: read_in_loop(dataset, size, samples),
            HEADRACE: lambda: read(hr.DataLoader, dataset, size, samples),
            TORCH: lambda: read(torch.utils.data.DataLoader, dataset, size, samples),
        },
        rounds=rounds,
        unit="samples/s",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=11)
    arguments = parse_arguments(parser, rounds=1)
    rows = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(rows, torch.arange(ROWS))
    check_same_batches(dataset)
    compared = {size: compare(dataset, size, arguments.rounds) for size in SIZES}
    one_by_one = {
        size: compare_one_by_one(Rows(dataset), size, arguments.rounds)
        for size in ONE_BY_ONE
    }
    print(
        f"{ROWS} × 16 floats and a label, shuffled, in the caller's thread; the batches are torch's, bit for bit"
    )
    print(describe_machine())
    for size, rounds in compared.items():
        print(f"\nbatches of {size}")
        rounds.show(against=LIMIT)
        figure = rounds.share(HEADRACE, TORCH, "× torch", at_least=SIZES[size])
        claim(f"`TensorDataset`, batches of {size}", figure)
    for size, rounds in one_by_one.items():
        print(f"\nbatches of {size}, the rows read one by one")
        rounds.show(against=LOOP)
        claim(
            f"rows read one by one, batches of {size}",
            rounds.share(HEADRACE, TORCH, "× torch"),
        )


if __name__ == "__main__":
    main()
