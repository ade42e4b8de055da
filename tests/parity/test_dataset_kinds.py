"""Dataset kinds: whatever torch's loader reads, ours reads, and gives the same batches."""

import pytest
import torch
from torch.utils import data

import headrace as hr
from tests.parity.datasets import LENGTH, Count, Endless, Map, Numbers, Stream, tensors
from tests.parity.harness import ASYNC, TORCH, epochs, parity

IN_MEMORY = dict.fromkeys(ASYNC, "samples in memory: there is nothing to wait for")
# The first few are enough where workers have to be started for each.
WAYS = (
    {"batch_size": 4},
    {"batch_size": 5, "shuffle": True, "drop_last": True},
    {"batch_size": None, "shuffle": True},
    {"batch_size": 4, "shuffle": True},
    {"batch_size": 1},
    {"batch_size": 100},
    {},
)
STREAM_WAYS = (
    {"batch_size": 4},
    {"batch_size": 4, "drop_last": True},
    {"batch_size": None},
    {},
)


def in_every_way(same, make, ways=WAYS):
    """Read what `make` makes; it is given what each part of it is to be put through."""
    if same.setting.asynchronous:
        ways = ways[:1]
    for options in ways[:3] if same.setting.workers else ways:
        same(
            lambda DataLoader, options=options: epochs(
                DataLoader(make(DataLoader.twin), **options)
            )
        )


@parity("map-style: `__getitem__` and `__len__`")
def test_map_style_dataset(same):
    in_every_way(same, lambda twin: Map())


@parity("iterable-style: `__iter__`, begun anew at each epoch")
def test_iterable_dataset(same):
    in_every_way(same, lambda twin: Stream(), STREAM_WAYS)


@parity("an endless iterable")
def test_infinite_iterable_dataset(DataLoader):
    batches = iter(DataLoader(Endless(), batch_size=3))
    return [next(batches) for _ in range(20)]


class OneShot(data.IterableDataset):
    """Is its own iterator, as a generator is: what is read is gone."""

    def __init__(self):
        self.left = iter(range(LENGTH))

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.left)


@parity(
    "an iterable that is an iterator is read once",
    not_for={
        "torch dataset, 2 workers": "each worker reads a copy",
        "async dataset, workers": "the reading process has a copy",
    },
)
def test_exhausted_iterable_dataset(same):
    assert same(lambda DataLoader: epochs(DataLoader(OneShot(), batch_size=4)))[1] == []


@pytest.mark.parametrize(
    "make", [lambda: Map(0), lambda: Count(0)], ids=["map", "stream"]
)
@parity("an empty dataset")
def test_empty_dataset(same, make):
    in_every_way(same, lambda twin: make(), STREAM_WAYS)


@parity("`TensorDataset`, and a `Subset` of it", not_for=IN_MEMORY)
def test_tensor_dataset(same):
    in_every_way(same, lambda twin: tensors())
    in_every_way(same, lambda twin: data.Subset(tensors(), [5, 1, 3, 2, 8]))


@parity("`Subset`, of any dataset")
def test_subset(same):
    in_every_way(same, lambda twin: data.Subset(twin(Map()), [5, 1, 3, 2, 8]))
    in_every_way(
        same,
        lambda twin: data.Subset(data.Subset(twin(Numbers()), [5, 1, 3, 2, 8]), range(4)),
        WAYS[:1],
    )
    in_every_way(same, lambda twin: data.Subset(twin(Many()), [5, 1, 3, 2, 8]), WAYS[:1])


@parity("`random_split`, with torch's parts for the same generator")
def test_random_split(DataLoader):
    parts = data.random_split(
        DataLoader.twin(Map()), [0.7, 0.3], torch.Generator().manual_seed(3)
    )
    return [epochs(DataLoader(part, batch_size=2, shuffle=True), 1) for part in parts]


@parity("`ConcatDataset`")
def test_concat_dataset(same):
    in_every_way(
        same,
        lambda twin: data.ConcatDataset(
            [twin(Map()), data.Subset(twin(Map()), [3, 1]), twin(Map(2))]
        ),
    )
    in_every_way(same, lambda twin: twin(Map()) + twin(Map()), WAYS[:1])


@parity("`StackDataset`, of a tuple and of names")
def test_stack_dataset(same):
    in_every_way(
        same,
        lambda twin: data.StackDataset(a=twin(Map()), b=twin(Numbers()), c=twin(Many())),
    )
    in_every_way(
        same, lambda twin: data.StackDataset(twin(Map()), twin(Numbers())), WAYS[:1]
    )


