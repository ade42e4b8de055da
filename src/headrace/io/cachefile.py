"""One file of the disk cache: its format, how it is read and checked, how it is published whole. Plain functions.

A file is a header of 64 bytes (magic, length and CRC-32 of the data, the entry's name) and the data. Its name is in
the header too, so that a file which was put in another's place is not taken for it.
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

__all__ = ["Look", "entry_path", "lazy_memory", "read_entry", "write_entry"]

HEADER = struct.Struct("<8sQI12x32s")  # 64 bytes, so that the data is aligned as arrays like it
MAGIC = b"headrc\x00\x01"
TOUCH = 60_000_000_000  # ns; what is read more often than that is not older for it, and the disk is spared the writing
_READ = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
_READ |= getattr(os, "O_NONBLOCK", 0)  # somebody may have put a pipe there
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _READ & ~getattr(os, "O_NONBLOCK", 0)


class Look(enum.Enum):
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


def read_entry(folder: str, name: bytes, marks: memoryview, slot: int) -> memoryview | Look:
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
        return _removed(path) if error.errno == errno.ELOOP else Look.ABSENT
    try:
        status = os.fstat(descriptor)
        size, modified = status.st_size, status.st_mtime_ns
        mark = hash((status.st_ino, size, modified))
        if marks[slot] == mark:
            content = os.read(descriptor, size)
            if len(content) != size:
                content = _rest(descriptor, content, size)
                if len(content) != size:  # it was cut between two of the calls above
                    return _removed(path)
        else:
            if not stat.S_ISREG(status.st_mode):
                return _removed(path)
            content = _rest(descriptor, b"", size)
            if not _is_whole(content, name):
                return _removed(path)
            marks[slot] = mark
        now = time.time_ns()
        if now - modified > TOUCH:
            _touch(descriptor, now)
            marks[slot] = hash((status.st_ino, size, now))
    except OSError:
        return Look.ABSENT
    finally:
        os.close(descriptor)
    return memoryview(content)[HEADER.size :]


def _rest(descriptor: int, content: bytes, size: int) -> bytes:
    """What is there and what follows, up to `size`: a call reads 2 GiB at most."""
    while len(content) < size and (more := os.read(descriptor, size - len(content))):
        content += more
    return content


def _is_whole(content: bytes, name: bytes) -> bool:
    if len(content) < HEADER.size:
        return False
    magic, length, checksum, named = HEADER.unpack_from(content)
    data = memoryview(content)[HEADER.size :]
    return bool(magic == MAGIC and named == name and length == len(data) and checksum == zlib.crc32(data))


def _removed(path: str) -> Look:
    # Another process may have put a good one there meanwhile; then that is fetched once more.
    try:
        os.unlink(path)
    except OSError:
        with contextlib.suppress(OSError):
            os.rmdir(path)
    return Look.DAMAGED


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
            # In one call, or the kernel keeps the file in more and smaller pieces, which are slower to read.
            header = HEADER.pack(MAGIC, len(data), zlib.crc32(data), name)
            written = os.writev(descriptor, (header, data)) if hasattr(os, "writev") else os.write(descriptor, header)
            if written < HEADER.size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            rest = data[written - HEADER.size :]
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        finally:
            os.close(descriptor)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
