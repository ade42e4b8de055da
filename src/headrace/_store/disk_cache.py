"""A cache of bytes in a folder, shared by processes.

The entries are rows of an SQLite database. docs/design/0011-the-disk-cache.md gives the reasons.
"""

from __future__ import annotations

import math
import os
import shutil
import sqlite3
import stat
import threading
import time
import warnings
import weakref
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from headrace._eventloop.blocking import run_blocking
from headrace._store.request_stats import RequestStats, session_stats
from headrace.errors import CacheFolderError

T = TypeVar("T")

# The folder of the database, in the cache's folder. Another format has another name. One rename of
# the folder puts away the database with the files that SQLite writes beside the database.
FORMAT = "headrace-3"
DATABASE = "entries.sqlite"
# Bytes: pages of 4 KiB cost more CPU time, pages of 64 KiB more room.
PAGE_SIZE = 16 << 10
# Bytes. SQLite copies the log to the database after each 256 pages, as far as readers allow. A
# writer of a log of this length waits for the readers.
LOG_LIMIT = 16 << 20
LARGEST = 900 << 20  # bytes of an entry; SQLite's limit is 10**9
BUSY_TIMEOUT = 1.0  # seconds that a call waits for a lock of another process
PAUSE = 10.0  # seconds without writes after an error
EVICTED_AT_ONCE = 16  # entries
MOST_EVICTIONS = 100  # in one write

# `synchronous`: what a power failure damages is found, and fetched again.
_OPEN = f"""
PRAGMA page_size = {PAGE_SIZE};
PRAGMA journal_mode = WAL;
PRAGMA wal_autocheckpoint = 256;
PRAGMA journal_size_limit = 0;
PRAGMA synchronous = OFF;
PRAGMA secure_delete = OFF;
CREATE TABLE IF NOT EXISTS entries (
    id INTEGER PRIMARY KEY, name BLOB UNIQUE NOT NULL, crc INTEGER NOT NULL, data BLOB NOT NULL
);
"""
_USED = "SELECT page_count - freelist_count FROM pragma_page_count, pragma_freelist_count"
_SELECT = "SELECT crc, data FROM entries WHERE name = ?"
_INSERT = "INSERT OR IGNORE INTO entries (name, crc, data) VALUES (?, ?, ?)"
_DELETE = "DELETE FROM entries WHERE name = ?"
_EVICT = "DELETE FROM entries WHERE id IN (SELECT id FROM entries ORDER BY id LIMIT ?)"

# Held while a connection is used, and during a fork: SQLite's locks do not protect a process that
# inherits a connection.
_lock = threading.Lock()
_open_caches: weakref.WeakSet[DiskCache] = weakref.WeakSet()


