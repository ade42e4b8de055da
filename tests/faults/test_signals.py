"""Ctrl-C, and the sudden death of the process that trains."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.skipif("sys.platform != 'linux'", reason="reads /proc")

NEVER_ANSWERS = """
import asyncio, os, sys
import headrace as hr
from headrace.pool import launch


class NeverAnswers(hr.AsyncDataset):
    def __len__(self):
        return 8

    async def aget(self, index):
        await asyncio.Event().wait()


def busy(sample):
    os.write(1, b"%d\\n" % os.getpid())  # one line in one call, whoever else writes
    while True:
        pass


class AtOnce(NeverAnswers):
    async def aget(self, index):
        return index
"""


def start(body: str) -> subprocess.Popen[str]:
    """Start a script that prints a line when it is where the test wants it, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-X", "dev", "-c", NEVER_ANSWERS + textwrap.dedent(body)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_ctrl_c_while_next_waits_interrupts_it() -> None:
    process = start(
        """
        iterator = iter(hr.DataLoader(NeverAnswers(), batch_size=4, num_workers=1))
        try:
            print("waiting", flush=True)
            next(iterator)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        """
    )
    _interrupt(process)


@pytest.mark.parametrize("run", ["asyncio.run(drain())", "uvloop.run(drain())"])
def test_ctrl_c_while_anext_waits_interrupts_it(run: str) -> None:
    process = start(
        f"""
        import uvloop

        async def drain():
            stream = aiter(hr.DataLoader(NeverAnswers(), batch_size=4, num_workers=1))
            asyncio.get_running_loop().call_soon(lambda: print("waiting", flush=True))
            await anext(stream)

        try:
            {run}
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        """
    )
    _interrupt(process)


def _interrupt(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "interrupted\n"), err
    assert "Traceback" not in err


def test_workers_and_zygote_go_when_the_trainer_is_killed() -> None:
    process = start(
        """
        loader = hr.DataLoader(AtOnce(), batch_size=4, num_workers=2, transform=busy)
        iterator = iter(loader)
        print(launch._zygote.process.pid, flush=True)
        next(iterator)
        """
    )
    assert process.stdout is not None
    pids = [int(process.stdout.readline()) for _ in range(3)]  # the zygote's, and each worker's as it gets to work
    descriptors = [os.pidfd_open(pid) for pid in pids]
    process.kill()
    process.communicate(timeout=30)
    for descriptor in descriptors:
        assert _ends(descriptor)
        os.close(descriptor)


def _ends(descriptor: int) -> bool:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(20_000))
