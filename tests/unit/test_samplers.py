"""`BlockShuffleSampler` draws every index once, neighbours together, and the same number for each rank."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import headrace as hr

SIZES = st.integers(1, 300), st.integers(1, 40), st.integers(1, 9)


@given(*SIZES, st.integers(0, 5))
def test_every_index_is_drawn_once(length, block_size, blocks_at_once, seed):
    sampler = hr.BlockShuffleSampler(length, block_size=block_size, blocks_at_once=blocks_at_once, seed=seed)
    assert sorted(sampler) == list(range(length))
    assert len(sampler) == length


@given(*SIZES)
def test_neighbouring_draws_are_from_few_blocks(length, block_size, blocks_at_once):
    order = list(hr.BlockShuffleSampler(length, block_size=block_size, blocks_at_once=blocks_at_once, seed=1))
    blocks = -(-length // block_size)
    seen = [index // block_size for index in order]
    at = 0
    while at < length:
        pool = set()
        while at < length and (len(pool) < blocks_at_once or seen[at] in pool):
            pool.add(seen[at])
            at += 1
        assert not pool & set(seen[at:]), "a block is torn apart"
    assert len(set(seen)) == blocks


@given(*SIZES, st.integers(2, 5))
def test_ranks_get_equal_numbers_of_distinct_full_blocks(length, block_size, blocks_at_once, world_size):
    samplers = [
        hr.BlockShuffleSampler(
            length, block_size=block_size, blocks_at_once=blocks_at_once, seed=3, rank=rank, world_size=world_size
        )
        for rank in range(world_size)
    ]
    orders = [list(sampler) for sampler in samplers]
    assert {len(order) for order in orders} == {len(samplers[0])} == {length // block_size // world_size * block_size}
    assert len(set(itertools.chain(*orders))) == sum(map(len, orders))


def test_order_is_reproducible_by_seed_and_differs_by_epoch():
    sampler = hr.BlockShuffleSampler(range(100), block_size=10, blocks_at_once=3, seed=7)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    second = list(sampler)
    assert second != first
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_order_without_a_seed_follows_torchs_generator():
    sampler = hr.BlockShuffleSampler(100, block_size=10)
    orders = []
    for _ in range(2):
        torch.manual_seed(5)
        orders.append((list(sampler), list(sampler)))
    assert orders[0] == orders[1]
    assert orders[0][0] != orders[0][1]
    own = hr.BlockShuffleSampler(100, block_size=10, generator=torch.Generator().manual_seed(3))
    assert list(own) != list(own)


def test_loader_sets_the_epoch():
    class Numbers(hr.AsyncDataset):
        def __len__(self):
            return 40

        async def aget(self, index):
            return index

    sampler = hr.BlockShuffleSampler(40, block_size=4, blocks_at_once=2, seed=0)
    with hr.DataLoader(Numbers(), batch_size=4, sampler=sampler) as loader:
        epochs = [torch.cat(list(loader)).tolist() for _ in range(2)]
    assert epochs[0] != epochs[1]
    for epoch, order in enumerate(epochs):
        sampler.set_epoch(epoch)
        assert list(sampler) == order


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"block_size": 0}, "block_size=0"),
        ({"block_size": 1, "blocks_at_once": 0}, "blocks_at_once=0"),
        ({"block_size": 1, "seed": 1, "generator": torch.Generator()}, "exclude each other"),
        ({"block_size": 1, "rank": 0, "world_size": 2}, "give all of them the same seed="),
    ],
)
def test_wrong_arguments_are_errors(options, what):
    with pytest.raises(ValueError, match=what):
        hr.BlockShuffleSampler(10, **options)
