"""`BalancedBatchSampler`: every sample once, equal numbers of tokens and steps, and any number of ranks continue."""

import collections
import itertools
import json
import pickle
import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.errors import StateError
from tests.datasets import Numbers

RNG = np.random.default_rng(0)
FILES = [path.stat().st_size // 4 for path in Path(torch.__file__).parent.rglob("*.py")]
LENGTHS = {
    "log-normal": RNG.lognormal(5.8, 1.2, 100_000).clip(0, 8192).astype(np.int32),
    "files of torch": RNG.choice(np.minimum(sorted(FILES), 65_536), 40_000),
}
MAX_TOKENS = {"log-normal": 16_384, "files of torch": 65_536}
MIXED = np.concatenate([RNG.integers(0, 300, 3000), RNG.integers(0, 5000, 100)])


def samplers(lengths, max_tokens, ranks, **options):
    return [
        hr.BalancedBatchSampler(lengths, max_tokens, rank=rank, world_size=ranks, **options)
        for rank in range(ranks)
    ]


def repeated(batches):
    counts = collections.Counter(itertools.chain.from_iterable(batches))
    return counts.keys(), counts.total() - len(counts)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=150),
    st.integers(20, 90),
    st.integers(1, 9),
    st.integers(1, 60),
)
def test_each_sample_comes_once_and_only_fewer_samples_than_ranks_come_twice(
    lengths, max_tokens, ranks, window
):
    steps = [*zip(*samplers(lengths, max_tokens, ranks, window=window), strict=True)]
    indices, more = repeated(itertools.chain.from_iterable(steps))
    assert indices == set(range(len(lengths)))
    assert repeated(itertools.chain.from_iterable(steps[:-1]))[1] == 0
    assert more <= repeated(steps[-1])[1] < ranks
    assert all(0 < len(batch) <= max_tokens for step in steps for batch in step)
    assert all(
        sum(lengths[index] for index in batch) <= max_tokens for step in steps for batch in step
    )


