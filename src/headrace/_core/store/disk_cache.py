"""A cache of bytes in a folder: each process appends what it fetched to segments of its own.

A segment is two files. ``.data`` has the bytes of its entries, one after the other; ``.index`` has
a header, and after the bytes of an entry are written a record of it.
docs/design/0011-the-disk-cache.md gives the reasons.
"""

from __future__ import annotations

import math
import os
import re
import stat
import struct
import threading
import time
import warnings
import weakref
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np

from headrace._core.eventloop.blocking import run_blocking
from headrace._core.store.request_stats import RequestStats, session_stats
from headrace.errors import CacheFolderError

# Of an entry: two halves of its name, its place in the data, the CRC-32 of all these and its bytes,
# so that a record that is damaged or leads elsewhere is a wrong checksum; and the segment's number,
# which means something in memory.
RECORD = np.dtype(
    [(each, "<u8") for each in ("low", "high", "start", "length")]
    + [("crc", "<u4"), ("segment", "<u4")]
)
_RECORD = struct.Struct("<16sQQII")
_HALVES = struct.Struct("<QQ")
_PLACE = struct.Struct("<16sQQ")
HEADER = b"headrace cache 2".ljust(
    RECORD.itemsize, b"\0"
)  # of another version the index is ignored
_STEM = re.compile(r"[0-9a-f]{16}-[0-9a-f]+-[0-9a-f]{8}")  # time in ns, process, random number

Records = np.ndarray[Any, np.dtype[np.void]]

RECENT = (
    1 << 16
)  # entries in a dictionary, at 300 bytes, before they are merged into the table, at 50
PER_CACHE = 64  # segments of a full cache: the oldest is evicted whole
SLACK = 8  # this part of `max_bytes` is left for what other processes append meanwhile
REFRESH_SHARE = 20  # looking for entries of other processes takes at most this part of the time

_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # opening a FIFO must not block
_VALID, _DEAD, _GONE = range(1, 4)
"""States of an entry: its checksum was verified in this process, or was wrong; it could not be read. 0 is unknown."""


class _Segment:
    """A segment, whose files are opened for each read: 1 µs, and an evicted segment takes no room."""

    def __init__(self, path: str, *, own: bool = False) -> None:
        self.stem = os.path.basename(path)  # the name of its files
        self.path = path
        self.own = own  # whether this process writes it
        self._consumed = 0  # bytes of the index that were read

    def new_records(self, number: int) -> Records:
        """The records that were appended since the last call; a torn one at the end is left for the next."""
        opened = _opened(f"{self.path}.index")
        with opened as descriptor, open(descriptor, "rb", closefd=False) as file:
            file.seek(self._consumed)
            data = file.read()
        if not self._consumed and data[: len(HEADER)] == HEADER:
            data, self._consumed = data[len(HEADER) :], len(HEADER)
        count = len(data) // RECORD.itemsize if self._consumed else 0
        self._consumed += count * RECORD.itemsize
        records = np.frombuffer(data, RECORD, count).copy()
        records["segment"] = number
        size = os.lstat(f"{self.path}.data").st_size
        starts, lengths = records["start"], records["length"]
        # A damaged length may be more than the memory. Without bytes the checksum is wrong.
        lengths[(starts > size) | (lengths > size - starts)] = 0
        return records

    def read_into(self, start: int, view: memoryview) -> bool:
        """Read data to fill a view; returns False if the file is too short."""
        done = -1
        with _opened(f"{self.path}.data") as descriptor:
            while view and done:
                done = os.preadv(descriptor, [view], start)  # at most 2 GiB
                start, view = start + done, view[done:]
        return not view


@contextmanager
def _opened(path: str) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | _FLAGS)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class _Entry(NamedTuple):
    """`states` has its state at `slot`."""

    name: bytes
    segment: _Segment
    start: int
    length: int
    crc: int
    states: bytearray
    slot: int


class _Table:
    """Entries sorted by name, in 50 bytes each; of those with one name, the last is the newest."""

    def __init__(self, records: Records, states: bytearray) -> None:
        order = np.argsort(records["low"], kind="stable")
        self.records = records[order]
        self.states = bytearray(np.frombuffer(states, np.uint8)[order])
        self.lows = memoryview(self.records["low"].tobytes()).cast("Q")


