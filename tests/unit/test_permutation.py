"""`headrace.Permutation`: every value once, at any position at once, as random as torch's."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace as hr

AROUND_POWERS = [2**k + offset for k in (15, 16, 17) for offset in (-1, 0, 1)]


def is_bijective(n, seed, epoch):
    seen = np.zeros(n, dtype=bool)
    seen[hr.Permutation(n, seed, epoch)[:]] = True
    return bool(seen.all())


def test_every_value_comes_once_for_every_length_up_to_1024_and_around_powers_of_two():
    lengths = (*range(1025), *AROUND_POWERS)
    assert [n for n in lengths if not is_bijective(n, seed=n % 5, epoch=n % 3)] == []


@pytest.mark.parametrize("n", [10**9, 2**40 + 1, 2**60])
def test_values_of_huge_lengths_are_distinct_and_in_range(n):
    found = hr.Permutation(n, seed=1)[n - 50_000 :]
    assert len(np.unique(found)) == 50_000
    assert found.min() >= 0
    assert found.max() < n


# The same on every machine, and in every version: saved states depend on it.
@pytest.mark.parametrize(
    ("n", "seed", "epoch", "first"),
    [
        (10, 0, 0, [4, 5, 9, 8, 1, 3, 2, 7, 0, 6]),
        (65_535, 7, 1, [33679, 3342, 48929, 30062]),
        (65_536, 7, 1, [13925, 7401, 44482, 20525]),
        (1_000_003, 2**63 - 1, 2, [542605, 602312, 237035, 550734]),
        (10**9, 0, 0, [674926332, 588355917, 123449438, 533760022]),
        (
            2**60,
            2**64 - 1,
            2**64 - 1,
            [
                158018458023373382,
                438945742031880014,
                838970791527663377,
                1018006017065883167,
            ],
        ),
    ],
)
def test_values_never_change(n, seed, epoch, first):
    assert hr.Permutation(n, seed, epoch)[: len(first)].tolist() == first


def z_scores(n, orders):
    """Chi-square of (value at each position, difference of neighbours, first two values), in standard deviations."""
    values, differences, pairs = np.zeros((n, n)), np.zeros(n), np.zeros((n, n))
    for order in orders:
        values[np.arange(n), order] += 1
        differences += np.bincount(np.diff(order) % n, minlength=n)
        pairs[order[0], order[1]] += 1
    different = ~np.eye(n, dtype=bool)

    def score(counts, freedom):
        expected = counts.mean()
        return (((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(
            2 * freedom
        )

    return (
        score(values, (n - 1) ** 2),
        score(differences[1:], n - 2),
        score(pairs[different], n * (n - 1) - 1),
    )


@pytest.mark.parametrize("n", [5, 16, 100])
def test_positions_and_differences_are_as_random_as_torchs(n):
    trials = 3000
    ours = z_scores(n, (hr.Permutation(n, seed, epoch=0)[:] for seed in range(trials)))
    generator = torch.Generator().manual_seed(0)
    torchs = z_scores(
        n, (torch.randperm(n, generator=generator).numpy() for _ in range(trials))
    )
    assert max(map(abs, torchs)) < 4
    assert max(map(abs, ours)) < 4


@pytest.mark.parametrize("lag", [1, 2, 257, 32_768])
def test_differences_over_any_distance_are_uniform_in_long_orders(lag):
    n = 66_000
    order = hr.Permutation(n, seed=0)[:]
    counts = np.bincount((order[lag:] - order[:-lag]) % n * 100 // n, minlength=100)
    expected = (n - lag) / 100
    assert ((counts - expected) ** 2 / expected).sum() < 99 + 4 * np.sqrt(2 * 99)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 50_000), st.integers(0, 2**64 - 1), st.integers(0, 9), st.data())
def test_any_access_agrees_with_the_whole_order(n, seed, epoch, data):
    order = hr.Permutation(n, seed, epoch)
    whole = order[:]
    bound = st.none() | st.integers(-n - 2, n + 2)
    part = slice(
        data.draw(bound), data.draw(bound), data.draw(st.integers(-9, 9).filter(bool))
    )
    assert np.array_equal(order[part], whole[part])
    positions = np.array(
        data.draw(st.lists(st.integers(-n, n - 1), max_size=8)), dtype=np.int64
    )
    assert np.array_equal(order[positions], whole[positions])
    assert [order[int(position)] for position in positions] == whole[positions].tolist()
    start, step = data.draw(st.integers(0, n + 2)), data.draw(st.integers(1, 9))
    assert [
        value for block in order.blocks(start, step=step) for value in block
    ] == whole[start::step].tolist()


@pytest.mark.parametrize(
    "position", [10, -11, [0, 10], 0.5, [0.5], "a", True, np.array(10)]
)
def test_a_position_that_is_not_there_is_an_index_error(position):
    with pytest.raises(IndexError, match=r"out of range|must be integers"):
        hr.Permutation(10, 0)[position]


@pytest.mark.parametrize(
    ("n", "seed", "epoch"), [(-1, 0, 0), (2**60 + 1, 0, 0), (1, 2**64, 0), (1, 0, -1)]
)
def test_numbers_out_of_range_are_errors(n, seed, epoch):
    with pytest.raises(ValueError, match="must be between 0 and 2"):
        hr.Permutation(n, seed, epoch)
