"""The next epoch's first batches are fetched before it begins, which shows in nothing but time."""

import asyncio
import random
import signal
import threading

import pytest
import torch

import headrace as hr
from headrace._core.eventloop.waiting import wait_readable
from tests.datasets import Numbers

LENGTH, BATCH, CONCURRENCY = 64, 4, 8
asked, in_flight, changed = [], [], threading.Condition()  # indices, and numbers of fetches at once


@pytest.fixture(autouse=True)
def none_asked():
    asked.clear()
    in_flight[:] = [0]


class OfTheUser(Numbers):
    scale = 1

    async def aget(self, index):
        with changed:
            asked.append(index)
            changed.notify_all()
        in_flight.append(in_flight[-1] + 1)
        try:
            await asyncio.sleep(0.0001 * random.Random(index).random())  # the latency under test
        finally:
            in_flight.append(in_flight[-1] - 1)
        if index == 5 and asked.count(5) == 3:
            raise OSError("lost")
        return index * self.scale


class Counted(OfTheUser):
    """Passes for one of headrace's: others may hold what a snapshot does not show, and are not read ahead."""

    __module__ = "headrace.datasets.counted"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for number in range(LENGTH):
        (folder / f"{number:02d}").write_bytes(bytes([number]))
    return hr.FileDataset(folder)


def noisy(sample):
    return sample[0].data[0], random.random(), torch.rand(()).item()


def loader_of(dataset, **options):
    options = {"shuffle": True, "seed": 3, "concurrency": CONCURRENCY, "batch_size": BATCH, **options}
    return hr.DataLoader(dataset, **options)


def expects_next(loader):
    return loader._control.sessions.next.epoch is not None


def epochs_of(files, options, *, reads_next, set_epoch=False):
    """For each of four epochs, its batches with the states after them, and the state at its end."""
    found = []
    with loader_of(files, **options) as loader:
        loader._control.sessions.next.reads = reads_next
        torch.manual_seed(1)
        for epoch in range(4):
            if set_epoch:
                loader.set_epoch(epoch)
            found.append([(str(batch), str(loader.state_dict())) for batch in loader])
            assert expects_next(loader) == (reads_next and epoch > 0)
            found.append(str(loader.state_dict()))
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"concurrency": "auto", "memory_budget": 1000},
        {"seed": None, "shuffle": False},
        {"sampler": hr.ElasticSampler(LENGTH, seed=1), "shuffle": None},
        {"placement": "process"},
        {"num_workers": 1},
        {"engines": 2},
        {"device": "cpu"},
    ],
    ids=str,
)
def test_batches_and_states_are_the_same_as_without_it(files, options):
    options = {"collate_fn": noisy, **options}
    expected = epochs_of(files, options, reads_next=False)
    assert epochs_of(files, options, reads_next=True) == expected
    assert epochs_of(files, options, reads_next=True, set_epoch=True) == expected


def test_a_loader_that_is_iterated_once_fetches_one_epoch(files):
    with loader_of(Counted(LENGTH)) as loader:
        list(loader)
        assert not expects_next(loader)
        assert sorted(asked) == list(range(LENGTH))
    with loader_of(files, num_workers=1, persistent_workers=True, collate_fn=noisy) as loader:
        list(loader)
        assert expects_next(loader)


def test_both_epochs_together_keep_to_look_ahead_and_concurrency_and_errors_are_of_their_epoch():
    with loader_of(Counted(LENGTH)) as loader:
        for _ in range(2):
            list(loader)
        assert expects_next(loader)
        with changed:
            assert changed.wait_for(lambda: len(asked) > 2 * LENGTH, 20)
        assert len(asked) - 2 * LENGTH <= BATCH * loader._control.sessions.look_ahead(loader)[1]
        with pytest.raises(OSError, match="lost"):
            list(loader)
        assert max(in_flight) <= CONCURRENCY  # the next epoch begins beside the fetches of the one that was given up
        list(loader)


def test_datasets_of_the_user_are_not_read_ahead():
    with loader_of(OfTheUser(LENGTH)) as loader:
        list(loader), list(loader)
        assert len(asked) == 2 * LENGTH


def test_functions_run_when_the_epoch_has_begun(files):
    counter = torch.zeros(1, dtype=torch.int64).share_memory_()
    with loader_of(files, num_workers=1, collate_fn=lambda _samples: counter.add_(1).item()) as loader:
        for epoch in range(4):
            list(loader)
            assert expects_next(loader) == (epoch > 0)
            assert int(counter) == (epoch + 1) * LENGTH // BATCH


CHANGES = {
    "set_epoch": lambda loader, state: loader.set_epoch(7),
    "load_state_dict": lambda loader, state: loader.load_state_dict(state),
    "exclude": lambda loader, state: loader.exclude(keys=[1, 2, 3]),
    "attribute": lambda loader, state: setattr(loader.dataset, "scale", 2),
    "collate_fn": lambda loader, state: setattr(loader, "collate_fn", tuple),
    "closed": lambda loader, state: loader.close(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_it_is_dropped_where_the_next_epoch_is_another_one(change):
    batches = []
    for reads_next in True, False:
        asked.clear()
        with loader_of(Counted(LENGTH), on_error="skip") as loader:
            loader._control.sessions.next.reads = reads_next
            states = [loader.state_dict() for _ in loader]
            list(loader)
            assert expects_next(loader) == reads_next
            CHANGES[change](loader, states[3])
            asked.clear()
            batches.append([str(list(loader)) for _ in range(2)])
    assert batches[0] == batches[1]


def test_an_engine_that_ends_between_epochs_is_started_again(files):
    with loader_of(files, placement="process", collate_fn=noisy) as loader:
        expected = [len(list(loader)) for _ in range(2)]
        process = loader._control.sessions._placements._current._engines[0].process
        process.signal(signal.SIGKILL)
        wait_readable(process.sentinel, timeout=20)
        assert len(list(loader)) == expected[0]


def test_dropping_the_loader_ends_it():
    loader = loader_of(Counted(LENGTH))
    list(loader), list(loader)
    session = loader._control.sessions.next.epoch.session
    del loader
    assert session.ended
