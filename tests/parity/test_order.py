"""The order of samples: the same seed gives torch's order, to the last index."""

import os

import pytest
import torch
from torch.utils import data

from tests.parity.datasets import LENGTH, Counted, InThread, Map, Numbers
from tests.parity.harness import ASYNC, TORCH, epochs, parity


@parity("in the dataset's own order, if nothing else is asked for")
def test_sequential_order(same):
    (first, second) = same(
        lambda DataLoader: epochs(DataLoader(Numbers(), batch_size=None))
    )
    assert first == second == sorted(first)


@parity(
    "`shuffle`: torch's order for the same `torch.manual_seed`, another in each epoch"
)
def test_seeded_shuffle_gives_torchs_order(same):
    def program(DataLoader):
        came = []
        for seed in (1, 2**40):
            torch.manual_seed(seed)
            came += epochs(DataLoader(Numbers(), shuffle=True, batch_size=4))
        return came

    assert len({str(epoch) for epoch in same(program)}) == 4


@parity(
    "`generator`: torch's order for the same seed; after the epoch both generators are in torch's state"
)
def test_loaders_generator_gives_torchs_order(DataLoader):
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(Numbers(), shuffle=True, generator=generator, batch_size=4)
    came = [list(loader), torch.rand(1), list(loader)]
    return came, generator.get_state()


@parity("a `generator` of the sampler's own, beside the loader's")
def test_samplers_generator_gives_torchs_order(DataLoader):
    generators = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
    sampler = data.RandomSampler(range(LENGTH), generator=generators[0])
    loader = DataLoader(Numbers(), sampler=sampler, generator=generators[1], batch_size=4)
    return epochs(loader), [generator.get_state() for generator in generators]


class Eager(data.Sampler):
    """Draws its whole order in `__iter__`, as many users' samplers do."""

    def __iter__(self):
        return iter(torch.randperm(LENGTH).tolist())

    def __len__(self):
        return LENGTH


SAMPLERS = {
    "a `SequentialSampler`": lambda: data.SequentialSampler(range(LENGTH)),
    "a `RandomSampler`": lambda: data.RandomSampler(range(LENGTH)),
    "a `WeightedRandomSampler`": lambda: data.WeightedRandomSampler([1.0, 2.0, 3.0], 11),
    "a `SubsetRandomSampler`": lambda: data.SubsetRandomSampler([3, 1, 4, 9]),
    "a `DistributedSampler`": lambda: data.DistributedSampler(
        Map(), num_replicas=3, rank=1, seed=5
    ),
}
ANY = {
    "tensor": lambda: torch.tensor([3, 1, 2]),
    "dict": lambda: {5: "five", 1: "one"},
    "eager": Eager,
}


def with_sampler(same, make):
    same(lambda DataLoader: epochs(DataLoader(Map(), sampler=make(), batch_size=3)))


@pytest.mark.parametrize("kind", SAMPLERS)
@parity(
    "`SequentialSampler`, `RandomSampler`, `WeightedRandomSampler`, `SubsetRandomSampler`, `DistributedSampler`"
)
def test_torchs_samplers_give_torchs_order(same, kind):
    with_sampler(same, SAMPLERS[kind])


@pytest.mark.parametrize("kind", ANY)
@parity("`sampler` as any iterable, also if the whole order is drawn at once")
def test_any_iterable_is_a_sampler(same, kind):
    with_sampler(same, ANY[kind])


@parity("`sampler` as an iterator is used up by one epoch")
def test_iterator_as_sampler_is_used_up(same):
    def program(DataLoader):
        return epochs(DataLoader(Numbers(), sampler=iter([3, 1, 2]), batch_size=2))

    assert same(program)[1] == []


class EagerBatches(Eager):
    def __iter__(self):
        return iter(torch.randperm(LENGTH).split(4))

    def __len__(self):
        return 4


BATCH_SAMPLERS = {
    "of a RandomSampler": lambda: data.BatchSampler(
        data.RandomSampler(range(LENGTH)), 4, True
    ),
    "eager": EagerBatches,
}


@pytest.mark.parametrize("kind", BATCH_SAMPLERS)
@parity("`BatchSampler`, and any other `batch_sampler`")
def test_batch_samplers_give_torchs_batches(same, kind):
    same(
        lambda DataLoader: epochs(DataLoader(Map(), batch_sampler=BATCH_SAMPLERS[kind]()))
    )


