"""The marker of tests from which the tables of docs/trainers.md are made."""

import os

import tests.integrations.torchvision_ops  # noqa: F401  # before any module that imports torchvision


def pytest_configure(config):
    # Ray gives its workers a niceness of 15. Beside other tests, on two cores, an actor then takes minutes to start.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # Ray's spelling
    config.addinivalue_line("markers", "proves(column, *rows): the test fills these cells of a table; see table.py")
