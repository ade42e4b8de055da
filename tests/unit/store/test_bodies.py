"""Small bodies are read by one thread; a body that stalls there holds up no other."""

import asyncio
import threading
from concurrent.futures import Future

import pytest

from headrace._store.request_stats import SMALL, BodyReader

TIMEOUT = 120


class Result:
    """An answer whose body arrives with `arrive`, at once by default."""

    def __init__(self, body=b"body", *, arrived=True):
        self.body = body
        self.began = threading.Event()
        self._arrival = Future()
        self.threads = []
        self.reading = None  # the thread that waits for the body
        if arrived:
            self.arrive()

    def arrive(self):
        self._arrival.set_result(None)

    def _take(self):
        self.threads.append(threading.current_thread().name)
        if isinstance(self.body, BaseException):
            raise self.body
        return self.body

    def bytes(self):
        self.reading = threading.current_thread()
        self.began.set()
        self._arrival.result(TIMEOUT)
        return self._take()

    async def bytes_async(self):
        await asyncio.wrap_future(self._arrival)
        return self._take()


@pytest.fixture
async def reader():
    reader = BodyReader()
    yield reader
    reader.close()
    if reader._thread is not None:
        reader._thread.join(TIMEOUT)
        assert not reader._thread.is_alive()


async def test_a_stalled_body_holds_up_no_other(reader):
    stalled = Result(arrived=False)
    waiting = asyncio.ensure_future(reader.read(stalled, 4))
    others = [Result(bytes([number])) for number in range(20)]
    queued = [asyncio.ensure_future(reader.read(other, 1)) for other in others]
    async with asyncio.timeout(TIMEOUT):
        assert await asyncio.gather(*queued) == [other.body for other in others]
        assert reader.late
        later = Result()
        # At once: the thread is still occupied.
        assert await reader.read(later, 4) == b"body"
    assert not waiting.done()
    assert {name for other in [*others, later] for name in other.threads} == {
        threading.current_thread().name
    }

    stalled.arrive()
    assert await waiting == b"body"
    async with asyncio.timeout(TIMEOUT):
        # The thread is free, and used again.
        while "headrace-bodies" not in later.threads:
            await reader.read(later, 4)
    long = Result()
    await reader.read(long, SMALL + 1)
    assert long.threads == [threading.current_thread().name], (
        "long bodies are read on the loop"
    )


async def test_requests_that_outlast_their_session_get_their_bodies_and_keep_no_thread():
    reader, stalled, queued, later = (
        BodyReader(),
        Result(arrived=False),
        Result(b"queued"),
        Result(b"later"),
    )
    waiting = asyncio.ensure_future(reader.read(stalled, 4))
    await asyncio.to_thread(stalled.began.wait, TIMEOUT)
    behind = asyncio.ensure_future(reader.read(queued, 6))
    await asyncio.sleep(0)  # it is queued
    reader.close()
    async with asyncio.timeout(TIMEOUT):
        assert await behind == b"queued"
        assert await reader.read(later, 5) == b"later"
        stalled.arrive()
        assert await waiting == b"body"
    stalled.reading.join(TIMEOUT)
    assert not stalled.reading.is_alive()
