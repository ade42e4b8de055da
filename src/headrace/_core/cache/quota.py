"""The bound on a disk cache's size, and eviction of the least recently read entries.

The total is in a small file, and raised before anything is written: a writer that is killed leaves it too high. The
process that evicts counts all files, and so corrects it. A file may be published unseen by a running count; so counts
are numbered, and a writer that finds another number than at its reservation adds its file again. The total may thus be
too high, and never too low.
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

ENTRY_LOCKS = SLOTS - 2  # the last two locks are the quota's
TOTAL_LOCK, EVICTION_LOCK = ENTRY_LOCKS, ENTRY_LOCKS + 1
TOTAL = struct.Struct("<8sQQ")  # magic, bytes, number of the count; followed by the CRC-32 of these
MAGIC = b"hrtotal\x01"
DISK_BLOCK = 4096  # bytes; the unit in which file systems allocate
EVICT_TO = 0.9  # of the bound; eviction stats every file, and must not run for each file that is added
LOCK_TIMEOUT = 1.0  # seconds; locks are held for microseconds, or rarely for a count of all files
LOCK_RETRY = 0.002  # seconds at most between two attempts
_FOLDER = re.compile(r"[0-9a-f]")
_FILE = re.compile(r"[0-9a-f]{63}(\.part)?")
_FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)


def disk_usage(length: int) -> int:
    """The bytes that a file of `length` bytes takes on disk.

    Example:
        >>> disk_usage(1), disk_usage(4096), disk_usage(4097)
        (4096, 4096, 8192)
    """
    return -(-length // DISK_BLOCK) * DISK_BLOCK


@dataclass(frozen=True, slots=True)
class Reservation:
    """The result of reserving bytes.

    Attributes:
        size: bytes reserved; 0 if the quota does not allow it.
        count: the number of the count that the total was based on.
        evicted: entries that were removed for it.
    """

    size: int
    count: int
    evicted: int


@dataclass(frozen=True, slots=True)
class _Total:
    size: int
    count: int


def eviction_rank(status: os.stat_result) -> int:
    """The eviction policy: entries of the lowest rank are removed first. Least recently read, by the file's mtime."""
    return status.st_mtime_ns


