"""The fixtures of the parity tests: `same` runs one program with both loaders, in the setting of the test."""

import cloudpickle
import pytest

pytest.register_assert_rewrite("tests.parity.harness")

from tests.parity import datasets, harness  # noqa: E402 — behind the line above, or differences are not shown

for module in (datasets, harness):  # what they define travels to processes that cannot import the tests
    cloudpickle.register_pickle_by_value(module)


def pytest_configure(config):
    config.addinivalue_line("markers", "parity(behaviour, not_for): a line of the parity table; see harness.parity")


@pytest.fixture
def same(setting):
    """`same(program)`: the program's outcome with torch's loader and with ours, compared."""
    return harness.Same(setting)
