"""What the tests with trainers share: the interpreter whose forks run programs, and the marker of docs/trainers.md."""

import os

import pytest

import tests.integrations.torchvision_ops  # noqa: F401  # before any module that imports torchvision
from tests.integrations.harness import Launcher

# torch imports these for the first step of an optimizer and for DistributedDataParallel: 4 seconds in each program.
TORCHS = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint")


def pytest_configure(config):
    # Ray gives its workers a niceness of 15. Beside other tests, on two cores, an actor then takes minutes to start.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # Ray's spelling
    config.addinivalue_line("markers", "proves(column, *rows): the test fills these cells of a table; see table.py")


@pytest.fixture(scope="session")
def launcher(request):
    """Runs programs, in forks of an interpreter with the modules that test modules name in IMPORTS."""
    names = {name for item in request.session.items for name in getattr(item.module, "IMPORTS", ())}
    with Launcher(*TORCHS, "headrace.loader", *sorted(names)) as launcher:
        yield launcher
