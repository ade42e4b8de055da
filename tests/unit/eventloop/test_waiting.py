"""Blocking waits for descriptors, with timeouts, interrupted by signals."""

import asyncio
import os
import signal
import socket
import threading
from concurrent.futures import Future

import pytest

from headrace._eventloop import waiting
from headrace._eventloop.waiting import wait_done, wait_readable
from tests.faults.watching import run_in_fork


@pytest.fixture
def handled():
    """The SIGUSR1s that a handler has seen."""
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    yield seen
    signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def raises():
    """SIGUSR1 raises KeyboardInterrupt, as SIGINT does."""

    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    yield
    signal.signal(signal.SIGUSR1, before)
    # one that interrupted the end of a wait is left to the next wait, here of another test
    wait_readable(timeout=0.0)


def test_timeout_or_a_signal_handler_that_returns_ends_the_wait(pair, handled):
    for timeout in (0.0, 0.01):
        # A future of an earlier test may wake it.
        while wait_readable(pair[1], timeout=timeout):
            pass
    threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    assert wait_readable(pair[1], timeout=None)
    assert handled == [signal.SIGUSR1]
    assert not wait_readable(pair[1], timeout=0.0)  # it is not taken for a signal twice


def interrupts(wait, turns):
    """In how many of so many turns a signal, sent as `wait` begins, has interrupted it."""

    def send():
        for _ in range(turns):
            # Not an Event: the handler may raise in the midst of its set().
            os.read(asked, 1)
            os.kill(os.getpid(), signal.SIGUSR1)

    interrupted = 0
    asked, ask = os.pipe()
    sender = threading.Thread(target=send)
    sender.start()
    for _ in range(turns):
        try:
            os.write(ask, b"x")
            wait()
        except KeyboardInterrupt:
            interrupted += 1
    sender.join()
    os.close(asked)
    os.close(ask)
    return interrupted


@pytest.mark.parametrize("future", [False, True])
def test_signal_just_before_or_during_the_wait_always_interrupts_it(pair, raises, future):
    def wait():
        if future:
            wait_done(Future())  # which never is done
        # A signal that ends a wait in its last moments leaves word of it to the next.
        while True:
            assert wait_readable(pair[1], timeout=120), "the signal was slept through"

    assert interrupts(wait, turns=200) == 200


def test_previous_wakeup_descriptor_is_restored(pair):
    wake, woken = socket.socketpair()
    wake.setblocking(False)
    before = signal.set_wakeup_fd(wake.fileno())
    try:
        assert not wait_readable(pair[1], timeout=0.0)
        assert signal.set_wakeup_fd(wake.fileno()) == wake.fileno()
    finally:
        signal.set_wakeup_fd(before)
        wake.close()
        woken.close()


async def test_signal_while_a_loop_is_blocked_in_a_wait_reaches_the_loop(pair):
    arrived = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, arrived.set)
    try:
        threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        # As a careless caller does, on its own loop.
        assert wait_readable(pair[1], timeout=None)
        await asyncio.wait_for(arrived.wait(), 20)
    finally:
        loop.remove_signal_handler(signal.SIGUSR1)


# A future


@pytest.mark.parametrize("where", ["main thread", "another"])
def test_wait_for_a_future_ends_when_it_is_done(where):
    def check():
        for _ in range(300):
            futures = [Future() for _ in range(2)]
            done = threading.Thread(
                target=lambda futures=futures: [
                    future.set_result(1) for future in futures
                ]
            )
            done.start()
            for future in futures:
                wait_done(future)
                assert future.result() == 1
            done.join()

    if where == "main thread":
        check()
        return
    thread = threading.Thread(target=check)
    thread.start()
    thread.join()


def test_signal_handler_that_returns_does_not_end_the_wait_for_a_future(handled):
    future = Future()

    def send():
        os.kill(os.getpid(), signal.SIGUSR1)
        future.set_result(7)

    thread = threading.Thread(target=send)
    thread.start()
    wait_done(future)
    thread.join()
    assert future.result() == 7
    assert handled == [signal.SIGUSR1]


def test_fork_does_not_share_the_signal_sockets(pair):
    pair[0].send(b"x")
    wait_readable(pair[1], timeout=None)  # from now on this process has such a pair

    def program():
        assert waiting._signal_pair is None

    run_in_fork(program)
