"""States without a batch of the epoch: before the first iteration, after the loop, or of an iterator just made."""

import json

import numpy as np
import pytest
import torch
from torch.utils.data import (
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from headrace import AsyncIterableDataset, DataLoader, ElasticSampler, StateError
from tests.datasets import Numbers

N = 8


class Permutations:
    """A sampler with a state: another order in each epoch, from the epoch's number."""

    def __init__(self):
        self.epoch = self.position = 0

    def __len__(self):
        return N

    def __iter__(self):
        order = np.random.default_rng(self.epoch).permutation(N).tolist()
        while self.position < N:
            self.position += 1
            yield order[self.position - 1]
        self.position = 0
        self.epoch += 1

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.epoch, self.position = state["epoch"], state["position"]


class Log(AsyncIterableDataset[int]):
    """A stream whose state outlives an epoch: each gives the next four records."""

    def __init__(self):
        self.next = 0

    async def __aiter__(self):
        for _ in range(4):
            self.next += 1
            yield self.next - 1

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def generator():
    return torch.Generator().manual_seed(3)


def noisy(sample):
    return sample, float(torch.rand(()))


def saved(loader):
    return json.loads(json.dumps(loader.state_dict()))


def epoch_of(loader):
    return [[int(value) for value in batch] for batch in loader]


UNSEEDED = {
    "sequential": lambda: {},
    "shuffled": lambda: {"shuffle": True},
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0] * N, N)},
    "shuffled by a generator": lambda: {"shuffle": True, "generator": generator()},
    "a sampler with a state": lambda: {"sampler": Permutations()},
}


@pytest.mark.parametrize("epochs", [0, 1])
@pytest.mark.parametrize("order", UNSEEDED.values(), ids=UNSEEDED)
def test_order_and_random_numbers_of_an_epoch_after_a_restored_state_are_saved(order, epochs):
    def loader():
        return DataLoader(Numbers(N), 2, transform=noisy, collate_fn=list, **order())

    first = loader()
    for _ in range(epochs):
        list(first)
    second = loader()
    second.load_state_dict(saved(first))
    batches = iter(second)
    for _ in range(3):
        next(batches)
        state = saved(second)
        torch.manual_seed(0)  # the program that continues has other generators
        third = loader()
        third.load_state_dict(state)
        rest = list(third)
    assert rest == list(batches)


class Noise(Dataset):
    def __len__(self):
        return N

    def __getitem__(self, index):
        return noisy(index)


class NoiseStream(IterableDataset):
    def __iter__(self):
        return map(noisy, range(N))


@pytest.mark.parametrize("epochs", [0, 1])
@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Noise(), 2, num_workers=1, collate_fn=list),
        lambda: DataLoader(NoiseStream(), 2, num_workers=1, collate_fn=list),
        lambda: DataLoader(Numbers(N), 2, transform=noisy, collate_fn=list),
    ],
    ids=["torch", "torch, a stream", "async"],
)
def test_state_between_epochs_changes_no_epoch_and_the_next_one_follows_torchs_generator(
    make, epochs
):
    def run(saves):
        torch.manual_seed(7)
        loader = make()
        given = [list(loader) for _ in range(epochs)]
        generator = torch.get_rng_state()
        state = saved(loader) if saves else None
        return [*given, list(loader)], state, generator

    whole, _, _ = run(False)
    given, state, generator = run(True)
    assert given == whole
    restored = make()
    restored.load_state_dict(state)
    torch.set_rng_state(generator)  # by the program that continues
    assert list(restored) == whole[-1]


@pytest.mark.parametrize(
    ("make", "is_iterator_made"), [(Log, True), (lambda: Log().map(int), False)]
)
def test_dataset_whose_state_outlives_an_epoch_continues(make, is_iterator_made):
    loader = DataLoader(make(), batch_size=1)
    list(loader)
    iterator = iter(loader) if is_iterator_made else None
    state = saved(loader)
    restored = DataLoader(make(), batch_size=1)
    restored.load_state_dict(state)
    assert epoch_of(restored) == [[4], [5], [6], [7]]
    del iterator


def test_order_of_a_sampler_whose_epoch_the_program_sets_is_restored():
    def loader():
        sampler = DistributedSampler(range(N), 1, 0)
        return DataLoader(list(range(N)), 4, sampler=sampler), sampler

    first, sampler = loader()
    list(first)
    between = saved(first)
    sampler.set_epoch(1)
    whole = epoch_of(first)
    sampler.set_epoch(1)
    batches = iter(first)
    next(batches)
    within = saved(first)
    for state, expected in ((between, whole), (within, whole[1:])):
        restored, sampler = loader()
        restored.load_state_dict(state)
        sampler.set_epoch(1)
        assert epoch_of(restored) == expected


def test_sampler_of_another_length_is_refused():
    for make in (
        lambda n: SequentialSampler(range(n)),
        lambda n: RandomSampler(range(N), num_samples=n),
    ):
        first = DataLoader(list(range(N)), 2, sampler=make(6))
        next(iter(first))
        with pytest.raises(StateError, match="length=6"):
            DataLoader(list(range(N)), 2, sampler=make(N)).load_state_dict(first.state_dict())


def test_epoch_without_a_batch_is_at_its_beginning_until_next_was_asked_for():
    sampler = ElasticSampler(2, rank=0, world_size=3, drop_last=True)
    with DataLoader(Numbers(2), 1, sampler=sampler, seed=0) as loader:
        iter(loader)
        state = loader.state_dict()
    alone = ElasticSampler(2, rank=0, world_size=1, drop_last=True)
    with DataLoader(Numbers(2), 1, sampler=alone, seed=0, collate_fn=list) as loader:
        loader.load_state_dict(state)
        assert sorted(number for batch in loader for number in batch) == [0, 1]
