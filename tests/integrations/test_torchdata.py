"""Programs written for torchdata's StatefulDataLoader resume, with the real package and with the import changed.

The first three are those of its documentation. The others are the cases of its own tests. Where torchdata does not keep
its contract, the case is skipped for it, with the reason.
"""

import copy
import io
import itertools
import json
from collections.abc import Iterator

import pytest
import torch

import headrace as hr

torchdata = pytest.importorskip("torchdata.stateful_dataloader")
BatchSampler, RandomSampler = torchdata.sampler.BatchSampler, torchdata.sampler.RandomSampler
StatefulDistributedSampler = torchdata.sampler.StatefulDistributedSampler

LOADERS = {"torchdata": torchdata.StatefulDataLoader, "headrace": hr.DataLoader}
pytestmark = [
    pytest.mark.filterwarnings("ignore:Stateless has no state_dict"),  # it says that it reads the stream again
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata 0.11 calls it, torch 2.13 warns
]


@pytest.fixture(params=LOADERS)
def loader_class(request):
    return LOADERS[request.param]


def identity(samples):
    return samples


def plain(batch):
    """A batch as lists and dicts of numbers, which `==` compares."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {name: plain(value) for name, value in batch.items()}
    return [plain(value) for value in batch] if isinstance(batch, list | tuple) else batch


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


@pytest.mark.parametrize("num_workers", [0, 2])
def test_documented_program_saves_and_loads(loader_class, num_workers):
    dataset = list(range(40))
    dataloader = loader_class(dataset, num_workers=num_workers)
    for i, _ in enumerate(dataloader):
        if i == 10:
            state_dict = dataloader.state_dict()
            break
    dataloader = loader_class(dataset, num_workers=num_workers)
    dataloader.load_state_dict(state_dict)
    assert [batch.item() for batch in dataloader] == list(range(11, 40))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    "make",
    [
        lambda loader, workers: loader(
            NoisyRange(5, 1, 1), sampler=MySampler(5, 1, 10), batch_size=2, drop_last=False, num_workers=workers
        ),
        lambda loader, workers: loader(MyIterableDataset(12, 0), batch_size=2, drop_last=False, num_workers=workers),
    ],
    ids=["map-style", "iterable-style"],
)
def test_documented_program_with_custom_state(loader_class, make, num_workers):
    dl = make(loader_class, num_workers)
    batches = []
    for i, batch in enumerate(dl):
        batches.append(batch)
        if i == 2:
            sd = dl.state_dict()
    dl.load_state_dict(sd)
    batches2 = list(dl)
    assert len(batches2) == len(batches) - 3
    assert all(torch.equal(a, b) for a, b in zip(batches[3:], batches2, strict=True))


# The cases of torchdata's tests.


class Range(torch.utils.data.Dataset):
    """A dataset without a state."""

    def __init__(self, length=12):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index


class Draws(Range):
    """A dataset that draws from torch's generator, which is its state."""

    def __getitem__(self, index):
        return [index, torch.randint(1 << 30, (1,)).item()]

    def state_dict(self):
        return {"generator": torch.get_rng_state()}

    def load_state_dict(self, state_dict):
        torch.set_rng_state(state_dict["generator"])


def own_part(sizes):
    """The samples of this worker; worker n has sizes[n], and a loader without workers has all."""
    info = torch.utils.data.get_worker_info()
    if info is None or info.num_workers == 1:
        return list(range(sum(sizes)))
    start = sum(sizes[: info.id])
    return list(range(start, start + sizes[info.id]))


class Cursor(Iterator):
    """An iterator with a nested state, with or without a tensor in it."""

    def __init__(self, samples, draws):
        self.samples, self.draws = samples, draws
        self.i = 0

    def __next__(self):
        if self.i >= len(self.samples):
            raise StopIteration
        self.i += 1
        sample = self.samples[self.i - 1]
        return [sample, torch.randint(1 << 30, (1,)).item()] if self.draws else sample

    def state_dict(self):
        return {"nest": {"i": self.i, **({"generator": torch.get_rng_state()} if self.draws else {})}}

    def load_state_dict(self, state_dict):
        self.i = state_dict["nest"]["i"]
        if self.draws:
            torch.set_rng_state(state_dict["nest"]["generator"])


class Iterable(torch.utils.data.IterableDataset):
    """A stream whose iterator has the state."""

    def __init__(self, sizes, draws=False):
        self.sizes, self.draws = sizes, draws

    def __iter__(self):
        return Cursor(own_part(self.sizes), self.draws)


class ItsOwnIterator(Cursor, torch.utils.data.IterableDataset):
    """A stream that is its own iterator; each worker reads all of it."""

    def __init__(self, length):
        super().__init__(list(range(length)), False)

    def __iter__(self):
        return self


