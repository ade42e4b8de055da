"""The batches are torch's own, value for value and type for type, computed by both loaders in the same run."""

import random
import re
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch.utils import data

import headrace as hr

Point = namedtuple("Point", ["x", "label"])
LENGTH = 13


def without_address(value):
    """A test's name that is the same in every process."""
    return re.sub(r" at 0x\w+", "", str(value))


class TorchMap(data.Dataset):
    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return torch.tensor([index, -index]), index


class AsyncMap(hr.AsyncDataset):
    def __len__(self):
        return LENGTH

    async def aget(self, index):
        return torch.tensor([index, -index]), index


class DuckMap:
    def __len__(self):
        return LENGTH

    async def aget(self, index):
        return torch.tensor([index, -index]), index

    def __getitem__(self, index):  # for torch's loader
        return torch.tensor([index, -index]), index


class TorchStream(data.IterableDataset):
    def __iter__(self):
        return ((torch.tensor([i, -i]), i) for i in range(LENGTH))


class ShardedStream(data.IterableDataset):
    """Each worker reads its own part, of unequal length."""

    def __iter__(self):
        info = data.get_worker_info()
        if info is None:
            return iter(range(LENGTH))
        return iter(range(info.id * 100, info.id * 100 + 3 + 5 * info.id))


class AsyncStream(hr.AsyncIterableDataset):
    async def __aiter__(self):
        for i in range(LENGTH):
            yield torch.tensor([i, -i]), i


class OldStyle:
    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return {"x": np.full(2, index), "y": float(index), "name": f"n{index}", "raw": b"x", "pair": (index, [index])}


class Many:
    """Answers a whole batch at once."""

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        raise AssertionError("batches are asked for at once")

    def __getitems__(self, indices):
        return [torch.tensor(index * 2) for index in indices]


class Batches(Many):
    """Answers a whole batch at once, already put together."""

    def __getitems__(self, indices):
        return {"x": torch.tensor(list(indices))}


class Points(TorchMap):
    def __getitem__(self, index):
        return Point(torch.full((2,), index), f"label {index}")


class Noisy(TorchMap):
    """What augmentation does: every generator is drawn from."""

    def __getitem__(self, index):
        return index, random.random(), np.random.random(), torch.rand(2)


def tensors():
    return data.TensorDataset(torch.arange(LENGTH), torch.arange(LENGTH * 2.0).reshape(LENGTH, 2))


DATASETS = {
    "torch map": TorchMap,
    "async map": AsyncMap,
    "duck-typed map": DuckMap,
    "TensorDataset": tensors,
    "Subset": lambda: data.Subset(TorchMap(), [5, 1, 3, 2, 8]),
    "Subset of tensors": lambda: data.Subset(tensors(), [5, 1, 3, 2, 8]),
    "Subset of async": lambda: data.Subset(AsyncMap(), [5, 1, 3, 2, 8]),
    "ConcatDataset": lambda: data.ConcatDataset([TorchMap(), data.Subset(TorchMap(), [3, 1])]),
    "ConcatDataset of async": lambda: data.ConcatDataset([AsyncMap(), AsyncMap()]),
    "StackDataset": lambda: data.StackDataset(a=TorchMap(), b=tensors()),
    "list": lambda: [10 * i for i in range(LENGTH)],
    "range": lambda: range(LENGTH),
    "dicts": OldStyle,
    "namedtuples": Points,
    "__getitems__": Many,
}
STREAMS = {
    "torch stream": TorchStream,
    "sharded stream": ShardedStream,
    "ChainDataset": lambda: data.ChainDataset([TorchStream(), TorchStream()]),
}
WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


def assert_same(ours, torchs):
    assert type(ours) is type(torchs)
    if isinstance(ours, torch.Tensor):
        assert (ours.dtype, ours.shape) == (torchs.dtype, torchs.shape)
        assert torch.equal(ours, torchs)
    elif isinstance(ours, dict):
        assert list(ours) == list(torchs)
        for key in ours:
            assert_same(ours[key], torchs[key])
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(torchs)
        for left, right in zip(ours, torchs, strict=True):
            assert_same(left, right)
    else:
        assert ours == torchs


def epochs(loader_class, make, *, count=2, seed=42, **options):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    options = {name: option() if callable(option) and name.endswith(("sampler", "generator")) else option
               for name, option in options.items()}  # fmt: skip
    loader = loader_class(make(), **options)
    came = [list(loader) for _ in range(count)]
    if isinstance(loader, hr.DataLoader):
        loader.close()
    return came


def assert_parity(make, **options):
    torchs = epochs(data.DataLoader, make, **options)
    assert any(torchs), "there is something to compare"
    assert_same(epochs(hr.DataLoader, make, **options), torchs)


