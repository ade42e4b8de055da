"""How much room a disk cache takes, and making room in it: what was read longest ago goes first.

The total is in a small file, raised before anything is written: a writer that is killed in between leaves it too high.
Whoever makes room counts the files, and so puts it right. A file may appear while they are counted, unseen: so counts
are numbered, and a writer that finds another number than it began with adds its file again. The total is thus too high
at times, and not too low.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace._core.cache.locks import SLOTS, Locks

if TYPE_CHECKING:
    from numpy.typing import NDArray

KEYS = SLOTS - 2  # the last two locks are ours
COUNTING, MAKING_ROOM = KEYS, KEYS + 1
TOTAL = struct.Struct("<8sQQ")  # magic, bytes, how often they were counted; behind it, the CRC-32 of these
MAGIC = b"hrtotal\x01"
BLOCK = 4096  # bytes; file systems give files whole blocks
KEPT = 0.9  # of the bound; making room means looking at every file, which must not be for every file that is added
PATIENCE = 1.0  # seconds for a lock that is held for microseconds, or for a count of all files in a rare case
PAUSE = 0.002  # seconds between two tries
_FOLDER = re.compile(r"[0-9a-f]")
_FILE = re.compile(r"[0-9a-f]{63}(\.part)?")
_FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)


def room(length: int) -> int:
    """The room that a file of `length` bytes takes.

    Example:
        >>> room(1), room(4096), room(4097)
        (4096, 4096, 8192)
    """
    return -(-length // BLOCK) * BLOCK


@dataclass(frozen=True, slots=True)
class Reserved:
    """What came of asking for room.

    Attributes:
        size: the room that was given; 0 where there was none.
        count: the number of the count of files that the total was based on.
        gone: entries that had to go for it.
    """

    size: int
    count: int
    gone: int


@dataclass(frozen=True, slots=True)
class _Total:
    size: int
    count: int


class Quota:
    """The room of one cache. Methods block, and may be called from any thread.

    Args:
        folder: the cache's.
        most: bytes that it may take; None for no bound.
        locks: the cache's.
        number_of: the lock of an entry, from its name in hexadecimal.
    """

    def __init__(self, folder: str, most: int | None, locks: Locks, number_of: Callable[[str], int]) -> None:
        self._folder = folder
        self._most = most
        self._locks = locks
        self._number_of = number_of

    def reserve(self, size: int) -> Reserved:
        """Ask for room before a file is written; `settle` follows.

        Raises:
            OSError: the cache cannot be written.
        """
        gone = 0
        deadline = time.monotonic() + PATIENCE
        while self._most is None or size <= self._most:
            total = self._raise(size)
            if total is not None and (self._most is None or total.size <= self._most):
                return Reserved(size, total.count, gone)
            # There is no room, or the total is not known. Who counts the files already does it for all.
            if self._locks.take(MAKING_ROOM):
                try:
                    gone += self._make_room(size)
                finally:
                    self._locks.free(MAKING_ROOM)
            elif total is not None:
                break
            if time.monotonic() > deadline:
                break
            time.sleep(PAUSE)
        return Reserved(0, 0, gone)

    def settle(self, reserved: Reserved, *, written: bool) -> int:
        """Say what became of the file that there was room for; returns how many entries had to go after all."""
        # A total that cannot be written is off by one file, until whoever finds no room counts anew.
        with contextlib.suppress(OSError):
            with _held(self._locks, COUNTING) as held:
                total = self._read() if held else None
                if total is None or written == (total.count == reserved.count):
                    return 0
                total = _Total(max(0, total.size + (reserved.size if written else -reserved.size)), total.count)
                self._write(total)
            # What a count did not see, others may have filled the room of.
            if self._most is not None and total.size > self._most:
                with _held(self._locks, MAKING_ROOM) as held:
                    return self._make_room(0) if held else 0
        return 0

    def _raise(self, size: int) -> _Total | None:
        """Raise the total unless it gets too high; returns what it would be, None if it is not known."""
        with _held(self._locks, COUNTING) as held:
            total = self._read() if held else None
            if total is None:
                return None
            raised = _Total(total.size + size, total.count)
            if self._most is None or raised.size <= self._most:
                self._write(raised)
            return raised

    def _make_room(self, size: int) -> int:
        with _held(self._locks, COUNTING) as held:
            before = self._read() if held else None
            if before is not None:  # from here on, who writes a file adds it again
                before = _Total(before.size, before.count + 1)
                self._write(before)
        modified, sizes = self._measure()
        total, gone = int(sizes.sum()), 0
        if self._most is not None and total + size > self._most:
            oldest = np.argsort(modified, kind="stable")
            too_much = total - max(0, min(int(self._most * KEPT), self._most - size))
            last = int(np.searchsorted(np.cumsum(sizes[oldest]), too_much))
            gone, freed = self._remove(int(modified[oldest[min(last, len(oldest) - 1)]]))
            total -= freed
        with _held(self._locks, COUNTING) as held:
            if held:
                now = self._read()
                # What was added meanwhile counts, also if it was seen: better too high than too low.
                added = now.size - before.size if before is not None and now is not None else 0
                self._write(_Total(total + max(0, added), 0 if before is None else before.count))
        return gone

    def _measure(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """When each entry was last read, and the room it takes; what killed writers have left is removed."""
        modified, sizes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for folder in self._folders():
            entries = []
            for entry in _files(folder):
                if entry.name.endswith(".part"):
                    self._remove_part(folder, entry)
                    continue
                with contextlib.suppress(OSError):  # it went since the folder was read
                    status = entry.stat(follow_symlinks=False)
                    entries.append((status.st_mtime_ns, room(status.st_size)))
            table = np.array(entries, dtype=np.int64).reshape(-1, 2)
            modified.append(table[:, 0])
            sizes.append(table[:, 1])
        return np.concatenate(modified), np.concatenate(sizes)

    def _remove(self, until: int) -> tuple[int, int]:
        """Remove the entries last read at `until` or before; returns how many, and the room they took."""
        gone = freed = 0
        for folder in self._folders():
            for entry in _files(folder):
                with contextlib.suppress(OSError):  # it went meanwhile, or stays: others make the room
                    status = entry.stat(follow_symlinks=False)
                    if not entry.name.endswith(".part") and status.st_mtime_ns <= until:
                        os.unlink(entry.path)
                        gone += 1
                        freed += room(status.st_size)
        return gone, freed

    def _remove_part(self, folder: str, entry: os.DirEntry[str]) -> None:
        number = self._number_of(os.path.basename(folder) + entry.name)
        if not self._locks.take(number):
            return  # somebody writes it
        try:
            with contextlib.suppress(OSError):  # what stays is found again by the next count
                os.unlink(entry.path)
        finally:
            self._locks.free(number)

    def _folders(self) -> list[str]:
        with os.scandir(self._folder) as entries:
            return [entry.path for entry in entries if _FOLDER.fullmatch(entry.name) and not entry.is_symlink()]

    def _read(self) -> _Total | None:
        descriptor = os.open(os.path.join(self._folder, "total"), _FLAGS, 0o600)
        try:
            content = os.read(descriptor, TOTAL.size + 5)
        finally:
            os.close(descriptor)
        if len(content) != TOTAL.size + 4 or content[TOTAL.size :] != _checksum(content[: TOTAL.size]):
            return None
        magic, size, count = TOTAL.unpack_from(content)
        return _Total(size, count) if magic == MAGIC else None

    def _write(self, total: _Total) -> None:
        content = TOTAL.pack(MAGIC, total.size, total.count)
        descriptor = os.open(os.path.join(self._folder, "total"), _FLAGS, 0o600)
        try:
            os.write(descriptor, content + _checksum(content))
            os.ftruncate(descriptor, TOTAL.size + 4)
        finally:
            os.close(descriptor)


def _checksum(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(4, "little")


@contextlib.contextmanager
def _held(locks: Locks, number: int) -> Iterator[bool]:
    """Hold a lock that others hold for microseconds; false if it could not be had."""
    deadline = time.monotonic() + PATIENCE
    pause = 0.0001
    while not locks.take(number):
        if time.monotonic() > deadline:
            yield False
            return
        time.sleep(pause)
        pause = min(2 * pause, PAUSE)
    try:
        yield True
    finally:
        locks.free(number)


def _files(folder: str) -> Iterator[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:  # a folder that went holds nothing
        for entry in entries:
            if _FILE.fullmatch(entry.name):
                yield entry
