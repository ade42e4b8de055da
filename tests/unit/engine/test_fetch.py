"""The fetch window: full across batch borders, never fuller than `concurrency`, and nothing fetched twice or lost."""

import asyncio
import collections
from types import SimpleNamespace

import anyio
import pytest

from headrace._engine.concurrency import AdaptiveLimit
from headrace._engine.fetch import BatchFetch, SampleFetch
from tests.programs import run_by
from tests.unit.engine.stages import Stage, plan, plans


class Store:
    """Samples that come when the test lets them."""

    def __init__(self):
        self.asked = []
        self.in_flight = 0
        self.most_in_flight = 0
        self._gates = collections.defaultdict(asyncio.Event)

    def let_go(self, *indices):
        for index in indices:
            self._gates[index].set()

    async def aget(self, index):
        self.asked.append(index)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await self._gates[index].wait()
            return -index
        finally:
            self.in_flight -= 1


def fetching(aget, concurrency):
    return Stage(
        lambda context: SampleFetch(context, SimpleNamespace(aget=aget), concurrency)
    )


def fetching_batches(agets, concurrency):
    return Stage(
        lambda context: BatchFetch(context, SimpleNamespace(agets=agets), concurrency)
    )


@pytest.mark.parametrize("concurrency", [1, 7, 100])
@run_by("on_loop")
async def test_the_window_is_full_and_never_fuller(concurrency):
    store = Store()
    async with fetching(store.aget, concurrency) as stage:
        await stage.admit(*plans(4, 4))
        assert store.in_flight == min(16, concurrency)
        for index in range(16):
            store.let_go(index)
            await anyio.wait_all_tasks_blocked()
            assert store.in_flight == min(15 - index, concurrency)
    assert store.most_in_flight == min(16, concurrency)
    assert store.asked == list(range(16)), "each sample once, in the order of the plans"
    assert stage.batches == [[-i for i in one.indices] for one in plans(4, 4)]


@pytest.mark.parametrize(
    "concurrency", [10, AdaptiveLimit(3, 8)], ids=["samples", "calls"]
)
@run_by("on_loop")
async def test_calls_for_whole_batches_cover_a_number_of_samples_or_are_counted_themselves(
    concurrency,
):
    store = Store()

    async def agets(indices):
        await store.aget(indices[0])
        return [index * 2 for index in indices]

    async with fetching_batches(agets, concurrency) as stage:
        await stage.admit(*plans(6, 4))
        assert store.in_flight == 3
        store.let_go(*range(24))
        await anyio.wait_all_tasks_blocked()
    fetched = {raw.plan.number: raw.samples for raw in stage.delivered}
    assert fetched == {one.number: [2 * i for i in one.indices] for one in plans(6, 4)}
    assert store.most_in_flight == 3


@pytest.mark.parametrize("count", [1, 3])
@run_by("on_loop")
async def test_agets_must_answer_for_every_index(count):
    async def agets(indices):
        return list(range(count))

    async with fetching_batches(agets, 4) as stage:
        await stage.admit(plan(0, [5, 6]))
    ((failure,),) = stage.batches
    assert isinstance(failure.error, ValueError)
    assert f"{count} samples for 2" in str(failure.error)


@run_by("on_loop")
async def test_time_outs_of_user_code_make_the_window_smaller():
    fetched = asyncio.Event()
    control = AdaptiveLimit(64, 512)

    async def aget(index):
        await asyncio.sleep(0)
        if control.limit < 64:
            fetched.set()
            await anyio.sleep_forever()
        raise TimeoutError

    async with fetching(aget, control) as stage:
        for one in plans(4000, 50):
            stage.source.admit(one)
        await fetched.wait()
        assert stage.source.size == control.limit < 64
