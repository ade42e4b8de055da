"""Real shortages: of file descriptors, by the limit of a process, and of room on a disk, by a small file system."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

AS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0

# Every function by which headrace opens descriptors from Python. Those of native code (an event
# loop's, obstore's) are refused by `free_descriptors`.
OPENERS: tuple[tuple[Any, str], ...] = (
    (socket, "socketpair"),
    (socket.socket, "recvmsg"),
    (os, "open"),
    (os, "dup"),
    (os, "pipe"),
    (os, "memfd_create"),
    (select, "epoll"),
    (subprocess, "Popen"),
)


@contextlib.contextmanager
def free_descriptors(count: int, pid: int = 0) -> Iterator[None]:
    """Let a process open `count` more descriptors and no more."""
    used = set(map(int, os.listdir(f"/proc/{pid or 'self'}/fd")))
    limit, free = 0, 0
    while free < count or limit in used:
        free += limit not in used
        limit += 1
    with soft_limit(limit, pid):
        yield


@contextlib.contextmanager
def soft_limit(limit: int, pid: int = 0) -> Iterator[None]:
    """Lower the limit of open files of a process, and of processes that it forks inside the block."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


class NthOpenFails:
    """A context in which the n-th call that opens descriptors, from 0, finds none left.

    Attributes:
        reached: whether there was such a call.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._count = 0
        self._lock = threading.Lock()
        self._patches = contextlib.ExitStack()
        self.reached = False

    def __enter__(self) -> NthOpenFails:
        for owner, name in OPENERS:
            self._patches.enter_context(
                mock.patch.object(owner, name, self._wrapped(getattr(owner, name)))
            )
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._patches.close()

    def _wrapped(self, opener: Callable[..., Any]) -> Callable[..., Any]:
        def refused_once(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                mine, self._count = self._count == self._number, self._count + 1
            if not mine:
                return opener(*args, **kwargs)
            self.reached = True
            with soft_limit(0):
                return opener(*args, **kwargs)

        return refused_once


@contextlib.contextmanager
def mounted(where: Path, options: str) -> Iterator[Path]:
    """A file system in memory, of limited size for example; skips the test where mounting is not allowed."""
    if not AS_ROOT:
        pytest.skip("mounting a file system needs root")
    where.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "headrace-test", where],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"mounting a file system is not allowed here: {done.stderr.strip()}")
    try:
        yield where
    finally:
        # The cache has its lock open.
        subprocess.run(["umount", "--lazy", where], check=True)
