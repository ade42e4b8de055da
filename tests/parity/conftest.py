"""The fixtures of the parity tests: `same` runs one program with both loaders, in the setting of the test."""

import multiprocessing
from pathlib import Path

import cloudpickle
import pytest

pytest.register_assert_rewrite("tests.parity.harness")

from tests.parity import datasets, harness  # noqa: E402 — behind the line above, or differences are not shown

for module in (
    datasets,
    harness,
):  # what they define travels to processes that cannot import the tests
    cloudpickle.register_pickle_by_value(module)

HERE = Path(__file__).parent
KINDS = {"map", "stream"}


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "parity(behaviour, not_for): a line of the parity page; see harness.parity",
    )


def pytest_collection_modifyitems(config, items):
    # Every case runs with torch's datasets. An async dataset goes through one engine, whatever the
    # case: of the cases of a test one is compared there, and one of each kind of dataset.
    seen, kept, others = set(), [], []
    for item in items:
        values = (
            dict(item.callspec.params)
            if hasattr(item, "callspec") and HERE in item.path.parents
            else {}
        )
        setting = values.pop("setting", None)
        if setting is not None and setting.asynchronous:
            kinds = KINDS.intersection(item.callspec.id.split("-"))
            case = item.path, item.originalname, setting.name, *sorted(kinds)
            if case in seen:
                others.append(item)
                continue
            seen.add(case)
        kept.append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = kept


@pytest.fixture
def same(setting):
    """`same(program)`: the program's outcome with torch's loader and with ours, compared."""
    return harness.Same(setting)


@pytest.fixture(autouse=True)
def fork():
    """Torch's workers start by fork, as before Python 3.14: by forkserver, torch cannot send a lambda."""
    default = multiprocessing.get_start_method()
    multiprocessing.set_start_method("fork", force=True)
    yield
    multiprocessing.set_start_method(default, force=True)
