"""Blocking reads of async datasets (`dataset[i]`, `for`, torch's own loader), and `map`."""

import asyncio
import contextlib
import os
import signal

import pytest

from headrace._streams import blocking
from headrace._streams.blocking import background_loop
from headrace._streams.iterable_style import AsyncIterableDataset
from headrace._streams.map_style import AsyncDataset
from headrace.errors import DeadlockError
from tests.datasets import SlowDataset

SQUARES = SlowDataset(10, 0, make=lambda index: index * index)


def test_batch_is_fetched_concurrently():
    together = asyncio.Barrier(4)

    class AllOrNone(AsyncDataset):
        async def aget(self, index):
            await together.wait()  # returns only when all four are in flight
            return index

    assert AllOrNone().__getitems__([3, 1, 2, 0]) == [3, 1, 2, 0]


def test_indexing_on_the_background_loop_raises_instead_of_deadlocking():
    class Nested(AsyncDataset):
        async def aget(self, index):
            return SQUARES[index]

    with pytest.raises(DeadlockError, match=r"await dataset\.aget"):
        Nested()[0]


def test_undefined_method_error_names_the_method():
    with pytest.raises(
        NotImplementedError, match="AsyncDataset must define `async def aget"
    ):
        AsyncDataset()[0]
    with pytest.raises(NotImplementedError, match="AsyncIterableDataset must define"):
        iter(AsyncIterableDataset())


@pytest.mark.parametrize(
    "held", [contextlib.nullcontext(), blocking._lock], ids=["", "while it is started"]
)
def test_forked_process_has_its_own_background_loop(held):
    assert SQUARES[2] == 4
    parents_loop = background_loop()
    with held:
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            status = 1
            try:
                status = (
                    0 if SQUARES[2] == 4 and background_loop() is not parents_loop else 2
                )
            finally:
                os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
