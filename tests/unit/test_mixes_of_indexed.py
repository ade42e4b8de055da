"""Mixes of map-style datasets: the share of each source, on every rank, at every position, for any number of ranks."""

import collections
import itertools
import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace._core.order.mixes import MixOrder, MixPlan, Shares, Source
from headrace.errors import StateError
from headrace.types import Blocks
from tests.datasets import Numbers

WEIGHTS = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=12)
LANES = (1, 12, 192)


class Indexed(hr.AsyncDataset):
    """The samples `first`, `first` + 1, …; in blocks if `blocks` is given."""

    def __init__(self, length, first=0, blocks=None):
        self.length, self.first, self.blocks = length, first, blocks

    def __len__(self):
        return self.length

    def sample_key(self, index):
        return f"{self.first}/{index}"

    async def aget(self, index):
        return self.first + index


def parts(*lengths, blocks=None):
    """Samples of dataset n begin at n * 10_000."""
    return {f"d{number}": Indexed(length, number * 10_000, blocks) for number, length in enumerate(lengths)}


def plan_of(lengths, schedule, *, stop="first", lanes=1, block_size=None):
    blocks = Blocks(block_size or 1, lanes) if lanes > 1 or block_size else None
    sources = [Source(str(number), length, blocks) for number, length in enumerate(lengths)]
    return MixPlan(sources, schedule, stop)


def order_of(*arguments, seed=0, epoch=0, shuffle=True, **options):
    return MixOrder(plan_of(*arguments, **options), seed, epoch, shuffle=shuffle)


def joined(arrays):
    return np.concatenate([np.empty(0, dtype=np.int64), *arrays])


def sources_of(indices, lengths):
    """The sources of indices of the concatenation."""
    return np.searchsorted(np.cumsum(lengths), indices, side="right")


def read(loader):
    return [int(sample) for batch in loader for sample in batch]


# Shares


@settings(deadline=None, max_examples=60)
@given(WEIGHTS, st.integers(0, 10**15))
def test_every_prefix_has_its_share_of_each_source(weights, start):
    shares, total, count = Shares(weights), sum(weights), 600
    sources, before = shares.draws(start, np.arange(count))
    first = shares.before(start)
    for source, weight in enumerate(weights):
        own = np.flatnonzero(sources == source)
        drawn = first[source] + np.concatenate([[0], np.cumsum(sources == source)])
        assert before[own].tolist() == list(range(first[source], first[source] + len(own)))
        # The weights are whole numbers of 2**30 parts, so that shares of 10**15 draws are not exact.
        ideal = (start + np.arange(count + 1)) * weight / total
        assert np.abs(drawn - ideal).max() < 1.5 + start / 2**29
        for number, position in zip(before[own].tolist(), own.tolist(), strict=True):
            assert shares.numbers([number] * len(weights))[source] == start + position


def test_one_frequent_and_many_rare_sources_do_not_cluster():
    sources, _ = Shares([900] + [1] * 100).draws(0, np.arange(20_000))
    rare = np.cumsum(sources > 0)
    assert np.abs(rare - np.arange(1, 20_001) * 0.1).max() < 1


# Orders


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(1, 9)), min_size=1, max_size=5),
    st.sampled_from(["first", "all"]),
    st.sampled_from(LANES),
    st.sampled_from([None, 3]),
    st.booleans(),
)
def test_each_pass_of_a_source_has_each_sample_once(sources, stop, lanes, block_size, shuffle):
    lengths, weights = zip(*sources, strict=True)
    order = order_of(lengths, [(0, weights)], stop=stop, lanes=lanes, block_size=block_size, shuffle=shuffle)
    indices = joined(order.blocks())
    assert len(indices) == len(order)
    passes = []
    for start, length in zip(itertools.accumulate([0, *lengths[:-1]]), lengths, strict=True):
        counts = np.bincount(indices, minlength=sum(lengths))[start : start + length]
        assert counts.max() - counts.min() <= 1
        passes.append(counts.min())
    if stop == "first":
        assert max(passes) == 1
        assert np.bincount(indices).max() == 1
    else:
        assert min(passes) >= 1


@pytest.mark.parametrize("lanes", LANES)
def test_weights_hold_up_to_a_row_at_every_window_and_nearly_at_every_position(lanes):
    lengths, weights = [70_000, 40_000, 90_000], [0.5, 0.3, 0.2]
    order = order_of(lengths, [(0, weights)], lanes=lanes, block_size=16)
    window = 8 * lanes
    for source, weight in enumerate(weights):
        drawn = np.cumsum(sources_of(joined(order.blocks()), lengths) == source)
        error = np.abs(drawn - np.arange(1, len(order) + 1) * weight)
        assert error[window - 1 :: window].max() <= 1.5 * lanes
        assert error.max() <= 1.5 * lanes + 8 * np.sqrt(lanes)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16, 64, 250, 256, 1024])
