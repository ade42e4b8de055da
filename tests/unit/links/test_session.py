"""A session's wait for its engine: nothing is lost, no wait is endless, nothing polls."""

import subprocess
import sys
import threading

import pytest

from headrace._core.batches import BatchPlan, HostBatch
from headrace._core.eventloop.waiting import wait_readable
from headrace._core.links.session import Session
from headrace._core.links.thread import Mailbox
from headrace._core.messages import SessionEnd


def host(number):
    return HostBatch(BatchPlan(number, (number,), 0), number, 1)


@pytest.fixture
def link():
    return Mailbox()


@pytest.fixture
def session(link):
    session = Session(link)
    yield session
    session.close()


def wait(session, timeout):
    for source, seconds in session.waits(timeout):
        wait_readable(source, timeout=seconds)
    return not session.must_wait()


def test_waiting_gives_up_after_the_timeout_and_can_go_on(link, session):
    assert not wait(session, 0.001)
    link.put(host(0))
    assert wait(session, None)
    assert session.take().data == 0


def test_a_byte_of_an_earlier_wait_does_not_end_a_later_one(link, session):
    wait(session, 0.001)
    link.put(host(0))  # writes a byte that is not read
    session.take()
    assert not wait(session, 0.001)


def test_an_end_wakes_and_follows_the_batches_before_it(link, session):
    waiting = threading.Thread(target=wait, args=(session, None))
    waiting.start()
    first = ValueError("first")
    for message in (host(0), SessionEnd(first), SessionEnd(ValueError("second"))):
        link.put(message)
    waiting.join()
    assert session.take().data == 0
    assert session.take() is None
    assert session.ended
    assert session.error is first
    assert wait(session, None)


WAITS_WHILE_IT_IS_CLOSED = """
import anyio, uvloop
from headrace._core.links.session import Session
from headrace._core.links.thread import Mailbox

async def wait(session):
    for source, _ in session.waits(None):
        await anyio.wait_readable(source)

async def scenario():
    session = Session(Mailbox())
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait, session)
            await anyio.wait_all_tasks_blocked()
            session.close()

uvloop.run(scenario())
"""


def test_closing_wakes_a_task_that_waits_on_uvloop():
    # In a process of its own: a loop that is left with a closed descriptor may end its process.
    command = [sys.executable, "-c", WAITS_WHILE_IT_IS_CLOSED]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
