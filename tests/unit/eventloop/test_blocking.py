"""Batched blocking calls: results, errors, cancellation, number of threads."""

import asyncio
import threading

import pytest

from headrace._eventloop import blocking as module
from headrace._eventloop.blocking import run_blocking


def test_many_calls_share_few_threads(on_loop):
    async def main():
        return set(
            await asyncio.gather(
                *(run_blocking(threading.get_ident) for _ in range(1000))
            )
        )

    threads = on_loop(main)
    assert threading.get_ident() not in threads
    assert len(threads) <= module.MAX_THREADS


def test_hanging_calls_do_not_block_others(on_loop):
    async def main():
        free = threading.Event()
        hanging = [run_blocking(free.wait) for _ in range(module.MAX_THREADS - 1)]
        others = [run_blocking(abs, -number) for number in range(50)]
        try:
            return await asyncio.gather(*others)
        finally:
            free.set()
            await asyncio.gather(*hanging)

    assert on_loop(main) == list(range(50))


def test_call_cancelled_before_it_starts_is_not_made(on_loop):
    async def main():
        made, free = [], [threading.Event() for _ in range(module.MAX_THREADS)]
        running = [run_blocking(event.wait) for event in free]
        waiting = [run_blocking(made.append, number) for number in range(3)]
        waiting[1].cancel()
        for event in free:
            event.set()
        await asyncio.gather(*running, *waiting, return_exceptions=True)
        return made

    assert sorted(on_loop(main)) == [0, 2]


def test_loop_may_end_while_a_call_runs(on_loop):
    ended = threading.Event()
    free = threading.Event()

    def call():
        free.wait()
        ended.set()

    async def main():
        run_blocking(call)
        await asyncio.sleep(0)
        free.set()

    on_loop(main)
    assert ended.wait(30)


@pytest.mark.parametrize(
    "error",
    [ValueError("no"), StopIteration(), SystemExit(3), KeyboardInterrupt()],
    ids=repr,
)
def test_error_is_raised_by_its_own_call_and_does_not_end_the_thread(on_loop, error):
    def fail():
        raise error

    async def main():
        calls = run_blocking(abs, -1), run_blocking(fail), run_blocking(abs, -2)
        return await asyncio.gather(*calls, return_exceptions=True)

    first, raised, last = on_loop(main)
    assert (first, last) == (1, 2)
    assert isinstance(
        raised, RuntimeError if isinstance(error, StopIteration) else type(error)
    )
