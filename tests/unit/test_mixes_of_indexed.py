"""Mixes of map-style datasets: the share of each source, on every rank, at every position, for any number of ranks."""

import collections
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace._order.exclusion import taken
from headrace._order.mixes import MixOrder, MixPlan, Source
from headrace.errors import StateError
from headrace.types import Blocks
from tests.datasets import Numbers

LANES = (1, 12, 192)


def order_of(lengths, weights, *, stop="first", lanes=1, shuffle=True):
    blocks = Blocks(4, lanes) if lanes > 1 else None
    sources = [
        Source(str(number), length, blocks) for number, length in enumerate(lengths)
    ]
    return MixOrder(MixPlan(sources, [(0, weights)], stop), 0, 0, shuffle)


def joined(order, part=slice(None)):
    return np.concatenate(
        [np.empty(0, dtype=np.int64), *taken(order, range(len(order))[part])]
    )


def sources_of(indices, lengths):
    """The sources of indices of the concatenation."""
    return np.searchsorted(np.cumsum(lengths), indices, side="right")


def read(loader):
    return [int(sample) for batch in loader for sample in batch]


# Orders


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(0.01, 1.0), min_size=1, max_size=12),
    st.sampled_from(LANES),
    st.integers(0, 10**6),
)
def test_every_prefix_has_its_share_of_each_source(weights, lanes, windows):
    order = order_of([10**10] * len(weights), weights, lanes=lanes)
    ideal = np.array(weights)[:, None] / sum(weights)
    first = windows * 8
    drawn = order.plan.drawn(np.full(lanes, first), np.arange(lanes)).sum(
        axis=1, keepdims=True
    )
    positions = np.arange(first * lanes, first * lanes + 2000)
    sources = sources_of(order[positions], [10**10] * len(weights))
    drawn = drawn + np.cumsum(sources == np.arange(len(weights))[:, None], axis=1)
    assert np.abs(drawn - (positions + 1) * ideal).max() < 2 + 3 * lanes**0.5


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(1, 9)), min_size=1, max_size=5),
    st.sampled_from(["first", "all"]),
    st.sampled_from([1, 6]),
    st.booleans(),
)
def test_each_pass_of_a_source_has_each_sample_once(sources, stop, lanes, shuffle):
    lengths, weights = zip(*sources, strict=True)
    order = order_of(lengths, weights, stop=stop, lanes=lanes, shuffle=shuffle)
    indices, lanes = joined(order), order.plan.lanes
    assert len(indices) == len(order)
    counts = np.split(
        np.bincount(indices, minlength=sum(lengths)), np.cumsum(lengths)[:-1]
    )
    for each in counts:
        assert np.ptp(each) <= (1 if lanes == 1 else 2)
    if stop == "first":
        assert max(each.max() for each in counts) == 1
        assert min((each == 0).sum() for each in counts) <= (
            0 if lanes == 1 else 3 * lanes
        )
    else:
        assert min(each.min() for each in counts) >= 1


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("weights", [(3, 1), (1, 1), (7, 2, 1)])
def test_each_rank_has_the_weights_however_they_fit_the_number_of_ranks(lanes, weights):
    lengths = [10**9] * len(weights)
    order = order_of(lengths, weights, lanes=lanes)
    expected, count = np.array(weights) / sum(weights), 400
    assert abs(len(order) * max(expected) - 10**9) < 5 * lanes
    for ranks in (2, 3, 4, 8, 16, 64, 250, 256, 768, 1024):
        for rank in random.Random(ranks).sample(range(ranks), min(ranks, 3)):
            positions = np.arange(10**8 + rank, 10**8 + count * ranks, ranks)
            shares = (
                np.bincount(sources_of(order[positions], lengths), minlength=len(weights))
                / count
            )
            deviation = np.sqrt(expected * (1 - expected) / count)  # of draws at random
            assert (np.abs(shares - expected) < 4.5 * deviation).all()


@pytest.mark.parametrize("lanes", LANES)
def test_every_global_batch_has_samples_of_a_rare_source(lanes):
    lengths = [10**9] * 3
    samples = joined(
        order_of(lengths, [0.69, 0.3, 0.01], lanes=lanes),
        slice(10**7, 10**7 + 2048 * 100),
    )
    rare = (sources_of(samples, lengths) == 2).reshape(100, 2048).sum(axis=1)
    assert rare.min() > 0
    assert rare.max() < 45