@pytest.mark.parametrize("weights", [(3, 1), (1, 1), (7, 2, 1)])
def test_each_rank_has_the_weights_however_they_fit_the_number_of_ranks(lanes, ranks, weights):
    lengths = [10**9] * len(weights)
    order = order_of(lengths, [(0, weights)], lanes=lanes)
    count = 400
    shares = []
    for rank in random.Random(0).sample(range(ranks), min(ranks, 12)):
        indices = joined(order.blocks(10**8 + rank, 10**8 + count * ranks, ranks))
        shares.append(np.bincount(sources_of(indices, lengths), minlength=len(weights)) / count)
    weights = np.array(weights) / sum(weights)
    deviation = np.sqrt(weights * (1 - weights) / count)  # of draws at random; these are more even
    assert (np.abs(np.array(shares) - weights) < 4.5 * deviation).all()


def test_a_global_batch_of_a_thousand_ranks_has_all_sources():
    lengths = [10**9] * 3
    for lanes in LANES:
        order = order_of(lengths, [(0, [0.6, 0.3, 0.1])], lanes=lanes)
        batch = joined(order.blocks(10**7, 10**7 + 1024 * 8))
        shares = np.bincount(sources_of(batch, lengths)) / len(batch)
        assert np.abs(shares - [0.6, 0.3, 0.1]).max() < 0.05


@pytest.mark.parametrize("ranks", [1, 2, 12])
def test_a_rank_reads_blocks_of_its_own(ranks):
    lengths = [4 * 12 * 100, 4 * 12 * 60]
    readers = collections.defaultdict(set)
    order = order_of(lengths, [(0, [5, 3])], lanes=12, block_size=4)
    for position, index in enumerate(joined(order.blocks()).tolist()):
        readers[index // 4].add(position % ranks)
    assert len(readers) > 1900
    assert {len(each) for each in readers.values()} == {1}


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from(LANES), st.booleans())
def test_any_positions_are_those_of_the_whole_order(seed, lanes, shuffle):
    draw = random.Random(seed)
    lengths = [draw.randint(1, 3000) for _ in range(draw.randint(1, 4))]
    weights = [draw.randint(1, 9) for _ in lengths]
    later = [draw.randint(0, 9) for _ in lengths[1:]] + [1]
    schedule = [(0, weights), (draw.randint(1, 2000), later)]
    stop = draw.choice(["first", "all"])
    order = order_of(lengths, schedule, stop=stop, lanes=lanes, block_size=5, seed=seed, shuffle=shuffle)
    whole = joined(order.blocks())
    counts = np.array([order.drawn_before(len(order))])
    assert counts.tolist()[0] == np.bincount(sources_of(whole, lengths), minlength=len(lengths)).tolist()
    for _ in range(10):
        start, step = draw.randrange(len(order)), draw.randint(1, 700)
        assert joined(order.blocks(start, None, step)).tolist() == whole[start::step].tolist()
        drawn = np.bincount(sources_of(whole[:start], lengths), minlength=len(lengths))
        assert order.drawn_before(start) == drawn.tolist()
    chosen = np.array(sorted(draw.sample(range(len(order)), min(50, len(order)))))
    assert joined(order.at(chosen)).tolist() == whole[chosen].tolist()


@pytest.mark.parametrize("lanes", [1, 192])
def test_positions_of_a_billion_samples_are_computed(lanes):
    lengths = [700_000_000, 200_000_000, 10**10]
    order = order_of(lengths, [(0, [0.7, 0.2, 0.1])], lanes=lanes, block_size=64)
    assert 999_000_000 < len(order) <= 10**9
    for position in (0, 123_456_789, len(order) - 1):
        (index,) = next(order.at(range(position, position + 1)))
        around = next(order.at(range(max(0, position - 5), position + 1)))
        assert index == around[-1]
    drawn = order.drawn_before(len(order))
    assert max(drawn[0] - 7 * 10**8, drawn[1] - 2 * 10**8) == 0, "the first that ends is given whole"


def test_schedule_changes_the_weights_at_its_steps():
    for lanes in (1, 12):
        order = order_of([20_000] * 2, [(0, [1, 0]), (996, [0, 1]), (3000, [1, 3])], lanes=lanes)
        sources = sources_of(joined(order.blocks()), [20_000] * 2)
        assert not sources[:996].any()
        assert sources[996:3000].all()
        assert abs(sources[3000:7000].mean() - 0.75) < 0.01


