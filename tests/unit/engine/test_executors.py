"""Workers that are threads give the batches that processes give, at once, and leave nothing behind."""

import threading

import pytest

import headrace as hr
from headrace._core.engine.executors import ThreadExecutor
from headrace._core.ranks.rankinfo import RankInfo
from tests.datasets import Numbers


def assembling():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("headrace-assemble")]


def test_as_many_threads_as_workers_work_at_once():
    together = threading.Barrier(2)

    def meet(sample):
        together.wait(timeout=20)
        return sample

    options = {"executor": "thread", "placement": "thread"}
    with hr.DataLoader(Numbers(24), batch_size=4, num_workers=2, transform=meet, **options) as loader:
        assert sum(len(batch) for batch in loader) == 24
        assert len(assembling()) == 2
    assert assembling() == []


async def test_error_outside_of_user_code_is_raised_and_the_thread_goes_on():
    executor = ThreadExecutor(1, RankInfo(0, 1, "the test"), seeds=False)
    await executor.open()

    def fail(raw):
        raise OSError("too many open files")

    with pytest.raises(OSError, match="too many open files"):
        await executor.assemble(None, fail)
    assert await executor.assemble(None, lambda raw: "a batch") == "a batch"
    await executor.close(10.0)
