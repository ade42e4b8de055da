"""The oracle for faults: a script in a child process, watched from inside and from outside.

The script leaves whatever it does behind `watch()`: descriptors, threads, child processes, named shared memory and
tasks are counted before and after. From outside: the exit status, a hard clock, and what standard error must not say.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest

CLOCK = 60  # seconds; a case that hangs fails here

PRELUDE = '''
import asyncio, collections, contextlib, gc, os, signal, sys, threading, time
import torch
import headrace as hr
from headrace.pool import launch


def children():
    """The processes whose parent is this one, without the zygote, which is kept for the process's life."""
    zygote = launch._zygote.process.pid if launch._zygote is not None else None
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return sorted(pid for pid in map(int, file.read().split()) if pid != zygote)


def workers():
    """The living processes that the zygote has forked."""
    if launch._zygote is None:
        return []
    pid = launch._zygote.process.pid
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return sorted(map(int, file.read().split()))


def held():
    gc.collect()
    zygote = [] if launch._zygote is None else [launch._zygote.control.fileno()]
    descriptors = sorted(set(map(int, os.listdir("/proc/self/fd"))) - set(zygote))
    descriptors = [fd for fd in descriptors if os.path.exists(f"/proc/self/fd/{fd}")]
    return {
        "descriptors": len(descriptors),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "children": children(),
        "workers": workers(),
        "shared memory": sorted(os.listdir("/dev/shm")),
    }


@contextlib.contextmanager
def watch():
    before = held()
    yield
    after = held()
    assert after == before, f"left behind:\\n  before {before}\\n  after  {after}"


class Slow(hr.AsyncDataset):
    """Samples that take a little while, so that an epoch has fetches under way wherever it is left."""

    def __init__(self, length=64, latency=0.002):
        self.length, self.latency = length, latency

    def __len__(self):
        return self.length

    async def aget(self, index):
        await asyncio.sleep(self.latency)  # latency
        return index


def negate(sample):
    return -sample
'''

NEVER_SAID = (
    "never retrieved",
    "Task was destroyed",
    "Event loop is closed",
    "never awaited",
    "ResourceWarning",
    "Exception ignored",
    "Fatal Python error",
    "Traceback",
)


Script = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def script() -> Script:
    """Run a script in a child; by default it must exit with status 0 and say nothing that a leak would say."""

    def run(
        body: str, *, status: int = 0, quiet: bool = True, engine_loop: str = "uvloop"
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-X", "dev", "-W", "error::ResourceWarning", "-c", PRELUDE + textwrap.dedent(body)],
            capture_output=True,
            text=True,
            timeout=CLOCK,
            check=False,
            env={**os.environ, "HEADRACE_EVENT_LOOP": engine_loop},
        )
        assert done.returncode == status, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        if quiet:
            said = [phrase for phrase in NEVER_SAID if phrase in done.stderr]
            assert not said, f"standard error says {said}:\n{done.stderr}"
        return done

    return run
