"""Programs written for torchdata's StatefulDataLoader resume, with the real package and with the import changed.

The cases are of its documentation and of its own tests; with the real package in one process.
"""

import io

import pytest
import torch

import headrace as hr
from tests.integrations.common import plain

torchdata = pytest.importorskip("torchdata.stateful_dataloader")
BatchSampler, RandomSampler = (
    torchdata.sampler.BatchSampler,
    torchdata.sampler.RandomSampler,
)
StatefulDistributedSampler = torchdata.sampler.StatefulDistributedSampler

# torchdata 0.11 calls it, torch 2.13 warns
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
everywhere = pytest.mark.parametrize(
    ("loader_class", "options"),
    [
        (torchdata.StatefulDataLoader, {}),
        (hr.DataLoader, {}),
        (hr.DataLoader, {"num_workers": 3}),
    ],
    ids=["torchdata", "headrace", "headrace, workers"],
)


def batches(loader):
    return [plain(batch) for batch in loader]


# The documentation.


class MySampler(torch.utils.data.Sampler):
    def __init__(self, high, seed, limit):
        self.seed, self.high, self.limit = seed, high, limit
        self.g = torch.Generator()
        self.g.manual_seed(self.seed)
        self.i = 0

    def __iter__(self):
        while self.i < self.limit:
            val = int(torch.randint(high=self.high, size=(1,), generator=self.g))
            self.i += 1
            yield val

    def load_state_dict(self, state_dict):
        self.i = state_dict["i"]
        self.g.set_state(state_dict["rng"])

    def state_dict(self):
        return {"i": self.i, "rng": self.g.get_state()}


class NoisyRange(torch.utils.data.Dataset):
    def __init__(self, high, mean, std):
        self.high, self.mean, self.std = high, torch.tensor([float(mean)]), float(std)

    def __len__(self):
        return self.high

    def __getitem__(self, idx):
        if not (0 <= idx < self.high):
            raise IndexError
        x = torch.normal(self.mean, self.std)
        noise = x.item()
        return idx + noise

    def load_state_dict(self, state_dict):
        torch.set_rng_state(state_dict["rng"])

    def state_dict(self):
        return {"rng": torch.get_rng_state()}


class MyIterableDataset(torch.utils.data.IterableDataset):
    def __init__(self, high, seed):
        self.high, self.seed = high, seed
        self.g = torch.Generator()
        self.i = 0

    def __iter__(self):
        worker_info = torch.utils.data.get_worker_info()
        if worker_info is not None:
            worker_id = worker_info.id
            num_workers = worker_info.num_workers
        else:
            worker_id = 0
            num_workers = 1
        self.g.manual_seed(self.seed)
        arr = torch.randperm(self.high, generator=self.g)
        arr = arr[worker_id : self.high : num_workers]
        for _idx in range(self.i, len(arr)):
            self.i += 1
            yield arr[_idx]
        self.i = 0

    def state_dict(self):
        return {"i": self.i}

    def load_state_dict(self, state_dict):
        self.i = state_dict["i"]


# The cases of torchdata's tests.

CASES = {
    "documented program": lambda loader, **k: loader(list(range(40)), **k),
    "documented sampler": lambda loader, **k: loader(
        NoisyRange(12, 1, 1), 2, sampler=MySampler(12, 1, 12), **k
    ),
    "documented stream": lambda loader, **k: loader(
        MyIterableDataset(12, 0), 2, drop_last=False, **k
    ),
    "random sampler": lambda loader, **k: loader(
        list(range(12)),
        2,
        sampler=RandomSampler(range(12), generator=torch.Generator().manual_seed(13)),
        **k,
    ),
    "batch sampler of torchdata": lambda loader, **k: loader(
        list(range(12)), batch_sampler=BatchSampler(MySampler(12, 1, 12), 5, True), **k
    ),
    "distributed sampler": lambda loader, **k: loader(
        list(range(12)),
        2,
        sampler=StatefulDistributedSampler(range(12), 2, 1, seed=3),
        **k,
    ),
}
"""Loaders, by the part that has a state."""


def first_epoch(loader):
    """The batches of an epoch, and the states before and after each of them, and after the end."""
    states, given = [loader.state_dict()], []
    for batch in loader:
        given.append(plain(batch))
        states.append(loader.state_dict())
    return given, states, loader.state_dict()