@pytest.mark.parametrize("drop_last", [False, True])
@parity(
    "`DistributedSampler` with `set_epoch`: a part for each rank, another order in each epoch"
)
def test_distributed_sampler_gives_torchs_order_in_each_epoch(same, drop_last):
    def program(DataLoader):
        orders = []
        for rank in range(2):
            sampler = data.DistributedSampler(
                Map(), num_replicas=2, rank=rank, seed=1, drop_last=drop_last
            )
            loader = DataLoader(Numbers(), sampler=sampler, batch_size=4)
            for epoch in (0, 1, 5):
                sampler.set_epoch(epoch)
                orders.append(list(loader))
        return orders

    assert len({str(order) for order in same(program)}) == 6


@parity(
    "a sampler is begun once for each epoch, and read to the end",
    not_for={
        "torch dataset, 2 workers": "torch calls its `__iter__` twice, and so does headrace"
    },
)
def test_sampler_is_started_and_read_as_in_torch(same):
    def program(DataLoader):
        sampler = Counted()
        came = epochs(DataLoader(Numbers(), sampler=sampler, batch_size=4))
        return came, sampler.begun, sampler.drawn

    assert same(program)[1:] == (2, 2 * LENGTH)


class Late(Map):
    """The first sample is available when the other end of a pipe is opened."""

    def __init__(self, pipe):
        super().__init__(4)
        self.pipe = pipe

    def __getitem__(self, index):
        if index == 0:
            self.pipe.read_bytes()
        return index


def out_of_order(loader, pipe):
    """Release the first sample after another was delivered."""
    batches = iter(loader)
    first = next(batches)
    pipe.write_bytes(b"")
    return first != 0, sorted([first, *batches])


@pytest.fixture
def pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


SLOW_BATCH = (
    "`in_order=False`: a slow batch does not hold up the others; every sample comes once"
)


@parity(SLOW_BATCH, not_for={TORCH[0]: "one batch is read at a time; torch ignores it"})
def test_in_order_false_gives_ready_batches_first(same, pipe):
    def program(DataLoader):
        fetches = same.setting.asynchronous and DataLoader.is_ours
        # only among workers can torch be out of order
        options = {} if fetches else {"num_workers": 2}
        dataset = InThread(Late(pipe)) if fetches else Late(pipe)
        return out_of_order(
            DataLoader(dataset, batch_size=None, in_order=False, **options), pipe
        )

    assert same(program) == (True, [0, 1, 2, 3])


class Held(Late):
    """Ten samples, each with its worker; the third comes only when the pipe is written to."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        if index == 2:
            self.pipe.read_bytes()
        return index, data.get_worker_info().id


class HeldStream(data.IterableDataset):
    """Ten samples, five in each of two workers, each with its worker; those of worker 0 are held before the first."""

    def __init__(self, pipe):
        self.pipe = pipe

    def __iter__(self):
        worker = data.get_worker_info().id
        if worker == 0:
            self.pipe.read_bytes()
        return ((index, worker) for index in range(5 * worker, 5 * worker + 5))


FREE_WORKERS = "`in_order=False`: batches go to free workers, not in turn"
ONLY_THERE = {
    TORCH[0]: "no workers",
    ASYNC[0]: "no workers",
    ASYNC[1]: "a batch goes to the first free worker",
}


def held(loader_class, dataset, first):
    """Read `first` samples while one worker is held, then the others."""
    options = {"num_workers": 2, "prefetch_factor": 2, "in_order": False, "timeout": 20}
    batches = iter(loader_class(dataset, batch_size=None, **options))
    early = [tuple(map(int, next(batches))) for _ in range(first)]
    dataset.pipe.write_bytes(b"")
    return early, [tuple(map(int, batch)) for batch in batches]


@parity(FREE_WORKERS, not_for=ONLY_THERE)
def test_in_order_false_gives_batches_to_the_idle_worker(same, pipe):
    def program(DataLoader):
        early, late = held(DataLoader, Held(pipe), 8)
        # One plan may have been sent to the slow worker before; the others have gone to the fast
        # one.
        return sorted(dict(early + late)), all(
            worker != dict(late)[2] for index, worker in early if index > 2
        )

    assert same(program) == (list(range(10)), True)


@parity(FREE_WORKERS, not_for=ONLY_THERE)
def test_in_order_false_continues_streams_while_one_is_blocked(same, pipe):
    came = same(lambda DataLoader: held(DataLoader, HeldStream(pipe), 5))
    assert came == ([(i, 1) for i in range(5, 10)], [(i, 0) for i in range(5)])


@parity(
    "`in_order=False` without workers changes nothing",
    not_for={
        TORCH[1]: "there are workers",
        **dict.fromkeys(ASYNC, "fetches overlap without workers too"),
    },
)
def test_in_order_false_without_workers_changes_nothing(same):
    same(lambda DataLoader: epochs(DataLoader(Numbers(), batch_size=4, in_order=False)))
