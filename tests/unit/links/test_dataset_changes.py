"""Changes of a dataset since it was copied are detected, without a look at every element."""

import os

import pytest
from torch.utils import data

import headrace as hr
from headrace._links.placement import snapshot


class Keys(hr.AsyncDataset):
    def __init__(self):
        self.keys = ["a", "b"]
        self.epoch = 0
        self.prefix = "p"
        self.function = lambda: 1

    def __len__(self):
        return len(self.keys)

    async def aget(self, index):
        return f"{self.prefix}{self.epoch}{self.keys[index]}"


CHANGES = {
    "a list grew": lambda keys: keys.keys.append("c"),
    "a list was replaced": lambda keys: setattr(keys, "keys", ["c", "d"]),
    "a number was set": lambda keys: setattr(keys, "epoch", 1),
    "something new was set": lambda keys: setattr(keys, "more", True),
    "something was deleted": lambda keys: delattr(keys, "prefix"),
    "a function was replaced": lambda keys: setattr(keys, "function", lambda: 2),
    "a function changed": lambda keys: setattr(keys.function, "strength", 2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_change_is_detected(change):
    for around in (
        lambda keys: keys,
        lambda keys: keys.map(str),
        lambda keys: data.Subset(keys, [0]),
        lambda keys: data.ConcatDataset([Keys(), keys]),
        lambda keys: data.StackDataset(x=Keys(), y=keys),
    ):
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


def test_copy_in_another_process_is_renewed_when_the_dataset_changed_otherwise_than_by_set_epoch():
    class Lives(Keys):
        def set_epoch(self, epoch):
            self.epoch = epoch

        async def aget(self, index):
            self.prefix += "+"  # in the copy
            return f"{self.prefix}{self.epoch}{self.keys[index]}"

    dataset = Lives()
    options = {"num_workers": 1, "placement": "process", "concurrency": 1}
    with hr.DataLoader(dataset, batch_size=None, **options) as loader:
        assert [*loader, *loader] == ["p+0a", "p++0b", "p+++1a", "p++++1b"]
        loader.set_epoch(7)
        assert list(loader) == ["p+++++7a", "p++++++7b"]
        dataset.prefix = "q"
        assert list(loader) == ["q+8a", "q++8b"]
        dataset.keys.append("c")
        assert list(loader) == ["q+9a", "q++9b", "q+++9c"]


NOTEBOOK = """
class Numbers(hr.AsyncDataset):
    def __len__(self):
        return 1

    async def aget(self, index):
        return helper(index) * SCALE, os.getpid()

def helper(index):
    return 1

SCALE = 1
"""


def test_helper_or_global_that_a_notebook_defines_anew_is_used_from_the_next_epoch_on():
    cells = {"__name__": "__main__", "hr": hr, "os": os}
    exec(NOTEBOOK, cells)
    with hr.DataLoader(cells["Numbers"](), batch_size=None, num_workers=1) as loader:
        assert next(iter(loader))[0] == 1
        exec("def helper(index):\n    return 100", cells)
        assert next(iter(loader))[0] == 100
        cells["SCALE"] = 3
        value, process = next(iter(loader))
        assert value == 300
        assert next(iter(loader)) == [300, process], (
            "the engine is not started again where nothing has changed"
        )
