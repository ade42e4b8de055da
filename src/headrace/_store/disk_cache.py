"""A cache of bytes in a folder, shared by processes.

Each process appends fetched bytes to own segments. A segment is two files: ``.data`` has the bytes
of all entries, ``.index`` has a header and a record for each entry. The record is written after the
bytes. docs/design/0011-the-disk-cache.md gives the reasons.
"""

from __future__ import annotations

import itertools
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

from headrace._eventloop.blocking import run_blocking
from headrace._store.request_stats import RequestStats, session_stats
from headrace.errors import CacheFolderError

# The record of an entry: two halves of the name, the place in the data, a checksum, and the number
# of the segment. The number has a meaning only in memory. The checksum is the CRC-32 of name, place
# and bytes: a damaged record, or a record with a wrong place, is a wrong checksum.
RECORD = np.dtype(
    [(each, "<u8") for each in ("low", "high", "start", "length")]
    + [("crc", "<u4"), ("segment", "<u4")]
)
_RECORD = struct.Struct("<16sQQII")
_HALVES = struct.Struct("<QQ")
_PLACE = struct.Struct("<16sQQ")
# An index with the header of another version is ignored.
HEADER = b"headrace cache 2".ljust(RECORD.itemsize, b"\0")
_STEM = re.compile(r"[0-9a-f]{16}-[0-9a-f]+-[0-9a-f]{8}")  # time in ns, process, random number

Records = np.ndarray[Any, np.dtype[np.void]]

# Most new entries in a dictionary, before a merge into the table. An entry takes 300 bytes in the
# dictionary, and 50 in the table.
RECENT = 1 << 16
PER_CACHE = 64  # segments of a full cache: the oldest segment is evicted whole
SLACK = 8  # this part of `max_bytes` is left for other processes
REFRESH_SHARE = 20  # looking for entries of other processes takes at most this part of the time

_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # opening a FIFO must not block
_VALID, _DEAD, _GONE = range(1, 4)
"""States of an entry.

Valid: this process has verified the checksum. Dead: the checksum was wrong. Gone: an error of the
disk. 0: unknown.
"""


class _Segment:
    """A segment, as readers see the files.

    A file is opened for each read, in 1 µs. So an evicted segment takes no room on the disk.
    """

    def __init__(self, path: str) -> None:
        self.stem = os.path.basename(path)  # the name of both files
        self.path = path
        self._consumed = 0  # bytes of the index that were read

    def new_records(self, number: int) -> Records:
        """Return the records appended since the last call.

        A torn record at the end is left for the next call.
        """
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
    """An entry of a segment."""

    name: bytes
    segment: _Segment
    start: int
    length: int
    crc: int
    states: bytearray  # states of all entries of a table
    slot: int  # position in the table

    @property
    def state(self) -> int:
        return self.states[self.slot]

    @state.setter
    def state(self, state: int) -> None:
        self.states[self.slot] = state


class _Table:
    """Entries sorted by name, in 50 bytes each.

    The last entry with a name is the newest.
    """

    def __init__(self, records: Records, states: bytearray) -> None:
        order = np.argsort(records["low"], kind="stable")
        self.records = records[order]
        self.states = bytearray(np.frombuffer(states, np.uint8)[order])
        self.lows = memoryview(self.records["low"].tobytes()).cast("Q")