class DiskCache:
    """Bytes by name in a folder, which all processes of a machine may use. None waits for another.

    May be used from several event loops and threads, and pickled. An error of the folder never
    costs a sample: its bytes are fetched and not cached, with one warning in each process. Errors
    of the constructor are those of `Cacheable.cache`.
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int | None = None) -> None:
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(f"max_bytes={max_bytes} must be at least 1, or None for no bound")
        self._folder = os.path.abspath(os.path.expanduser(folder))
        self._limit = max_bytes
        secure_folder(self._folder)
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()  # of all that follows, but for lookups
        self._segments: list[_Segment | None] = []
        self._numbers: dict[str, int] = {}
        self._table = _Table(np.empty(0, RECORD), bytearray())
        self._recent: dict[bytes, _Entry] = {}  # written by this process, and not in the table yet
        self._own: _Writer | None = None
        self._next_refresh = 0.0
        self._writable = True
        self._warned = False
        self._own_counts = RequestStats()  # outside a session

    def __getstate__(self) -> dict[str, object]:
        return {"_folder": self._folder, "_limit": self._limit}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._reset()

    def __repr__(self) -> str:
        bound = "" if self._limit is None else f", max_bytes={self._limit}"
        return f"{type(self).__name__}({self._folder!r}{bound})"

    def counts(self) -> RequestStats:
        return session_stats.get(self._own_counts)

    def begin_epoch(self) -> None:
        """Look for entries of other processes at the next miss, and write again after an error."""
        self._next_refresh, self._writable = 0.0, True

    async def read_many(self, names: Sequence[bytes]) -> list[memoryview | None]:
        """Read entries into one buffer, in order.

        Returns:
            A view of each entry, None for entries that are not cached, and for empty names.
        """
        if self._pid != os.getpid():  # after a fork
            self._reset()
        entries = [self._find(name) for name in names]
        if None in entries and time.monotonic() >= self._next_refresh:
            await run_blocking(self._refresh)
            entries = [self._find(name) for name in names]
        there = [entry for entry in entries if entry is not None]
        views = iter(await run_blocking(_read_entries, there) if there else ())
        found = [None if entry is None else next(views) for entry in entries]
        counts = self.counts()
        counts.cache_hits += sum(view is not None for view in found)
        counts.cache_damaged += sum(entry.states[entry.slot] == _DEAD for entry in there)
        return found

    def discard(self, names: Sequence[bytes]) -> None:
        """Forget entries with bytes that make no sample, though their checksums are right."""
        for entry in filter(None, map(self._find, names)):
            entry.states[entry.slot] = _DEAD
            self.counts().cache_damaged += 1

    async def write(self, names: Sequence[bytes], views: Sequence[memoryview]) -> None:
        """Append entries, unless the disk was found full or read-only in this epoch."""
        self.counts().cache_misses += len(names)
        if not self._writable:
            return
        try:
            await run_blocking(self._append, names, views)
        except OSError as error:
            self._writable = False
            if not self._warned:
                self._warned = True
                what = f"the disk cache in {self._folder} cannot be written, so samples that it lacks are fetched and"
                with suppress(Warning):  # a warnings filter "error" must not cost the sample
                    warnings.warn(f"{what} not cached: {error}", RuntimeWarning, stacklevel=2)

    def _find(self, name: bytes) -> _Entry | None:
        # The newest first. A merge replaces the table before it empties `_recent`, so that no entry
        # is missed.
        recent = self._recent.get(name)
        if recent is not None:
            return recent if recent.states[0] < _DEAD else None
        if not name:
            return None
        low, high = _HALVES.unpack(name)
        table = self._table
        slot = bisect_right(table.lows, low) - 1
        while slot >= 0 and table.lows[slot] == low:
            _, other, start, length, crc, number = table.records[slot].item()
            segment = self._segments[number]
            if other == high and segment is not None and table.states[slot] < _DEAD:
                return _Entry(name, segment, start, length, crc, table.states, slot)
            slot -= 1
        return None

    # The rest blocks, and runs in threads.

    def _refresh(self) -> None:
        """Take note of what other processes have appended and evicted."""
        with self._lock:
            began = time.monotonic()
            with suppress(FileNotFoundError, NotADirectoryError):  # the first write will warn
                secure_folder(
                    self._folder
                )  # its owner may have changed since another process created the cache
            self._read_indices()
            # A share of the time, however large the cache and often the misses.
            self._next_refresh = time.monotonic() + REFRESH_SHARE * (time.monotonic() - began)

    def _read_indices(self, *, own: bool = False) -> None:
        """Sort the new records of segments into the table, those of this process's too if `own`."""
        stems = sorted(self._files())  # the oldest first
        gone = self._numbers.keys() - stems
        for stem in gone:  # evicted
            self._segments[self._numbers.pop(stem)] = None
        found = []
        for stem in stems:
            with suppress(OSError):  # evicted meanwhile, or no descriptor is left
                if stem not in self._numbers:
                    self._add(_Segment(os.path.join(self._folder, stem)))
                number = self._numbers[stem]
                segment = self._segments[number]
                if segment is not None and (own or not segment.own):
                    found.append(segment.new_records(number))
        new = np.concatenate([np.empty(0, RECORD), *found])
        if len(new):
            records, states = self._table.records, np.frombuffer(self._table.states, np.uint8)
            alive = np.array([segment is not None for segment in self._segments], dtype=bool)
            old = alive[records["segment"]] & (states < _DEAD)
            merged = bytearray(states[old].tobytes() + bytes(len(new)))
            self._table = _Table(np.concatenate([records[old], new]), merged)
        if own or gone:
            kept_recent = {} if own else self._recent
            self._recent = {
                name: each
                for name, each in kept_recent.items()
                if each.segment.stem in self._numbers
            }

    def _add(self, segment: _Segment) -> None:
        self._numbers[segment.stem] = len(self._segments)
        self._segments.append(segment)

    def _append(self, names: Sequence[bytes], views: Sequence[memoryview]) -> None:
        """Append the entries that are not there."""
        with self._lock:
            new: dict[bytes, memoryview] = {}
            room = math.inf if self._limit is None else self._limit // 2
            for name, view in zip(names, views, strict=True):
                if (
                    self._find(name) is None
                    and name not in new
                    and len(view) + RECORD.itemsize <= room
                ):
                    new[name] = view
                    room -= len(view) + RECORD.itemsize
            if not new:
                return
            nbytes = sum(map(len, new.values())) + RECORD.itemsize * len(new)
            own = self._own
            full = (
                own is not None
                and self._limit is not None
                and own.end + nbytes > self._limit // PER_CACHE
            )
            if own is None or full or own.is_unlinked():
                self._make_room(nbytes)
                secure_folder(self._folder)
                own = self._own = _Writer(self._folder)
                self._add(own.segment)
            try:
                entries = own.append(new)
            except (
                BaseException
            ):  # a new segment is begun the next time: this one's index may be torn
                self._own = None
                own.abandon()
                raise
            self._recent.update(zip(new, entries, strict=True))
            if len(self._recent) > RECENT:
                self._read_indices(own=True)

    def _make_room(self, nbytes: int) -> None:
        """Evict the oldest segments so that `nbytes` fit, and a segment."""
        if self._limit is None:
            return
        files = self._files()
        usage = sum(map(sum, files.values())) + max(nbytes, self._limit // PER_CACHE)
        for stem, sizes in sorted(files.items()):
            if usage <= self._limit - self._limit // SLACK:
                break
            for ending in (".index", ".data"):
                with suppress(OSError):  # another process was faster, or it cannot be removed
                    os.unlink(os.path.join(self._folder, stem + ending))
            usage -= sum(sizes)

    def _files(self) -> dict[str, list[int]]:
        """The sizes of the files of each segment."""
        found: dict[str, list[int]] = {}
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self._folder) as files:
            for file in files:
                stem, _, ending = file.name.partition(".")
                if ending in ("data", "index") and _STEM.fullmatch(stem):
                    with suppress(OSError):  # removed since the folder was read
                        found.setdefault(stem, []).append(file.stat(follow_symlinks=False).st_size)
        return found


