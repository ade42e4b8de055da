"""Programs written for torch's loader whose parts have unusual attributes: each gets what torch's loader gives."""

import gc
import os
import pickle
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, SequentialSampler, TensorDataset
from torch.utils.data._utils.collate import default_collate_fn_map

import headrace as hr
from tests.datasets import Numbers


@dataclass
class Collator:
    """Compared by its fields, and so without a hash, as the data collators of transformers are."""

    add: int = 1

    def __call__(self, samples):
        return torch.tensor(samples) + self.add


class Videos(Dataset[torch.Tensor]):
    """Frames, height, width and channels, permuted as for a convolution."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.rand(3, 4, 4, 2).permute(0, 3, 1, 2)


class Record(dict[int, int]):
    """A missing attribute is None."""

    __getattr__ = dict.get


class Unopened(Dataset[int]):
    """A dataset whose length is unknown until it is read."""

    def __len__(self):
        raise AttributeError("it is opened by the first __getitem__")

    def __getitem__(self, index):
        return index


@dataclass
class Box:
    value: int


@dataclass
class Boxes:
    """A collate function without a hash, equal to any other of its class."""

    factor: int = field(compare=False)

    def __call__(self, batch, *, collate_fn_map=None):
        return torch.tensor([self.factor * box.value for box in batch])


def values(loader):
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("dataset", [range(4), Numbers(4)], ids=["torch", "async"])
def test_collate_function_without_a_hash(dataset, num_workers):
    assert values(
        hr.DataLoader(dataset, 2, num_workers=num_workers, collate_fn=Collator())
    ) == [
        [1, 2],
        [3, 4],
    ]


def test_strides_of_batches_are_those_of_torchs_workers():
    for make in (TorchDataLoader, hr.DataLoader):
        strides = {batch.stride() for batch in make(Videos(), 2, num_workers=1)}
        assert strides == {(96, 32, 16, 4, 1)}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_type_registered_with_torchs_collate_after_the_import(num_workers, monkeypatch):
    for factor in (1, 2):
        monkeypatch.setitem(default_collate_fn_map, Box, Boxes(factor))
        for make in (TorchDataLoader, hr.DataLoader):
            batches = values(make(list(map(Box, range(4))), 2, num_workers=num_workers))
            assert batches == [[0, factor], [2 * factor, 3 * factor]]
        assert hr.default_collate([Box(1), Box(2)]).tolist() == [factor, 2 * factor]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_function_registered_for_tensors_takes_precedence(num_workers, monkeypatch):
    def collate_tensors(batch, *, collate_fn_map=None):
        return -torch.stack(batch)

    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, collate_tensors)
    for make in (TorchDataLoader, hr.DataLoader):
        for dataset in (
            TensorDataset(torch.arange(4)),
            [(np.array(i),) for i in range(4)],
        ):
            batches = list(make(dataset, 2, num_workers=num_workers))
            assert [batch[0].tolist() for batch in batches] == [[0, -1], [-2, -3]]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_rows_of_an_empty_tensor_dataset_are_out_of_range(num_workers):
    for make in (TorchDataLoader, hr.DataLoader):
        with pytest.raises(IndexError):
            list(
                make(
                    TensorDataset(torch.zeros(0, 3)),
                    2,
                    num_workers=num_workers,
                    sampler=[0, 1],
                )
            )


def test_numbers_become_tensors_of_the_default_device():
    for make in (TorchDataLoader, hr.DataLoader):
        batches = iter(make([(i, float(i)) for i in range(4)], 2))
        with torch.device("meta"):
            assert {field.device.type for field in next(batches)} == {"meta"}


@pytest.mark.parametrize("kind", [tuple, Sequence, (list, tuple)])
def test_function_registered_for_tuples_takes_precedence(kind, monkeypatch):
    monkeypatch.setitem(
        default_collate_fn_map, kind, lambda batch, *, collate_fn_map=None: len(batch)
    )
    for make in (TorchDataLoader, hr.DataLoader):
        assert list(make([(1, 2)] * 4, 2, num_workers=1)) == [2, 2]


def test_attributes_of_a_subclass_with_the_names_of_options_are_its_own():
    for base in (TorchDataLoader, hr.DataLoader):

        class Loader(base):
            device = "cuda"

            def transform(self, batch):
                return batch * 2

            def __iter__(self):
                return map(self.transform, super().__iter__())

        loader = Loader(range(4), 2)
        assert values(loader) == [[0, 2], [4, 6]]
        assert loader.device == "cuda"


@pytest.mark.parametrize("num_workers", [0, 1])
def test_dataset_of_which_every_missing_attribute_is_none(num_workers):
    for make in (TorchDataLoader, hr.DataLoader):
        assert values(
            make(Record({i: i for i in range(4)}), 2, num_workers=num_workers)
        ) == [
            [0, 1],
            [2, 3],
        ]


def test_length_of_a_dataset_with_a_sampler_is_not_needed():
    for make in (TorchDataLoader, hr.DataLoader):
        assert values(make(Unopened(), 2, sampler=SequentialSampler(range(3)))) == [
            [0, 1],
            [2],
        ]


def test_loading_of_a_torch_dataset_without_workers_starts_no_thread_and_opens_no_file():
    before = threading.active_count(), os.listdir("/proc/self/fd")
    loader = hr.DataLoader(TensorDataset(torch.arange(8)), batch_size=2)
    batches = iter(loader)
    next(batches)
    loader.report()
    assert (threading.active_count(), os.listdir("/proc/self/fd")) == before
    assert len(list(batches)) == 3
    assert (threading.active_count(), os.listdir("/proc/self/fd")) == before


class Opened(torch.utils.data.IterableDataset):
    """A stream that holds something open while it is read."""

    def __init__(self):
        self.open = 0

    def __iter__(self):
        self.open += 1
        try:
            yield from range(100)
        finally:
            self.open -= 1


def test_stream_of_an_iterator_that_is_dropped_is_closed_without_the_garbage_collector():
    stream = Opened()
    loader = hr.DataLoader(stream, batch_size=4)
    gc.disable()
    try:
        batches = iter(loader)
        assert next(batches).tolist() == [0, 1, 2, 3]
        assert stream.open == 1
        del batches
        assert stream.open == 0
    finally:
        gc.enable()


def test_iterator_that_a_subclass_keeps_is_closed_by_none():
    loader = hr.DataLoader(Numbers(4), batch_size=2, placement="thread")
    loader._iterator = iterator = iter(loader)
    assert next(loader._iterator).tolist() == [0, 1]
    loader._iterator = None
    assert loader._iterator is None
    with pytest.raises(hr.errors.LoaderClosedError):
        next(iterator)


def test_iterator_has_the_attributes_of_torchs_that_libraries_read():
    seen = []
    for kind in (TorchDataLoader, hr.DataLoader):
        loader = kind(
            dataset := Videos(),
            3,
            num_workers=2,
            generator=torch.Generator().manual_seed(3),
        )
        iterator = iter(loader)
        assert (iterator._dataset, iterator._index_sampler) == (
            dataset,
            loader.batch_sampler,
        )
        yielded = [
            iterator._num_yielded,
            *(iterator._num_yielded for _ in iterator),
            iterator._num_yielded,
        ]
        seen.append((yielded, iterator._base_seed, iterator._num_workers))
        with pytest.raises(NotImplementedError, match="cannot be pickled"):
            pickle.dumps(iterator)
    assert seen[0] == seen[1]
