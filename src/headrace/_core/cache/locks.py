"""Numbered locks between processes, which the kernel releases when their holder dies, however it dies.

On Linux: byte ranges of one file, locked for an open file description (``F_OFD_SETLK``). Elsewhere `flock` of one of 64
files. Acquiring never blocks.
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

SLOTS = 1 << 62  # lock numbers, from 0: offsets of a file, whose size is a signed 64-bit number
STRIPES = 64  # files where ranges cannot be locked: numbers that share a file exclude each other
_RANGE = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid
_OFD = getattr(fcntl, "F_OFD_SETLK", None) if sys.platform == "linux" and sys.maxsize > 1 << 32 else None
_FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)


class Locks:
    """The locks of one folder. Thread-safe; within a process, too, each number has one holder.

    Args:
        path: the file whose bytes are locked, or the prefix of the files.
        ranges: whether to lock byte ranges.
    """

    def __init__(self, path: str, *, ranges: bool = _OFD is not None) -> None:
        self._path = path
        self._ranges = ranges
        self._reset()
        _all.add(self)

    def _reset(self) -> None:
        self._mutex = threading.Lock()
        self._files: dict[int, tuple[int, weakref.finalize[Any, Any]]] = {}  # descriptor and finalizer, by stripe
        self._held: set[int] = set()
        self._uses: Counter[int] = Counter()  # locks held, by stripe

    def acquire(self, number: int) -> bool:
        """Try to acquire a lock; returns whether this call has acquired it.

        Raises:
            OSError: locking is impossible: the folder is gone or read-only, or its file system has no locks.
        """
        with self._mutex:
            if number in self._held:
                return False
            stripe = 0 if self._ranges else number % STRIPES
            descriptor = self._descriptor(stripe)
            if (self._ranges or not self._uses[stripe]) and not self._lock_file(descriptor, number):
                return False
            self._held.add(number)
            self._uses[stripe] += 1
            return True

    def release(self, number: int) -> None:
        """Release a lock that this process holds."""
        with self._mutex:
            if number not in self._held:  # this process is a fork of the holder
                return
            self._held.discard(number)
            stripe = 0 if self._ranges else number % STRIPES
            self._uses[stripe] -= 1
            with contextlib.suppress(OSError):  # a network file system: closing the descriptor releases the lock
                if self._ranges:
                    _lock_range(self._files[0][0], fcntl.F_UNLCK, number)
                elif fcntl is not None and not self._uses[stripe]:
                    fcntl.flock(self._files[stripe][0], fcntl.LOCK_UN)

    def _descriptor(self, stripe: int) -> int:
        if stripe in self._files:
            descriptor, close = self._files[stripe]
            if self._uses[stripe] or os.fstat(descriptor).st_nlink:
                return descriptor
            close()  # the file was deleted: other processes lock its successor
            del self._files[stripe]
        descriptor = os.open(self._path if self._ranges else f"{self._path}{stripe}", _FLAGS, 0o600)
        self._files[stripe] = descriptor, weakref.finalize(self, os.close, descriptor)
        return descriptor

    def _lock_file(self, descriptor: int, number: int) -> bool:
        try:
            if self._ranges:
                _lock_range(descriptor, fcntl.F_WRLCK, number)
            elif fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # EAGAIN or EACCES, by fcntl(2)
            return False
        return True

    def _after_fork(self) -> None:
        for _, close in self._files.values():
            with contextlib.suppress(OSError):  # forked while another thread was closing it
                close()
        self._reset()


def _lock_range(descriptor: int, kind: int, number: int) -> None:
    assert _OFD is not None
    fcntl.fcntl(descriptor, _OFD, _RANGE.pack(kind, os.SEEK_SET, number, 1, 0))


_all: weakref.WeakSet[Locks] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    # The child shares the open file description that holds its parent's locks. It must close its copy, or the locks of
    # a parent that dies would remain.
    for locks in list(_all):
        locks._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