def _read_entries(entries: Sequence[_Entry]) -> list[memoryview | None]:
    """Read entries into one buffer.

    A checksum is verified at the first read.

    Returns:
        A view of each entry, None if the entry is damaged or cannot be read.
    """
    buffer = memoryview(np.empty(sum(entry.length for entry in entries), np.uint8))
    views: list[memoryview | None] = []
    end = 0
    for name, segment, start, length, crc, states, slot in entries:
        data = buffer[end : end + length]
        end += length
        try:
            complete = segment.read_into(start, data)
        except OSError:  # evicted, or an I/O error of the disk: fetch from the store instead
            states[slot] = _GONE
        else:
            valid = states[slot] == _VALID or _checksum(name, start, data) == crc
            states[slot] = _VALID if complete and valid else _DEAD
        views.append(data.toreadonly() if states[slot] == _VALID else None)
    return views


def _checksum(name: bytes, start: int, data: bytes | memoryview) -> int:
    return zlib.crc32(data, zlib.crc32(_PLACE.pack(name, start, len(data))))


class _Writer:
    """The files of the segment that this process appends to, open until this is collected.

    Nothing is flushed to disk: what a power failure takes is detected by its checksum, and fetched
    again.
    """

    def __init__(self, folder: str) -> None:
        path = os.path.join(folder, f"{time.time_ns():016x}-{os.getpid():x}-{os.urandom(4).hex()}")
        self.segment = _Segment(path, own=True)
        self.end = 0  # bytes of the data
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS
        self._data = os.open(f"{path}.data", flags, 0o600)
        weakref.finalize(self, os.close, self._data)
        try:
            self._index = os.open(f"{path}.index", flags, 0o600)
            weakref.finalize(self, os.close, self._index)
            _write_all(self._index, [HEADER])
        except BaseException:  # Ctrl-C too: no empty segment is left behind
            self.abandon()
            raise

    def is_unlinked(self) -> bool:
        """Whether it was evicted, or the folder deleted."""
        return os.fstat(self._data).st_nlink == 0

    def append(self, new: Mapping[bytes, memoryview]) -> list[_Entry]:
        start, entries = self.end, []
        for name, view in new.items():
            entries.append(
                _Entry(
                    name,
                    self.segment,
                    start,
                    len(view),
                    _checksum(name, start, view),
                    bytearray(1),
                    0,
                )
            )
            start += len(view)
        records = b"".join(
            _RECORD.pack(each.name, each.start, each.length, each.crc, 0) for each in entries
        )
        _write_all(self._data, new.values())
        _write_all(self._index, [records])
        self.end = start
        return entries

    def abandon(self) -> None:
        """Give the room of what was half written back to the disk."""
        with suppress(
            OSError
        ):  # the error that led here is raised; half an entry is ignored by readers
            os.ftruncate(self._data, self.end)
            if not self.end:
                os.unlink(f"{self.segment.path}.data")
                os.unlink(f"{self.segment.path}.index")


