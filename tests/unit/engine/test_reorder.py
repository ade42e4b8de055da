"""Plan order is restored whatever order batches are finished in."""

from hypothesis import given
from hypothesis import strategies as st

from headrace._core.batches import BatchPlan, HostBatch
from headrace._core.engine.reorder import Reorder


def host(number):
    return HostBatch(BatchPlan(number, (), 0), number, 1)


@given(st.integers(0, 30).flatmap(lambda n: st.permutations(range(n))))
def test_every_order_becomes_plan_order_and_nothing_is_lost(order):
    reorder = Reorder()
    came_out = []
    for arrived, number in enumerate(order, 1):
        came_out += [batch.data for batch in reorder.put(host(number))]
        in_time = 0
        while in_time in order[:arrived]:
            in_time += 1
        assert came_out == list(range(in_time)), "each leaves as soon as all before it have come"
    assert came_out == list(range(len(order)))