@pytest.mark.parametrize("ranks", [2, 12])
def test_a_rank_reads_blocks_of_its_own(ranks):
    readers = collections.defaultdict(set)
    order = order_of([4 * 12 * 100, 4 * 12 * 60], [5, 3], lanes=12)
    for position, index in enumerate(joined(order).tolist()):
        readers[index // 4].add(position % ranks)
    assert len(readers) > 1850
    assert {len(each) for each in readers.values()} == {1}


# Loaders


def test_a_state_of_another_mix_is_an_error():
    data, weights = [Numbers(60), Numbers(40)], [2, 1]
    loader = hr.DataLoader(hr.mix(data, weights), batch_size=5, shuffle=True, seed=0)
    next(iter(loader))
    for other in (
        hr.mix(data, [1, 1]),
        hr.mix([Numbers(59), Numbers(41)], weights),
        hr.mix({"a": data[0], "b": data[1]}, weights),
        hr.mix(data, weights, stop="all"),
        hr.mix(data, weights, seed=1),
        hr.concat(data),
    ):
        with pytest.raises(StateError):
            hr.DataLoader(other, batch_size=5, shuffle=True, seed=0).load_state_dict(
                loader.state_dict()
            )


def test_a_mix_works_through_map_and_is_a_concatenation_to_torch():
    data = [Numbers(30), Numbers(30).map(lambda n: n + 100)]
    mixed = hr.mix(data, [1, 1])
    assert [mixed[index] for index in (0, 29, 30, 59)] == [0, 29, 100, 129]
    plain = read(hr.DataLoader(mixed, 6, shuffle=True, seed=0))
    assert sorted(plain) == sorted(read(torch.utils.data.DataLoader(mixed, 6)))
    assert read(hr.DataLoader(mixed.map(lambda n: -n), 6, shuffle=True, seed=0)) == [
        -sample for sample in plain
    ]


class Sentences(Numbers):
    """Samples of the same number of words each; a sample is this number, which is its length."""

    def __init__(self, length, words):
        super().__init__(length)
        self.lengths = np.full(length, words)

    async def aget(self, index):
        return int(self.lengths[index])


def test_weights_are_shares_of_lengths():
    mixed = hr.mix([Sentences(4000, 3), Sentences(12_000, 1)], [1, 1], unit="lengths")
    with hr.DataLoader(mixed, 4000, shuffle=True, seed=0) as loader:
        words = next(iter(loader))
    assert words[words == 3].sum() / words[words == 1].sum() == pytest.approx(1, abs=0.02)
    with pytest.raises(ValueError, match="dataset 'a' has no lengths"):
        hr.mix({"a": Numbers(5)}, {"a": 1}, unit="lengths")
    with pytest.raises(ValueError, match="'lengths' is for map-style"):
        hr.mix([hr.from_async_iterable(print)], [1], unit="lengths")


def test_what_cannot_be_mixed_is_an_error():
    data, weights = [Numbers(5), Numbers(0)], [1, 1]
    mixed = hr.mix(data, weights)
    for lossy in (
        lambda: hr.mix([mixed.map(abs), data[0]], weights),
        lambda: hr.concat([mixed, data[0]]),
        lambda: hr.DataLoader(torch.utils.data.Subset(mixed, [1, 2])),
        lambda: hr.DataLoader(torch.utils.data.StackDataset(mixed, mixed)),
    ):
        with pytest.raises(TypeError, match="would lose its weights: mix last"):
            lossy()
    with pytest.raises(ValueError, match="is for streams"):
        hr.mix(data, weights, stop="once")
    with pytest.raises(ValueError, match=r"datasets \['1'\] of the mix have no samples"):
        hr.DataLoader(mixed)
    assert read(hr.DataLoader(hr.mix(data, [(0, [1, 0])]), 5)) == list(range(5))
    for options in (
        {"sampler": torch.utils.data.RandomSampler(range(5))},
        {"shuffle": True, "generator": torch.Generator()},
    ):
        with pytest.warns(UserWarning, match="weights have no effect"):
            hr.DataLoader(mixed, **options)
