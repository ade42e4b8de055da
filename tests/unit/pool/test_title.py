import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import headrace as hr

PROGRAM = """
import sys
sys.modules["setproctitle"] = {setproctitle}
from headrace._core.pool.title import set_title
set_title("worker 3")
print(open("/proc/self/cmdline").read().rstrip(chr(0)))
print(open("/proc/self/comm").read().strip())
"""


def command_line(sample):
    return Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode()


class Samples(hr.AsyncDataset):
    def __len__(self):
        return 2

    async def aget(self, index):
        return command_line(index)


class TorchSamples(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return command_line(index)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("placement", ["thread", "process"])
def test_processes_have_titles_with_their_role(placement):
    transform = lambda of_fetcher: (of_fetcher, command_line(None))  # noqa: E731
    with hr.DataLoader(Samples(), num_workers=1, placement=placement, transform=transform, collate_fn=list) as loader:
        ((fetcher, worker),) = next(iter(loader))
    assert worker == f"headrace: worker 0 of pid {os.getpid()}"
    if placement == "process":
        assert fetcher == f"headrace: loader of pid {os.getpid()}"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_of_torch_datasets_have_titles():
    own = command_line(None)
    with hr.DataLoader(TorchSamples(), num_workers=1, collate_fn=list) as loader:
        (worker,) = next(iter(loader))
    assert f"headrace: worker 0 of pid {os.getpid()}".startswith(worker) or worker.startswith("headrace: worker 0")
    assert command_line(None) == own, "this process keeps its name"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_command_line_is_overwritten_without_setproctitle():
    program = PROGRAM.format(setproctitle=None)
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines() == [f"headrace: worker 3 of pid {os.getpid()}", "headrace: worke"]


@pytest.mark.skipif(importlib.util.find_spec("setproctitle") is None, reason="setproctitle is not installed")
def test_setproctitle_is_used_if_installed():
    program = PROGRAM.format(setproctitle="__import__('setproctitle')")
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[0].startswith(f"headrace: worker 3 of pid {os.getpid()}")
