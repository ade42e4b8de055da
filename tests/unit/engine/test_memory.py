"""Memory in flight is bounded before a size is known."""

from headrace._core.batches import BatchPlan, FetchLoad, HostBatch, RawBatch
from headrace._core.engine.memory import MemoryBudget, SampleSizes, size_of_a_sample

SIZE = 1000
PLANS = [BatchPlan(number, (2 * number, 2 * number + 1), 0) for number in range(100)]


def admitted(budget, plans):
    """The number of plans that the budget admits."""
    return next((count for count, plan in enumerate(plans) if not budget.take(plan)), len(plans))


def test_before_a_batch_is_assembled_one_or_a_few_small_ones_are_admitted():
    sizes = SampleSizes()
    budget = MemoryBudget(20 * SIZE, sizes)
    assert admitted(budget, PLANS) == 2, "four samples"
    sizes.on_fetched(RawBatch(PLANS[0], [bytes(SIZE)] * 2))
    budget.on_fetched(0)
    assert admitted(budget, PLANS[2:]) == 0, "what a transform makes of it is not known"
    assert budget.load(FetchLoad(), 1).held_plans == 0, "it does not wait for memory"
    sizes.on_assembled(HostBatch(PLANS[0], bytes(2 * SIZE), 2))
    assert admitted(budget, PLANS[2:]) == 7


def test_sizes_that_repeat_by_powers_of_two_are_measured_evenly():
    sizes = SampleSizes()
    for number in range(160):
        sizes.on_fetched(RawBatch(PLANS[0], [bytes(10 if number % 8 == 7 else SIZE)] * 2))
    assert sizes.fetched > SIZE / 2
    mean = size_of_a_sample([bytes(10 if slot % 8 == 0 else SIZE) for slot in range(64)])
    assert mean > SIZE / 2
