"""States of datasets: continued, or an error, in every placement, and never another order."""

import os
import signal

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import headrace as hr
from tests.unit.consumer.test_epoch import drain

pytestmark = pytest.mark.filterwarnings("ignore:.* has no state_dict:UserWarning")


class Unpicklable:
    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        raise TypeError("a lock")


class Counter:
    def __init__(self, owner, part):
        self.fault, self.part, self.next = owner.fault, part, 0

    def __next__(self):
        if self.next >= len(self.part):
            raise StopIteration
        self.next += 1
        return self.part[self.next - 1]

    async def __anext__(self):
        try:
            return next(self)
        except StopIteration:
            raise StopAsyncIteration from None


class StatefulCounter(Counter):
    """With a fault, if its dataset has one."""

    def state_dict(self):
        if self.fault == "save" and self.next > 2:
            raise KeyError("cursor")
        return {"next": Unpicklable() if self.fault == "pickle" else self.next}

    def load_state_dict(self, state):
        if self.fault == "load":
            raise KeyError("cursor")
        self.next = state["next"]


class Stream:
    def __init__(self, length=5, fault=None, iterator=StatefulCounter):
        self.length, self.fault, self.iterator = length, fault, iterator


class Count(Stream, hr.AsyncIterableDataset):
    def __aiter__(self):
        return self.iterator(self, range(self.length))


class TorchCount(Stream, IterableDataset):
    """Each worker reads its part; a fault is that of worker 0."""

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        self.fault = None if first else self.fault
        return self.iterator(self, range(first, self.length, step))


PLACES = {
    "thread": (Count, {}),
    "process": (Count, {"placement": "process"}),
    "torch": (TorchCount, {}),
    "torch, a worker": (TorchCount, {"num_workers": 1}),
}
EVERYWHERE = pytest.mark.parametrize(("make", "options"), PLACES.values(), ids=PLACES)


def new(dataset, **options):
    return hr.DataLoader(dataset, 2, **{"collate_fn": list, **options})


def check_continues(make):
    """An epoch that is interrupted after any batch gives the others when it is continued."""
    with make() as loader:
        whole = drain(iter(loader))
        assert len(whole) > 2
    for count in range(1, len(whole)):
        with make() as first, make() as second:
            batches = iter(first)
            given = [next(batches) for _ in range(count)]
            second.load_state_dict(first.state_dict())
            assert given + drain(iter(second)) == whole


@EVERYWHERE
def test_state_dict_that_raises_is_the_error_of_its_batch(make, options):
    with new(make(fault="save"), on_error="skip", **options) as loader:
        first, *others = drain(iter(loader))
    assert first == [0, 1]
    assert others
    assert {type(error) for error in others} == {KeyError}
    assert "state_dict" in "".join(others[0].__notes__)


@EVERYWHERE
def test_state_that_cannot_be_pickled_is_an_error_where_it_leaves_its_process(
    make, options
):
    with new(make(fault="pickle"), **options) as loader:
        found = drain(iter(loader))
    if options:
        assert {type(error) for error in found} == {hr.errors.NotPicklableError}
        assert "the state of the dataset" in str(found[0])
    else:
        assert found == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(
    ("make", "options"),
    [*PLACES.values(), (TorchCount, {"num_workers": 2})],
    ids=[*PLACES, "torch, two workers"],
)
def test_nothing_is_given_out_after_a_state_that_could_not_be_restored(make, options):
    with new(make(12), **options) as first:
        running = iter(first)
        next(running), next(running)
        state = first.state_dict()
    with new(make(12, fault="load"), on_error="skip", **options) as second:
        second.load_state_dict(state)
        running = iter(second)
        with pytest.raises(KeyError, match="cursor"):
            next(running)
        assert list(running) == []
        assert second.state_dict() == state


@EVERYWHERE
def test_stream_that_has_become_shorter_ends_the_epoch_with_both_numbers(make, options):
    with new(make(7, iterator=Counter), **options) as loader:
        batches = iter(loader)
        next(batches), next(batches)
        state = loader.state_dict()
    with new(make(3, iterator=Counter), **options) as loader:
        loader.load_state_dict(state)
        first, *others = drain(iter(loader))
    assert type(first) is hr.StateError
    assert "ended after 3 samples, but 4 had been read" in str(first)
    assert others == []


class Reads(Dataset):
    """Its samples have the number of reads in its process before them, which is its state."""

    reads = 0

    def __init__(self, length=9):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.reads += 1
        return index, self.reads

    def state_dict(self):
        return {"reads": self.reads}

    def load_state_dict(self, state):
        self.reads = state["reads"]


class Many(Reads):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


@pytest.mark.parametrize(("dataset", "workers"), [(Reads, 0), (Reads, 2), (Many, 0)])
def test_map_style_dataset_with_a_state_continues_from_it(dataset, workers):
    check_continues(lambda: new(dataset(), num_workers=workers))


class Dies(Reads):
    def __getitem__(self, index):
        if index == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_worker_that_dies_with_the_state_of_its_dataset_is_not_replaced():
    with new(Dies(), num_workers=1) as loader:
        first, *others = drain(iter(loader))
    assert first == [(0, 1), (1, 2)]
    assert {type(error) for error in others} == {hr.errors.WorkerDiedError}


def without_the_last(samples):
    if max(samples) > 6:
        raise ValueError(samples)
    return list(samples)


@pytest.mark.filterwarnings("ignore:.*skip:RuntimeWarning")
@pytest.mark.parametrize(
    ("make", "iterator", "workers"),
    [
        (Count, StatefulCounter, 2),
        (TorchCount, Counter, 0),
        (TorchCount, StatefulCounter, 0),
        (TorchCount, StatefulCounter, 2),
    ],
)
def test_stream_continues_around_lost_batches(make, iterator, workers):
    options = {
        "num_workers": workers,
        "collate_fn": without_the_last,
        "on_error": "skip",
        "seed": 3,
    }
    check_continues(lambda: new(make(9, iterator=iterator), **options))


class Generators(Dataset):
    """Saves the random generator of its worker."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.randint(1000, ()).item()

    def state_dict(self):
        return {"generator": torch.get_rng_state()}

    def load_state_dict(self, state):
        torch.set_rng_state(state["generator"])


class GeneratorStream(IterableDataset):
    """The same, as a stream that is its own iterator; a restored position is one for `iter()`."""

    first = 0

    def __iter__(self):
        self.position, self.first = self.first, 0
        return self

    def __next__(self):
        if self.position == 6:
            raise StopIteration
        self.position += 1
        return torch.randint(1000, ()).item()

    def state_dict(self):
        return {"generator": torch.get_rng_state(), "position": self.position}

    def load_state_dict(self, state):
        torch.set_rng_state(state["generator"])
        self.first = state["position"]


@pytest.mark.parametrize("made", [Generators, GeneratorStream])
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("count", [0, 2])
def test_generators_of_workers_are_restored_also_in_a_loader_that_has_run(
    made, workers, persistent, count
):
    def loader():
        return hr.DataLoader(
            made(), 2, num_workers=workers, persistent_workers=persistent, collate_fn=list
        )

    torch.manual_seed(0)
    first = loader()
    batches = iter(first)
    for _ in range(count):
        next(batches)
    state, rest = first.state_dict(), list(batches)
    for restored in (loader(), loader(), first):
        if restored is not first:
            list(restored)
        restored.load_state_dict(state)
        assert list(restored) == rest