@WORKERS
@pytest.mark.parametrize("kind", DATASETS)
def test_every_kind_of_dataset_in_order(kind, num_workers):
    assert_parity(DATASETS[kind], batch_size=4, num_workers=num_workers)


@pytest.mark.parametrize("kind", DATASETS)
@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True, "batch_size": 4},
        {"shuffle": True, "batch_size": 4, "drop_last": True},
        {"shuffle": True, "generator": lambda: torch.Generator().manual_seed(3), "batch_size": 5},
        {"batch_size": 1},
        {"batch_size": 100},
        {},
    ],
    ids=without_address,
)
def test_every_kind_of_dataset_shuffled_and_cut(kind, options):
    assert_parity(DATASETS[kind], **options)


@WORKERS
@pytest.mark.parametrize("kind", [kind for kind in DATASETS if kind != "__getitems__"])
def test_without_batches(kind, num_workers):
    assert_parity(DATASETS[kind], batch_size=None, shuffle=True, num_workers=num_workers, count=1)


@WORKERS
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("kind", STREAMS)
def test_every_kind_of_stream(kind, num_workers, drop_last):
    assert_parity(STREAMS[kind], batch_size=4, num_workers=num_workers, drop_last=drop_last)


@WORKERS
@pytest.mark.parametrize("kind", STREAMS)
def test_streams_without_batches(kind, num_workers):
    assert_parity(STREAMS[kind], batch_size=None, num_workers=num_workers)


def test_a_stream_in_three_uneven_parts():
    assert_parity(ShardedStream, batch_size=2, num_workers=3)


@pytest.mark.parametrize("drop_last", [False, True])
def test_an_async_stream_gives_what_its_sync_face_gives_torch(drop_last):
    assert_parity(AsyncStream, batch_size=4, drop_last=drop_last)
    assert_parity(AsyncStream, batch_size=None)


class EagerSampler(data.Sampler):
    """Draws its whole order when it is asked to begin, as many a user's sampler does."""

    def __iter__(self):
        return iter(torch.randperm(LENGTH).tolist())

    def __len__(self):
        return LENGTH


class EagerBatches(EagerSampler):
    def __iter__(self):
        return iter(torch.randperm(LENGTH).split(4))

    def __len__(self):
        return 4


SAMPLERS = {
    "sequential": lambda: data.SequentialSampler(range(LENGTH)),
    "random": lambda: data.RandomSampler(range(LENGTH)),
    "random with replacement": lambda: data.RandomSampler(range(LENGTH), replacement=True, num_samples=20),
    "weighted": lambda: data.WeightedRandomSampler([1.0, 2.0, 3.0], 11),
    "subset": lambda: data.SubsetRandomSampler([3, 1, 4, 9]),
    "distributed": lambda: data.DistributedSampler(TorchMap(), num_replicas=3, rank=1, seed=5),
    "batches as samples": lambda: data.BatchSampler(data.RandomSampler(range(LENGTH)), 3, False),
    "eager": EagerSampler,
    "list": lambda: [4, 2, 2, 7],
}


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}], ids=str)
@pytest.mark.parametrize("kind", [kind for kind in SAMPLERS if kind != "batches as samples"])
@pytest.mark.parametrize("make", [TorchMap, AsyncMap], ids=["torch", "async"])
def test_every_kind_of_sampler(kind, make, options):
    assert_parity(make, sampler=SAMPLERS[kind], batch_size=3, **options)


@pytest.mark.parametrize("kind", ["eager", "random", "list", "weighted"])
@pytest.mark.parametrize("make", [TorchMap, AsyncMap], ids=["torch", "async"])
def test_every_kind_of_sampler_without_batches(kind, make):
    assert_parity(make, sampler=SAMPLERS[kind], batch_size=None)


class ByTensor(TorchMap):
    def __getitem__(self, index):
        return torch.arange(LENGTH)[index]


class AsyncByTensor(ByTensor, hr.AsyncDataset):
    async def aget(self, index):
        return torch.arange(LENGTH)[index]


@pytest.mark.parametrize("make", [ByTensor, AsyncByTensor], ids=["torch", "async"])
def test_a_batch_sampler_as_the_sampler_gives_whole_batches_as_indices(make):
    assert_parity(make, sampler=SAMPLERS["batches as samples"], batch_size=None)


@WORKERS
@pytest.mark.parametrize(
    "sampler",
    [
        lambda: data.BatchSampler(data.RandomSampler(range(LENGTH)), 4, True),
        lambda: [[1, 2], [3], [0, 4, 5]],
        EagerBatches,
    ],
    ids=["BatchSampler", "ragged", "eager"],
)
def test_every_kind_of_batch_sampler(sampler, num_workers):
    assert_parity(TorchMap, batch_sampler=sampler, num_workers=num_workers)


