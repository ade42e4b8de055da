"""Datasets that several parity tests read."""

import asyncio
import itertools

import torch
from torch.utils import data

import headrace as hr

LENGTH = 13


class Map(data.Dataset):
    """A tensor and a number."""

    def __init__(self, length=LENGTH):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if not -self.length <= index < self.length:
            raise IndexError(index)
        return torch.tensor([index, -index]), index


class Numbers(Map):
    def __getitem__(self, index):
        return 10 * super().__getitem__(index)[1]


class Indices(data.Dataset):
    """Twelve samples that are their index."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return index


class InThread(hr.AsyncDataset):
    """A dataset whose samples are read in a thread."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    async def aget(self, index):
        return await asyncio.to_thread(self.dataset.__getitem__, index)


class Counted(data.Sampler):
    """Counts how often it is started and how far it is read."""

    def __init__(self):
        self.begun = 0
        self.drawn = 0

    def __len__(self):
        return LENGTH

    def __iter__(self):
        self.begun += 1
        for index in range(LENGTH):
            self.drawn += 1
            yield index


class Stream(data.IterableDataset):
    def __iter__(self):
        return ((torch.tensor([i, -i]), i) for i in range(LENGTH))


class Count(data.IterableDataset):
    """A stream whose length is known: `length` if nothing else is said."""

    def __init__(self, length=LENGTH, said=None):
        self.length = length
        self.said = length if said is None else said

    def __len__(self):
        return self.said

    def __iter__(self):
        return iter(range(self.length))


class Endless(data.IterableDataset):
    def __iter__(self):
        return itertools.count()


def tensors():
    return data.TensorDataset(
        torch.arange(LENGTH), torch.arange(LENGTH * 2.0).reshape(LENGTH, 2)
    )
