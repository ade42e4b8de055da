"""Samplers: every index once, the same number for each rank, and any number of ranks can continue at any position."""

import copy
import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

import headrace as hr
from headrace._order.blocks import BlockOrder
from tests.datasets import Numbers

SIZES = st.integers(1, 300), st.integers(1, 40), st.integers(1, 9)


def block_samplers(length, world_size):
    return [
        hr.BlockShuffleSampler(
            length,
            block_size=4,
            blocks_at_once=12,
            seed=3,
            rank=rank,
            world_size=world_size,
        )
        for rank in range(world_size)
    ]


def elastic_samplers(length, world_size, **options):
    return [
        hr.ElasticSampler(length, seed=3, rank=r, world_size=world_size, **options)
        for r in range(world_size)
    ]


@settings(deadline=None, max_examples=40)
@given(*SIZES, st.integers(0, 5))
def test_every_index_is_drawn_once_and_a_block_within_one_group_of_blocks(
    length, block_size, blocks_at_once, seed
):
    sampler = hr.BlockShuffleSampler(
        length, block_size=block_size, blocks_at_once=blocks_at_once, seed=seed
    )
    order = list(sampler)
    assert sorted(order) == list(range(length))
    assert len(sampler) == length
    positions = {}
    for position, index in enumerate(order):
        positions.setdefault(index // block_size, []).append(position)
    assert (
        max(found[-1] - found[0] for found in positions.values())
        < block_size * blocks_at_once
    )


def test_a_group_that_is_not_full_comes_at_a_random_place_and_in_random_order():
    sampler = hr.BlockShuffleSampler(
        4 * 3 * 10 + 5, block_size=4, blocks_at_once=3, seed=1
    )
    places = set()
    for epoch in range(40):
        sampler.set_epoch(epoch)
        # The last sample is always of that group.
        places.add(list(sampler).index(124) // 12)
    assert len(places) > 5
    small = [
        list(hr.BlockShuffleSampler(12, block_size=6, blocks_at_once=64, seed=seed))
        for seed in range(50)
    ]
    assert len({tuple(order) for order in small}) == 50
    assert len({order[0] for order in small}) > 8


def test_ranks_that_do_not_divide_the_blocks_are_a_warning_once():
    (sampler, *_) = block_samplers(100, 5)
    with pytest.warns(UserWarning, match="blocks_at_once=12 is no multiple of 5 ranks"):
        first = list(sampler)
    assert list(sampler) == first


# ElasticSampler


@settings(deadline=None, max_examples=40)
@given(st.integers(7, 100), st.integers(1, 7), st.booleans())
def test_without_shuffling_it_deals_as_torchs_distributed_sampler(
    length, world_size, drop_last
):
    options = {"shuffle": False, "drop_last": drop_last}
    for rank, ours in enumerate(elastic_samplers(length, world_size, **options)):
        torchs = DistributedSampler(range(length), world_size, rank, **options)
        assert list(ours) == list(torchs)
        assert len(ours) == len(torchs)
        assert (ours.num_samples, ours.total_size) == (
            torchs.num_samples,
            torchs.total_size,
        )


def test_an_epoch_of_a_billion_samples_begins_and_continues_at_once():
    sampler = hr.ElasticSampler(10**9, seed=1, rank=3, world_size=8)
    order = hr.Permutation(10**9, 1)
    assert next(iter(sampler)) == order[3]
    assert next(sampler.indices_from(900_000_005)) == order[900_000_008]


def test_the_rank_is_that_of_the_environment_at_iter(as_rank):
    sampler = hr.ElasticSampler(range(10), shuffle=False)
    assert isinstance(sampler, DistributedSampler)
    assert (sampler.rank, sampler.num_replicas, sampler.epoch_size) == (0, 1, 10)
    as_rank(1, 2)
    assert list(sampler) == [1, 3, 5, 7, 9]
    assert (sampler.rank, sampler.num_replicas, len(sampler)) == (1, 2, 5)


# Continuing an epoch


def test_wrong_arguments_are_errors():
    for options in ({"block_size": 0}, {"block_size": 1, "blocks_at_once": 0}):
        with pytest.raises(ValueError, match="must be at least 1"):
            hr.BlockShuffleSampler(10, **options)
    for options, message in (
        ({"seed": -1}, "must be between"),
        ({"rank": 1}, "give both"),
        ({"rank": 2, "world_size": 2}, "out of range"),
        (
            {"drop_last": True, "exact": True},
            "drop_last=True leaves out samples, and exact=True",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            hr.ElasticSampler(10, **options)
    with pytest.raises(
        TypeError, match="positional"
    ):  # torch's are the number of ranks and the rank
        hr.ElasticSampler(10, 2, 1)


def test_samplers_can_be_copied():
    for (sampler,) in (
        elastic_samplers(20, 1),
        elastic_samplers(20, 1, shuffle=False),
        block_samplers(20, 1),
    ):
        sampler.set_epoch(2)
        for other in (
            copy.copy(sampler),
            copy.deepcopy(sampler),
            pickle.loads(pickle.dumps(sampler)),
        ):
            assert list(other) == list(sampler)


@pytest.mark.parametrize("kind", ["elastic", "blocks", "balanced", "loader"])
def test_numbers_of_numpy_give_states_of_plain_numbers(kind):
    number, data = np.int64, Numbers(40)
    ranks = {"seed": number(3), "rank": number(1), "world_size": number(2)}
    options = {
        "elastic": lambda: {
            "sampler": hr.ElasticSampler(
                number(40), shuffle=np.True_, drop_last=np.True_, **ranks
            )
        },
        "blocks": lambda: {
            "sampler": hr.BlockShuffleSampler(
                data, block_size=number(4), blocks_at_once=number(2), **ranks
            )
        },
        "balanced": lambda: {
            "batch_sampler": hr.BalancedBatchSampler(
                np.arange(40), number(80), window=number(20), **ranks
            )
        },
        "loader": lambda: {"shuffle": True, "seed": number(3), "concurrency": number(4)},
    }[kind]
    loader = hr.DataLoader(data, **options())
    loader.set_epoch(number(2))
    next(iter(loader))
    restored = hr.DataLoader(data, **options())
    restored.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    if kind == "loader":
        loader.exclude(steps={number(2): np.array([4])}, keys=np.array([5]))
        json.dumps(loader.state_dict())


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_exact_sampler_gives_each_sample_once_on_any_number_of_ranks(world_size):
    ranks = [list(sampler) for sampler in elastic_samplers(10, world_size, exact=True)]
    assert sorted(index for rank in ranks for index in rank) == list(range(10))
    assert [len(sampler) for sampler in elastic_samplers(10, world_size, exact=True)] == [
        *map(len, ranks)
    ]
    assert max(map(len, ranks)) - min(map(len, ranks)) <= 1


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=40),
    st.integers(1, 8),
    st.integers(0, 5),
    st.booleans(),
)
def test_blocks_of_different_sizes_have_every_index_once_at_a_computed_position(
    sizes, lanes, seed, shuffle
):
    borders = np.cumsum(sizes) - sizes
    order = BlockOrder(sum(sizes), 1, lanes, seed, 3, shuffle=shuffle, borders=borders)
    whole = np.concatenate([*order.at(range(len(order)))])
    assert sorted(whole.tolist()) == [*range(sum(sizes))]
    some = np.arange(0, sum(sizes), 3)
    assert np.concatenate([*order.at(some)]).tolist() == whole[some].tolist()
