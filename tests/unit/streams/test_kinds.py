"""The kind of a dataset is determined by its methods, and optional methods are optional."""

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from headrace._core.streams.iterable_style import AsyncIterableDataset
from headrace._core.streams.kinds import DatasetKind, kind_of, sample_key
from headrace.errors import DatasetTypeError
from tests.datasets import SlowDataset


class Count(AsyncIterableDataset):
    async def __aiter__(self):
        yield 0


class DuckMap:
    def __len__(self):
        return 1

    async def aget(self, index):
        return index


class DuckStream:
    async def __aiter__(self):
        yield 1


class TorchStream(IterableDataset):
    def __iter__(self):
        return iter(())


class TorchMap(Dataset):
    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    ("dataset", "kind"),
    [
        (SlowDataset(10, 0.0), DatasetKind.ASYNC_MAP),
        (SlowDataset(10, 0.0).map(str), DatasetKind.ASYNC_MAP),
        (DuckMap(), DatasetKind.ASYNC_MAP),
        (Count(), DatasetKind.ASYNC_ITERABLE),
        (Count().map(str), DatasetKind.ASYNC_ITERABLE),
        (DuckStream(), DatasetKind.ASYNC_ITERABLE),
        (TensorDataset(torch.zeros(1)), DatasetKind.MAP),
        (TorchMap(), DatasetKind.MAP),
        ([1, 2], DatasetKind.MAP),
        (TorchStream(), DatasetKind.ITERABLE),
        ({1, 2}, DatasetKind.ITERABLE),
    ],
    ids=lambda value: value.name if isinstance(value, DatasetKind) else type(value).__name__,
)
def test_kind_is_determined_by_methods(dataset, kind):
    assert kind_of(dataset) is kind


def test_error_for_an_object_that_is_no_dataset_names_the_missing_methods():
    with pytest.raises(DatasetTypeError, match="'object' object is not a dataset: it has neither `aget`"):
        kind_of(object())


def test_failing_sample_key_is_no_key():
    assert sample_key([1], 0) is None
    assert sample_key(object(), 0) is None

    class Confused:
        def sample_key(self, index):
            raise ZeroDivisionError

    assert sample_key(Confused(), 0) is None