class DiskCache:
    """Bytes by name in a folder, for all processes of a machine.

    No process waits for another process. A cache may be used from several event loops and threads,
    and pickled. An error of the folder costs no sample: the bytes are fetched and not cached, with
    one warning in each process. `Cacheable.cache` lists the errors of the constructor.
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
        self._lock = threading.Lock()  # for changes of the attributes below; lookups need no lock
        self._segments: dict[int, _Segment] = {}  # by the numbers in records
        self._numbers = itertools.count()
        self._table = _Table(np.empty(0, RECORD), bytearray())
        self._recent: dict[bytes, _Entry] = {}  # own entries that are not in the table yet
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
        """Read entries into one buffer.

        Returns:
            A view of each entry; None for a missing entry, and for an empty name.
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
        counts.cache_damaged += sum(entry.state == _DEAD for entry in there)
        return found

    def discard(self, names: Sequence[bytes]) -> None:
        """Forget entries with bytes that make no sample."""
        for entry in filter(None, map(self._find, names)):
            entry.state = _DEAD
            self.counts().cache_damaged += 1

    async def write(self, names: Sequence[bytes], views: Sequence[memoryview]) -> None:
        """Append entries, unless an append has failed in this epoch."""
        self.counts().cache_misses += len(names)
        if not self._writable:
            return
        try:
            await run_blocking(self._append, names, views)
        except OSError as error:
            self._writable = False
            if not self._warned:
                self._warned = True
                what = f"the disk cache in {self._folder} cannot be written; nothing is cached"
                with suppress(Warning):  # a warnings filter "error" must not cost the sample
                    warnings.warn(f"{what}: {error}", RuntimeWarning, stacklevel=2)

    def _find(self, name: bytes) -> _Entry | None:
        # The newest entry first. A merge replaces the table and then empties `_recent`: no entry is
        # missed.
        recent = self._recent.get(name)
        if recent is not None:
            return recent if recent.state < _DEAD else None
        if not name:
            return None
        low, high = _HALVES.unpack(name)
        table = self._table
        slot = bisect_right(table.lows, low) - 1
        while slot >= 0 and table.lows[slot] == low:
            _, other, start, length, crc, number = table.records[slot].item()
            segment = self._segments.get(number)
            if other == high and segment is not None and table.states[slot] < _DEAD:
                return _Entry(name, segment, start, length, crc, table.states, slot)
            slot -= 1
        return None

    # The methods below block, and run in threads.

    def _refresh(self) -> None:
        """Read what other processes have appended and evicted."""
        with self._lock:
            began = time.monotonic()
            # The owner may have changed since another process created the cache. The first write
            # will warn of a missing folder.
            with suppress(FileNotFoundError, NotADirectoryError):
                secure_folder(self._folder)
            self._read_indices()
            # A share of the time, for a cache of any size and any number of misses.
            self._next_refresh = time.monotonic() + REFRESH_SHARE * (time.monotonic() - began)

    def _read_indices(self) -> None:
        """Sort new records of all segments into the table."""
        unknown = set(self._files())
        for number, segment in [*self._segments.items()]:
            if segment.stem not in unknown:  # evicted
                del self._segments[number]
            unknown.discard(segment.stem)
        for stem in sorted(unknown):  # the oldest first
            self._add(_Segment(os.path.join(self._folder, stem)))
        found = [np.empty(0, RECORD)]
        for number, segment in self._segments.items():
            with suppress(OSError):  # evicted meanwhile, or no descriptor is left
                found.append(segment.new_records(number))
        new = np.concatenate(found)
        if len(new):
            records, states = self._table.records, np.frombuffer(self._table.states, np.uint8)
            old = np.isin(records["segment"], [*self._segments]) & (states < _DEAD)
            merged = bytearray(states[old].tobytes() + bytes(len(new)))
            self._table = _Table(np.concatenate([records[old], new]), merged)
        # The table does not know which of the entries are dead.
        self._recent = {name: each for name, each in self._recent.items() if each.state >= _DEAD}

    def _add(self, segment: _Segment) -> None:
        self._segments[next(self._numbers)] = segment

    def _append(self, names: Sequence[bytes], views: Sequence[memoryview]) -> None:
        """Append the entries that are missing."""
        with self._lock:
            new: dict[bytes, memoryview] = {}
            nbytes, limit = 0, math.inf if self._limit is None else self._limit
            for name, view in zip(names, views, strict=True):
                with_record = nbytes + len(view) + RECORD.itemsize
                if name not in new and with_record <= limit / 2 and self._find(name) is None:
                    new[name], nbytes = view, with_record
            if not new:
                return
            own = self._own
            if own is None or own.end + nbytes > limit / PER_CACHE or own.is_unlinked():
                self._make_room(nbytes)
                secure_folder(self._folder)
                own = self._own = _Writer(self._folder)
                self._add(own.segment)
            try:
                entries = own.append(new)
            except BaseException:
                # The index may be torn: the next append begins a new segment.
                self._own = None
                own.abandon()
                raise
            self._recent.update(zip(new, entries, strict=True))
            if len(self._recent) > RECENT:
                self._read_indices()

    def _make_room(self, nbytes: int) -> None:
        """Evict the oldest segments until `nbytes`, and a segment, fit."""
        if self._limit is None:
            return
        files = self._files()
        usage = sum(map(sum, files.values())) + max(nbytes, self._limit // PER_CACHE)
        for stem, sizes in sorted(files.items()):
            if usage <= self._limit - self._limit // SLACK:
                break
            for ending in (".index", ".data"):
                with suppress(OSError):  # another process was faster, or the file cannot be removed
                    os.unlink(os.path.join(self._folder, stem + ending))
            usage -= sum(sizes)

    def _files(self) -> dict[str, list[int]]:
        """Return the sizes of the files of each segment."""
        found: dict[str, list[int]] = {}
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self._folder) as files:
            for file in files:
                stem, _, ending = file.name.partition(".")
                if ending in ("data", "index") and _STEM.fullmatch(stem):
                    with suppress(OSError):  # removed since the folder was read
                        found.setdefault(stem, []).append(file.stat(follow_symlinks=False).st_size)
        return found