@pytest.mark.parametrize(
    ("schedule", "stop", "counts"),
    [
        ([(0, [1, 1])], "first", {0: 30, 1: 30}),
        ([(0, [2, 1])], "first", {0: 30, 1: 15}),
        ([(0, [1, 3])], "all", {0: 30, 1: 90}),
        ([(0, [1, 0])], "all", {0: 30}),
        ([(0, [1, 1]), (10, [1, 0])], "all", {0: 30, 1: 5}),
        ([(0, [1, 0]), (40, [0, 1])], "all", {0: 40, 1: 40}),
        ([(0, [1, 0]), (40, [0, 1])], "first", {0: 30}),
        ([(0, [1, 0]), (10, [0, 1]), (20, [1, 0])], "first", {0: 30, 1: 10}),
    ],
)
def test_an_epoch_ends_with_the_first_source_or_with_the_last(schedule, stop, counts):
    lengths = [30, 40]
    found = collections.Counter(sources_of(joined(order_of(lengths, schedule, stop=stop).blocks()), lengths).tolist())
    assert all(abs(found[source] - counts.get(source, 0)) <= 1 for source in (0, 1))


def test_a_source_that_occurs_twice_has_two_orders():
    data = Indexed(300)
    seen = read(hr.DataLoader(hr.mix([data, data.map(lambda n: n + 1000)], [1, 1]), 10, shuffle=True, seed=0))
    first, second = [n for n in seen if n < 1000], [n - 1000 for n in seen if n >= 1000]
    assert sorted(first) == sorted(second) == list(range(300))
    assert first != second


