"""The fixtures of the parity tests: `same` runs one program with both loaders, in the setting of the test."""

import cloudpickle
import pytest

from tests.parity import harness

cloudpickle.register_pickle_by_value(harness)  # the twins travel to processes that cannot import the tests


def pytest_configure(config):
    config.addinivalue_line("markers", "parity(behaviour, not_for): a line of the parity table; see harness.parity")


@pytest.fixture
def same(setting):
    """`same(program)`: the program's outcome with torch's loader and with ours, compared."""
    return harness.Same(setting)
