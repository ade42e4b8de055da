"""Supervised workers: replacement after death, limited retries, no process left after close."""

import asyncio
import os
import signal
import socket

import pytest

from headrace._core.pool import supervisor
from headrace._core.pool.supervisor import Job, Pool

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


class Obey:
    """A program whose requests are functions; it calls them."""

    def start(self, worker, workers):
        self.me = (worker, workers)

    def __call__(self, request):
        return request(self)


def pid(_):
    return os.getpid()


async def value(pool, request, **where):
    answer = await pool.run(Job(request, **where))
    if answer.error is not None:
        raise answer.error
    return answer.value


@pytest.fixture
def started(monkeypatch):
    """The processes that are started, and an event that is set when the first is replaced."""
    processes, replaced, launch = [], asyncio.Event(), supervisor.launch_worker

    def watched(*args):
        processes.append(launch(*args))
        if len(processes) == 2:
            replaced.set()
        return processes[-1]

    monkeypatch.setattr(supervisor, "launch_worker", watched)
    return processes, replaced


@pytest.mark.parametrize("deadline", [0.0, 5.0])
def test_close_during_replacement_ends_the_successor_and_closes_no_descriptor_twice(on_loop, started, deadline):
    processes, replaced = started
    reused = []

    async def scenario():
        pool = Pool(Obey(), workers=1)
        pool.launch()
        await pool.open()
        os.kill(await value(pool, pid), signal.SIGKILL)
        await replaced.wait()
        await pool.close(deadline)
        reused.extend(socket.socket() for _ in range(10))  # one has the number of the connection's socket

    on_loop(scenario)
    successor, connection = processes[1]
    assert successor.ended()
    assert connection.frames.fileno() == -1
    for each in reused:
        os.fstat(each.fileno())  # an OSError if the loop has closed it
        each.close()
