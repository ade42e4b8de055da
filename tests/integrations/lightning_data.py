"""Datasets of the tests with Lightning, in a module that workers import without Lightning."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, IterableDataset

import headrace as hr

SAMPLES = 40


class Numbers(hr.AsyncDataset):
    """Numbers by index; counts the calls that are under way."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples
        self.now = self.most = 0

    def __len__(self):
        return self.samples

    async def aget(self, index):
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        return index


class PlainNumbers(Dataset):
    """Numbers by index, as torch's datasets."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return index


class PlainStream(IterableDataset):
    """Numbers in their order, as torch's streams."""

    def __iter__(self):
        return iter(range(SAMPLES))


def tenfold(sample):
    return 10 * sample


def over_two(number):
    return number > 2


def lines(folder: str, **options: Any) -> Any:
    """A stream of four shards of ten numbers each."""
    Path(folder).mkdir(exist_ok=True)
    for shard in range(4):
        file = Path(folder, f"{shard}.txt")
        if not file.exists():
            new = file.with_name(f"{os.getpid()}-{shard}")
            new.write_text("".join(f"{10 * shard + line}\n" for line in range(10)))
            new.rename(file)
    return hr.LinesDataset(os.path.join(folder, "*.txt"), **options).map(int)
