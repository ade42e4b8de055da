"""Plans are drawn lazily, numbered, and seeded by the epoch and their position among the samples of all ranks."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace._core.consumer.planning import Planner, PlanStart, Scattered
from headrace._core.seeding import batch_seed

SEEDS = st.integers(0, 2**63 - 1)


def planner(sampler, *, batched=True, base_seed=0, epoch=0, stream=False, **start):
    return Planner(sampler, batched=batched, stream=stream, base_seed=base_seed, epoch=epoch, start=PlanStart(**start))


def test_batch_sampler_yields_whole_plans():
    plans = list(planner([[1, 2], (3,), [], range(2)], epoch=5))
    assert [plan.indices for plan in plans] == [(1, 2), (3,), (), (0, 1)]
    assert [plan.number for plan in plans] == [0, 1, 2, 3]
    assert [list(plan.positions) for plan in plans] == [[0, 1], [2], [], [3, 4]]
    assert {plan.epoch for plan in plans} == {5}


def test_ranks_take_positions_in_turn():
    plans = list(planner([[1, 2], [3]], first=10 + 1, stride=3, batches=4))
    assert [list(plan.positions) for plan in plans] == [[11, 14], [17]]
    assert [plan.number for plan in plans] == [4, 5]
    assert [plan.seed for plan in plans] == [batch_seed(0, 0, 11), batch_seed(0, 0, 17)]


def test_batches_of_a_stream_have_the_positions_of_all_its_samples():
    plans = list(planner([[None, None], [None]], stream=True, first=1, stride=2))
    assert [list(plan.positions[:3]) for plan in plans] == [[1, 3, 5], [1, 3, 5]]
    assert [plan.seed for plan in plans] == [batch_seed(0, 0, 1), batch_seed(0, 0, 5)]


def test_samples_between_delivered_ones_keep_their_positions():
    plans = planner([Scattered(("a", "b"), (4, 7)), ["c"]], stride=2)
    assert [list(plan.positions) for plan in plans] == [[8, 14], [16]]


@pytest.mark.parametrize("stream", [False, True])
def test_replacements_have_positions_and_seeds_of_their_own(stream):
    plans = planner([[0, 1], [2, 3]], stream=stream)
    regular = list(itertools.islice(plans, 2))
    repeats = [plans.repeat([0, 1]), plans.repeat([0, 1])]
    assert len({plan.seed for plan in regular + repeats}) == 4
    assert [plan.number for plan in repeats] == [2, 3]
    if not stream:
        assert len({position for plan in regular + repeats for position in plan.positions}) == 8


def test_plans_say_how_many_batches_were_taken_before():
    plans = planner([[0], [1], [2], [3]], batches=4)
    assert [next(plans).taken, next(plans).taken] == [3, 3]
    for _ in range(2):
        plans.taken += 1
    assert next(plans).taken == 5
    assert plans.repeat([0]).taken == 5


def test_sampler_yields_plans_of_one_sample():
    assert [plan.indices for plan in planner(["a", [1, 2]], batched=False)] == [("a",), ([1, 2],)]


def test_sampler_is_drawn_lazily():
    drawn = []
    plans = planner(drawn.append(i) or [i] for i in itertools.count())
    assert drawn == []
    next(plans)
    next(plans)
    assert drawn == [0, 1]


def test_list_that_the_sampler_reuses_is_copied():
    class Reusing:
        def __iter__(self):
            batch = []
            for i in range(3):
                batch[:] = [i]
                yield batch

    assert [plan.indices for plan in list(planner(Reusing()))] == [(0,), (1,), (2,)]


@given(base=SEEDS, epoch=st.integers(0, 10_000), number=st.integers(0, 10_000_000))
def test_seed_depends_on_all_three_and_on_nothing_else(base, epoch, number):
    seed = batch_seed(base, epoch, number)
    assert seed == batch_seed(base, epoch, number)
    assert 0 <= seed < 2**64
    others = (
        batch_seed(base ^ 1, epoch, number),
        batch_seed(base, epoch + 1, number),
        batch_seed(base, epoch, number + 1),
    )
    assert len({seed, *others}) == 4


def test_seeds_are_the_same_on_every_machine():
    assert batch_seed(0, 0, 0) == 2891389769238885931
    assert batch_seed(2**63 - 1, 3, 5) == 5492607835317456068
    assert [plan.seed for plan in planner([[0], [1]], base_seed=7, epoch=2)] == [
        batch_seed(7, 2, 0),
        batch_seed(7, 2, 1),
    ]


@pytest.mark.parametrize("sampler", [[3], [None]])
def test_batch_sampler_must_give_batches(sampler):
    with pytest.raises(TypeError):
        next(planner(sampler))
