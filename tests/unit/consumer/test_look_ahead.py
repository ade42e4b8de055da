"""The look-ahead of a loader grows while its store has fewer fetches in flight than it may have."""

import asyncio
import threading

import anyio
import pytest

import headrace as hr
from tests.datasets import Numbers

CONCURRENCY = 8
BATCH = 4


class SlowFirst(Numbers):
    """The first sample of each batch arrives when it is released, the others at once."""

    def __init__(self, length):
        self.length = length
        self.changed = threading.Condition()
        self.pending = {}

    async def aget(self, index):
        if index % BATCH == 0:
            arrives = asyncio.Event()
            with self.changed:
                self.pending[index] = asyncio.get_running_loop(), arrives
                self.changed.notify_all()
            await arrives.wait()
        return index

    def release(self, index):
        """Let a sample arrive, when it has been asked for."""
        with self.changed:
            assert self.changed.wait_for(lambda: index in self.pending, 20)
            loop, arrives = self.pending.pop(index)
        loop.call_soon_threadsafe(arrives.set)

    def await_pending(self, count):
        with self.changed:
            return self.changed.wait_for(lambda: len(self.pending) >= count, 20)


async def take_while_waiting(batches, dataset, index):
    """The next batch, whose first sample arrives after the consumer has begun to wait for it."""
    async with anyio.create_task_group() as tasks:
        found = []

        async def take():
            found.append(await anext(batches))

        tasks.start_soon(take)
        await anyio.wait_all_tasks_blocked()
        await anyio.to_thread.run_sync(dataset.release, index)
    return found[0].tolist()


@pytest.mark.parametrize("in_order", [True, False])
async def test_all_fetches_are_in_flight_although_each_batch_waits_for_one_sample(
    in_order,
):
    dataset = SlowFirst(40 * BATCH)
    async with hr.DataLoader(
        dataset, BATCH, concurrency=CONCURRENCY, in_order=in_order
    ) as loader:
        batches = aiter(loader)
        for number in range(12):
            indices = list(range(number * BATCH, (number + 1) * BATCH))
            assert await take_while_waiting(batches, dataset, indices[0]) == indices
        assert await anyio.to_thread.run_sync(dataset.await_pending, CONCURRENCY), (
            dataset.pending
        )
        assert loader._control._ahead.batches == CONCURRENCY, (
            "one batch for each fetch is enough"
        )
