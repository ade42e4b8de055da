"""The random order of a loader with a seed, the seeds of its batches, and samplers with habits."""

import asyncio
import itertools
import tracemalloc

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, TensorDataset
from torch.utils.data import DataLoader as TorchDataLoader

import headrace as hr
from headrace._order.samplers import SeededRandomSampler
from headrace._random.seeding import batch_seed
from tests.model.parts import Drawing, TorchNumbers

NUMBERS = TensorDataset(torch.arange(40))


def order_of(loader):
    return torch.cat([batch[0] for batch in loader]).tolist()


def test_torchs_generators_neither_change_the_order_nor_are_drawn_from():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    sampler = SeededRandomSampler(range(20), seed=5)
    first = list(sampler)
    assert torch.equal(before, torch.get_rng_state())
    sampler.generator = torch.Generator().manual_seed(3)  # as accelerate does
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_torchs_own_loader_draws_the_same_orders():
    sampler = SeededRandomSampler(range(40), seed=5)
    loader = TorchDataLoader(NUMBERS, batch_size=4, sampler=sampler, num_workers=1)
    assert [order_of(loader) for _ in range(2)] == [
        hr.Permutation(40, 5, epoch)[:].tolist() for epoch in range(2)
    ]


def test_memory_does_not_grow_with_the_length():
    tracemalloc.start()
    try:
        sampler = SeededRandomSampler(range(10**9), seed=1)
        assert len(set(itertools.islice(sampler, 20_000))) == 20_000
        assert (
            len(set(itertools.islice(sampler.indices_from(999_980_000), 20_001)))
            == 20_000
        )
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


def test_seeds_of_batches_are_the_same_on_every_machine():
    assert batch_seed(0, 0, 0) == 2891389769238885931
    assert batch_seed(2**63 - 1, 3, 5) == 5492607835317456068


def test_list_that_a_batch_sampler_reuses_is_copied():
    def reusing():
        batch = []
        for i in range(3):
            batch[:] = [i]
            yield batch

    loader = hr.DataLoader(list(range(3)), batch_sampler=reusing())
    assert [batch.tolist() for batch in loader] == [[0], [1], [2]]


def draw(most):
    return int(torch.randint(most, ()))


def run(loader_class, dataset, draw, **options):
    """Two epochs of a program that draws in its loop, which the first epoch is left early."""
    torch.manual_seed(0)
    loader = loader_class(dataset, **options)
    return [
        (torch.as_tensor(batch).tolist(), [draw(1000) for _ in range(3)])
        for most in (50, None)
        for batch in itertools.islice(loader, most)
    ]


@pytest.mark.parametrize("persistent", [False, True])
def test_generator_that_the_program_shares_with_torchs_sampler_is_drawn_from_when_torch_does(
    persistent,
):
    def drawn(loader_class):
        generator = torch.Generator().manual_seed(3)
        options = {
            "shuffle": True,
            "generator": generator,
            "num_workers": 2,
            "persistent_workers": persistent,
        }
        return run(
            loader_class,
            TorchNumbers(100),
            lambda most: int(torch.randint(most, (), generator=generator)),
            **options,
        )

    assert drawn(hr.DataLoader) == drawn(TorchDataLoader)


@pytest.mark.parametrize("batched", [False, True])
def test_draws_of_a_sampler_do_not_depend_on_the_order_of_arrival(batched):
    class Released(hr.AsyncDataset):
        """Samples arrive after some iterations of the event loop."""

        def __init__(self, delay):
            self.delay = delay

        def __len__(self):
            return 100

        async def aget(self, index):
            for _ in range(int(np.sum(index)) % 7 * self.delay):
                await asyncio.sleep(0)
            return index

    def drawn(delay):
        options = {
            "sampler": Drawing(100, 60, "torch"),
            "batch_size": 1,
            "in_order": False,
        }
        if batched:
            sampler = BatchSampler(options["sampler"], 1, False)
            options |= {"sampler": sampler, "batch_size": None}
        return [
            draws for _, draws in run(hr.DataLoader, Released(delay), draw, **options)
        ]

    assert drawn(0) == drawn(1) == drawn(40)


class Endless(torch.utils.data.IterableDataset):
    """A stream whose position outlives an epoch."""

    def __init__(self):
        self.position = 0

    def __iter__(self):
        while True:
            self.position += 1
            yield self.position


class Noise(TorchNumbers):
    def __getitem__(self, index):
        return int(torch.randint(1 << 40, ()))


@pytest.mark.parametrize("make", [Endless, lambda: Noise(100)], ids=["stream", "map"])
@pytest.mark.parametrize("prefetch_factor", [2, 5])
def test_epoch_after_one_that_was_left_begins_as_by_torch_in_workers_that_persist(
    make, prefetch_factor
):
    def given(loader_class):
        torch.manual_seed(1)
        options = {
            "num_workers": 2,
            "persistent_workers": True,
            "prefetch_factor": prefetch_factor,
        }
        loader = loader_class(make(), 2, **options)
        return [
            batch.tolist()
            for most in (3, 7, 1, 4)
            for batch in itertools.islice(loader, most)
        ]

    assert given(hr.DataLoader) == given(TorchDataLoader)
