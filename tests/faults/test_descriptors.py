"""Few file descriptors: wherever one cannot be opened there is one clear error, and no batch is lost silently."""

from __future__ import annotations

import collections
import functools
import os
from typing import Any

import pytest
import torch

import headrace as hr
from headrace._pool import launch
from tests.faults.shortage import NthOpenFails, free_descriptors
from tests.faults.watching import Numbers, kill, sidecar, text_of, watch, workers
from tests.programs import run_by

pytestmark = pytest.mark.skipif("sys.platform != 'linux'", reason="reads /proc")

WHERE = pytest.mark.parametrize("where", ["thread", "process"])

FEW = (*range(8), *range(8, 62, 3))  # free descriptors
WORKERS = 2


class Large(Numbers):
    """Samples large enough for shared memory."""

    async def aget(self, index):
        return torch.full((4096,), index)


def new_loader(where):
    if where == "torch dataset":
        return hr.DataLoader(
            [torch.full((4096,), index) for index in range(24)],
            4,
            num_workers=WORKERS,
            transform=abs,
        )
    return hr.DataLoader(
        Large(24), 4, placement=where, concurrency=8, num_workers=WORKERS, transform=abs
    )


def epoch(loader):
    """The number of batches of an epoch in a shortage, and its errors, which say what is short."""
    try:
        iterator = iter(loader)
    except OSError as error:
        return 0, [error]
    delivered, errors = 0, []
    for number in range(100):
        try:
            batch = next(iterator)
        except StopIteration:
            break
        except Exception as error:
            errors.append(error)
        else:
            # In order, whole, and none in place of a batch that was reported.
            assert batch.shape == (4, 4096)
            assert (4 * number + torch.arange(4) == batch.T).all(), (number, batch)
            delivered += 1
    # An error that ends an epoch is the only one; others stand for a batch each.
    assert delivered + len(errors) == 6 or len(errors) == 1, (delivered, errors)
    for error in errors:
        assert "no file descriptor is left" in text_of(error), text_of(error)
        assert "ulimit -n" in text_of(error), text_of(error)
    return delivered, errors


def until_one_is_whole(where, shortage, numbers, more_than=5):
    """Epochs in a shortage of each number, every one followed by one without; ends with the first that is whole."""
    for number in numbers:
        with watch(within=5):
            with new_loader(where) as loader, shortage(number) as opens:
                whole = epoch(loader) == (6, [])
            with new_loader(where) as loader:
                assert epoch(loader) == (6, [])
        if whole and not (opens and opens.reached):
            assert number > more_than
            return
    raise AssertionError("no epoch was whole")


@WHERE
def test_each_failing_open_is_at_most_one_error(case: Any, where: str) -> None:
    case(lambda: until_one_is_whole(where, NthOpenFails, range(100)))


@pytest.mark.parametrize("where", ["thread", "process", "torch dataset"])
def test_any_number_of_free_descriptors_is_enough_or_reported(
    case: Any, where: str
) -> None:
    case(lambda: until_one_is_whole(where, free_descriptors, FEW))


@run_by("case")
def test_shortage_in_the_zygote_is_reported_and_ends_nothing() -> None:
    zygote = launch._zygote.process.pid
    few = functools.partial(free_descriptors, pid=zygote)
    until_one_is_whole("process", few, FEW[1:], more_than=2)
    assert launch._zygote.process.pid == zygote
    assert launch._zygote.process.poll() is None


@WHERE
@run_by("case")
def test_worker_that_cannot_be_replaced_is_an_error_of_its_epoch(where: str) -> None:
    with hr.DataLoader(
        Large(24), 4, num_workers=1, prefetch_factor=1, transform=abs, placement=where
    ) as loader:
        iterator = iter(loader)
        assert next(iterator)[0, 0] == 0
        own = where == "thread"
        (worker,) = (
            workers() if own else [pid for pid in workers() if pid != sidecar(loader)]
        )
        with free_descriptors(0, os.getpid() if own else sidecar(loader)):
            kill(worker)
            with pytest.raises(hr.errors.WorkerDiedError, match=r"ulimit -n") as caught:
                collections.deque(iterator, maxlen=0)
        assert "worker 0" in str(caught.value), caught.value
        assert "cannot be started: no file descriptor is left" in str(caught.value), (
            caught.value
        )
        assert [int(batch[0, 0]) for batch in loader] == [0, 4, 8, 12, 16, 20]
