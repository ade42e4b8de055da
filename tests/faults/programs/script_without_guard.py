"""A user's script, run by `test_sidecar.py`: no main guard, and classes of its own that travel to other processes."""

import dataclasses
import enum
import threading

import torch

import headrace as hr

print("imported")
SCALE = 10


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Record:
    value: torch.Tensor
    colour: Colour


class Dataset(hr.AsyncDataset):
    def __len__(self):
        return 8

    async def aget(self, index):
        return Record(torch.tensor(index * SCALE), Colour.RED)


def increased(record):
    return dataclasses.replace(record, value=record.value + 1)


loader = hr.DataLoader(
    Dataset(), 4, num_workers=2, transform=increased, collate_fn=lambda records: tuple(records)
)
for batch in loader:
    assert all(type(record) is Record and record.colour is Colour.RED for record in batch)
    print([int(record.value) for record in batch])
assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
print(loader.stats().placement)
