"""A loader sees through torch's compositions of async datasets: their parts are fetched at once, on the loop."""

import asyncio
import os

import pytest
from torch.utils import data

import headrace as hr
from headrace._core.interface.compositions import unwrap


class Together(hr.AsyncDataset):
    """Nobody gets a sample before all have asked."""

    def __init__(self, length):
        self.length = length
        self.waiting = 0
        self.all_there = asyncio.Event()

    def __len__(self):
        return self.length

    async def aget(self, index):
        self.waiting += 1
        if self.waiting == self.length:
            self.all_there.set()
        await self.all_there.wait()
        return index


class Named(hr.AsyncDataset):
    def __init__(self, name, length=4):
        self.name = name
        self.length = length
        self.epoch = None

    def __len__(self):
        return self.length

    async def aget(self, index):
        if index >= self.length:
            raise KeyError(index)
        return f"{self.name}{index}"

    def sample_key(self, index):
        return f"{self.name}/{index}"

    def set_epoch(self, epoch):
        self.epoch = epoch


class Numbers(hr.AsyncIterableDataset):
    async def __aiter__(self):
        for i in range(3):
            yield i


def loaded(dataset, **options):
    with hr.DataLoader(dataset, batch_size=None, **options) as loader:
        return list(loader)


def in_process(sample):
    return sample, os.getpid()


def test_samples_of_a_part_are_fetched_at_once():
    dataset = Together(6)
    assert loaded(data.Subset(dataset, [3, 1, 2, 0, 5, 4])) == [3, 1, 2, 0, 5, 4]


def test_samples_of_all_parts_are_fetched_at_once():
    first = Together(6)
    assert loaded(data.ConcatDataset([data.Subset(first, [0, 1, 2]), data.Subset(first, [3, 4, 5])])) == [*range(6)]


def test_a_negative_index_counts_from_the_end_of_all():
    row = data.ConcatDataset([Named("a"), Named("b")])
    assert loaded(row, sampler=[-1, -8, -5]) == [row[-1], row[-8], row[-5]]
    with pytest.raises(ValueError, match="absolute value of index should not exceed dataset length"):
        loaded(row, sampler=[-9])


def test_what_map_queued_on_a_part_is_done_in_the_workers():
    mapped = Named("a").map(in_process)
    compositions = [
        data.Subset(mapped, [2]),
        data.Subset(data.Subset(mapped, [0, 2]), [1]),
        data.ConcatDataset([data.Subset(Named("b").map(str.upper), []), data.Subset(mapped, [2])]),
    ]
    for dataset in compositions:
        ((sample, pid),) = loaded(dataset, num_workers=1)
        assert sample == "a2"
        assert pid != os.getpid()


def test_each_part_has_its_own_maps():
    upper, plain = Named("a", 1).map(str.upper), Named("b", 1)
    assert loaded(data.ConcatDataset([upper, plain])) == ["A0", "b0"]
    assert loaded(data.StackDataset(x=upper, y=plain)) == [{"x": "A0", "y": "b0"}]
    assert loaded(data.ChainDataset([Numbers(), Numbers().map(str)])) == [0, 1, 2, "0", "1", "2"]


def test_an_error_names_the_sample_as_its_part_does():
    with pytest.raises(KeyError) as caught:
        loaded(data.Subset(Named("a"), [1, 7]))
    assert caught.value.__notes__ == ["headrace: stage fetch, batch 1, index 1, key 'a/7'"]
    row = unwrap(data.ConcatDataset([Named("a"), Named("b")]))[0]
    assert row.sample_key(5) == "b/1"
    assert unwrap(data.StackDataset(Named("a"), Named("b")))[0].sample_key(2) == "a/2 + b/2"


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


def test_a_subclass_may_do_more_and_is_read_as_torch_reads_it():
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
    ids=["row", "stack", "subset", "chain"],
)
def test_what_is_not_async_in_all_its_parts_is_left_alone(dataset):
    assert unwrap(dataset) == (dataset, ())


def test_the_loaders_dataset_stays_the_users():
    part = data.Subset(Named("a"), [1])
    assert hr.DataLoader(part).dataset is part


def test_a_stream_of_a_chain_is_closed_where_it_was_left():
    closed = []

    class Closing(hr.AsyncIterableDataset):
        async def __aiter__(self):
            try:
                for i in range(100):
                    yield i
            finally:
                closed.append(True)

    loader = hr.DataLoader(data.ChainDataset([Closing(), Closing()]), batch_size=None)
    batches = iter(loader)
    assert next(batches) == 0
    loader.close()
    assert closed == [True]
