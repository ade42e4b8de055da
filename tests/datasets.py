"""Datasets whose samples are their indices, without a latency and with one; and a torch stream with a state."""

import asyncio

from torch.utils.data import IterableDataset, get_worker_info

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
        await asyncio.sleep(self.latency)  # of a store
        index %= self.length
        return index if self.make is None else self.make(index)


class TorchStream(IterableDataset):
    """Numbers, of which each worker reads its part; its iterators have a state."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return _TorchIterator(self.length, get_worker_info())


class _TorchIterator:
    def __init__(self, length, worker):
        self.length = length
        self.next, self.step = (worker.id, worker.num_workers) if worker else (0, 1)

    def __iter__(self):
        return self

    def __next__(self):
        if self.next >= self.length:
            raise StopIteration
        self.next += self.step
        return self.next - self.step

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]
