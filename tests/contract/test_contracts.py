"""Shipped datasets fulfil the shipped contracts, which fail for a dataset that does not."""

import itertools

import pytest

from headrace._store.store import Store
from headrace._streams.iterable_style import AsyncIterableDataset
from headrace._streams.map_style import AsyncDataset
from headrace.datasets.objects import ObjectDataset
from headrace.testing import DatasetContract, StreamContract
from object_server import ObjectServer
from tests.datasets import SlowDataset
from tests.unit.streams.reading import Plain


@pytest.fixture(scope="module")
def object_server():
    """A server with a dozen objects that no test changes."""
    with ObjectServer(
        {f"train/{i:02}.bin": bytes([i]) * 100 * i for i in range(12)}
    ) as server:
        yield server


class TestCachedDataset(DatasetContract):
    @pytest.fixture(autouse=True)
    def _over_a_server(self, object_server, tmp_path):
        self.server = object_server
        self.folder = tmp_path / "cache"

    def make_dataset(self):
        dataset = ObjectDataset(
            Store(self.server.url + "/train", options=self.server.store_options),
            labels=len,
        )
        return dataset.cache(self.folder)


class TestStream(StreamContract):
    def make_dataset(self):
        return Plain(5).map(str)


# The contracts themselves


class Unsteady(AsyncDataset):
    """A map-style dataset that violates every contract."""

    def __init__(self):
        self.calls = itertools.count()

    def __len__(self):
        return 3 + next(self.calls)

    async def aget(self, index):
        return next(self.calls)

    async def agets(self, indices):
        return [0]

    def __reduce__(self):
        return Unsteady, ()


class OnlyOnce(AsyncIterableDataset):
    """A stream that cannot be read again."""

    def __init__(self):
        self.rest = iter(range(5))

    def __aiter__(self):
        return self

    async def __anext__(self):
        try:
            return next(self.rest)
        except StopIteration:
            raise StopAsyncIteration from None


class OnlyAget:
    """A map-style dataset by duck typing, with the methods that a loader needs."""

    def __len__(self):
        return 3

    async def aget(self, index):
        if index >= 3:
            raise IndexError(index)
        return index


class OnlyAiter:
    """A stream by duck typing."""

    async def __aiter__(self):
        for number in range(3):
            yield number


class Batched(SlowDataset):
    async def agets(self, indices):
        return [await self.aget(index) for index in indices]


def promises(contract):
    return [name for name in dir(contract) if name.startswith("test_")]


def checks(contract, make):
    """The contract of a dataset."""
    return type("Checks", (contract,), {"make_dataset": lambda self: make()})()


@pytest.mark.parametrize("promise", promises(DatasetContract))
def test_contract_fails_for_a_dataset_that_breaks_it(promise):
    with pytest.raises(AssertionError):
        getattr(checks(DatasetContract, Unsteady), promise)()


@pytest.mark.parametrize(
    "promise", [name for name in promises(StreamContract) if "pickled" not in name]
)
def test_contract_fails_for_a_stream_that_cannot_be_read_twice(promise):
    with pytest.raises((AssertionError, StopAsyncIteration, RuntimeError)):
        getattr(checks(StreamContract, OnlyOnce), promise)()


@pytest.mark.parametrize("contract", [DatasetContract, StreamContract])
def test_contract_without_a_dataset_says_what_to_define(contract):
    with pytest.raises(NotImplementedError, match="make_dataset"):
        contract().make_dataset()


@pytest.mark.parametrize(
    ("contract", "make", "reasons"),
    [
        (
            DatasetContract,
            OnlyAget,
            {
                "test_indexing_equals_aget": "no __getitem__",
                "test_agets_equals_aget_in_order": "no agets",
            },
        ),
        (StreamContract, OnlyAiter, {"test_sync_iteration_equals_async": "no __iter__"}),
        (DatasetContract, lambda: Batched(5, 0.0), {}),
    ],
)
def test_checks_of_optional_methods_are_skipped_with_a_reason(contract, make, reasons):
    found = {}
    for name in promises(contract):
        try:
            getattr(checks(contract, make), name)()
        except pytest.skip.Exception as skipped:
            found[name] = str(skipped)
    assert found.keys() == reasons.keys()
    assert all(reason in found[name] for name, reason in reasons.items())