def test_a_distributed_sampler_with_its_epochs():
    def orders(loader_class):
        sampler = data.DistributedSampler(TorchMap(), num_replicas=2, rank=0)
        loader = loader_class(TorchMap(), sampler=sampler, batch_size=4)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            yield list(loader)

    assert_same(list(orders(hr.DataLoader)), list(orders(data.DataLoader)))


@WORKERS
@pytest.mark.parametrize(
    "collate_fn", [list, len, tuple, lambda samples: {"all": samples}, data.default_convert], ids=without_address
)
def test_a_users_collate(collate_fn, num_workers):
    assert_parity(TorchMap, batch_size=4, collate_fn=collate_fn, num_workers=num_workers)


@WORKERS
def test_batches_that_the_dataset_puts_together_itself(num_workers):
    assert_parity(Batches, batch_size=4, collate_fn=_itself, num_workers=num_workers)


def _itself(batch):
    return batch


@WORKERS
@pytest.mark.parametrize("options", [{}, {"shuffle": True}], ids=str)
def test_random_numbers_in_the_dataset_are_torchs(num_workers, options):
    assert_parity(Noisy, batch_size=4, num_workers=num_workers, **options)


def test_random_numbers_are_torchs_with_workers_that_persist():
    assert_parity(Noisy, batch_size=4, num_workers=2, persistent_workers=True, shuffle=True)


def test_the_worker_info_is_torchs():
    class Info(TorchMap):
        def __getitem__(self, index):
            info = data.get_worker_info()
            return index, info.id, info.num_workers, info.seed, type(info.dataset).__name__

    assert_parity(Info, batch_size=2, num_workers=2, shuffle=True, collate_fn=list)


def test_the_global_generators_stand_where_torch_leaves_them():
    def stands(loader_class):
        torch.manual_seed(5)
        for _ in range(2):
            list(loader_class(TorchMap(), shuffle=True))
        return torch.rand(3)

    assert torch.equal(stands(hr.DataLoader), stands(data.DataLoader))


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0},
        {"batch_size": -1},
        {"batch_size": "4"},
        {"num_workers": -1},
        {"timeout": -1},
        {"prefetch_factor": 2},
        {"prefetch_factor": -2, "num_workers": 1},
        {"persistent_workers": True},
        {"shuffle": True, "sampler": [1]},
        {"batch_sampler": [[1]], "batch_size": 2},
        {"batch_sampler": [[1]], "shuffle": True},
        {"batch_sampler": [[1]], "sampler": [1]},
        {"batch_sampler": [[1]], "drop_last": True},
        {"batch_size": None, "drop_last": True},
        {"num_workers": 1, "multiprocessing_context": "sideways"},
        {"num_workers": 1, "multiprocessing_context": 3},
        {"multiprocessing_context": "spawn"},
        {"drop_last": "yes"},
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [TorchMap, AsyncMap], ids=["torch", "async"])
def test_the_constructor_refuses_what_torch_refuses_in_its_words(options, make):
    assert_refused(make(), options)


@pytest.mark.parametrize("options", [{"shuffle": True}, {"sampler": [1]}, {"batch_sampler": [[1]]}], ids=str)
@pytest.mark.parametrize("make", [TorchStream, AsyncStream], ids=["torch", "async"])
def test_the_constructor_refuses_for_a_stream_what_torch_refuses(options, make):
    assert_refused(make(), options)


def assert_refused(dataset, options):
    with pytest.raises((ValueError, TypeError)) as torchs:
        data.DataLoader(dataset, **options)
    with pytest.raises(torchs.type) as ours:
        hr.DataLoader(dataset, **options)
    assert str(ours.value) == str(torchs.value)


@pytest.mark.parametrize("make", [TorchMap, AsyncMap, TorchStream, AsyncStream])
def test_a_loader_is_a_torch_loader_with_its_attributes(make):
    ours, torchs = hr.DataLoader(make(), batch_size=3), data.DataLoader(make(), batch_size=3)
    assert isinstance(ours, data.DataLoader)
    for name in ("batch_size", "num_workers", "drop_last", "timeout", "prefetch_factor", "persistent_workers",
                 "pin_memory", "in_order", "generator", "multiprocessing_context", "worker_init_fn"):  # fmt: skip
        assert getattr(ours, name) == getattr(torchs, name)
    for name in ("sampler", "batch_sampler"):
        assert type(getattr(ours, name)) is type(getattr(torchs, name))


def test_an_error_of_the_dataset_is_of_the_same_type():
    class Bad(TorchMap):
        def __getitem__(self, index):
            raise KeyError(index)

    for loader_class in (data.DataLoader, hr.DataLoader):
        for num_workers in (0, 1):
            with pytest.raises(KeyError, match="0"):
                list(loader_class(Bad(), num_workers=num_workers))
