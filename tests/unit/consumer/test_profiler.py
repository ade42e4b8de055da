"""Records of `next()` in `torch.profiler`: named as those of torch's loader, one for each call, and none without it."""

import asyncio
import contextlib

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader as TorchDataLoader

import headrace as hr
from tests.unit.consumer.test_skipping import Bad, Numbers

# which concerns schedules
pytestmark = pytest.mark.filterwarnings("ignore:Profiler clears events:UserWarning")

SYNC = "enumerate(DataLoader)#BatchIterator.__next__"
ASYNC = "enumerate(DataLoader)#AsyncBatchIterator.__next__"
TORCH = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
TENSORS = list(torch.arange(8))


@contextlib.contextmanager
def recorded():
    """The names of the profiler's records and their events; filled at exit."""
    events = []
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        yield events
    events += profiler.events()


def named(events, name):
    return [event for event in events if event.name == name]


async def read(loader):
    async for _ in loader:
        await asyncio.sleep(0)  # another task's turn


def test_each_call_of_next_has_a_record_named_as_torchs():
    loaders = {
        TORCH: TorchDataLoader(TENSORS, batch_size=2),
        SYNC: hr.DataLoader(TENSORS, batch_size=2),
    }
    for name, loader in loaders.items():
        with recorded() as events:
            assert [batch.tolist() for batch in loader] == [
                [0, 1],
                [2, 3],
                [4, 5],
                [6, 7],
            ]
        assert len(named(events, name)) == 4 + 1  # and the end of the epoch
        stacks = [event for event in events if event.name == "aten::stack"]
        assert [event.cpu_parent.name for event in stacks] == [
            name
        ] * 4  # the default collate function's


def test_records_of_tasks_that_take_turns_are_all_kept():
    async def both():
        async with asyncio.TaskGroup() as group:
            for loader in (first, second):
                group.create_task(read(loader))

    first, second = (
        hr.DataLoader(Numbers(8), batch_size=2),
        hr.DataLoader(Numbers(8), batch_size=1),
    )
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        with first, second:
            asyncio.run(both())
        torch.ones(1)
    # Not `events()`, which drops a record that lies inside another of the same name.
    assert [event.name() for event in profiler.profiler.kineto_results.events()].count(
        ASYNC
    ) == 5 + 9
    (last,) = named(profiler.events(), "aten::ones")
    assert last.cpu_parent is None, "a record has not ended"


def test_record_ends_when_next_raises():
    with hr.DataLoader(Numbers(8, Bad(3)), batch_size=2) as loader, recorded() as events:
        batches = iter(loader)
        next(batches)
        with pytest.raises(ValueError, match="3 is bad"):
            next(batches)
        torch.ones(1)
        assert next(batches).tolist() == [4, 5]
    assert len(named(events, SYNC)) == 3
    (between,) = named(events, "aten::ones")
    assert between.cpu_parent is None, "the record of the call that raised has not ended"
