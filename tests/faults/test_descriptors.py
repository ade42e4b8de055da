"""Few file descriptors: wherever one cannot be opened there is one clear error, and no batch is lost without one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif("sys.platform != 'linux'", reason="reads /proc")

OURS = [*itertools.product(["thread", "process"], [0, 2])]
PLACES_OF_OURS = pytest.mark.parametrize(("placement", "workers"), OURS, ids=str)
PLACES = pytest.mark.parametrize(("placement", "workers"), [*OURS, ("torch", 2)], ids=str)

# Batches in shared memory, and the assertions about every epoch with a shortage.
EPOCH = """
from tests.faults.shortage import NthOpenFails, free_descriptors


class Large(Numbers):
    async def aget(self, index):
        return torch.full((4096,), index)


class Torchs(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.full((4096,), index)


def new():
    options = {"num_workers": count, "transform": abs}
    if placement == "torch":
        return hr.DataLoader(Torchs(), 4, **options)
    return hr.DataLoader(Large(24), 4, placement=placement, concurrency=8, **options)


def epoch(loader):
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
            # In order, whole, and no batch is given in place of another that was reported.
            assert batch.shape == (4, 4096) and (batch.T == 4 * number + torch.arange(4)).all(), (number, batch)
            delivered += 1
    # An error that ends an epoch is the only one; others stand for a batch each.
    assert delivered + len(errors) == 6 or len(errors) == 1, (delivered, errors)
    for error in errors:
        assert "no file descriptor is left" in text_of(error) and "ulimit -n" in text_of(error), text_of(error)
    return delivered, errors


"""


@PLACES_OF_OURS
def test_each_open_that_fails_is_one_error_or_none(case: Any, placement: str, workers: int) -> None:
    count = workers
    # PREFIX ['EPOCH']

    def program() -> None:
        for number in range(100):
            with watch(within=5):
                with new() as loader, NthOpenFails(number) as opens:
                    epoch(loader)
                with new() as loader:
                    assert epoch(loader) == (6, [])
            if not opens.reached:
                break
        assert number > 5

    case(program)


@PLACES
def test_any_number_of_free_descriptors_is_enough_or_one_error(case: Any, placement: str, workers: int) -> None:
    count = workers
    # PREFIX ['EPOCH']

    def program() -> None:
        for number in range(60):
            with watch(within=5):
                with new() as loader, free_descriptors(number):
                    result = epoch(loader)
                with new() as loader:
                    assert epoch(loader) == (6, [])
            if result == (6, []):
                break
        assert number > 5

    case(program)


@pytest.mark.parametrize(("placement", "workers"), [("thread", 2), ("process", 0), ("process", 2)], ids=str)
def test_a_shortage_in_the_process_that_forks_is_one_error_and_ends_nothing(
    case: Any, placement: str, workers: int
) -> None:
    count = workers
    # PREFIX ['EPOCH']

    def program() -> None:
        zygote = launch._zygote.process.pid
        for number in range(1, 60):
            with watch(within=5):
                with new() as loader, free_descriptors(number, zygote):
                    result = epoch(loader)
                with new() as loader:
                    assert epoch(loader) == (6, [])
            if result == (6, []):
                break
        assert number > 2
        assert launch._zygote.process.pid == zygote and launch._zygote.process.poll() is None

    case(program)


@pytest.mark.parametrize("placement", ["thread", "process"])
def test_a_dead_worker_that_cannot_be_replaced_costs_no_batch_where_another_lives(
    case: Any, placement: str, tmp_path: Path
) -> None:
    count = 2
    path = str(tmp_path / "died")
    # PREFIX ['EPOCH']

    def program() -> None:
        def killed_once(sample):
            if sample[0] == 9 and first_call(path):
                os.kill(os.getpid(), signal.SIGKILL)
            return sample

        with hr.DataLoader(
            Large(24), 4, num_workers=2, prefetch_factor=1, transform=killed_once, placement=placement
        ) as loader:
            iterator = iter(loader)
            assert next(iterator)[0, 0] == 0
            pid = os.getpid() if placement == "thread" else sidecar(loader)
            with free_descriptors(0, pid):
                assert [int(batch[0, 0]) for batch in iterator] == [4, 8, 12, 16, 20]
                assert len(workers()) == 1 + (placement == "process"), "it was replaced without descriptors"
            assert [int(batch[0, 0]) for batch in loader] == [0, 4, 8, 12, 16, 20]
            assert len(workers()) == 2 + (placement == "process"), "it was never replaced"

    case(program)


@pytest.mark.parametrize("placement", ["thread", "process"])
def test_only_worker_that_cannot_be_replaced_is_an_error_until_descriptors_are_free(case: Any, placement: str) -> None:
    count = 1
    # PREFIX ['EPOCH']

    def program() -> None:
        with hr.DataLoader(
            Large(24), 4, num_workers=1, prefetch_factor=1, transform=abs, placement=placement
        ) as loader:
            iterator = iter(loader)
            assert next(iterator)[0, 0] == 0
            own = placement == "thread"
            (worker,) = workers() if own else [pid for pid in workers() if pid != sidecar(loader)]
            with free_descriptors(0, os.getpid() if own else sidecar(loader)):
                kill(worker)
                try:
                    while True:
                        next(iterator)
                except hr.WorkerDiedError as error:
                    assert "worker 0" in str(error) and "cannot be started: no file descriptor is left" in str(error), error
                    assert "ulimit -n" in str(error), error
            assert [int(batch[0, 0]) for batch in loader] == [0, 4, 8, 12, 16, 20]

    case(program)
