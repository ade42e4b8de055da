"""Memory in flight is bounded before a size is known."""

from headrace._engine.memory import MemoryBudget, SampleSizes, size_of_a_sample
from headrace._records.batches import BatchPlan, FetchLoad, RawBatch

SIZE = 1000
PLANS = [BatchPlan(number, (2 * number, 2 * number + 1), 0) for number in range(100)]


def admitted(budget, plans, at_once=64):
    """The number of plans that the budget admits."""
    return next(
        (count for count, plan in enumerate(plans) if not budget.take(plan, at_once)), len(plans)
    )


def fetch(budget, plans):
    for plan in plans:
        budget.on_fetched(RawBatch(plan, [bytes(SIZE)] * 2))


def test_before_sizes_are_known_few_samples_are_admitted_and_then_no_more_than_are_fetched_at_once():
    sizes = SampleSizes()
    budget = MemoryBudget(10**9, sizes)
    assert admitted(budget, PLANS) == 2, "four samples"
    assert budget.load(FetchLoad(), 1).held_plans == 0, "it does not wait for memory"
    fetch(budget, PLANS[:2])
    assert admitted(budget, PLANS[2:]) == 10, "four for each sample that is known, and four"
    fetch(budget, PLANS[2:12])
    assert admitted(budget, PLANS[12:]) == 21, "64 at once, and one batch more"
    fetch(budget, PLANS[12:33])
    assert not budget.take(PLANS[33], 64)
    assert budget.load(FetchLoad(), 1).held_plans == 0, "it does not wait for memory"
    budget.on_assembled()
    assert admitted(budget, PLANS[33:]) == 67


def test_sizes_that_repeat_by_powers_of_two_are_measured_evenly():
    sizes = SampleSizes()
    for number in range(160):
        sizes.on_fetched(RawBatch(PLANS[0], [bytes(10 if number % 8 == 7 else SIZE)] * 2))
    assert sizes.fetched.mean > SIZE / 2
    mean = size_of_a_sample([bytes(10 if slot % 8 == 0 else SIZE) for slot in range(64)])
    assert mean > SIZE / 2
