"""Mixes with weights that change, named streams, counts, and streams that have changed since the state was saved."""

import collections
import math

import pytest

import headrace as hr
from headrace._streams.kinds import ranks_differ
from tests.unit.streams.reading import Count


def mix(weights, *, length=9000, **options):
    """Samples of stream n begin at n * 10_000."""
    parts = [Count(begin + length, begin) for begin in (0, 10_000)]
    return hr.mix(parts, weights, **options)


def drawn(samples):
    return collections.Counter(sample // 10_000 for sample in samples)


def test_schedule_changes_weights_at_its_numbers_of_samples():
    samples = list(mix([(0, [1, 0]), (100, [0, 1]), (150, [1, 3])]).take(2150))
    assert drawn(samples[:100]) == {0: 100}
    assert drawn(samples[100:150]) == {1: 50}
    assert 1400 < drawn(samples[150:])[1] < 1600


@pytest.mark.parametrize(
    ("temperature", "share"),
    [(1, 0.9), (2, 0.75), (1e9, 0.5), (math.inf, 0.5), (0.5, 0.99), (0.001, 1)],
)
@pytest.mark.parametrize("scale", [1e301, 1e-307])
def test_temperature_evens_out_sizes_of_any_scale(temperature, share, scale):
    found = drawn(mix([9e6 * scale, 1e6 * scale], temperature=temperature).take(2000))
    assert found[0] / 2000 == pytest.approx(share, abs=0.03)
    assert drawn(mix([(0, [scale, 0])], temperature=temperature).take(50)) == {0: 50}


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        ([(0, [1, 0])], {0: 30}),
        ([(0, [1, 1]), (10, [1, 0])], None),  # the second stream does not end before
        ([(0, [1, 0]), (40, [0, 1])], {0: 40, 1: 30}),
    ],
)
def test_stream_without_a_weight_now_or_later_is_not_waited_for(weights, counts):
    found = drawn(mix(weights, length=30, stop="all"))
    assert counts is None or found == counts


def test_each_stream_is_read_once():
    parts = [Count(5), Count(140, 100), Count(0), Count(1001, 1000)]
    samples = list(hr.mix(parts, [1, 1, 9, 1], stop="once"))
    assert sorted(samples) == [*range(5), *range(100, 140), 1000]
    ends = [(0, [1, 1, 1, 1]), (2, [1, 0, 0, 0])]
    assert set(list(hr.mix(parts, ends, stop="once"))[2:]) <= set(range(5)), (
        "until no stream with a weight is left"
    )


def test_dataset_that_occurs_twice_has_another_order_the_second_time():
    shuffled = Count(50).shuffle(50)
    pairs = list(
        hr.mix(
            [shuffled.map(lambda n: ("a", n)), shuffled.map(lambda n: ("b", n))],
            [1, 1],
            stop="once",
        )
    )
    first, second = ([n for name, n in pairs if name == each] for each in "ab")
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first == list(shuffled)


# Ranks


def test_each_rank_draws_for_itself_and_again_the_same(as_rank):
    def sources(rank, ranks):
        as_rank(rank, ranks)
        samples = list(mix([3, 1], seed=5).take(100))
        return [sample // 10_000 for sample in samples]

    steps = [*zip(*(sources(rank, 64) for rank in range(64)), strict=True)]
    assert all(4 <= sum(step) <= 34 for step in steps), (
        "of 64 ranks a quarter draws from the second stream"
    )
    assert sources(63, 64) == [step[63] for step in steps]
    assert sources(0, 1) == [step[0] for step in steps]


def test_rank_given_to_a_part_is_the_same_in_a_process_and_for_the_other_parts():
    part = Count(40).split(rank=1, world_size=2)
    orders = []
    for placement in ("thread", "process"):
        mixed = hr.mix([part, Count(90, 50)], [1, 1])
        with hr.DataLoader(mixed, placement=placement) as loader:
            orders.append([batch.item() for batch in loader])
    assert orders[0] == orders[1]
    with pytest.raises(
        ValueError, match=r"\(40\)\.split\(\) was given.*\(90\)\.split\(\) in the"
    ):
        iter(hr.DataLoader(hr.concat([part, Count(90).split()])))


def test_ranks_of_a_mix_have_equal_numbers_only_without_an_end():
    endless = Count(9).map(abs).repeat()
    for stop, parts, differ in (
        ("first", [endless, endless.shuffle(3)], False),
        ("first", [endless, Count(9)], True),
        ("all", [endless, Count(9)], False),
        ("all", [Count(9), Count(9)], True),
    ):
        assert ranks_differ(hr.mix(parts, [1, 1], stop=stop)) is differ
    assert ranks_differ(hr.mix([endless, endless], [1, 1]).take(5)) is False
    assert ranks_differ(hr.mix([Count(9)], [1]).split()) is False