@parity(
    "`ConcatDataset` and `StackDataset` of async and of other datasets, read as by torch",
    not_for=dict.fromkeys(IN_MEMORY, "read inside the workers, or by the caller"),
)
def test_concat_of_different_datasets(same):
    in_every_way(same, lambda twin: data.ConcatDataset([AsyncMap(), Map()]), WAYS[:3])
    in_every_way(
        same, lambda twin: data.StackDataset(a=AsyncMap(), b=tensors()), WAYS[:3]
    )


@parity("`ChainDataset`")
def test_chain_dataset(same):
    in_every_way(
        same,
        lambda twin: data.ChainDataset([twin(Stream()), twin(Stream())]),
        STREAM_WAYS,
    )


class Many(Map):
    """Answers a whole batch at once."""

    def __getitems__(self, indices):
        return [torch.tensor(index * 2) for index in indices]


class NoSingles(Many):
    def __getitem__(self, index):
        raise AssertionError("batches are asked for at once")


@parity(
    "`__getitems__` answers a whole batch, and is asked only where batches are automatic"
)
def test_getitems_reads_whole_batches(same):
    in_every_way(same, lambda twin: Many())
    in_every_way(
        same, lambda twin: NoSingles(), [way for way in WAYS if way.get("batch_size", 1)]
    )


class PutTogether(Many):
    def __getitems__(self, indices):
        return {"x": torch.tensor(list(indices))}


def itself(batch):
    return batch


@parity(
    "`__getitems__` may return a collated batch",
    not_for=dict.fromkeys(
        ASYNC, "`agets` returns samples; `collate_fn` collates, in the workers"
    ),
)
def test_getitems_of_composed_datasets(same):
    same(
        lambda DataLoader: epochs(
            DataLoader(PutTogether(), batch_size=4, collate_fn=itself)
        )
    )


class Growing(Map):
    """Has learnt of more samples each time."""

    def grow(self, by):
        self.length += by


@pytest.mark.parametrize(
    "options", [{"batch_size": 4, "shuffle": True}, {"batch_size": None}], ids=str
)
@parity("a dataset that grows or shrinks between epochs")
def test_dataset_that_grows(DataLoader, options):
    dataset = Growing()
    loader = DataLoader(dataset, **options)
    came = [(len(loader), list(loader))]
    for by in (6, -10):
        dataset.grow(by)
        came.append((len(loader), list(loader)))
    return came


@pytest.mark.parametrize(
    "make",
    [
        lambda: [10 * i for i in range(LENGTH)],
        lambda: range(LENGTH),
        lambda: "characters",
    ],
    ids=["list", "range", "str"],
)
@parity(
    "a list, a range, a string: anything with `__getitem__` and `__len__`",
    not_for=IN_MEMORY,
)
def test_sequence_as_dataset(same, make):
    in_every_way(same, lambda twin: make())


class Duck:
    """No base class."""

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return torch.tensor([index]), index


class AsyncDuck(Duck):
    async def aget(self, index):
        return self[index]


@parity("a class without a base class")
def test_dataset_without_base_class(same):
    in_every_way(same, lambda twin: AsyncDuck() if same.setting.asynchronous else Duck())


class Keyed:
    """Indices are what the sampler says."""

    def __getitem__(self, key):
        return f"value of {key}"


@parity("keys other than numbers, and a dataset without a length, with a sampler")
def test_sampler_of_keys(same):
    same(
        lambda DataLoader: epochs(
            DataLoader(Keyed(), sampler=["a", ("b", 1), "c"], batch_size=2)
        )
    )


class AsyncMap(hr.AsyncDataset):
    def __len__(self):
        return LENGTH

    async def aget(self, index):
        return torch.tensor([index, -index]), index


class AsyncStream(hr.AsyncIterableDataset):
    async def __aiter__(self):
        for i in range(LENGTH):
            yield torch.tensor([i, -i]), i


@pytest.mark.parametrize("make", [AsyncMap, AsyncStream], ids=["map", "stream"])
@parity(
    "an async dataset gives the same samples in torch's own loader",
    not_for=dict.fromkeys(TORCH, "the dataset is async"),
)
def test_blocking_reads_of_an_async_dataset(same, make):
    in_every_way(same, lambda twin: make(), STREAM_WAYS)
