"""The datasets in the attributes of a dataset are found."""

import pytest
from torch.utils import data

import headrace as hr
from headrace._core.streams.kinds import walk_datasets
from tests.datasets import SlowDataset


async def _numbers():
    yield 1


class Holder(hr.AsyncDataset):
    def __init__(self, held):
        self.held = held


@pytest.mark.parametrize(
    "around",
    [
        lambda part: part.map(str),
        lambda part: part.take(2),
        lambda part: hr.concat([part, part]),
        lambda part: data.Subset(part.map(str), [0]),
        lambda part: data.ConcatDataset([data.StackDataset(x=part), part]),
        lambda part: Holder(part),
        lambda part: Holder({"train": part}),
    ],
    ids=["map", "take", "concat", "Subset", "ConcatDataset", "attribute", "dict"],
)
def test_inner_dataset_is_found_once_and_before_its_holder(around):
    part = SlowDataset(4, 0.0)
    dataset = around(part)
    found = list(walk_datasets(dataset))
    assert [each for each in found if each is part] == [part]
    assert found[0] is part
    assert found[-1] is dataset


def test_streams_inside_a_mix_are_found():
    part = hr.from_async_iterable(_numbers)
    assert any(each is part for each in walk_datasets(hr.mix([part.take(1), part], [1, 1])))


def test_dataset_that_holds_itself_is_found_once():
    holder = Holder(None)
    holder.held = holder
    assert list(walk_datasets(holder)) == [holder]
