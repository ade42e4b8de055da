"""How fast large batches come from worker processes: 38 MB each, from two workers.

A torch map-style dataset whose samples are in memory already (float32, 3 × 224 × 224), batches of
64, the default collate; headrace and torch get the same dataset, workers, start method and
prefetch. Claimed: headrace reaches 10 GB/s or 0.8 of a warm memcpy of one core (the limit), and 8
times torch. A row of its own is the same work as an async dataset, whose batches cross two process
borders: from the worker to the loader's process, and from there to here. Then both loaders without
workers, where a batch is put together in new memory. Claimed: twice torch.

The batches' first and last values are checked as they come, every value of each round's last batch
behind the clock.

    python benchmarks/batch_bandwidth.py
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
from harness import claim, describe_machine, interleave, parse_arguments

import headrace as hr

SHAPE = (3, 224, 224)
BATCH = 64
IMAGES = 16  # different ones in memory
# torch is given a quarter of the batches: its rate does not depend on how many there are
TORCH_SHARE = 4

LIMIT, HEADRACE, TORCH = "warm memcpy", "headrace", "torch"
HERE, TORCH_HERE = "headrace, without workers", "torch, without workers"


def make_images() -> torch.Tensor:
    return torch.arange(IMAGES, dtype=torch.float32).view(-1, 1, 1, 1) + torch.rand(
        SHAPE, generator=torch.Generator().manual_seed(0)
    )


class InMemory(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, images: torch.Tensor, length: int) -> None:
        self.images = images
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.images[index % IMAGES]


class Indices(hr.AsyncDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    async def aget(self, index: int) -> int:
        return index


class Pick:
    """The transform of the async dataset: the sample of `InMemory` at that index."""

    def __init__(self, images: torch.Tensor) -> None:
        self.images = images

    def __call__(self, index: int) -> torch.Tensor:
        return self.images[index % IMAGES]


class Reader:
    """Reads epochs, and knows what must come."""

    def __init__(self, images: torch.Tensor) -> None:
        # every batch holds the same
        self.expected = torch.stack([images[index % IMAGES] for index in range(BATCH)])
        self.ends = self.expected[0, 0, 0, 0].item(), self.expected[-1, -1, -1, -1].item()

    def __call__(self, loader: Any, batches: int) -> float:
        received = iter(loader)
        last = next(received)  # not counted: the workers are starting
        right = 1
        began = time.perf_counter()
        for batch in received:
            right += (batch[0, 0, 0, 0].item(), batch[-1, -1, -1, -1].item()) == self.ends
            last = batch
        elapsed = time.perf_counter() - began
        if right != batches or not torch.equal(last, self.expected):
            raise RuntimeError("batches are missing or wrong: this run does not count")
        return (batches - 1) * self.expected.nbytes / elapsed / 1e9


def copy_in_memory(times: int) -> float:
    source = np.ones(BATCH * int(np.prod(SHAPE)), np.float32)
    target = np.zeros_like(source)
    np.copyto(target, source)
    began = time.perf_counter()
    for _ in range(times):
        np.copyto(target, source)
    return times * source.nbytes / (time.perf_counter() - began) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", type=int, default=121)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parse_arguments(parser, batches=12, rounds=1)
    images = make_images()
    reader = Reader(images)
    batches, few = arguments.batches, arguments.batches // TORCH_SHARE
    workers: dict[str, Any] = {
        "batch_size": BATCH,
        "num_workers": 2,
        "persistent_workers": True,
    }
    dataset, shorter = InMemory(images, BATCH * batches), InMemory(images, BATCH * few)
    torch_loader = torch.utils.data.DataLoader(
        shorter, multiprocessing_context="spawn", **workers
    )
    with (
        hr.DataLoader(dataset, multiprocessing_context="spawn", **workers) as map_loader,
        hr.DataLoader(
            Indices(BATCH * batches), transform=Pick(images), **workers
        ) as async_loader,
    ):
        rounds = interleave(
            {
                LIMIT: lambda: copy_in_memory(50),
                HEADRACE: lambda: reader(map_loader, batches),
                "headrace, async dataset": lambda: reader(async_loader, batches),
                TORCH: lambda: reader(torch_loader, few),
                HERE: lambda: reader(hr.DataLoader(shorter, BATCH), few),
                TORCH_HERE: lambda: reader(
                    torch.utils.data.DataLoader(shorter, BATCH), few
                ),
            },
            rounds=arguments.rounds,
            unit="GB/s",
        )
        placement = async_loader.stats().placement
    print(
        f"{reader.expected.nbytes / 1e6:.1f} MB a batch, 2 workers; the async dataset in a {placement}"
    )
    print(describe_machine())
    rounds.show(against=LIMIT)
    rate, of_copy = (
        rounds.figure(HEADRACE, at_least=10),
        rounds.share(HEADRACE, LIMIT, at_least=0.8),
    )
    of_torch = rounds.share(HEADRACE, TORCH, "× torch", at_least=8)
    claim(
        "batches of 38 MB from 2 workers",
        rate,
        of_copy,
        of_torch,
        aim=f"{rate.aim} or {of_copy.aim}; {of_torch.aim}",
        met=bool((rate.met or of_copy.met) and of_torch.met),
    )
    claim(
        "batches of 38 MB without workers",
        rounds.share(HERE, TORCH_HERE, "× torch", at_least=2),
    )


if __name__ == "__main__":
    main()
