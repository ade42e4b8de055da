"""A loop in its own thread: calls, death, closing."""

import asyncio
import gc
import os
import signal
import threading

import obstore
import pytest
import uvloop
from obstore.store import MemoryStore

from headrace._eventloop import waiting
from headrace._eventloop.loop_thread import LoopThread, new_event_loop
from headrace.errors import EngineDiedError

pytestmark = pytest.mark.usefixtures("engine_loop")


@pytest.fixture
def loop():
    loop = LoopThread("headrace-test")
    yield loop
    assert loop.close(1.0) is None


def test_environment_variable_selects_the_loop(engine_loop):
    loop = new_event_loop()
    loop.close()
    assert isinstance(loop, uvloop.Loop) == (engine_loop == "uvloop")


def test_close_cancels_tasks_which_no_collection_ends_and_ends_the_thread():
    loop = LoopThread("headrace-test")
    started, ended = threading.Event(), threading.Event()

    async def wait_for_ever():
        started.set()
        try:
            await asyncio.Event().wait()  # referenced by this task only
        finally:
            ended.set()

    future = loop.start(wait_for_ever())
    started.wait()
    loop.run(asyncio.sleep(0))  # it waits now
    gc.collect()
    assert not ended.is_set()
    assert loop.close(1.0) is None
    assert ended.is_set()
    assert future.cancelled()
    assert not loop.alive
    assert loop.close(1.0) is None, "closing again is allowed"


def test_close_names_what_ignores_cancellation_or_blocks():
    loop = LoopThread("headrace-test")
    reached, release = threading.Event(), threading.Event()

    async def stubborn():
        reached.set()
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue

    loop.start(stubborn())
    reached.wait()
    assert "stubborn" in loop.close(0.0)

    loop = LoopThread("headrace-test")
    reached.clear()

    async def block():
        reached.set()
        release.wait()

    loop.start(block())
    reached.wait()
    left = loop.close(0.0)
    release.set()
    assert "'headrace-test' is blocked in" in left
    assert loop.close(1.0) is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_system_exit_on_the_loop_is_reported_to_waiters():
    loop = LoopThread("headrace-test")
    notified, died = threading.Event(), []
    loop.on_death.add(lambda error: (died.append(error), notified.set()))

    async def leave():
        raise SystemExit(3)

    loop.start(leave())
    notified.wait()
    assert isinstance(died[0], SystemExit)
    assert not loop.alive
    loop.close(1.0)
    with pytest.raises(EngineDiedError):
        loop.call_soon(print)


def test_signal_handler_that_raises_ends_the_wait_and_cancels_the_coroutine(loop):
    class Rung(Exception):
        pass

    def ring(signum, frame):
        if (
            frame.f_code.co_filename == waiting.__file__
            and frame.f_code.co_name == "wait_readable"
        ):
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            raise Rung

    cancelled = threading.Event()

    async def wait_for_ever():
        try:
            while True:  # until one comes while the caller waits
                os.kill(os.getpid(), signal.SIGUSR1)
                await asyncio.sleep(0.01)  # the interval of the signals
        finally:
            cancelled.set()

    before = signal.signal(signal.SIGUSR1, ring)
    try:
        with pytest.raises(Rung):
            loop.run(wait_for_ever())
        assert cancelled.wait(5)
    finally:
        signal.signal(signal.SIGUSR1, before)


async def callback_of_obstore():
    """The callback by which obstore hands a result to the loop, from a thread of its own."""
    loop, callbacks = asyncio.get_running_loop(), []
    call = loop.call_soon_threadsafe

    def record(callback, *args, **options):
        callbacks.append(callback)
        return call(callback, *args, **options)

    loop.call_soon_threadsafe = record
    with pytest.raises(FileNotFoundError):
        await obstore.get_async(MemoryStore(), "absent")
    return callbacks[0]


def test_result_of_a_request_after_the_close_is_dropped_and_other_calls_are_refused():
    loop = LoopThread("headrace-test")
    assert loop.close(1.0) is None
    assert (
        loop._loop.call_soon_threadsafe(
            asyncio.run(callback_of_obstore()), None, context=None
        )
        is None
    )
    with pytest.raises(EngineDiedError):
        loop.call_soon(print)
    with pytest.raises(EngineDiedError):
        loop.start(asyncio.sleep(0))
