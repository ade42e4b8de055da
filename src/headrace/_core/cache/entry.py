"""The file format of a cache entry: reading with verification, and atomic publication.

A file is the data followed by a trailer of 64 bytes: magic, length and CRC-32 of the data, and the entry's name, so
that a file moved to another entry's path is rejected.
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
TOUCH_INTERVAL = 60_000_000_000  # ns between two updates of a file's mtime, the order of eviction; spares disk writes
_READ = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
_READ |= getattr(os, "O_NONBLOCK", 0)  # opening a FIFO must not block
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _READ & ~getattr(os, "O_NONBLOCK", 0)


class Lookup(enum.Enum):
    """The reason why an entry could not be read."""

    MISS = "miss"
    """It does not exist, or cannot be read at the moment: no file descriptor is left, for example."""
    CORRUPT = "corrupt"


def lazy_memory(size: int) -> mmap.mmap:
    """Private zero-filled memory whose pages are allocated at first use."""
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, size)


def entry_path(folder: str, name: bytes) -> str:
    """The path of an entry, in one of 16 folders: the kernel caches their dentries better than those of 256."""
    hexadecimal = name.hex()
    return f"{folder}/{hexadecimal[0]}/{hexadecimal[1:]}"


def read_entry(folder: str, name: bytes, validated: memoryview, slot: int) -> memoryview | Lookup:
    """Read an entry; remove it if it is corrupt.

    The checksum is verified at the first read, and again when inode, size or mtime have changed.

    Args:
        folder: the cache's folder.
        name: the entry's name, 32 bytes.
        validated: int64 fingerprints of the files whose checksums were verified; zero at first.
        slot: the entry's position in `validated`.

    Returns:
        A read-only view of the data, or the reason why there is none.
    """
    # Nearly every sample of a training passes here: the common case is inlined and comes first.
    hexadecimal = name.hex()
    path = f"{folder}/{hexadecimal[0]}/{hexadecimal[1:]}"
    try:
        descriptor = os.open(path, _READ)
    except OSError as error:
        return _removed(path) if error.errno == errno.ELOOP else Lookup.MISS  # symbolic links are not followed
    try:
        status = os.fstat(descriptor)
        size, modified = status.st_size, status.st_mtime_ns
        fingerprint = hash((status.st_ino, size, modified))
        if validated[slot] == fingerprint:
            length = size - TRAILER.size
            data = os.read(descriptor, length)
            if len(data) != length:
                data = _read_rest(descriptor, data, length)
                if len(data) != length:  # truncated between fstat and read
                    return _removed(path)
        else:
            length = size - TRAILER.size
            if not stat.S_ISREG(status.st_mode) or length < 0:
                return _removed(path)
            data = _read_rest(descriptor, b"", length)
            if _read_rest(descriptor, b"", TRAILER.size) != _trailer(data, name):
                return _removed(path)
            validated[slot] = fingerprint
        now = time.time_ns()
        if now - modified > TOUCH_INTERVAL:
            _touch(descriptor, now)
            validated[slot] = hash((status.st_ino, size, now))
    except OSError:  # an I/O error of the disk: fetch from the store instead
        return Lookup.MISS
    finally:
        os.close(descriptor)
    return memoryview(data)


def _read_rest(descriptor: int, data: bytes, length: int) -> bytes:
    """Read on after `data` up to `length` bytes: one call reads at most 2 GiB."""
    while len(data) < length and (more := os.read(descriptor, length - len(data))):
        data += more
    return data


def _trailer(data: bytes | memoryview, name: bytes) -> bytes:
    return TRAILER.pack(MAGIC, len(data), zlib.crc32(data), name)


def _removed(path: str) -> Lookup:
    # If another process has just replaced the file by a good one, that one is fetched once more.
    try:
        os.unlink(path)
    except OSError:  # a folder in the file's place
        with contextlib.suppress(OSError):  # a file that cannot be removed is found corrupt at each read
            os.rmdir(path)
    return Lookup.CORRUPT


def _touch(descriptor: int, now: int) -> None:
    with contextlib.suppress(OSError):  # a read-only cache
        os.utime(descriptor, ns=(now, now))


def write_entry(path: str, part: str, name: bytes, data: memoryview) -> None:
    """Write an entry and publish it by a rename: readers see all of it or nothing, whenever this process is killed.

    Nothing is flushed to disk: a file truncated by a power failure is detected, and fetched again.

    Args:
        path: the entry's path.
        part: a temporary path in the same folder, which no other process may write; what a killed writer left there is
            replaced.
        name: the entry's name, 32 bytes.
        data: the entry's bytes.

    Raises:
        OSError: it could not be written; nothing is left behind.
    """
    with contextlib.suppress(FileNotFoundError):  # no writer was killed before it had finished
        os.unlink(part)
    descriptor = os.open(part, _WRITE, 0o600)
    try:
        try:
            trailer = memoryview(_trailer(data, name))
            # One call where possible: the kernel then caches the file in few, large pieces.
            written = os.writev(descriptor, (data, trailer)) if hasattr(os, "writev") else 0
            for piece, skipped in ((data, written), (trailer, max(0, written - len(data)))):
                rest = piece[skipped:]
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
        finally:
            os.close(descriptor)
        os.replace(part, path)
    except BaseException:  # Ctrl-C too: a partial file would stay
        with contextlib.suppress(OSError):  # the original error is raised
            os.unlink(part)
        raise
