"""One file of the disk cache: its format, how it is read and checked, how it is published whole. Plain functions.

A file is the data and a trailer of 64 bytes: magic, length and CRC-32 of the data, the entry's name, so that a file
which was put in another's place is not taken for it. At the end, since whoever knows the file reads the data alone.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import mmap
import os
import stat
import struct
import time
import zlib

TRAILER = struct.Struct("<8sQI12x32s")
MAGIC = b"headrc\x00\x01"
TOUCH = 60_000_000_000  # ns; what is read more often than that is not older for it, and the disk is spared the writing
_READ = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
_READ |= getattr(os, "O_NONBLOCK", 0)  # somebody may have put a pipe there
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _READ & ~getattr(os, "O_NONBLOCK", 0)


class Lookup(enum.Enum):
    """Why an entry could not be read."""

    ABSENT = "absent"
    """It is not there; or it may be whole, but cannot be read now: no descriptor is left, say."""
    DAMAGED = "damaged"


def lazy_memory(size: int) -> mmap.mmap:
    """Zeros for this process alone, which the kernel provides as they are used."""
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, size)


def entry_path(folder: str, name: bytes) -> str:
    """Where an entry is, in a cache's folder: in one of sixteen, which the kernel has at hand more than 256."""
    hexadecimal = name.hex()
    return f"{folder}/{hexadecimal[0]}/{hexadecimal[1:]}"


def read_entry(folder: str, name: bytes, marks: memoryview, slot: int) -> memoryview | Lookup:
    """Read an entry; one that is damaged is removed.

    It is checked when it is first read, and when the file is not the one that was checked.

    Args:
        folder: the cache's.
        name: the entry's, 32 bytes.
        marks: numbers of 64 bits, zero at first, that say which file was checked.
        slot: which of them is this entry's.

    Returns:
        A read-only view of the data, or why there is none.
    """
    # Nearly every sample of a training comes by here, so what is usual is written out, and stands first.
    hexadecimal = name.hex()
    path = f"{folder}/{hexadecimal[0]}/{hexadecimal[1:]}"
    try:
        descriptor = os.open(path, _READ)
    except OSError as error:
        # A link in its place is not followed.
        return _removed(path) if error.errno == errno.ELOOP else Lookup.ABSENT
    try:
        status = os.fstat(descriptor)
        size, modified = status.st_size, status.st_mtime_ns
        mark = hash((status.st_ino, size, modified))
        if marks[slot] == mark:
            length = size - TRAILER.size
            data = os.read(descriptor, length)
            if len(data) != length:
                data = _rest(descriptor, data, length)
                if len(data) != length:  # it was cut between two of the calls above
                    return _removed(path)
        else:
            length = size - TRAILER.size
            if not stat.S_ISREG(status.st_mode) or length < 0:
                return _removed(path)
            data = _rest(descriptor, b"", length)
            if _rest(descriptor, b"", TRAILER.size) != _trailer(data, name):
                return _removed(path)
            marks[slot] = mark
        now = time.time_ns()
        if now - modified > TOUCH:
            _touch(descriptor, now)
            marks[slot] = hash((status.st_ino, size, now))
    except OSError:  # the disk does not give it back; the store will
        return Lookup.ABSENT
    finally:
        os.close(descriptor)
    return memoryview(data)


def _rest(descriptor: int, data: bytes, length: int) -> bytes:
    """What is there and what follows, up to `length`: a call reads 2 GiB at most."""
    while len(data) < length and (more := os.read(descriptor, length - len(data))):
        data += more
    return data


def _trailer(data: bytes | memoryview, name: bytes) -> bytes:
    return TRAILER.pack(MAGIC, len(data), zlib.crc32(data), name)


def _removed(path: str) -> Lookup:
    # Another process may have put a good one there meanwhile; then that is fetched once more.
    try:
        os.unlink(path)
    except OSError:
        with contextlib.suppress(OSError):  # what cannot be removed is damaged for whoever looks next, too
            os.rmdir(path)
    return Lookup.DAMAGED


def _touch(descriptor: int, now: int) -> None:
    with contextlib.suppress(OSError):  # a cache that can only be read
        os.utime(descriptor, ns=(now, now))


def write_entry(path: str, part: str, name: bytes, data: memoryview) -> None:
    """Write an entry and publish it: whoever looks sees all of it or nothing, whenever this process is killed.

    Nothing is flushed to the disk: a file that a power failure cut is seen to be damaged, and fetched again.

    Args:
        path: its file.
        part: the file to write it in first, in the same folder; what is left there of a writer that was killed is
            replaced. No other process may write it.
        name: its name, 32 bytes.
        data: what is in it.

    Raises:
        OSError: it could not be written; nothing is left then.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(part)
    descriptor = os.open(part, _WRITE, 0o600)
    try:
        try:
            trailer = memoryview(_trailer(data, name))
            # In one call if it can be, so that the kernel has the file in few and large pieces.
            written = os.writev(descriptor, (data, trailer)) if hasattr(os, "writev") else 0
            for piece, skipped in ((data, written), (trailer, max(0, written - len(data)))):
                rest = piece[skipped:]
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
        finally:
            os.close(descriptor)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):  # what went wrong before it is the error to raise
            os.unlink(part)
        raise
