"""Supervised workers: replacement after death, limited retries, no process left after close."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import socket

import pytest

from headrace._core.pool.launch import ContextLauncher, ZygoteLauncher
from headrace._core.pool.supervisor import Pool
from headrace.errors import WorkerDiedError

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


class Obey:
    """A program whose requests are functions; it calls them."""

    def start(self, worker, workers):
        self.me = (worker, workers)

    def __call__(self, request):
        return request(self)


class StartExits(Obey):
    def start(self, worker, workers):
        os._exit(9)


def kill_self(_):
    os.kill(os.getpid(), signal.SIGKILL)


def pid(_):
    return os.getpid()


@pytest.fixture(params=["zygote", "fork"])
def launcher(request):
    return ZygoteLauncher() if request.param == "zygote" else ContextLauncher(multiprocessing.get_context("fork"))


@contextlib.asynccontextmanager
async def opened(program, launcher, *, workers=1, stateful=False, deadline=5.0):
    pool = Pool(program, workers=workers, launcher=launcher, stateful=stateful)
    pool.launch()
    await pool.open()
    try:
        yield pool
    finally:
        await pool.close(deadline)


async def value(pool, request, **where):
    reply = await pool.run(request, **where)
    if reply.answer.error is not None:
        raise reply.answer.error
    return reply.answer.value


def test_workers_are_numbered_and_answer_requests(on_loop, launcher):
    async def scenario():
        async with opened(Obey(), launcher, workers=3) as pool:
            numbers = [await value(pool, lambda program: program.me, worker=worker) for worker in range(3)]
            assert numbers == [(0, 3), (1, 3), (2, 3)]
            assert len({await value(pool, pid, worker=worker) for worker in range(3)}) == 3

    on_loop(scenario)


def test_dead_worker_is_replaced_and_its_request_retried_once(on_loop, launcher, tmp_path):
    flag = tmp_path / "died"

    def die_once(_):
        if not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return "done"

    async def scenario():
        async with opened(Obey(), launcher) as pool:
            before = await value(pool, pid)
            reply = await pool.run(die_once)
            assert (reply.answer.value, reply.attempt, reply.worker) == ("done", 2, 0)
            assert await value(pool, pid) != before

    on_loop(scenario)


def test_request_that_kills_two_workers_fails_with_its_batch(on_loop, launcher):
    async def scenario():
        async with opened(Obey(), launcher) as pool:
            await value(pool, pid)
            with pytest.raises(WorkerDiedError, match="SIGKILL") as caught:
                await pool.run(kill_self, batch=7, indices=(70, 71))
            died = caught.value
            assert (died.worker, died.exit_code, died.batch, died.indices) == (0, -9, 7, (70, 71))
            assert "attempt 2" in str(died)
            assert await value(pool, lambda _: "alive") == "alive"

    on_loop(scenario)


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


@pytest.mark.parametrize("later", range(4))
def test_close_during_replacement_ends_the_successor(on_loop, launcher, later):
    launcher, started, replaced = watched(launcher)

    async def scenario():
        pool = Pool(Obey(), workers=1, launcher=launcher)
        pool.launch()
        await pool.open()
        os.kill(await value(pool, pid), signal.SIGKILL)
        await replaced.wait()
        for _ in range(later):  # rounds of the loop
            await asyncio.sleep(0)
        await pool.close(5.0)

    on_loop(scenario)
    successor, connection = started[1]
    assert successor.ended()
    assert connection.frames.fileno() == -1


@pytest.mark.parametrize("later", range(4))
def test_close_before_the_successor_is_connected_closes_no_descriptor_twice(on_loop, launcher, later):
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
        await pool.close(0.0)
        reused.extend(socket.socket() for _ in range(10))  # one has the number of the connection's socket

    on_loop(scenario)
    assert started[1][1].frames.fileno() == -1
    for each in reused:
        os.fstat(each.fileno())  # an OSError if the loop has closed it
        each.close()


def test_stateful_workers_are_not_replaced(on_loop, launcher):
    async def scenario():
        async with opened(Obey(), launcher, stateful=True) as pool:
            with pytest.raises(WorkerDiedError, match="attempt 1"):
                await pool.run(kill_self, worker=0, batch=0)
            with pytest.raises(WorkerDiedError):
                await pool.run(pid, worker=0, batch=1)

    on_loop(scenario)


def test_workers_that_never_start_break_the_pool(on_loop, launcher):
    async def scenario():
        async with opened(StartExits(), launcher) as pool:
            for _ in range(3):
                with pytest.raises(WorkerDiedError, match="exited with code 9"):
                    await pool.run(pid)

    on_loop(scenario)


# Closing


def test_queued_request_survives_a_request_that_kills_two_workers(on_loop, launcher):
    async def scenario():
        async with opened(Obey(), launcher, workers=2) as pool:
            requests = [pid, kill_self, pid, pid, kill_self, pid]
            running = (pool.run(request, worker=0, batch=batch) for batch, request in enumerate(requests))
            replies = await asyncio.gather(*running, return_exceptions=True)
            died = [reply.batch for reply in replies if isinstance(reply, WorkerDiedError)]
            assert died == [1, 4]
            assert [reply.attempt for reply in replies if not isinstance(reply, WorkerDiedError)] == [1] * 4

    on_loop(scenario)


def test_worker_has_the_environment_of_the_requesting_process(on_loop, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADRACE_TEST", "here")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "headrace_test_module.py").write_text("ANSWER = 42")

    def look(_):
        import headrace_test_module

        return os.getcwd(), os.environ["HEADRACE_TEST"], headrace_test_module.ANSWER

    async def scenario():
        async with opened(Obey(), ZygoteLauncher()) as pool:
            assert await value(pool, look) == (str(tmp_path), "here", 42)

    on_loop(scenario)
