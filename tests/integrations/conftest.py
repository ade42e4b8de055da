"""The marker of tests from which the tables of docs/trainers.md are made."""

import tests.integrations.torchvision_ops  # noqa: F401  # before any module that imports torchvision


def pytest_configure(config):
    config.addinivalue_line("markers", "proves(column, *rows): the test fills these cells of a table; see table.py")