def _read_entries(entries: Sequence[_Entry]) -> list[memoryview | None]:
    """Read entries into one buffer, in order.

    Checksums are verified at the first read.

    Returns:
        A view of each entry; None if the entry is damaged or cannot be read.
    """
    buffer = np.empty(sum(entry.length for entry in entries), np.uint8).data
    views: list[memoryview | None] = []
    end = 0
    for entry in entries:
        data = buffer[end : end + entry.length]
        end += entry.length
        try:
            complete = entry.segment.read_into(entry.start, data)
        except OSError:  # evicted, or an I/O error of the disk
            entry.state = _GONE
        else:
            known = entry.state == _VALID
            valid = known or _checksum(entry.name, entry.start, data) == entry.crc
            entry.state = _VALID if complete and valid else _DEAD
        views.append(data.toreadonly() if entry.state == _VALID else None)
    return views


def _checksum(name: bytes, start: int, data: bytes | memoryview) -> int:
    return zlib.crc32(data, zlib.crc32(_PLACE.pack(name, start, len(data))))


class _Writer:
    """The files of the segment to which this process appends.

    The files are open until the writer is collected. Nothing is flushed to disk: bytes lost in a
    power failure are found by the checksum, and fetched again.
    """

    def __init__(self, folder: str) -> None:
        path = os.path.join(folder, f"{time.time_ns():016x}-{os.getpid():x}-{os.urandom(4).hex()}")
        self.segment = _Segment(path)
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
        """Return whether the segment was evicted, or the folder deleted."""
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
        """Free the room of entries that are half written."""
        # The caller raises the error of the write. Readers ignore half an entry.
        with suppress(OSError):
            os.ftruncate(self._data, self.end)
            if not self.end:
                os.unlink(f"{self.segment.path}.data")
                os.unlink(f"{self.segment.path}.index")


def _write_all(descriptor: int, views: Iterable[bytes | memoryview]) -> None:
    with open(descriptor, "wb", closefd=False) as file:
        file.writelines(views)


def secure_folder(folder: str) -> None:
    """Create a folder for the files of a cache, or check an existing folder.

    New folders, parents included, get mode 0700 with any umask.

    Raises:
        CacheFolderError: the folder belongs to another user, or others may write there.
        OSError: the folder cannot be created.
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
    me, mode = os.geteuid(), status.st_mode & 0o7777
    if mode & 0o022 or status.st_uid != me or link.st_uid not in (me, 0):
        reason = (
            f"other users may write to it (it belongs to user {status.st_uid}, its link to user "
            f"{link.st_uid}, its mode is {mode:o}, and this process runs as user {me})"
        )
        raise CacheFolderError(folder=folder, reason=reason)
