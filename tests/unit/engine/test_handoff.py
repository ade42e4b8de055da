"""The bridge from the engine to its consumer: nothing is lost, no wait is endless, nothing polls."""

import subprocess
import sys
import threading

import anyio
import anyio.to_thread
import pytest

from headrace._core.batches import BatchPlan, HostBatch
from headrace._core.engine.handoff import Handoff


def host(number):
    return HostBatch(BatchPlan(number, (number,), 0), number, 1)


@pytest.fixture
def handoff():
    handoff = Handoff()
    yield handoff
    handoff.close()


def test_batches_come_in_the_order_they_were_put(handoff):
    for number in range(3):
        handoff.put(host(number))
    assert [handoff.take().data for _ in range(3)] == [0, 1, 2]
    assert handoff.take() is None


def test_waiting_returns_at_once_when_a_batch_is_there(handoff):
    handoff.put(host(0))
    assert handoff.wait(None)


def test_waiting_gives_up_after_the_timeout_and_can_go_on(handoff):
    assert not handoff.wait(0.001)
    handoff.put(host(0))
    assert handoff.wait(None)
    assert handoff.take().data == 0


def test_a_byte_of_an_earlier_wait_does_not_end_a_later_one(handoff):
    handoff.wait(0.001)
    handoff.put(host(0))  # writes a byte that is not read
    handoff.take()
    assert not handoff.wait(0.001)


def test_an_end_wakes_and_the_first_reason_counts(handoff):
    waiting = threading.Thread(target=handoff.wait, args=(None,))
    waiting.start()
    first = ValueError("first")
    handoff.end(first)
    handoff.end(ValueError("second"))
    waiting.join()
    assert handoff.ended
    assert handoff.error is first
    assert handoff.wait(None)


def test_what_was_put_before_the_end_can_still_be_taken(handoff):
    handoff.put(host(0))
    handoff.end()
    assert handoff.take().data == 0


def test_a_thousand_batches_cross_to_a_blocking_consumer(handoff):
    def produce():
        for number in range(1000):
            handoff.put(host(number))
        handoff.end()

    producer = threading.Thread(target=produce)
    producer.start()
    got = []
    while not (handoff.ended and len(got) == 1000):
        handoff.wait(None)
        while (batch := handoff.take()) is not None:
            got.append(batch.data)
    producer.join()
    assert got == list(range(1000))


def test_a_thousand_batches_cross_to_an_async_consumer(handoff, consumer_loop):
    def produce():
        for number in range(1000):
            handoff.put(host(number))
        handoff.end()

    async def consume():
        got = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, produce)
            while not (handoff.ended and len(got) == 1000):
                assert await handoff.wait_async(None)
                while (batch := handoff.take()) is not None:
                    got.append(batch.data)
        return got

    assert consumer_loop(consume) == list(range(1000))


def test_an_async_wait_gives_up_after_the_timeout(handoff, consumer_loop):
    async def wait():
        return await handoff.wait_async(0.001)

    assert consumer_loop(wait) is False


def test_a_cancelled_wait_leaves_the_batch_for_the_next(handoff, consumer_loop):
    async def scenario():
        with anyio.move_on_after(0.001):
            await handoff.wait_async(None)
        handoff.put(host(0))
        await handoff.wait_async(None)
        return handoff.take().data

    assert consumer_loop(scenario) == 0


def test_closing_drops_what_was_not_taken_and_putting_is_harmless(handoff):
    handoff.put(host(0))
    handoff.close()
    handoff.put(host(1))
    handoff.end()
    handoff.close()
    assert handoff.ended


def test_closing_wakes_a_thread_that_waits(handoff):
    waiting = threading.Thread(target=handoff.wait, args=(None,), daemon=True)
    waiting.start()
    handoff.close()
    waiting.join(10)
    assert not waiting.is_alive()


WAITS_WHILE_IT_IS_CLOSED = """
import asyncio, sys, anyio, trio, uvloop
from headrace._core.engine.handoff import Handoff

async def scenario():
    handoff = Handoff()
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(handoff.wait_async, None)
            await anyio.wait_all_tasks_blocked()
            handoff.close()

if sys.argv[1] == "trio":
    trio.run(scenario)
else:
    loop = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}[sys.argv[1]]
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(scenario())
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop", "trio"])
def test_closing_wakes_a_task_that_waits(loop):
    # In a process of its own: a loop that is left with a closed descriptor may end its process.
    command = [sys.executable, "-c", WAITS_WHILE_IT_IS_CLOSED, loop]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=25, check=False)
    assert ended.returncode == 0, ended.stderr
