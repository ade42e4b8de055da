"""Ctrl-C, and SIGKILL of the process that trains."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable

import pytest
import torch
import uvloop

import headrace as hr
from headrace._core.eventloop.waiting import wait_readable
from headrace._core.pool import launch
from tests.faults.watching import Numbers, sidecar, wait_for_exit
from tests.forks import Forks

pytestmark = pytest.mark.skipif("sys.platform != 'linux'", reason="reads /proc")


class NeverAnswers(Numbers):
    async def aget(self, index):
        await asyncio.Event().wait()


def test_ctrl_c_interrupts_next(forks: Forks) -> None:
    def program() -> None:
        # The first wait of a process makes a socket pair; interrupted there, Python would report it as not closed.
        wait_readable(timeout=0.0)
        iterator = iter(hr.DataLoader(NeverAnswers(8), batch_size=4, num_workers=1))
        try:
            print("waiting", flush=True)
            next(iterator)
        except KeyboardInterrupt:
            print("interrupted", flush=True)

    assert_interrupted(forks, program)


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_ctrl_c_interrupts_anext(forks: Forks, runner: Callable[..., object]) -> None:
    def program() -> None:
        async def drain():
            stream = aiter(hr.DataLoader(NeverAnswers(8), batch_size=4, num_workers=1))
            asyncio.get_running_loop().call_soon(lambda: print("waiting", flush=True))
            await anext(stream)

        try:
            runner(drain())
        except KeyboardInterrupt:
            print("interrupted", flush=True)

    assert_interrupted(forks, program)


def assert_interrupted(forks: Forks, program: Callable[[], object]) -> None:
    with forks.start(program) as process:
        assert process.stdout.readline() == "waiting\n"
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        out, err = process.communicate(timeout=30)
        assert (process.wait(), out) == (0, "interrupted\n"), err
    assert "Traceback" not in err


@pytest.mark.parametrize("consumer", ["waiting", "training"])
@pytest.mark.parametrize("placement", ["thread", "process"])
def test_workers_and_zygote_end_when_the_trainer_is_killed(forks: Forks, placement: str, consumer: str) -> None:
    def program() -> None:
        def busy(index):
            if index < 8:
                return index
            os.write(1, b"%d\n" % os.getpid())  # one call for the line: several processes write
            while True:
                pass

        loader = hr.DataLoader(Numbers(64), batch_size=4, num_workers=2, transform=busy, placement=placement)
        iterator = iter(loader)
        next(iterator)
        engine = sidecar(loader) if placement == "process" else launch._zygote.process.pid
        os.write(1, b"%d\n%d\n" % (launch._zygote.process.pid, engine))
        if consumer == "waiting":
            list(iterator)
        signal.pause()

    with forks.start(program) as trainer:
        pids = {int(trainer.stdout.readline()) for _ in range(4)}  # zygote, sidecar and two workers
        assert len(pids) == (4 if placement == "process" else 3)
        descriptors = [os.pidfd_open(pid) for pid in pids]
        trainer.send_signal(signal.SIGKILL)
        _, stderr = trainer.communicate(timeout=30)  # standard output closes when the last process has ended
        for descriptor in descriptors:
            wait_for_exit(descriptor)
        assert trainer.wait() == -signal.SIGKILL
        assert "Traceback" not in stderr, stderr


class TorchNumbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return index


@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_workers_of_multiprocessing_end_when_the_trainer_is_killed(forks: Forks, start: str) -> None:
    def program() -> None:
        loader = hr.DataLoader(TorchNumbers(), batch_size=4, num_workers=2, multiprocessing_context=start)
        iterator = iter(loader)
        next(iterator)
        for worker in multiprocessing.active_children():
            print(worker.pid, flush=True)
        threading.Event().wait()

    with forks.start(program) as process:
        descriptors = [os.pidfd_open(int(process.stdout.readline())) for _ in range(2)]
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    for descriptor in descriptors:
        wait_for_exit(descriptor)
