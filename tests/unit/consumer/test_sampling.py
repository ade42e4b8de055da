"""The random order of a loader with a seed, the seeds of its batches, and samplers with habits."""

import itertools
import tracemalloc

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import RandomSampler, TensorDataset

import headrace as hr
from headrace._core.order.samplers import SeededRandomSampler
from headrace._core.seeding import batch_seed

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
    assert [order_of(loader) for _ in range(2)] == [hr.Permutation(40, 5, epoch)[:].tolist() for epoch in range(2)]


def test_without_set_epoch_each_iteration_is_the_next_epoch():
    sampler = SeededRandomSampler(range(9), seed=1)
    assert isinstance(sampler, RandomSampler)
    assert [list(sampler) for _ in range(3)] == [hr.Permutation(9, 1, epoch)[:].tolist() for epoch in range(3)]
    iter(sampler)  # draws nothing, and counts for nothing
    assert list(sampler) == hr.Permutation(9, 1, 3)[:].tolist()
    with hr.DataLoader(NUMBERS, batch_size=4, shuffle=True, seed=5) as loader:
        assert [order_of(loader) for _ in range(3)] == [hr.Permutation(40, 5, epoch)[:].tolist() for epoch in range(3)]
        loader.set_epoch(1)
        assert order_of(loader) == hr.Permutation(40, 5, 1)[:].tolist()


def test_memory_does_not_grow_with_the_length():
    tracemalloc.start()
    try:
        sampler = SeededRandomSampler(range(10**9), seed=1)
        assert len(set(itertools.islice(sampler, 20_000))) == 20_000
        assert len(set(itertools.islice(sampler.indices_from(999_980_000), 20_001))) == 20_000
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


def test_seeds_of_batches_are_the_same_on_every_machine():
    assert batch_seed(0, 0, 0) == 2891389769238885931
    assert batch_seed(2**63 - 1, 3, 5) == 5492607835317456068


def test_list_that_a_batch_sampler_reuses_is_copied():
    class Reusing:
        def __iter__(self):
            batch = []
            for i in range(3):
                batch[:] = [i]
                yield batch

    assert [batch.tolist() for batch in hr.DataLoader(list(range(3)), batch_sampler=Reusing())] == [[0], [1], [2]]
