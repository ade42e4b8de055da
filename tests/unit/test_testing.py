"""Checks of the shipped contracts that do not apply to a dataset are skipped, with the reason."""

import pytest

from headrace.testing import DatasetContract, StreamContract
from tests.datasets import SlowDataset


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


class OfOnlyAget(DatasetContract):
    def make_dataset(self):
        return OnlyAget()


class OfOnlyAiter(StreamContract):
    def make_dataset(self):
        return OnlyAiter()


def outcome(contract, name):
    try:
        getattr(contract(), name)()
    except pytest.skip.Exception as skipped:
        return str(skipped)
    return "passed"


def outcomes(contract):
    return {name: outcome(contract, name) for name in dir(contract) if name.startswith("test_")}


def skipped(contract):
    return {name: reason for name, reason in outcomes(contract).items() if reason != "passed"}


def test_checks_of_optional_methods_are_skipped_with_a_reason():
    indexing, agets = "test_indexing_equals_aget", "test_agets_equals_aget_in_order"
    found = skipped(OfOnlyAget)
    assert found.keys() == {indexing, agets}
    assert "no __getitem__" in found[indexing]
    assert "no agets" in found[agets]
    ((name, reason),) = skipped(OfOnlyAiter).items()
    assert name == "test_sync_iteration_equals_async"
    assert "no __iter__" in reason


def test_no_check_is_skipped_for_a_dataset_with_all_methods():
    class Batched(SlowDataset):
        async def agets(self, indices):
            return [await self.aget(index) for index in indices]

    class OfBatched(DatasetContract):
        def make_dataset(self):
            return Batched(5, 0.0)

    assert skipped(OfBatched) == {}