def _write_all(descriptor: int, views: Iterable[bytes | memoryview]) -> None:
    with open(descriptor, "wb", closefd=False) as file:
        file.writelines(views)


def secure_folder(folder: str) -> None:
    """Create a folder for the files of a cache, or raise `CacheFolderError` if others may write to the existing one.

    New folders, parents included, get mode 0700, whatever the umask.
    """
    try:
        link = os.lstat(folder)
    except FileNotFoundError:
        parent = os.path.dirname(folder)
        if not os.path.isdir(parent):
            secure_folder(parent)
        with suppress(FileExistsError):  # created by another process meanwhile
            os.mkdir(folder, 0o700)
        link = os.lstat(folder)
    status = os.stat(folder) if stat.S_ISLNK(link.st_mode) else link
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"the cache folder is not a folder: {folder}")
    me, reason = os.geteuid(), ""
    if status.st_mode & 0o022:
        reason = f"other users may write to it (its mode is {status.st_mode & 0o7777:o})"
    if status.st_uid != me:
        reason = f"it belongs to user {status.st_uid}, and this process runs as user {me}"
    if status is not link and link.st_uid not in (me, 0):
        reason = f"it is a symbolic link created by user {link.st_uid}"
    if reason:
        raise CacheFolderError(folder=folder, reason=reason)
