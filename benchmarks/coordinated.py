"""The cost of `coordinated=True` per step: two gloo ranks on this machine, a stream whose batches are ready at once.

    python benchmarks/coordinated.py

Epochs with and without agreement alternate in one run; the median time of a step is printed.
"""

from __future__ import annotations

import statistics
import tempfile
import time

import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import IterableDataset

import headrace as hr

RANKS, STEPS, REPETITIONS = 2, 500, 5
TRAINING_STEP = 0.003  # seconds; a GPU computes, and the CPU waits


class Numbers(hr.AsyncIterableDataset):
    splits_by_rank = True

    async def __aiter__(self):
        for number in range(STEPS):
            yield number


class TorchNumbers(IterableDataset):
    splits_by_rank = True

    def __iter__(self):
        return iter(range(STEPS))


def microseconds(loader, training_step):
    iterator = iter(loader)
    next(iterator)
    dist.barrier()
    began = time.perf_counter()
    steps = 0
    for _ in iterator:
        steps += 1
        time.sleep(training_step)
    return (time.perf_counter() - began) / steps * 1e6


def rank(number, folder):
    dist.init_process_group("gloo", f"file://{folder}/store", rank=number, world_size=RANKS)
    cases = (
        ("batches are ready, steps of 3 ms", Numbers(), TRAINING_STEP),
        ("an agreement for each step", TorchNumbers(), 0.0),
    )
    for name, dataset, step in cases:
        loaders = [hr.DataLoader(dataset, coordinated=coordinated) for coordinated in (False, True)]
        times = [[microseconds(loader, step) for loader in loaders] for _ in range(REPETITIONS)]
        alone, together = (statistics.median(column) for column in zip(*times, strict=True))
        if number == 0:
            print(f"{name}: {alone:.0f} µs a step alone, {together:.0f} µs coordinated")
        for loader in loaders:
            loader.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank, (folder,), RANKS)
