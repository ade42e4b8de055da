"""Ctrl-C, and the sudden death of the process that trains."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import textwrap
from collections.abc import Callable

import pytest

from tests.forks import Forks, Program

pytestmark = pytest.mark.skipif("sys.platform != 'linux'", reason="reads /proc")

NEVER_ANSWERS = """
import asyncio, os, sys
import headrace as hr
from headrace._core.pool import launch


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


Start = Callable[[str], contextlib.AbstractContextManager[Program]]


@pytest.fixture
def start(forks: Forks) -> Start:
    """Start a script that prints a line when it is where the test wants it, in a process group of its own."""
    return lambda body: forks.start(NEVER_ANSWERS + textwrap.dedent(body))


def test_ctrl_c_while_next_waits_interrupts_it(start: Start) -> None:
    script = """
        iterator = iter(hr.DataLoader(NeverAnswers(), batch_size=4, num_workers=1))
        try:
            print("waiting", flush=True)
            next(iterator)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        """
    _interrupt(start(script))


@pytest.mark.parametrize("run", ["asyncio.run(drain())", "uvloop.run(drain())"])
def test_ctrl_c_while_anext_waits_interrupts_it(start: Start, run: str) -> None:
    script = f"""
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
    _interrupt(start(script))


def _interrupt(program: contextlib.AbstractContextManager[Program]) -> None:
    with program as process:
        assert process.stdout.readline() == "waiting\n"
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        out, err = process.communicate(timeout=30)
        assert (process.wait(), out) == (0, "interrupted\n"), err
    assert "Traceback" not in err


def test_workers_and_zygote_go_when_the_trainer_is_killed(start: Start) -> None:
    script = """
        loader = hr.DataLoader(AtOnce(), batch_size=4, num_workers=2, transform=busy)
        iterator = iter(loader)
        print(launch._zygote.process.pid, flush=True)
        next(iterator)
        """
    with start(script) as process:
        pids = [int(process.stdout.readline()) for _ in range(3)]  # the zygote's, and each worker's as it gets to work
        descriptors = [os.pidfd_open(pid) for pid in pids]
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)
        assert process.wait() == -signal.SIGKILL
    for descriptor in descriptors:
        assert _ends(descriptor)
        os.close(descriptor)


def _ends(descriptor: int) -> bool:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(20_000))