def through_torch_save(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@everywhere
@pytest.mark.parametrize("name", CASES)
def test_restored_loader_continues_after_the_last_batch(loader_class, name, options):
    make = CASES[name]
    torch.manual_seed(0)
    given, states, end = first_epoch(make(loader_class, **options))
    for point in {len(given) // 2, len(given)} if options else range(1, len(given) + 1):
        torch.manual_seed(point)
        restored = make(loader_class, snapshot_every_n_steps=3, **options)
        restored.load_state_dict(through_torch_save(states[point]))
        assert batches(restored) == given[point:], point  # after the last batch: none
    for state in (states[0], end) if name == "random sampler" and not options else ():
        restored = make(loader_class)
        restored.load_state_dict(state)
        assert len(batches(restored)) == len(given), "a whole epoch"


@everywhere
@pytest.mark.parametrize("name", ["documented sampler", "documented stream"])
def test_loader_goes_back_to_its_own_states_any_number_of_times(
    loader_class, name, options
):
    loader = CASES[name](loader_class, **options)
    iterator = iter(loader)
    start = loader.state_dict()
    given = [plain(next(iterator)) for _ in range(3)]
    middle = loader.state_dict()
    loader.load_state_dict(middle)
    given += batches(loader)
    assert len(given) == 6
    for state, expected in ((start, given), (middle, given[3:]), (start, given)):
        loader.load_state_dict(state)
        assert batches(loader) == expected


class Reversed(torch.utils.data.Sampler):
    """Indices that the training loop reverses from the present one on, as a curriculum does."""

    def __init__(self):
        self.order, self.given = list(range(20)), 0

    def __len__(self):
        return len(self.order)

    def __iter__(self):
        while self.given < len(self.order):
            self.given += 1
            yield self.order[self.given - 1]
        self.given = 0

    def reverse(self):
        self.order[self.given :] = self.order[self.given :][::-1]

    def state_dict(self):
        return {"order": list(self.order), "given": self.given}

    def load_state_dict(self, state):
        self.order, self.given = list(state["order"]), state["given"]


@pytest.mark.parametrize("loader_class", [torchdata.StatefulDataLoader, hr.DataLoader])
def test_state_has_what_the_loop_changed_in_the_sampler_since_the_last_batch(
    loader_class,
):
    def train(loader, given):
        for batch in loader:
            given.append(plain(batch))
            loader.sampler.reverse()
            yield loader.state_dict()

    given, resumed = [], []
    states = list(train(loader_class(list(range(20)), 4, sampler=Reversed()), given))
    assert given[:2] == [[0, 1, 2, 3], [19, 18, 17, 16]]
    restored = loader_class(list(range(20)), 4, sampler=Reversed())
    restored.load_state_dict(through_torch_save(states[1]))
    list(train(restored, resumed))
    assert resumed == given[2:]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("point", ["last batch", "end"])
def test_distributed_sampler_that_was_restored_at_its_end_gives_a_whole_next_epoch(
    point, workers
):
    # torchdata's own loader gives an empty epoch after the end, without workers.
    def make():
        sampler = StatefulDistributedSampler(range(37), 2, 1, seed=3)
        return hr.DataLoader(
            range(37), 4, sampler=sampler, num_workers=workers, drop_last=True
        )

    loader, states, epochs = make(), {}, []
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        epochs.append([])
        for batch in loader:
            epochs[epoch].append(plain(batch))
            if epoch == 0:
                states["last batch"] = loader.state_dict()
        states.setdefault("end", loader.state_dict())
    restored = make()
    restored.load_state_dict(through_torch_save(states[point]))
    if point == "last batch":
        assert batches(restored) == []
    for epoch in (1, 2):
        restored.sampler.set_epoch(epoch)
        assert batches(restored) == epochs[epoch]


def test_state_of_torchdata_is_refused_with_its_keys():
    state = CASES["random sampler"](torchdata.StatefulDataLoader).state_dict()
    with pytest.raises(hr.StateError, match=r"no state of a headrace\.DataLoader: \{'_"):
        CASES["random sampler"](hr.DataLoader).load_state_dict(state)
