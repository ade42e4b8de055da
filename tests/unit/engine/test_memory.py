"""Memory in flight is bounded, and the next batch in order is never held back."""

from headrace._core.batches import BatchPlan, FetchLoad, HostBatch, RawBatch
from headrace._core.engine.memory import MemoryBudget, SampleSizes

SIZE = 1000
PLANS = [BatchPlan(number, (2 * number, 2 * number + 1), 0) for number in range(100)]


def sizes(fetched=None, assembled=None):
    """Of samples of which a batch was measured."""
    known = SampleSizes()
    if fetched is not None:
        known.on_fetched(RawBatch(PLANS[0], [bytes(fetched)] * 2))
    if assembled is not None:
        known.on_assembled(HostBatch(PLANS[0], bytes(2 * assembled), 2))
    return known


def admitted(budget, plans, at_once=64):
    """The number of plans that the budget admits."""
    return next((count for count, plan in enumerate(plans) if not budget.take(plan, at_once)), len(plans))


def test_a_guess_bounds_what_is_fetched_before_the_first_sample():
    assert admitted(MemoryBudget(8 * SIZE, sizes()), PLANS) == 1


def test_no_more_is_fetched_than_the_budget_holds_and_taking_a_batch_makes_room():
    budget = MemoryBudget(8 * (SIZE + 40), sizes(SIZE, SIZE))
    assert admitted(budget, PLANS) == 4
    budget.on_consumed(1)
    assert not budget.take(PLANS[4], 64), "those are not fetched yet, by another engine's order"
    for number in range(4):
        budget.on_fetched(number)
    assert admitted(budget, PLANS[4:]) == 2
    budget.on_consumed(0)
    assert not budget.take(PLANS[6], 64)


def test_next_batch_is_admitted_whatever_its_size():
    budget = MemoryBudget(1, sizes(SIZE, SIZE))
    assert budget.take(PLANS[5], 64)
    assert budget.take(PLANS[3], 64), "of an engine that has ended: what is held comes after it"
    assert not budget.take(PLANS[4], 64)


def test_before_a_batch_is_assembled_no_more_is_fetched_than_at_once():
    budget = MemoryBudget(10**9, sizes(SIZE))
    assert admitted(budget, PLANS) == 33, "64 at once, and one batch more"
    for number in range(33):
        budget.on_fetched(number)
    assert not budget.take(PLANS[33], 64)
    assert budget.load(FetchLoad(), 1).held_plans == 0, "it does not wait for memory"
    budget.on_assembled()
    assert admitted(budget, PLANS[33:]) == 67


def test_samples_count_with_their_size_in_the_batch_if_that_is_larger():
    budget = MemoryBudget(101 * SIZE, sizes(SIZE, 10 * SIZE))
    assert admitted(budget, PLANS) == 5
    load = budget.load(FetchLoad(unused=3), 95)
    assert (load.held_plans, load.memory_samples, load.unused) == (95, 10, 0)
    assert 100 * SIZE <= load.memory <= 101 * SIZE