class Quota:
    """The quota of one cache. Methods block; thread-safe."""

    def __init__(self, folder: str, limit: int | None, locks: Locks, lock_number: Callable[[str], int]) -> None:
        self._folder = folder
        self._limit = limit
        self._locks = locks
        self._lock_number = lock_number

    def reserve(self, size: int) -> Reservation:
        """Reserve bytes before a file is written; `settle` must follow.

        Raises:
            OSError: the cache cannot be written.
        """
        evicted = 0
        deadline = time.monotonic() + LOCK_TIMEOUT
        while self._limit is None or size <= self._limit:
            total = self._raise(size)
            if total is not None and (self._limit is None or total.size <= self._limit):
                return Reservation(size, total.count, evicted)
            # The cache is full, or the total is unknown. One process evicts for all.
            if self._locks.acquire(EVICTION_LOCK):
                try:
                    evicted += self._evict(size)
                finally:
                    self._locks.release(EVICTION_LOCK)
            elif total is not None:
                break
            if time.monotonic() > deadline:
                break
            time.sleep(LOCK_RETRY)
        return Reservation(0, 0, evicted)

    def settle(self, reserved: Reservation, *, written: bool) -> int:
        """Confirm or cancel a reservation; returns the number of entries evicted meanwhile."""
        # If the total cannot be written it is wrong by one file until the next count.
        with contextlib.suppress(OSError):
            with _held(self._locks, TOTAL_LOCK) as held:
                total = self._read() if held else None
                if total is None or written == (total.count == reserved.count):
                    return 0
                total = _Total(max(0, total.size + (reserved.size if written else -reserved.size)), total.count)
                self._write(total)
            # Other writers may have reserved the bytes that a count did not see.
            if self._limit is not None and total.size > self._limit:
                with _held(self._locks, EVICTION_LOCK) as held:
                    return self._evict(0) if held else 0
        return 0

    def _raise(self, size: int) -> _Total | None:
        """Raise the total unless it would exceed the limit; returns the raised total, None if it is unknown."""
        with _held(self._locks, TOTAL_LOCK) as held:
            total = self._read() if held else None
            if total is None:
                return None
            raised = _Total(total.size + size, total.count)
            if self._limit is None or raised.size <= self._limit:
                self._write(raised)
            return raised

    def _evict(self, size: int) -> int:
        with _held(self._locks, TOTAL_LOCK) as held:
            before = self._read() if held else None
            if before is not None:  # from now on, a writer adds its file again
                before = _Total(before.size, before.count + 1)
                self._write(before)
        ranks, sizes = self._measure()
        total, evicted = int(sizes.sum()), 0
        if self._limit is not None and total + size > self._limit:
            order = np.argsort(ranks, kind="stable")
            excess = total - max(0, min(int(self._limit * EVICT_TO), self._limit - size))
            last = int(np.searchsorted(np.cumsum(sizes[order]), excess))
            evicted, freed = self._remove(int(ranks[order[min(last, len(order) - 1)]]), excess)
            total -= freed
        with _held(self._locks, TOTAL_LOCK) as held:
            if held:
                now = self._read()
                # Files added meanwhile are added even if the count saw them: the total may be too high, not too low.
                added = now.size - before.size if before is not None and now is not None else 0
                self._write(_Total(total + max(0, added), 0 if before is None else before.count))
        return evicted

    def _measure(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The eviction ranks and sizes of all entries; removes the temporary files of killed writers."""
        ranks, sizes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for folder in self._folders():
            entries = []
            for entry in _files(folder):
                if entry.name.endswith(".part"):
                    self._remove_part(folder, entry)
                    continue
                with contextlib.suppress(OSError):  # removed since the folder was read
                    status = entry.stat(follow_symlinks=False)
                    entries.append((eviction_rank(status), disk_usage(status.st_size)))
            table = np.array(entries, dtype=np.int64).reshape(-1, 2)
            ranks.append(table[:, 0])
            sizes.append(table[:, 1])
        return np.concatenate(ranks), np.concatenate(sizes)

    def _remove(self, until: int, excess: int) -> tuple[int, int]:
        """Remove entries of a rank up to `until` until `excess` bytes are free; returns the number and the bytes."""
        evicted = freed = 0
        for folder in self._folders():
            for entry in _files(folder):
                if freed >= excess:  # entries of one rank need not all go
                    return evicted, freed
                with contextlib.suppress(OSError):  # removed meanwhile, or not removable
                    status = entry.stat(follow_symlinks=False)
                    if not entry.name.endswith(".part") and eviction_rank(status) <= until:
                        os.unlink(entry.path)
                        evicted += 1
                        freed += disk_usage(status.st_size)
        return evicted, freed

    def _remove_part(self, folder: str, entry: os.DirEntry[str]) -> None:
        number = self._lock_number(os.path.basename(folder) + entry.name)
        if not self._locks.acquire(number):
            return  # it is being written
        try:
            with contextlib.suppress(OSError):  # the next count finds it again
                os.unlink(entry.path)
        finally:
            self._locks.release(number)

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
    """Hold a lock that others hold for microseconds; yields False if it was not acquired within `LOCK_TIMEOUT`."""
    deadline = time.monotonic() + LOCK_TIMEOUT
    pause = 0.0001
    while not locks.acquire(number):
        if time.monotonic() > deadline:
            yield False
            return
        time.sleep(pause)
        pause = min(2 * pause, LOCK_RETRY)
    try:
        yield True
    finally:
        locks.release(number)


def _files(folder: str) -> Iterator[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:  # a removed folder has no files
        for entry in entries:
            if _FILE.fullmatch(entry.name):
                yield entry
