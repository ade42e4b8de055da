"""Datasets whose samples are their indices, without a latency and with one."""

import asyncio

from headrace import AsyncDataset


class Numbers(AsyncDataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    async def aget(self, index):
        return index


class SlowDataset(AsyncDataset):
    """A map-style dataset whose samples, the index or what `make` makes of it, take `latency` seconds and no CPU."""

    def __init__(self, length, latency, make=None):
        self.length = length
        self.latency = latency
        self.make = make

    def __len__(self):
        return self.length

    async def aget(self, index):
        if not -self.length <= index < self.length:
            raise IndexError(f"index {index} is out of range for {self.length} samples")
        await asyncio.sleep(self.latency)
        index %= self.length
        return index if self.make is None else self.make(index)
