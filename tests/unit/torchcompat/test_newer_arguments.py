"""A torch whose DataLoader has more arguments than headrace knows: passed on, and not ignored in silence."""

import inspect
import warnings

import pytest
import torch
from torch.utils.data import dataloader

from tests.forks import Forks


@pytest.fixture(scope="module")
def newer_torch():
    """Runs a function in a process whose torch has two more arguments, made by editing its source, before headrace."""
    with Forks() as forks:

        def run(program):
            def edited():
                source = inspect.getsource(dataloader)
                for old, new in (
                    ("in_order: bool = True,\n", 'worker_method: str = "process",\n        seed: int = 4,\n'),
                    ("self.in_order = in_order\n", "self.worker_method, self.seed = check(worker_method), seed\n"),
                ):
                    assert source.count(old) == 1, old
                    source = source.replace(old, f"{old}        {new}")
                source += """
def check(method):
    if method not in ("process", "thread"):
        raise ValueError(f"worker_method must be process or thread, but is {method!r}")
    return method
"""
                exec(compile(source, dataloader.__file__, "exec"), vars(dataloader))
                torch.utils.data.DataLoader = dataloader.DataLoader
                warnings.simplefilter("error")
                program()

            done = forks.run(edited, timeout=60)
            assert done.returncode == 0, done.stderr

        yield run


def test_unknown_arguments_of_torch_are_given_to_its_constructor_with_a_warning(newer_torch):
    def program():
        import headrace as hr

        with pytest.warns(RuntimeWarning, match="worker_method='thread' is given to torch's") as caught:
            loader = hr.DataLoader([1, 2], worker_method="thread")
        assert [warning.filename for warning in caught] == [__file__]
        assert loader.worker_method == "thread"
        assert len(list(loader)) == 2
        with pytest.raises(ValueError, match="must be process or thread, but is 'fibre'"), pytest.warns(RuntimeWarning):
            hr.DataLoader([1, 2], worker_method="fibre")

    newer_torch(program)


def test_loader_without_them_has_torchs_defaults(newer_torch):
    def program():
        import headrace as hr

        assert hr.DataLoader([1, 2]).worker_method == "process"
        assert hr.DataLoader([1, 2], worker_method="process").worker_method == "process"
        parameter = inspect.signature(hr.DataLoader).parameters["worker_method"]
        assert (parameter.default, parameter.kind) == ("process", inspect.Parameter.KEYWORD_ONLY)

    newer_torch(program)


def test_loader_rebuilt_from_its_attributes_keeps_them(newer_torch):
    def rebuilt(loader):
        """As Lightning does it."""
        parameters = inspect.signature(loader.__init__).parameters
        attributes = {name: value for name, value in vars(loader).items() if not name.startswith("_")}
        differ = {name for name, each in parameters.items() if name in attributes}
        differ = {name for name in differ if parameters[name].default is not attributes[name]}
        return type(loader)(**{name: attributes[name] for name in differ - {"batch_sampler"}})

    def program():
        import headrace as hr

        assert rebuilt(hr.DataLoader([1, 2])).worker_method == "process"
        with pytest.warns(RuntimeWarning, match="worker_method"):
            loader = hr.DataLoader([1, 2], worker_method="thread", on_error="skip")
        with pytest.warns(RuntimeWarning, match="worker_method"):
            again = rebuilt(loader)
        assert (again.worker_method, again.on_error) == ("thread", "skip")

    newer_torch(program)


def test_argument_that_both_have_is_headraces(newer_torch):
    def program():
        import headrace as hr

        assert hr.DataLoader([1, 2]).seed is None
        loader = hr.DataLoader(range(9), shuffle=True, seed=7)
        assert loader.seed == 7
        with pytest.warns(RuntimeWarning, match="read once"):
            loader.seed = 3

    newer_torch(program)


def test_argument_that_neither_knows_is_refused(newer_torch):
    def program():
        import headrace as hr

        with pytest.raises(TypeError, match=r"argument 'worker_metod'\. Did you mean 'worker_method'\?"):
            hr.DataLoader([1, 2], worker_metod="thread")

    newer_torch(program)