def test_epochs_and_seeds_have_other_orders_and_other_sequences_of_sources():
    def sources(**options):
        return sources_of(joined(order_of([400, 400], [(0, [1, 1])], **options).blocks()), [400, 400]).tolist()

    assert len({tuple(sources(seed=seed, epoch=epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4
    assert sources(epoch=0, shuffle=False) == sources(epoch=1, shuffle=False)


def test_rare_sources_have_smaller_rows_and_other_sources_as_many_blocks_side_by_side():
    plan = plan_of([96_000, 1200], [(0, [0.99, 0.01])], lanes=192, block_size=8)
    assert plan.lanes == 48
    order = MixOrder(plan, 0, 0, shuffle=True)
    assert abs(order.drawn_before(plan.length)[1] / plan.length - 0.01) < 0.001
    blocks = [index // 8 for index in joined(order.blocks(0, 400)).tolist() if index < 96_000]
    assert len({*blocks}) == 192
    readers = collections.defaultdict(set)
    for position, index in enumerate(joined(order.blocks()).tolist()):
        readers[index // 8].add(position % 16)
    assert sum(len(each) > 1 for number, each in readers.items() if number < 12_000) < 100


# Loaders


def test_ranks_continue_a_mix_on_any_numbers_of_ranks(monkeypatch):
    blocks = Blocks(4, 12)
    mixed = hr.mix(parts(3000, 900, 700, blocks=blocks), {"d0": 6, "d1": 3, "d2": 1}, stop="first")
    draw = random.Random(5)

    def loader(rank, ranks):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        return hr.DataLoader(mixed, batch_size=5, shuffle=True, seed=3, collate_fn=list)

    whole = read(loader(0, 1))
    seen, state = [], None
    while True:
        ranks = draw.choice([1, 2, 3, 5, 12])
        steps = draw.randint(1, 30)
        states, batches = [], []
        for rank in range(ranks):
            each = loader(rank, ranks)
            if state is not None:
                each.load_state_dict(json.loads(json.dumps(state)))
            batches.append(list(itertools.islice(each, steps)))
            states.append(each.state_dict())
        rows = itertools.zip_longest(*(itertools.chain.from_iterable(each) for each in batches))
        seen += [sample for row in rows for sample in row if sample is not None]
        state = states[0]
        if any(len(each) < steps for each in batches):
            break
    assert seen == whole[: len(seen)]
    assert len(whole) - len(seen) < 12


def test_steps_are_computed_again_and_left_out():
    mixed = hr.mix(parts(60, 40), {"d0": 2, "d1": 1}, seed=4)
    with hr.DataLoader(mixed, batch_size=6, shuffle=True, seed=0, collate_fn=list) as loader:
        epochs = [list(loader), list(loader)]
        assert epochs[0] != epochs[1]
        for epoch, step in ((0, 0), (1, 3), (1, len(epochs[1]) - 1)):
            assert loader.batch_at(epoch, step) == epochs[epoch][step]
            keys = [f"{sample // 10_000 * 10_000}/{sample % 10_000}" for sample in epochs[epoch][step]]
            assert loader.samples_at(epoch, [step]) == [keys]
    with hr.DataLoader(mixed, batch_size=6, shuffle=True, seed=0, collate_fn=list) as loader:
        loader.exclude(steps={0: [1]}, keys=["10000/7"])
        left = [sample for batch in epochs[0][:1] + epochs[0][2:] for sample in batch if sample != 10_007]
        assert read(loader) == left


def test_report_has_the_samples_of_each_source():
    mixed = hr.mix(parts(600, 400), {"d0": 3, "d1": 1})
    with hr.DataLoader(mixed, batch_size=8, shuffle=True, seed=0) as loader:
        samples = [sample for batch in itertools.islice(loader, 25) for sample in batch.tolist()]
        of_first = sum(sample < 10_000 for sample in samples)
        assert loader.report().mixed == {"d0": of_first, "d1": 200 - of_first}
        list(loader)
        assert loader.report().mixed == {"d0": 600, "d1": 200}


@pytest.mark.parametrize(
    "other",
    [
        lambda: hr.mix(parts(60, 40), {"d0": 1, "d1": 1}),
        lambda: hr.mix(parts(59, 41), {"d0": 2, "d1": 1}),
        lambda: hr.mix({"e": Indexed(60), "d1": Indexed(40)}, {"e": 2, "d1": 1}),
        lambda: hr.mix(parts(60, 40), {"d0": 2, "d1": 1}, stop="all"),
        lambda: hr.mix(parts(60, 40), {"d0": 2, "d1": 1}, seed=1),
        lambda: hr.mix(parts(60, 40), [(0, {"d0": 2, "d1": 1}), (50, {"d0": 1, "d1": 1})]),
        lambda: hr.concat(list(parts(60, 40).values())),
    ],
)
def test_a_state_of_another_mix_is_an_error(other):
    loader = hr.DataLoader(hr.mix(parts(60, 40), {"d0": 2, "d1": 1}), batch_size=5, shuffle=True, seed=0)
    next(iter(loader))
    with pytest.raises(StateError):
        hr.DataLoader(other(), batch_size=5, shuffle=True, seed=0).load_state_dict(loader.state_dict())


def test_a_mix_works_through_map_and_is_a_concatenation_to_torch():
    mixed = hr.mix(parts(30, 30), {"d0": 1, "d1": 1})
    assert len(mixed) == 60
    assert [mixed[index] for index in (0, 29, 30, 59)] == [0, 29, 10_000, 10_029]
    plain = read(hr.DataLoader(mixed, 6, shuffle=True, seed=0))
    assert read(hr.DataLoader(mixed.map(lambda n: -n), 6, shuffle=True, seed=0)) == [-sample for sample in plain]
    with hr.DataLoader(mixed, 6, shuffle=True, seed=0, num_workers=2) as loader:
        assert read(loader) == plain
    subset = torch.utils.data.Subset(mixed, [0, 31])
    assert read(hr.DataLoader(subset, 2)) == [0, 10_001]


def test_what_cannot_be_mixed_is_an_error():
    data = parts(9, 9)
    weights = {"d0": 1, "d1": 1}
    with pytest.raises(TypeError, match="weights multiplied"):
        hr.mix([hr.mix(data, weights).map(abs), Indexed(5)], [1, 1])
    with pytest.raises(TypeError, match="would lose the weights"):
        hr.concat([hr.mix(data, weights), Indexed(5)])
    with pytest.raises(TypeError, match=r"a list of \(step, weights\)"):
        hr.mix(data, lambda step: weights)
    with pytest.raises(ValueError, match="are for streams"):
        hr.mix(data, weights, stop="once")
    with pytest.raises(ValueError, match="are for streams"):
        hr.mix(data, weights, strict=False)
    with pytest.raises(ValueError, match="dataset '1' of the mix has no samples"):
        hr.mix([Indexed(5), Indexed(0)], [1, 1])
    with pytest.raises(ValueError, match="leave out generator="):
        hr.DataLoader(hr.mix(data, weights), shuffle=True, generator=torch.Generator())
    drawn = torch.utils.data.RandomSampler(range(18))
    with pytest.warns(UserWarning, match="its weights have no effect"):
        hr.DataLoader(hr.mix(data, weights), sampler=drawn)
    assert read(hr.DataLoader(hr.mix([Numbers(5), Indexed(0)], [(0, [1, 0])]), 5)) == list(range(5))
