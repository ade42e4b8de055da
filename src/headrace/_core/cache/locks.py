"""Locks by number between processes, which the kernel frees when their holder dies, however it dies.

On Linux: byte ranges of one file, locked for an open file description (``F_OFD_SETLK``). Elsewhere `flock` of one of a
few files. Both are tried and never waited for.
"""

from __future__ import annotations

import contextlib
import os
import struct
import sys
import threading
import weakref
from collections import Counter
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

SLOTS = 1 << 62  # numbers, from 0: bytes of a file that is as long as a signed number can say
STRIPES = 64  # files, where ranges cannot be locked: two numbers that share one exclude each other, and wait
_RANGE = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid
_OFD = getattr(fcntl, "F_OFD_SETLK", None) if sys.platform == "linux" and sys.maxsize > 1 << 32 else None
_FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)


class Locks:
    """The locks of one folder. To be used from any thread; each number is held once in a process, too.

    Args:
        path: the file whose bytes are locked, or to whose name numbers are added.
        ranges: whether ranges of bytes can be locked; found out where it is not said.
    """

    def __init__(self, path: str, *, ranges: bool = _OFD is not None) -> None:
        self._path = path
        self._ranges = ranges
        self._restart()
        _all.add(self)

    def _restart(self) -> None:
        self._mutex = threading.Lock()
        self._files: dict[int, tuple[int, weakref.finalize[Any, Any]]] = {}  # descriptors, and what closes each
        self._held: set[int] = set()
        self._uses: Counter[int] = Counter()  # of each file

    def take(self, number: int) -> bool:
        """Whether the lock is held now; if not, somebody else holds it.

        Raises:
            OSError: it cannot be known: the folder is gone or read-only, or its file system has no locks.
        """
        with self._mutex:
            if number in self._held:
                return False
            stripe = 0 if self._ranges else number % STRIPES
            descriptor = self._opened(stripe)
            if (self._ranges or not self._uses[stripe]) and not self._locked(descriptor, number):
                return False
            self._held.add(number)
            self._uses[stripe] += 1
            return True

    def free(self, number: int) -> None:
        """Let go of a lock that is held."""
        with self._mutex:
            if number not in self._held:  # a fork of the process that held it
                return
            self._held.discard(number)
            stripe = 0 if self._ranges else number % STRIPES
            self._uses[stripe] -= 1
            with contextlib.suppress(OSError):  # a network's file system: the lock goes with the descriptor
                if self._ranges:
                    _set_range(self._files[0][0], fcntl.F_UNLCK, number)
                elif fcntl is not None and not self._uses[stripe]:
                    fcntl.flock(self._files[stripe][0], fcntl.LOCK_UN)

    def _opened(self, stripe: int) -> int:
        if stripe in self._files:
            descriptor, close = self._files[stripe]
            if self._uses[stripe] or os.fstat(descriptor).st_nlink:
                return descriptor
            close()  # the file was deleted: others lock another one by now
            del self._files[stripe]
        descriptor = os.open(self._path if self._ranges else f"{self._path}{stripe}", _FLAGS, 0o600)
        self._files[stripe] = descriptor, weakref.finalize(self, os.close, descriptor)
        return descriptor

    def _locked(self, descriptor: int, number: int) -> bool:
        try:
            if self._ranges:
                _set_range(descriptor, fcntl.F_WRLCK, number)
            elif fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, says fcntl(2)
            return False
        return True

    def _forked(self) -> None:
        for _, close in self._files.values():
            with contextlib.suppress(OSError):  # the child was forked while it was being closed
                close()
        self._restart()


def _set_range(descriptor: int, kind: int, number: int) -> None:
    assert _OFD is not None
    fcntl.fcntl(descriptor, _OFD, _RANGE.pack(kind, os.SEEK_SET, number, 1, 0))


_all: weakref.WeakSet[Locks] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    # The child shares the description that its parent's locks belong to: it must neither use it nor keep it open, or
    # the locks of a parent that dies would live on in it.
    for locks in list(_all):
        locks._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
