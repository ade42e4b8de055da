"""Torch's compositions of async datasets: samples of the parts are fetched concurrently, on the loop."""

import asyncio

import pytest
from torch.utils import data

import headrace as hr
from headrace._streams.torch_views import unwrap
from tests.datasets import Numbers


class Together(Numbers):
    """Samples that arrive only when all of them are being fetched."""

    def __init__(self, length):
        super().__init__(length)
        self.all_there = asyncio.Barrier(length)

    async def aget(self, index):
        await self.all_there.wait()
        return index


class Named(Numbers):
    epoch = None

    def __init__(self, name):
        super().__init__(4)
        self.name = name

    async def aget(self, index):
        if index >= self.length:
            raise KeyError(index)
        return f"{self.name}{index}"

    def sample_key(self, index):
        return f"{self.name}/{index}"

    def set_epoch(self, epoch):
        self.epoch = epoch


def loaded(dataset, **options):
    with hr.DataLoader(dataset, batch_size=None, **options) as loader:
        return list(loader)


def test_samples_of_all_parts_are_fetched_concurrently():
    first = Together(4)  # as many as are fetched before the size of a sample is known
    assert loaded(
        data.ConcatDataset([data.Subset(first, [0, 1]), data.Subset(first, [2, 3])])
    ) == [*range(4)]


def test_negative_index_counts_from_the_end():
    both = data.ConcatDataset([Named("a"), Named("b")])
    assert loaded(both, sampler=[-1, -8, -5]) == [both[-1], both[-8], both[-5]]
    with pytest.raises(IndexError, match="index -9 is out of range for 8 samples"):
        loaded(both, sampler=[-9])


def test_error_has_the_sample_key_of_the_part():
    with pytest.raises(KeyError) as caught:
        loaded(data.Subset(Named("a"), [1, 7]))
    assert caught.value.__notes__ == [
        "headrace: stage fetch, batch 1, index 1, key 'a/7'"
    ]
    both = unwrap(data.ConcatDataset([Named("a"), Named("b")]))[0]
    assert both.sample_key(5) == "b/1"
    assert (
        unwrap(data.StackDataset(Named("a"), Named("b")))[0].sample_key(2) == "a/2 + b/2"
    )


def test_set_epoch_reaches_the_parts():
    first, second = Named("a"), Named("b")
    loader = hr.DataLoader(data.ConcatDataset([data.Subset(first, [0]), second]))
    loader.set_epoch(3)
    assert (first.epoch, second.epoch) == (3, 3)


class Doubled(data.Subset):
    def __getitem__(self, index):
        return super().__getitem__(index) * 2

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def test_subclass_of_a_composition_is_read_as_torch_reads_it():
    dataset = Doubled(Named("a"), [1])
    assert unwrap(dataset) == (dataset, ())
    assert loaded(dataset) == ["a1a1"]


@pytest.mark.parametrize(
    "dataset",
    [
        data.ConcatDataset([Named("a"), [1, 2]]),
        data.StackDataset(Named("a"), [1, 2, 3, 4]),
        data.Subset([1, 2], [0]),
        data.ChainDataset([]),
    ],
    ids=["concat", "stack", "subset", "chain"],
)
def test_composition_with_a_torch_part_is_not_unwrapped(dataset):
    assert unwrap(dataset) == (dataset, ())


def test_dataset_attribute_of_the_loader_is_the_users_object():
    part = data.Subset(Named("a"), [1])
    assert hr.DataLoader(part).dataset is part