@pytest.mark.parametrize("ranks", [8, 64, 512])
@pytest.mark.parametrize("name", LENGTHS)
def test_ranks_have_nearly_equal_and_full_batches(name, ranks):
    lengths, max_tokens = LENGTHS[name], MAX_TOKENS[name]
    batches = [
        lengths[batch].sum() for batch in hr.BalancedBatchSampler(lengths, max_tokens)
    ]  # of all ranks, in turn
    steps = np.array(batches[: len(batches) // ranks * ranks]).reshape(-1, ranks)
    assert len(steps)
    assert (steps.max(axis=1) / steps.mean(axis=1)).max() <= 1.02
    assert steps.mean() / max_tokens >= 0.97


def test_samples_longer_than_half_of_the_budget_have_batches_of_their_own():
    assert sorted(hr.BalancedBatchSampler([6] * 10, 10)) == [[index] for index in range(10)]
    assert {len(batch) for batch in hr.BalancedBatchSampler([34] * 300, 100)} == {1, 2}


def test_ranks_take_the_batches_of_one_rank_in_turn_and_epochs_differ():
    one, *three = (samplers(MIXED, 5000, ranks, seed=2, window=512) for ranks in (1, 3))
    whole = [*one[0]]
    parts = [*map(list, three[0])]
    assert [batch for step in zip(*parts, strict=True) for batch in step][
        : len(whole) // 3 * 3
    ] == whole[: len(whole) // 3 * 3]
    assert one[0].state_dict()["epoch"] == 1
    assert [*one[0]][:5] != whole[:5]
    one[0].set_epoch(0)
    assert [*one[0]] == whole
    three[0][1].set_epoch(0)
    assert [*pickle.loads(pickle.dumps(three[0][1]))] == parts[1]


@pytest.mark.parametrize("seed", range(3))
def test_fifty_restarts_with_other_numbers_of_ranks_give_every_sample_once(seed):
    lengths, draw, state, given = np.tile(MIXED, 6), random.Random(seed), None, []
    for restart in range(51):
        ranks = draw.randint(1, 9)
        parts = samplers(lengths, 5000, ranks, seed=seed, window=500)
        for part in parts if state else ():
            part.load_state_dict(json.loads(json.dumps(state)))
        steps = zip(*parts, strict=True)
        for step in itertools.islice(steps, draw.randint(0, 3)) if restart < 50 else steps:
            given += step
        states = [part.state_dict() for part in parts]
        assert states == [states[0]] * ranks
        state = states[0]
    indices, more = repeated(given)
    assert (len(indices), more) == (len(lengths), 0)
    assert state == {"epoch": 1, "window": 0, "batches": 0, "checksum": None}


def test_state_of_a_loader_with_another_max_tokens_is_an_error():
    def loader_of(max_tokens):
        sampler = hr.BalancedBatchSampler(MIXED, max_tokens, rank=0, world_size=1)
        return hr.DataLoader(Numbers(len(MIXED)), batch_sampler=sampler, seed=4)

    with pytest.raises(StateError, match="max_tokens"):
        loader_of(5001).load_state_dict(loader_of(5000).state_dict())


def test_torchs_loader_reads_its_batches():
    sampler = hr.BalancedBatchSampler(MIXED, 5000)
    loader = torch.utils.data.DataLoader(range(len(MIXED)), batch_sampler=sampler, collate_fn=list)
    given = [*loader]
    sampler.set_epoch(0)
    assert given == [*sampler]


def test_a_hundred_million_lengths_in_a_file_take_the_memory_of_a_window(tmp_path):
    with open(tmp_path / "lengths", "wb") as file:
        file.truncate(10**8)
    lengths = np.memmap(tmp_path / "lengths", np.uint8, mode="r")
    tracemalloc.start()
    try:
        batch = next(iter(hr.BalancedBatchSampler(lengths, 100, window=1000)))
        assert tracemalloc.get_traced_memory()[1] < 10**6
    finally:
        tracemalloc.stop()
    assert 90 <= len(batch) <= 100


@pytest.mark.parametrize(
    "change",
    [
        {"lengths": MIXED[::-1]},
        {"lengths": MIXED[1:]},
        {"lengths": MIXED[:400]},
        {"window": 600},
        {"seed": 8},
    ],
)
def test_state_with_other_lengths_or_arguments_is_an_error(change):
    sampler = hr.BalancedBatchSampler(MIXED, 5000, window=500)
    next(iter(sampler))
    other = hr.BalancedBatchSampler(
        **{"lengths": MIXED, "max_tokens": 5000, "window": 500} | change
    )
    other.load_state_dict(sampler.state_dict())
    with pytest.raises(StateError, match="other lengths, max_tokens=, window= or seed="):
        next(iter(other))


def test_lengths_that_change_after_the_sampler_was_made_are_an_error():
    lengths = np.array([3, 3, 3])
    sampler = hr.BalancedBatchSampler(lengths, 4)
    assert len(list(sampler)) == 3
    lengths[1] = 9
    with pytest.raises(
        ValueError, match="sample 1 has 9 tokens, more than max_tokens=4: the lengths have changed"
    ):
        list(sampler)


@pytest.mark.parametrize(
    "change", [{"window": -1}, {"batches": -1}, {"epoch": -1}, {"window": "x"}]
)
def test_damaged_state_is_an_error(change):
    sampler = hr.BalancedBatchSampler(MIXED, 5000, window=500)
    next(iter(sampler))
    with pytest.raises(StateError):
        sampler.load_state_dict(sampler.state_dict() | change)


def test_wrong_arguments_are_errors():
    for lengths, max_tokens, what in (
        ([3, 9, 4], 8, "sample 1 has 9 tokens, which must be 0 to max_tokens=8"),
        ([3, -1, 4], 8, "sample 1 has -1 tokens"),
        ([0, 0], 0, "max_tokens=0 must be at least 1"),
        ([], 8, "lengths must be whole numbers"),
        ([0.5], 8, "lengths must be whole numbers"),
        ([[1]], 8, "lengths must be whole numbers"),
    ):
        with pytest.raises(ValueError, match=what):
            hr.BalancedBatchSampler(lengths, max_tokens)
    with pytest.raises(TypeError, match="give the trainer a number of steps"):
        len(hr.BalancedBatchSampler([1], 8))
    with pytest.raises(StateError):
        hr.BalancedBatchSampler([1], 8).load_state_dict({"epoch": 0, "cursor": 5})