class DiskCache:
    """Bytes by name in a folder, for all processes of a machine.

    A call waits at most `BUSY_TIMEOUT` for another process. A cache may be used from several event
    loops and threads, and pickled. An error of the folder costs no sample: the bytes are fetched
    and not cached, with one warning in each process.
    """

    def __init__(
        self, folder: str | os.PathLike[str], max_bytes: int | None = None
    ) -> None:
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(
                f"max_bytes={max_bytes} must be at least 1, or None for no bound"
            )
        self._arguments = os.path.abspath(os.path.expanduser(folder)), max_bytes
        self.folder = self._arguments[0]
        self._limit = max_bytes or math.inf
        self._path = os.path.join(self.folder, FORMAT, DATABASE)
        self._connection: sqlite3.Connection | None = None
        self._inode = 0  # of the database of the connection
        self._paused_until = 0.0
        self._warned = False
        self._own_counts = RequestStats()  # outside a session

    def __reduce__(self) -> tuple[Callable[..., DiskCache], tuple[str, int | None]]:
        return type(self), self._arguments

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self._arguments}"

    def counts(self) -> RequestStats:
        return session_stats.get(self._own_counts)

    async def read_many(self, names: Sequence[bytes]) -> list[memoryview | None]:
        """Return the bytes of each entry; None for a missing entry."""
        found = await run_blocking(self._try, self._read, names)
        views, damaged = found or ([None] * len(names), [])
        self.counts().cache_hits += len(views) - views.count(None)
        if damaged:
            await self.discard(damaged)
        return views

    async def discard(self, names: Sequence[bytes]) -> None:
        """Delete damaged entries."""
        self.counts().cache_damaged += len(names)
        await run_blocking(self._try, self._delete, names)

    async def write(self, names: Sequence[bytes], views: Sequence[memoryview]) -> None:
        """Add entries, unless a call has failed a short time ago."""
        self.counts().cache_misses += len(names)
        if time.monotonic() >= self._paused_until:
            await run_blocking(self._try, self._write, names, views)

    # The methods below block, and run in threads.

    def _try(self, function: Callable[..., T], *args: object) -> T | None:
        """Call a function with a connection; returns None after an error of the folder."""
        with _lock:
            try:
                return function(self._connected(), *args)
            except CacheFolderError:
                raise
            except (OSError, sqlite3.Error) as error:
                self._recover(error)
                return None

    def _read(
        self, connection: sqlite3.Connection, names: Sequence[bytes]
    ) -> tuple[list[memoryview | None], list[bytes]]:
        """Return the bytes of each entry, and the names of damaged entries."""
        views: list[memoryview | None] = [None] * len(names)
        damaged = []
        for place, name in enumerate(names):
            for crc, data in connection.execute(_SELECT, [name]):
                if isinstance(data, bytes) and _checksum(name, data) == crc:
                    views[place] = memoryview(data)
                else:
                    damaged.append(name)
        return views, damaged

    def _delete(self, connection: sqlite3.Connection, names: Sequence[bytes]) -> None:
        connection.executemany(_DELETE, [[name] for name in names])

    def _write(
        self,
        connection: sqlite3.Connection,
        names: Sequence[bytes],
        views: Sequence[memoryview],
    ) -> None:
        largest = min(LARGEST, self._limit / 2)
        rows = [
            (name, _checksum(name, view), view)
            for name, view in zip(names, views, strict=True)
            if len(view) <= largest
        ]
        # An entry takes at most two pages more than its bytes.
        nbytes = sum(len(row[2]) + 2 * PAGE_SIZE for row in rows)
        with connection:  # commits or rolls back
            connection.execute("BEGIN IMMEDIATE")
            if self._make_room(connection, nbytes):
                connection.executemany(_INSERT, rows)
        if os.path.getsize(f"{self._path}-wal") > LOG_LIMIT:
            (is_busy, *_) = connection.execute(
                "PRAGMA wal_checkpoint(TRUNCATE)"
            ).fetchone()
            if is_busy:  # a process was stopped while it read, for example
                self._pause()

    def _make_room(self, connection: sqlite3.Connection, nbytes: int) -> bool:
        """Evict the oldest entries until `nbytes` fit; returns whether `nbytes` fit."""
        for _ in range(MOST_EVICTIONS):
            (pages,) = connection.execute(_USED).fetchone()
            if pages * PAGE_SIZE + nbytes <= self._limit:
                return True
            connection.execute(_EVICT, [EVICTED_AT_ONCE])
        return False

    def _connected(self) -> sqlite3.Connection:
        """Return a connection to the database in the folder."""
        with suppress(FileNotFoundError):  # the folder was deleted
            if self._connection is not None and os.stat(self._path).st_ino == self._inode:
                return self._connection
        self._close()
        folder = os.path.dirname(self._path)
        secure_folder(self.folder)
        secure_folder(folder)
        with suppress(FileExistsError):
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL, 0o600))
        status = os.lstat(self._path)
        self._inode = status.st_ino
        if not stat.S_ISREG(status.st_mode):
            raise sqlite3.DatabaseError(f"{self._path} is not a regular file")
        writable = os.access(folder, os.W_OK)
        # Where SQLite cannot make a log, and there is none, the database does not change.
        immutable = not writable and not os.path.exists(f"{self._path}-wal")
        self._connection = sqlite3.connect(
            f"{Path(self._path).as_uri()}?immutable={int(immutable)}",
            uri=True,
            timeout=BUSY_TIMEOUT,
            isolation_level=None,
            check_same_thread=False,
        )
        self._finalize = weakref.finalize(self, self._connection.close)
        _open_caches.add(self)
        self._connection.text_factory = bytes
        if writable:
            self._connection.executescript(_OPEN)
        return self._connection

    def _close(self) -> None:
        if self._connection is not None:
            self._connection = None
            self._finalize()

    def _pause(self) -> None:
        self._paused_until = time.monotonic() + PAUSE

    def _recover(self, error: Exception) -> None:
        """Close the database after an error, and put away a damaged database."""
        self._close()
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        # `sqlite3` raises subclasses of `DatabaseError` for errors other than damage.
        if type(error) is sqlite3.DatabaseError or code == sqlite3.SQLITE_ERROR:
            with suppress(OSError):
                self._put_away()
        else:
            self._pause()
        if code != sqlite3.SQLITE_BUSY and not self._warned:
            self._warned = True
            message = (
                f"the disk cache in {self.folder} failed; samples are fetched: {error}"
            )
            with suppress(Warning):  # a warnings filter "error" must not cost the sample
                warnings.warn(message, RuntimeWarning, stacklevel=2)

    def _put_away(self) -> None:
        """Delete the database, unless another process has done so."""
        if os.lstat(self._path).st_ino == self._inode:
            folder = os.path.dirname(self._path)
            damaged = f"{folder}-damaged-{os.urandom(8).hex()}"
            os.rename(folder, damaged)
            shutil.rmtree(damaged, ignore_errors=True)


def _checksum(name: bytes, data: bytes | memoryview) -> int:
    return zlib.crc32(data, zlib.crc32(name))


def _before_fork() -> None:
    _lock.acquire()
    for cache in _open_caches:
        cache._close()


os.register_at_fork(
    before=_before_fork, after_in_parent=_lock.release, after_in_child=_lock.release
)


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