class BegunByIter(torch.utils.data.IterableDataset):
    """A stream that is its own iterator, with a state from `iter()` on."""

    def __iter__(self):
        self.left = own_part([6, 6, 6])
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        return self.left.pop(0)

    def state_dict(self):
        return {"left": self.left}

    def load_state_dict(self, state_dict):
        assert self.left
        self.left = state_dict["left"]


class Stateless(torch.utils.data.IterableDataset):
    """A stream without a state."""

    def __init__(self, sizes):
        self.sizes = sizes

    def __iter__(self):
        yield from own_part(self.sizes)


class Generator(torch.utils.data.IterableDataset):
    """A stream read by a generator function, with the state in the dataset, the number of its epoch among it."""

    def __init__(self, sizes):
        self.sizes = sizes
        self.i = self.epoch = 0
        self.resume = None

    def __iter__(self):
        self.i, self.resume = self.resume or 0, None
        for sample in own_part(self.sizes)[self.i :]:
            self.i += 1
            yield [sample, self.epoch]
        self.i = 0
        self.epoch += 1

    def state_dict(self):
        return {"i": self.i, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.resume, self.epoch = state["i"], state["epoch"]


class Mutable(torch.utils.data.IterableDataset):
    """A stream whose `state_dict` returns the objects that it goes on to change."""

    def __init__(self, length=20):
        self.state, self.step, self.length = {0: 0, 1: 0, 2: 0}, 0, length

    def __iter__(self):
        for _ in range(self.step, self.length):
            self.step += 1
            self.state[self.step % 3] = 1 - self.state[self.step % 3]
            yield self.state[self.step % 3]

    def state_dict(self):
        return {"state": self.state, "step": self.step}

    def load_state_dict(self, state):
        self.state, self.step = state["state"], state["step"]


class Indices(Iterator):
    """The iterator of a sampler, with a state."""

    def __init__(self, length):
        self.length, self.i = length, 0

    def __next__(self):
        if self.i >= self.length:
            raise StopIteration
        self.i += 1
        return self.i - 1

    def state_dict(self):
        return {"i": self.i}

    def load_state_dict(self, state_dict):
        self.i = state_dict["i"]


class IteratorSampler(torch.utils.data.Sampler):
    """A sampler whose iterator has the state."""

    def __iter__(self):
        return Indices(12)

    def __len__(self):
        return 12


class GeneratorSampler(torch.utils.data.Sampler):
    """A sampler read by a generator function, with a state of its own."""

    def __init__(self, limit=12):
        self.limit, self.i, self.epoch, self.resume = limit, 0, 0, None

    def __iter__(self):
        if self.resume is not None:
            self.i, self.resume = self.resume, None
        for i in range(self.i, self.limit):
            self.i += 1
            yield (i + self.epoch) % self.limit
        self.i = 0
        self.epoch += 1

    def state_dict(self):
        return {"i": self.i, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.resume, self.epoch = state["i"], state["epoch"]


class Batches(torch.utils.data.Sampler):
    """A batch sampler with a state, and batches of different sizes."""

    def __init__(self):
        self.i = 0

    def __iter__(self):
        while self.i < 6:
            self.i += 1
            yield list(range(self.i))
        self.i = 0

    def __len__(self):
        return 6

    def state_dict(self):
        return {"i": self.i}

    def load_state_dict(self, state_dict):
        self.i = state_dict["i"]


SIZES = [0, 8, 4]


def seeded():
    return torch.Generator().manual_seed(13)


CASES = {
    "map": lambda loader, **k: loader(Range(), 2, **k),
    "map, shuffled": lambda loader, **k: loader(Range(), 2, shuffle=True, **k),
    "map, shuffled by a generator": lambda loader, **k: loader(Range(), 2, shuffle=True, generator=seeded(), **k),
    "map, stateful": lambda loader, **k: loader(Draws(), 2, **k),
    "map, stateful and shuffled": lambda loader, **k: loader(Draws(), 2, shuffle=True, generator=seeded(), **k),
    "torch's random sampler": lambda loader, **k: loader(
        Range(), 2, sampler=torch.utils.data.RandomSampler(range(12), generator=seeded()), **k
    ),
    "torchdata's random sampler": lambda loader, **k: loader(
        Range(), 2, sampler=RandomSampler(range(12), generator=seeded()), **k
    ),
    "torchdata's batch sampler": lambda loader, **k: loader(
        Range(), batch_sampler=BatchSampler(RandomSampler(range(12), generator=seeded()), 2, False), **k
    ),
    "torchdata's batch sampler of one with a state": lambda loader, **k: loader(
        Range(), batch_sampler=BatchSampler(GeneratorSampler(), 5, True), **k
    ),
    "torchdata's distributed sampler": lambda loader, **k: loader(
        Range(), 2, sampler=StatefulDistributedSampler(range(12), 2, 1, seed=3), **k
    ),
    "sampler whose iterator has the state": lambda loader, **k: loader(Range(), 2, sampler=IteratorSampler(), **k),
    "sampler with a state": lambda loader, **k: loader(Range(), 2, sampler=GeneratorSampler(), **k),
    "sampler without a state": lambda loader, **k: loader(Range(), 2, sampler=[3, 1, 4, 1, 5, 9, 2], **k),
    "batch sampler with a state": lambda loader, **k: loader(Range(), batch_sampler=Batches(), **k),
    "iterable": lambda loader, **k: loader(Iterable(SIZES), 2, **k),
    "iterable, random": lambda loader, **k: loader(Iterable(SIZES, draws=True), 3, **k),
    "iterable, its own iterator": lambda loader, **k: loader(ItsOwnIterator(8), 3, **k),
    "iterable, its own iterator, state from iter() on": lambda loader, **k: loader(BegunByIter(), 2, **k),
    "iterable, state in the dataset": lambda loader, **k: loader(Generator(SIZES), 3, **k),
    "iterable, without a state": lambda loader, **k: loader(Stateless(SIZES), 3, **k),
    "iterable, state that it goes on to change": lambda loader, **k: loader(Mutable(), 3, **k),
}
WORKERS = {"no workers": {}, "3 workers": {"num_workers": 3}}
ALSO = {"1 worker": {"num_workers": 1}, "3 persistent workers": {"num_workers": 3, "persistent_workers": True}}
ALSO_FOR = ["map, stateful and shuffled", "sampler with a state", "iterable, random", "iterable, state in the dataset"]
RUNS = [pytest.param(make, options, id=f"{name}, {place}")
        for name, make in CASES.items()
        for place, options in (WORKERS | (ALSO if name in ALSO_FOR else {})).items()]  # fmt: skip
REPEATS = "torchdata asks a worker that has ended once more: a dataset that resets its state at its end begins again"
NOT_COPIED = "torchdata does not copy a dataset's state"
TORCHDATA_FAILS = {
    "torchdata-iterable, state in the dataset, 3 workers": REPEATS,
    "torchdata-iterable, state in the dataset, 3 persistent workers": REPEATS,
    "torchdata-iterable, state that it goes on to change, no workers": NOT_COPIED,
    "torchdata-iterable, its own iterator, state from iter() on, no workers": NOT_COPIED,
    "torchdata-iterable, its own iterator, state from iter() on, 3 workers": REPEATS,
}


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


@pytest.mark.parametrize(("make", "options"), RUNS)
def test_restored_loader_continues_after_the_last_batch(request, loader_class, make, options):
    if request.node.callspec.id in TORCHDATA_FAILS:
        pytest.skip(TORCHDATA_FAILS[request.node.callspec.id])
    torch.manual_seed(0)
    given, states, _ = first_epoch(make(loader_class, **options))
    workers = options.get("num_workers", 0)
    points = {len(given) // 2, len(given)} if workers else range(1, len(given) + 1)
    for point in points:
        torch.manual_seed(point)
        restored = make(loader_class, snapshot_every_n_steps=3, **options)
        restored.load_state_dict(through_torch_save(states[point]))
        assert batches(restored) == given[point:], point


def stopped_after(loader, count):
    """The state after so many batches."""
    iterator = iter(loader)
    for _ in range(count):
        next(iterator)
    return loader.state_dict()


BOTH = [pytest.param(options, id=name) for name, options in {"no workers": {}, "2 workers": {"num_workers": 2}}.items()]
JSON_CASES = ["map", "sampler with a state", "iterable", "iterable, without a state"]


@pytest.mark.parametrize("options", BOTH)
@pytest.mark.parametrize("name", JSON_CASES)
def test_states_of_json_values_survive_json(request, loader_class, name, options):
    if request.node.callspec.id == "torchdata-iterable, without a state-no workers":
        pytest.skip("it is tested above")
    make = CASES[name]
    whole = batches(make(loader_class, **options))
    state = json.loads(json.dumps(stopped_after(make(loader_class, **options), 2)))
    restored = make(loader_class, **options)
    restored.load_state_dict(state)
    assert batches(restored) == whole[2:]


ENDS = ["map", "map, shuffled", "torchdata's random sampler", "sampler whose iterator has the state", "iterable"]


@pytest.mark.parametrize("options", BOTH)
@pytest.mark.parametrize("name", ENDS)
def test_state_before_the_end_gives_no_batches_and_after_it_a_whole_epoch(loader_class, name, options):
    def count(state):
        loader = CASES[name](loader_class, **options)
        loader.load_state_dict(state)
        return len(list(loader))

    given, states, end = first_epoch(CASES[name](loader_class, **options))
    assert count(states[-1]) == 0
    assert count(end) == count(states[0]) == len(given)


@pytest.mark.parametrize("options", [*BOTH, pytest.param({"num_workers": 2, "persistent_workers": True}, id="kept")])
@pytest.mark.parametrize("name", ["map, shuffled", "torchdata's random sampler", "iterable, state in the dataset"])
def test_epochs_after_a_restored_one_are_those_of_an_uninterrupted_run(request, loader_class, name, options):
    if request.node.callspec.id == "torchdata-iterable, state in the dataset-2 workers":
        pytest.skip("torchdata's workers that do not persist have the dataset of the first epoch")
    make = CASES[name]
    torch.manual_seed(0)
    uninterrupted = make(loader_class, **options)
    whole = [batches(uninterrupted) for _ in range(4)]
    torch.manual_seed(0)
    loader = make(loader_class, **options)
    begun = [batches(loader) for _ in range(2)]
    state = loader.state_dict()
    restored = make(loader_class, **options)
    restored.load_state_dict(state)
    assert begun + [batches(restored) for _ in range(2)] == whole


@pytest.mark.parametrize("options", BOTH)
def test_loader_goes_back_to_its_own_states_any_number_of_times(loader_class, options):
    loader = CASES["map, stateful and shuffled"](loader_class, **options)
    iterator = iter(loader)
    start = loader.state_dict()
    given = [plain(next(iterator)) for _ in range(3)]
    middle = loader.state_dict()
    kept = copy.deepcopy(middle)
    loader.load_state_dict(middle)
    given += batches(loader)
    assert len(given) == 6
    for state, expected in ((start, given), (middle, given[3:]), (start, given)):
        loader.load_state_dict(state)
        assert batches(loader) == expected
    assert json.dumps(middle, default=plain) == json.dumps(kept, default=plain)


@pytest.mark.parametrize("options", BOTH)
@pytest.mark.parametrize("name", ["map, stateful", "iterable, random", "iterable, state in the dataset"])
def test_state_soon_after_a_restore_continues_too(request, loader_class, name, options):
    if request.node.callspec.id == "torchdata-iterable, state in the dataset-2 workers":
        pytest.skip(REPEATS)
    make = CASES[name]
    given, states, _ = first_epoch(make(loader_class, **options))
    restored = make(loader_class, **options)
    restored.load_state_dict(states[2])
    if loader_class is hr.DataLoader:
        assert json.dumps(restored.state_dict(), default=plain) == json.dumps(states[2], default=plain)
    state = stopped_after(restored, 1)  # one worker has not given anything yet
    again = make(loader_class, **options)
    again.load_state_dict(state)
    assert batches(again) == given[3:]


def test_other_number_of_workers_for_a_stream_is_an_error(loader_class):
    state = stopped_after(CASES["iterable"](loader_class), 1)
    restored = CASES["iterable"](loader_class, num_workers=2)

    def load_and_begin():
        restored.load_state_dict(state)
        iter(restored)

    with pytest.raises((AssertionError, hr.StateError), match=r"num_workers was 0, and is 2|State doesn't contain"):
        load_and_begin()


@pytest.mark.parametrize("name", ["map", "iterable"])
def test_batches_out_of_order_are_neither_lost_nor_repeated(loader_class, name):
    if loader_class is not hr.DataLoader:
        pytest.skip('torchdata says that in_order=False "currently has no guarantees for state management"')
    for point in (1, 3):
        loader = CASES[name](loader_class, num_workers=3, in_order=False)
        iterator = iter(loader)
        given = [plain(next(iterator)) for _ in range(point)]
        restored = CASES[name](loader_class, num_workers=3, in_order=False)
        restored.load_state_dict(loader.state_dict())
        given += batches(restored)
        assert sorted(itertools.chain.from_iterable(given)) == list(range(12))


@pytest.mark.parametrize("options", BOTH)
def test_state_of_torchdata_is_refused_with_its_keys(options):
    state = CASES["map"](torchdata.StatefulDataLoader, **options).state_dict()
    with pytest.raises(hr.StateError, match=r"torchdata's StatefulDataLoader: a dict with the keys _"):
        CASES["map"](hr.DataLoader, **options).load_state_dict(state)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}], ids=["inline", "kept worker"])
def test_state_of_a_dataset_that_counts_epochs_is_saved_at_their_ends(options):
    make = CASES["iterable, state in the dataset"]
    uninterrupted = make(hr.DataLoader, **options)
    whole = [batches(uninterrupted) for _ in range(3)]
    loader = make(hr.DataLoader, **options)
    batches(loader)
    second, states, end = first_epoch(loader)
    assert second == whole[1]
    for state, expected in ((states[0], whole[1:]), (states[-1], [[], whole[2]]), (end, whole[2:])):
        restored = make(hr.DataLoader, **options)
        restored.load_state_dict(state)
        assert [batches(restored) for _ in expected] == expected
