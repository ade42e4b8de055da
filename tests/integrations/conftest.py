"""What the tests with trainers share: the interpreter whose forks run programs, and the marker of docs/trainers.md."""

import os

import pytest

import tests.integrations.torchvision_ops  # noqa: F401  # before any module that imports torchvision
from tests.documents import ROOT
from tests.integrations.common import write_lines
from tests.integrations.harness import Launcher

# torch imports these for the first step of an optimizer and for DistributedDataParallel: 4 seconds
# in each program.
TORCHS = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint")


def pytest_configure(config):
    # Ray gives its workers a niceness of 15. Beside other tests, on two cores, an actor then takes
    # minutes to start.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # Ray's spelling
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    }
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (os.environ.get("PYTHONPATH"), str(ROOT)))
    )  # Ray's workers
    config.addinivalue_line(
        "markers", "proves(column, *rows): of docs/trainers.md; see test_table.py"
    )


@pytest.fixture(scope="session")
def launcher(request):
    """Runs programs, in forks of an interpreter with the modules that test modules name in IMPORTS."""
    names = {
        name
        for item in request.session.items
        for name in getattr(item.module, "IMPORTS", ())
    }
    with Launcher(*TORCHS, "headrace.loader", *sorted(names)) as launcher:
        yield launcher


@pytest.fixture(scope="module")
def pattern(request, tmp_path_factory):
    """The pattern of shards with as many numbers as the test module's LINES says."""
    return write_lines(tmp_path_factory.mktemp("lines"), request.module.LINES)
