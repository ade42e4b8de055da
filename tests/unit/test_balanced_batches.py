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
        hr.BalancedBatchSampler(
            lengths, max_tokens, rank=rank, world_size=ranks, **options
        )
        for rank in range(ranks)
    ]


def repeated(batches):
    counts = collections.Counter(itertools.chain.from_iterable(batches))
    return counts.keys(), counts.total() - len(counts)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), min_size=1, max_size=150),
    st.integers(20, 90),
    st.integers(1, 9),
    st.integers(1, 60),
    st.integers(5, 9) | st.none(),
)
def test_each_sample_comes_once_and_only_fewer_samples_than_ranks_come_twice(
    samples, max_tokens, ranks, window, most
):
    """Without a cost and limits, or with both of them."""
    lengths, images = map(np.array, zip(*samples, strict=True))
    limits = {"images": (images, most), "samples": (np.ones_like(images), 4)}
    options = {"cost": hr.quadratic(1, 0.5), "limits": limits} if most else {}
    parts = samplers(lengths, max_tokens, ranks, window=window, **options)
    steps = [*zip(*parts, strict=True)]
    indices, more = repeated(itertools.chain.from_iterable(steps))
    assert indices == set(range(len(lengths)))
    assert repeated(itertools.chain.from_iterable(steps[:-1]))[1] == 0
    assert more <= repeated(steps[-1])[1] < ranks
    for batch in itertools.chain.from_iterable(steps):
        assert 0 < len(batch) <= (4 if most else max_tokens)
        assert lengths[batch].sum() <= max_tokens
        assert most is None or images[batch].sum() <= most


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


def imbalances(lengths, max_tokens, true_cost, ranks, **options):
    """The largest of the mean cost, of each step of all ranks."""
    batches = hr.BalancedBatchSampler(lengths, max_tokens, **options)
    costs = [true_cost(lengths[batch].astype(float)).sum() for batch in batches]
    steps = np.array(costs[: len(costs) // ranks * ranks]).reshape(-1, ranks)
    return steps.max(axis=1) / steps.mean(axis=1)


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize(
    "cost",
    [hr.quadratic(1, 1 / 8192), lambda lengths: lengths**1.2],
    ids=["quadratic", "own"],
)
def test_ranks_have_nearly_equal_costs(cost, ranks):
    lengths, max_tokens = LENGTHS["log-normal"], MAX_TOKENS["log-normal"]
    assert imbalances(lengths, max_tokens, cost, ranks).max() > 1.05
    assert imbalances(lengths, max_tokens, cost, ranks, cost=cost).max() <= 1.03


def test_batches_of_samples_that_cost_more_than_others_are_of_the_same_steps():
    lengths, cost = LENGTHS["log-normal"], hr.quadratic(1, 1 / 2048)
    before, after = (
        imbalances(lengths, 16_384, cost, 8, **options)
        for options in ({}, {"cost": cost})
    )
    assert before.mean() > 1.3
    assert after.mean() <= 1.03
    assert (after <= 1.03).mean() >= 0.95


def timed(loader, seconds_of_step):
    """Replace the times of the loader's steps: from the return of `next()` to the next call."""
    kept, now, records = loader._control.counters._kept, 100.0, []
    for record in kept:
        records.append(record._replace(called=now, returned=now + 0.5))
        now += 0.5 + seconds_of_step(record.number)
    kept.clear()
    kept.extend(records)


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize(("a", "b"), [(3e-6, 2e-9), (1e-6, 0), (0, 1e-9)])
def test_cost_is_fitted_to_the_times_of_the_slowest_rank(a, b, resumed):
    lengths, true = LENGTHS["log-normal"], hr.quadratic(a, b)

    def make():
        sampler = hr.BalancedBatchSampler(lengths, 16_384, rank=1, world_size=4)
        return hr.DataLoader(Numbers(len(lengths)), batch_sampler=sampler, seed=4)

    whole = [*hr.BalancedBatchSampler(lengths, 16_384)]
    loader = make()
    if resumed:
        list(itertools.islice(loader, 7))
        state = loader.state_dict()
        loader = make()
        loader.load_state_dict(state)
    batches = iter(loader)
    assert len(list(itertools.islice(batches, 90))) == 90

    def seconds_of_step(number):
        step = whole[number * 4 : number * 4 + 4]
        checkpoint = 9.0 * (number % 30 == 11)
        return (
            max(true(lengths[batch].astype(float)).sum() for batch in step) + checkpoint
        )

    timed(loader, seconds_of_step)
    fitted = hr.fit_cost(loader)
    assert fitted.a == pytest.approx(a, rel=1e-6, abs=1e-12)
    assert fitted.b == pytest.approx(b, rel=1e-6, abs=1e-15)
    assert (
        hr.BalancedBatchSampler(lengths, 16_384, cost=fitted).state_dict()["epoch"] == 0
    )


def test_constant_time_of_a_step_is_no_cost_if_batches_differ():
    lengths, true = np.tile([1, 5, 30], 400), hr.quadratic(1e-3, 1e-4)
    sampler = hr.BalancedBatchSampler(
        lengths, 90, limits={"samples": (np.ones_like(lengths), 5)}
    )
    loader = hr.DataLoader(Numbers(len(lengths)), batch_sampler=sampler)
    batches = [lengths[batch.long()] for batch in loader]
    timed(loader, lambda number: 0.02 + true(batches[number].astype(float)).sum())
    assert hr.fit_cost(loader) == pytest.approx(true, rel=0.02)


def test_cost_is_fitted_only_to_steps_of_a_balanced_batch_sampler():
    loader = hr.DataLoader(Numbers(40), batch_size=2)
    assert len(list(loader)) == 20
    few = hr.DataLoader(Numbers(8), batch_sampler=hr.BalancedBatchSampler([1] * 8, 1))
    next(iter(few))
    for each in (loader, few):
        with pytest.raises(
            ValueError, match="10 steps of a loader with a BalancedBatchSampler"
        ):
            hr.fit_cost(each)


def test_samples_longer_than_half_of_the_budget_have_batches_of_their_own():
    assert sorted(hr.BalancedBatchSampler([6] * 10, 10)) == [
        [index] for index in range(10)
    ]
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
    options = {"cost": hr.quadratic(1, 1e-3)} if seed == 1 else {}
    for restart in range(51):
        ranks = draw.randint(1, 9)
        parts = samplers(lengths, 5000, ranks, seed=seed, window=500, **options)
        for part in parts if state else ():
            part.load_state_dict(json.loads(json.dumps(state)))
        steps = zip(*parts, strict=True)
        for step in (
            itertools.islice(steps, draw.randint(0, 3)) if restart < 50 else steps
        ):
            given += step
        states = [part.state_dict() for part in parts]
        assert states == [states[0]] * ranks
        state = states[0]
    indices, more = repeated(given)
    assert (len(indices), more) == (len(lengths), 0)
    assert state == {"epoch": 1, "window": 0, "batches": 0, "checksum": None}


def test_open_iterations_of_a_loader_have_their_epochs():
    def make():
        sampler = hr.BalancedBatchSampler(range(1, 9), 9, seed=0)
        return hr.DataLoader(range(8), batch_sampler=sampler, collate_fn=list)

    loader, other = make(), make()
    first, second = iter(loader), iter(loader)
    assert [list(first), list(second), list(loader)] == [list(other) for _ in range(3)]


def test_state_of_a_loader_with_another_max_tokens_is_an_error():
    def loader_of(max_tokens):
        sampler = hr.BalancedBatchSampler(MIXED, max_tokens, rank=0, world_size=1)
        return hr.DataLoader(Numbers(len(MIXED)), batch_sampler=sampler, seed=4)

    with pytest.raises(StateError, match="max_tokens"):
        loader_of(5001).load_state_dict(loader_of(5000).state_dict())


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
        {"cost": hr.quadratic(1, 1e-3)},
        {"limits": {"samples": (np.ones_like(MIXED), 100)}},
    ],
)
def test_state_with_other_lengths_or_arguments_is_an_error(change):
    sampler = hr.BalancedBatchSampler(MIXED, 5000, window=500)
    next(iter(sampler))
    other = hr.BalancedBatchSampler(
        **{"lengths": MIXED, "max_tokens": 5000, "window": 500} | change
    )
    other.load_state_dict(sampler.state_dict())
    with pytest.raises(
        StateError, match="other lengths, max_tokens=, cost=, limits=, window= or seed="
    ):
        next(iter(other))


