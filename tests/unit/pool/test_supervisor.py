"""Supervised workers: replacement after death, limited retries, no process left after close."""

import asyncio
import multiprocessing
import os
import signal
import socket

import pytest

from headrace._core.pool.launch import ContextLauncher, ZygoteLauncher
from headrace._core.pool.supervisor import Pool

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


class Obey:
    """A program whose requests are functions; it calls them."""

    def start(self, worker, workers):
        self.me = (worker, workers)

    def __call__(self, request):
        return request(self)


def pid(_):
    return os.getpid()


@pytest.fixture(params=["zygote", "fork"])
def launcher(request):
    return ZygoteLauncher() if request.param == "zygote" else ContextLauncher(multiprocessing.get_context("fork"))


async def value(pool, request, **where):
    reply = await pool.run(request, **where)
    if reply.answer.error is not None:
        raise reply.answer.error
    return reply.answer.value


def watched(launcher):
    """The launcher, the processes that it starts, and an event that is set when it starts a replacement."""
    started, replaced = [], asyncio.Event()

    class Watched(type(launcher)):
        def launch(self, *args):
            started.append(super().launch(*args))
            if len(started) == 2:
                replaced.set()
            return started[-1]

    launcher.__class__ = Watched
    return launcher, started, replaced


@pytest.mark.parametrize("deadline", [0.0, 5.0])
@pytest.mark.parametrize("later", range(4))
def test_close_during_replacement_ends_the_successor_and_closes_no_descriptor_twice(on_loop, launcher, later, deadline):
    launcher, started, replaced = watched(launcher)
    reused = []

    async def scenario():
        pool = Pool(Obey(), workers=1, launcher=launcher)
        pool.launch()
        await pool.open()
        os.kill(await value(pool, pid), signal.SIGKILL)
        await replaced.wait()
        for _ in range(later):  # iterations of the loop
            await asyncio.sleep(0)
        await pool.close(deadline)
        reused.extend(socket.socket() for _ in range(10))  # one has the number of the connection's socket

    on_loop(scenario)
    successor, connection = started[1]
    assert successor.ended()
    assert connection.frames.fileno() == -1
    for each in reused:
        os.fstat(each.fileno())  # an OSError if the loop has closed it
        each.close()
