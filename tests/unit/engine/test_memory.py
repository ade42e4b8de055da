"""Memory in flight is bounded, and the next batch in order is never held back."""

import asyncio

import anyio
import pytest

from headrace._core.batches import BatchPlan, HostBatch
from headrace._core.engine.fetch import BatchFetch, SampleFetch
from headrace._core.engine.memory import BoundedFetch, SampleSizes
from headrace._core.store.request_stats import RequestStats

SIZE = 1000


class Store:
    """Samples of `SIZE` bytes that come when the test lets them."""

    def __init__(self):
        self.asked = set()
        self._gates = {}

    def let_go(self, *indices):
        for index in indices:
            self._gates.setdefault(index, asyncio.Event()).set()

    async def aget(self, index):
        self.asked.add(index)
        await self._gates.setdefault(index, asyncio.Event()).wait()
        return bytes(SIZE)

    async def agets(self, indices):
        return [await self.aget(index) for index in indices]


class Stage:
    """A bounded source of batches of two, from 64 fetchers."""

    def __init__(self, store, budget, whole=False, sizes=None):
        self.store, self.delivered, self.sizes = store, [], sizes or SampleSizes()
        self._budget, self._whole = budget, whole
        self._number = 0

    async def __aenter__(self):
        self._tasks = await anyio.create_task_group().__aenter__()
        spawn = self._tasks.start_soon
        kind, get = (BatchFetch, self.store.agets) if self._whole else (SampleFetch, self.store.aget)
        self.source = BoundedFetch(
            lambda deliver: kind(get, 64, deliver, spawn, RequestStats()),
            self._budget,
            self._deliver,
            self.sizes,
        )
        return self

    def _deliver(self, raw):  # as a session
        self.sizes.on_fetched(raw)
        self.delivered.append(raw)

    async def __aexit__(self, *exc_info):
        self.source.stop()
        self._tasks.cancel_scope.cancel()
        return await self._tasks.__aexit__(*exc_info)

    async def admit(self, count=1, taken=-1):
        for _ in range(count):
            first = self._number * 2
            self.source.admit(BatchPlan(self._number, (first, first + 1), 0, taken=taken))
            self._number += 1
        await anyio.wait_all_tasks_blocked()

    def assembled(self, nbytes, size=2):
        """The first batch that was delivered is a batch of so many bytes now."""
        raw = self.delivered[0]
        host = HostBatch(raw.plan, bytes(nbytes), size)
        self.sizes.on_assembled(host)
        return self.source.on_assembled(raw, host)

    async def come(self, *indices):
        self.store.let_go(*indices)
        await anyio.wait_all_tasks_blocked()


@pytest.mark.parametrize("whole", [False, True], ids=["aget", "agets"])
def test_no_more_is_fetched_than_the_budget_holds_and_taking_a_batch_makes_room(on_loop, whole):
    async def scenario():
        store = Store()
        async with Stage(store, budget=8 * (SIZE + 40), whole=whole) as stage:
            await stage.admit(6)
            assert max(store.asked) <= 1, "nothing is known of sizes, and the budget is less than a guess"
            await stage.come(0, 1)
            assert len(stage.delivered) == 1
            await stage.come(*range(100))
            assert len(stage.delivered) == 4, "all that the budget holds, although nothing is being fetched"
            await stage.admit(taken=0)
            assert len(stage.delivered) == 5

    on_loop(scenario)


def test_consumption_after_the_last_plan_makes_room(on_loop):
    async def scenario():
        store = Store()
        async with Stage(store, budget=8 * (SIZE + 40)) as stage:
            await stage.admit(20)
            await stage.come(*range(8))
            assert len(store.asked) == 8, "the budget is full"
            stage.source.on_consumed(1)
            await anyio.wait_all_tasks_blocked()
            assert len(store.asked) == 12
            stage.source.on_consumed(1)
            stage.source.on_consumed(0)
            await anyio.wait_all_tasks_blocked()
            assert len(store.asked) == 12

    on_loop(scenario)


@pytest.mark.parametrize("size", [2, 0], ids=["a batch", "a batch without samples"])
def test_before_a_batch_is_assembled_no_more_is_fetched_than_at_once(on_loop, size):
    async def scenario():
        store = Store()
        async with Stage(store, budget=10**9) as stage:
            await stage.admit(100)
            assert len(store.asked) == 64
            await stage.come(*range(200))
            assert len(store.asked) == 66, "64 at once, and one batch more"
            stage.assembled(100, size)
            await anyio.wait_all_tasks_blocked()
            assert len(store.asked) == 200

    on_loop(scenario)


def test_samples_count_with_their_size_in_the_batch_if_that_is_larger(on_loop):
    async def scenario():
        store = Store()
        async with Stage(store, budget=100 * SIZE) as stage:
            await stage.admit(20)
            await stage.come(0, 1)
            stage.assembled(2 * 10 * SIZE)
            await anyio.wait_all_tasks_blocked()
            assert stage.source.load().memory == pytest.approx(len(store.asked) * 10 * SIZE, rel=0.01)
            asked = len(store.asked)
            stage.source.on_consumed(0)
            await anyio.wait_all_tasks_blocked()
            assert len(store.asked) == asked, "what was asked for before is beyond the budget"
        sizes = stage.sizes

        store = Store()
        async with Stage(store, budget=100 * SIZE, sizes=sizes) as stage:  # the next epoch knows both sizes
            await stage.admit(20)
            assert len(store.asked) == 8
            await stage.come(0, 1)
            assert len(store.asked) == 8
            stage.source.on_consumed(0)
            await anyio.wait_all_tasks_blocked()
            assert len(store.asked) == 10

    on_loop(scenario)