def test_lengths_that_change_after_the_sampler_was_made_are_an_error():
    lengths = np.array([3, 3, 3])
    sampler = hr.BalancedBatchSampler(lengths, 4)
    assert len(list(sampler)) == 3
    lengths[1] = 9
    with pytest.raises(ValueError, match="sample 1 has 9 tokens, which must be 0 to 4"):
        list(sampler)


@pytest.mark.parametrize("change", [{"window": "x"}, {"batches": -1}, {"epoch": -1}])
def test_damaged_state_is_an_error(change):
    sampler = hr.BalancedBatchSampler(MIXED, 5000, window=500)
    next(iter(sampler))
    with pytest.raises(StateError):
        sampler.load_state_dict(sampler.state_dict() | change)


def test_wrong_arguments_are_errors():
    for lengths, max_tokens, what in (
        ([3, 9, 4], 8, "sample 1 has 9 tokens, which must be 0 to 8"),
        ([3, -1, 4], 8, "sample 1 has -1 tokens"),
        ([0, 0], 0, "max_tokens=0 must be at least 1"),
        ([], 8, "lengths must be whole numbers"),
        ([0.5], 8, "lengths must be whole numbers"),
        (8, 8, "lengths must be whole numbers"),
    ):
        with pytest.raises(ValueError, match=what):
            hr.BalancedBatchSampler(lengths, max_tokens)
    for images, what in (
        ([1, 9], "sample 1 has 9 images, which must be 0 to 8"),
        ([1, -1], "sample 1 has -1 images"),
        ([1], "limits= as many"),
        ([1, 0.5], "limits= as many"),
    ):
        with pytest.raises(ValueError, match=what):
            hr.BalancedBatchSampler([1, 1], 8, limits={"images": (images, 8)})
    for cost in (
        lambda lengths: lengths * np.nan,
        lambda lengths: lengths - 2,
        hr.quadratic(0, 0),
    ):
        with pytest.raises(ValueError, match="cost= must return positive numbers"):
            list(hr.BalancedBatchSampler([1, 2, 3], 8, cost=cost))
    with pytest.raises(TypeError, match="give the trainer a number of steps"):
        len(hr.BalancedBatchSampler([1], 8))
    with pytest.raises(StateError):
        hr.BalancedBatchSampler([1], 8).load_state_dict({"epoch": 0, "cursor": 5})
