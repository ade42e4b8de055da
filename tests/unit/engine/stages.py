"""Helpers for tests of the fetch stage: plans, and a stage with a recipient."""

import anyio

from headrace._engine.fetch import FetchContext
from headrace._records.batches import BatchPlan
from headrace._store.request_stats import RequestStats


def plan(number, indices):
    return BatchPlan(number, tuple(indices), 0, positions=range(1 << 20))


def plans(count, size):
    return [
        plan(number, range(number * size, number * size + size))
        for number in range(count)
    ]


class Stage:
    """A source on a task group, and what it delivered."""

    def __init__(self, make):
        self._make = make
        self.delivered = []

    async def __aenter__(self):
        self._tasks = await anyio.create_task_group().__aenter__()
        self._context = FetchContext(
            self.delivered.append, self._tasks.start_soon, RequestStats()
        )
        self.source = self._make(self._context)
        return self

    async def __aexit__(self, *exc_info):
        self._context.stopping = True
        self._tasks.cancel_scope.cancel()
        return await self._tasks.__aexit__(*exc_info)

    async def admit(self, *plans):
        for one in plans:
            self.source.admit(one)
        await anyio.wait_all_tasks_blocked()

    @property
    def batches(self):
        return [list(raw.samples) for raw in self.delivered]

    @property
    def numbers(self):
        return [raw.plan.number for raw in self.delivered]
