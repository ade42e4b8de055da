"""Classes and functions that another process cannot import travel by value."""

import importlib.util
import sys
import types

import cloudpickle
import pytest

import headrace as hr
from tests.datasets import Numbers

SCRIPT = """
import headrace as hr
import torch.multiprocessing as mp

class Photos(hr.AsyncDataset):
    def __len__(self):
        return 4

    async def aget(self, index):
        return Photo(index)

class Photo:
    __slots__ = ("number",)

    def __init__(self, number):
        self.number = number

@hr.randomized
def negate(photo, rng):
    return Photo(-photo.number)

def photos(samples) -> list[Photo]:
    return samples

def train(rank, *_):
    for options in OPTIONS:
        with hr.DataLoader(Photos(), **{"num_workers": 1} | options, transform=negate, collate_fn=photos) as loader:
            batches = list(loader)
        assert [type(photo) for batch in batches for photo in batch] == [Photo] * 4
        assert [photo.number for batch in batches for photo in batch] == [0, -1, -2, -3]

if __name__ == "__main__":
    METHOD
    print("trained")
"""


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (None, "[{}, {'placement': 'thread'}, {'multiprocessing_context': 'spawn'}]"),
        ("spawn", "[{}, {'placement': 'thread'}, {'engines': 2, 'num_workers': 2}]"),
        ("forkserver", "[{}]"),
    ],
)
def test_classes_and_functions_of_a_script_reach_workers(
    method, options, forks, tmp_path
):
    """Where the script itself trains, and where its children do, which `multiprocessing` starts."""
    script, source = tmp_path / "script.py", SCRIPT.replace("OPTIONS", options)
    train = (
        "train(0)"
        if method is None
        else f"mp.start_processes(train, nprocs=1, start_method={method!r})"
    )
    script.write_text(source.replace("METHOD", train))
    done = forks.run_file(script)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr


def made_by_the_program(name, source, folder):
    return types.ModuleType(name)


def loaded_from_a_file(name, source, folder):
    """As a plug-in is loaded; another file of this name could be imported."""
    (folder / "plugin.py").write_text(source)
    spec = importlib.util.spec_from_file_location(name, folder / "plugin.py")
    return importlib.util.module_from_spec(spec)


SOURCE = """
class Sample(int):
    pass

def transform(index):
    return Sample(index * 10)
"""


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (made_by_the_program, "config_of_the_program"),
        (loaded_from_a_file, "plugin_1"),
        (loaded_from_a_file, "this"),
    ],
)
def test_functions_and_classes_of_a_module_that_is_registered_reach_workers(
    make, name, tmp_path, monkeypatch
):
    module = make(name, SOURCE, tmp_path)
    monkeypatch.setitem(sys.modules, name, module)
    exec(SOURCE, module.__dict__)
    if name != "this":
        with pytest.raises(ModuleNotFoundError) as caught:
            next(
                iter(hr.DataLoader(Numbers(2), num_workers=1, transform=module.transform))
            )
        assert "cloudpickle.register_pickle_by_value" in str(caught.value.__notes__)
    cloudpickle.register_pickle_by_value(module)
    for options in ({}, {"placement": "thread"}):
        with hr.DataLoader(
            Numbers(2),
            batch_size=2,
            num_workers=1,
            transform=module.transform,
            collate_fn=list,
            **options,
        ) as loader:
            (batch,) = loader
        assert batch == [0, 10]
        assert {type(sample) for sample in batch} == {module.Sample}
    cloudpickle.unregister_pickle_by_value(module)


def fail(sample):
    raise LookupError(f"no {sample}")


def test_traceback_of_a_function_that_travelled_by_value_has_its_file_and_line(
    monkeypatch,
):
    """cloudpickle leaves out the file from 3.1.3 on."""
    monkeypatch.setattr(fail, "__module__", "__main__")
    line = fail.__code__.co_firstlineno + 1
    with (
        hr.DataLoader(Numbers(2), num_workers=1, transform=fail) as loader,
        pytest.raises(LookupError) as caught,
    ):
        next(iter(loader))
    assert (
        f'File "{__file__}", line {line}, in fail\n    raise LookupError'
        in caught.value.__notes__[0]
    )
