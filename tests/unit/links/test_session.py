"""A session that is closed while a task waits for its engine; on other loops, see `test_epoch.py`."""

import subprocess
import sys

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
