"""A read plan: each batch gets its own bytes, and bytes are released after their last use."""

import gc
import weakref

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace._core.engine.range_fetch import ReadPlan
from headrace._core.store.ranges import Ranges

CONTENT = [bytes((number + place) % 251 for place in range(400)) for number in range(3)]

a_range = st.tuples(st.integers(0, 2), st.integers(0, 300), st.integers(0, 99))
some_batches = st.lists(st.lists(a_range, min_size=1, max_size=8), min_size=1, max_size=6)


def ranges_of(batch):
    numbers, starts, sizes = np.array(batch, np.int64).T
    return Ranges(numbers, starts, starts + sizes)


def expected(batch):
    return [CONTENT[number][start : start + size] for number, start, size in batch]


def answer(together, number):
    span = together.spans[number]
    return memoryview(CONTENT[span.object][span.start : span.stop])


@settings(suppress_health_check=[HealthCheck.too_slow])  # the first example imports, which a busy machine is long at
@given(some_batches, st.randoms(use_true_random=False), st.booleans())
def test_each_batch_is_complete_when_its_last_bytes_come_and_gets_its_own(batches, random, some_are_here):
    together = ReadPlan(list(range(len(batches))), [ranges_of(batch) for batch in batches])
    ranges = [(number, item) for number, batch in enumerate(batches) for item in batch]
    arrived, complete = set(), []

    def arrive(positions, found):
        arrived.update(positions)
        complete.extend(found)
        waiting = {number for at, (number, _) in enumerate(ranges) if at not in arrived}
        assert sorted(complete) == sorted(set(range(len(batches))) - waiting)

    left = None
    if some_are_here:
        here = [at for at in range(len(ranges)) if random.random() < 0.5]
        arrive(here, together.put([(at, memoryview(expected([ranges[at][1]])[0])) for at in here]))
        left = sorted(set(range(len(ranges))) - arrived)
    together.plan(left)
    empty = {at for at, (_, (_, _, size)) in enumerate(ranges) if not size}
    arrive(empty, together.put_empty(left))
    numbers = list(range(len(together.spans)))
    random.shuffle(numbers)
    for each in numbers:
        arrive(together.spans[each].members.tolist(), together.on_response(each, answer(together, each)))
    assert len(arrived) == len(ranges)
    for number in random.sample(range(len(batches)), len(batches)):
        assert [bytes(view) for view in together.pop_batch(number)] == expected(batches[number])


def test_what_a_request_has_brought_is_let_go_with_the_last_batch_that_needs_it():
    class Bytes(bytearray):
        """With weak references."""

    together = ReadPlan([0, 1], [Ranges.of([(0, 1)]), Ranges.of([(1, 2)])])
    together.plan()
    data = Bytes(b"ab")
    kept = weakref.ref(data)
    together.on_response(0, memoryview(data))
    del data
    together.pop_batch(0)
    gc.collect()
    assert kept() is not None
    together.pop_batch(1)
    gc.collect()
    assert kept() is None
