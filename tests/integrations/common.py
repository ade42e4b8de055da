"""Datasets and functions that the programs share; a module that workers import without a trainer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch

import headrace as hr

SHARDS = 4


class Numbers(hr.AsyncDataset):
    """Samples that are their indices; records which it fetched, and the most fetches that were in flight at once."""

    def __init__(self, count):
        self.count = count
        self.fetched = []
        self.in_flight = self.most = 0

    def __len__(self):
        return self.count

    async def aget(self, index):
        self.fetched.append(index)
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        await asyncio.sleep(0)
        self.in_flight -= 1
        return index


class Stream(hr.AsyncIterableDataset):
    """Numbers in their order, of unknown length, all for every rank."""

    def __init__(self, count):
        self.count = count

    async def __aiter__(self):
        for number in range(self.count):
            yield number


class TorchNumbers(torch.utils.data.Dataset):
    """The samples of `Numbers`, as torch's datasets."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index >= self.count:  # by which Python ends an iteration
            raise IndexError(index)
        return index


class TorchStream(torch.utils.data.IterableDataset):
    """The samples of `Stream`, as torch's streams."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


def tenfold(sample):
    """Shows how often it was applied."""
    return 10 * sample


def write_lines(folder, count):
    """Shards of as many numbers each; returns their pattern."""
    Path(folder).mkdir(exist_ok=True)
    for shard in range(SHARDS):
        numbers = range(shard * count // SHARDS, (shard + 1) * count // SHARDS)
        Path(folder, f"{shard}.txt").write_text(
            "".join(f"{number}\n" for number in numbers)
        )
    return str(Path(folder, "*.txt"))


def flat(batches):
    """The samples of batches."""
    return [
        sample
        for batch in batches
        for sample in torch.as_tensor(batch).flatten().tolist()
    ]


def plain(batch):
    """A batch, or dicts and lists of batches, as lists and numbers, which `==` compares."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {name: plain(part) for name, part in batch.items()}
    return [plain(part) for part in batch] if isinstance(batch, list | tuple) else batch
