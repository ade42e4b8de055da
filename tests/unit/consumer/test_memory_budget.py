"""`memory_budget` bounds what is fetched and not taken, also of a loop slower than the loader, and ends no epoch."""

import asyncio
import time
import weakref

import numpy as np
import pytest
import torch

import headrace as hr
from tests.datasets import SlowDataset

LENGTH, SIZE = 60, 1 << 18
PLACES = [
    {},
    {"num_workers": 1, "placement": "thread"},
    {"placement": "process"},
    {"placement": "process", "num_workers": 1},
    {"engines": 2, "num_workers": 2},
]


class Small(SlowDataset):
    """Samples whose fetch suspends once; they become large by a transform."""

    def __init__(self):
        super().__init__(LENGTH, latency=0)


class Large(Small):
    async def aget(self, index):
        return [await super().aget(index), bytes(SIZE)]


class LargeBatches(Small):
    async def agets(self, indices):
        await asyncio.sleep(0)  # suspends once, as a fetch does
        return [[index, bytes(SIZE)] for index in indices]


class LargeRanges(hr.RangedDataset):
    """Samples that follow each other in one object."""

    def __len__(self):
        return LENGTH

    def ranges(self, indices):
        starts = SIZE * np.asarray(indices)
        return hr.Ranges(np.zeros_like(starts), starts, starts + SIZE)

    async def read_range(self, number, start, stop, *, index=None):
        await asyncio.sleep(0)  # suspends once, as a fetch does
        return memoryview(bytes(stop - start))

    def sample_of(self, index, data):
        return [index, bytes(data)]


@pytest.mark.parametrize("options", PLACES, ids=str)
def test_no_more_is_transformed_ahead_than_the_budget_holds(tmp_path, options):
    taken = tmp_path / "taken"  # a byte for each batch
    taken.touch()

    def enlarge(index):
        return torch.full(
            (SIZE,), max(0, index - taken.stat().st_size), dtype=torch.uint8
        )

    with hr.DataLoader(
        Small(), 1, transform=enlarge, concurrency=30, memory_budget=8 * SIZE, **options
    ) as loader:
        list(loader)  # after which the sizes are known
        ahead = []
        for batch in loader:
            with taken.open("a") as file:
                file.write(".")
            time.sleep(0.005)  # the loop is slower than the loader
            ahead.append(batch[0, 0].item())
    assert len(ahead) == LENGTH
    # One is with the consumer, which counts it later. Each of two engines may be ahead of the
    # other.
    assert max(ahead) <= (2 * 4 + 1 + 4 if "engines" in options else 8 + 1)


def refuse(sample):
    if not sample[0] % 7:
        raise ValueError("not this one")
    return sample


LOSSY = {"memory_budget": 1, "transform": refuse, "on_error": "skip"}


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (Large, {"memory_budget": 1}),
        (Large, {"memory_budget": 3 * SIZE, "in_order": False}),
        (LargeBatches, {"memory_budget": 3 * SIZE}),
        (LargeRanges, {"memory_budget": 3 * SIZE}),
        (Large, LOSSY),
    ],
)
@pytest.mark.parametrize("options", PLACES, ids=str)
def test_each_sample_arrives_once_within_any_budget(options, kind, arguments):
    lost = range(0, LENGTH, 7) if arguments is LOSSY else ()
    with hr.DataLoader(kind(), 2, collate_fn=list, **arguments, **options) as loader:
        for _ in range(2):
            numbers = [sample[0] for batch in loader for sample in batch]
            assert sorted(numbers) == [
                number for number in range(LENGTH) if number not in lost
            ]
            assert numbers == sorted(numbers) or "in_order" in arguments


@pytest.mark.parametrize("options", [PLACES[0], PLACES[-1]], ids=str)
def test_async_for_and_a_device_get_each_batch_within_any_budget(options):
    async def numbers():
        loader = hr.DataLoader(
            Small(),
            2,
            transform=lambda index: torch.full((SIZE,), index),
            device="cpu",
            memory_budget=1,
            **options,
        )
        async with loader:
            return [int(number) async for batch in loader for number in batch[:, 0]]

    assert asyncio.run(numbers()) == list(range(LENGTH))


class Measured(hr.AsyncDataset):
    """Samples of different sizes, which count the bytes that are alive."""

    def __init__(self, units):
        self.units, self.alive, self.most = units, 0, 0

    def __len__(self):
        return 480

    async def aget(self, index):
        sample = Bytes(self.units(index) * 1024)
        self.alive += len(sample)
        self.most = max(self.most, self.alive)
        weakref.finalize(sample, self.forget, len(sample))
        await asyncio.sleep(0)  # suspends once, as a fetch does
        return sample

    def forget(self, nbytes):
        self.alive -= nbytes


class Bytes(bytearray):
    __slots__ = ("__weakref__",)


@pytest.mark.parametrize(
    "units",
    [
        lambda index: 24,
        lambda index: index // 16 + 1,
        lambda index: 16 if index % 32 >= 4 else 1,
    ],
    ids=["large", "growing", "small in each eighth batch"],
)
def test_bytes_alive_stay_near_the_budget_for_sizes_of_any_order(units):
    dataset = Measured(units)
    with hr.DataLoader(dataset, 4, collate_fn=len, memory_budget=256 * 1024) as loader:
        assert sum(loader) == 480
    assert dataset.most <= 1.5 * 256 * 1024
