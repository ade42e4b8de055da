"""Changes of a dataset since it was copied are detected, without a look at every element."""

import pytest
from torch.utils import data

import headrace as hr
from headrace._core.links.placement import snapshot


class Keys(hr.AsyncDataset):
    def __init__(self):
        self.keys = ["a", "b"]
        self.epoch = 0
        self.prefix = "p"

    def __len__(self):
        return len(self.keys)

    async def aget(self, index):
        return f"{self.prefix}{self.epoch}{self.keys[index]}"


CHANGES = {
    "a list grew": lambda keys: keys.keys.append("c"),
    "a list was replaced": lambda keys: setattr(keys, "keys", ["c", "d"]),
    "a number was set": lambda keys: setattr(keys, "epoch", 1),
    "a string was set": lambda keys: setattr(keys, "prefix", "q"),
    "something new was set": lambda keys: setattr(keys, "more", True),
    "something was deleted": lambda keys: delattr(keys, "prefix"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "around",
    [lambda keys: keys, lambda keys: keys.map(str), lambda keys: data.Subset(keys, [0]),
     lambda keys: data.ConcatDataset([Keys(), keys]), lambda keys: data.StackDataset(x=Keys(), y=keys)],
    ids=["itself", "map", "Subset", "ConcatDataset", "StackDataset"],
)  # fmt: skip
def test_change_is_detected(change, around):
    keys = Keys()
    dataset = around(keys)
    before = snapshot(dataset)
    assert before == snapshot(dataset)
    CHANGES[change](keys)
    assert before != snapshot(dataset)


def test_error_of_len_is_ignored():
    class Endless(hr.AsyncIterableDataset):
        def __len__(self):
            raise TypeError("no length")

    dataset = Endless()
    assert snapshot(dataset) == snapshot(dataset)


def test_datasets_that_hold_each_other_are_visited_once():
    one, other = Keys(), Keys()
    one.other, other.other = other, one
    assert snapshot(one) == snapshot(one)


def test_attribute_set_on_a_dataset_reaches_its_copy_in_another_process():
    dataset = Keys()
    with hr.DataLoader(dataset, batch_size=None, num_workers=1, placement="process") as loader:
        assert list(loader) == ["p0a", "p0b"]
        dataset.epoch = 7
        assert list(loader) == ["p7a", "p7b"]
        dataset.keys.append("c")
        assert list(loader) == ["p7a", "p7b", "p7c"]


def test_unchanged_dataset_is_not_copied_again():
    class Lives(Keys):
        async def aget(self, index):
            self.epoch += 1  # in the copy
            return self.epoch

    with hr.DataLoader(Lives(), batch_size=None, num_workers=1, placement="process", concurrency=1) as loader:
        assert [list(loader), list(loader)] == [[1, 2], [3, 4]]
