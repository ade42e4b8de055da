"""A cache of bytes in a folder, shared by all processes of a machine that use the folder.

docs/design/0011-the-disk-cache.md gives the reasons for its design.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from headrace._core.cache.entry import Lookup, entry_path, read_entry
from headrace._core.cache.folder import secure_folder
from headrace._core.cache.in_flight import Flight, InFlight
from headrace._core.cache.locks import Locks
from headrace._core.cache.quota import ENTRY_LOCKS, Quota
from headrace._core.cache.write_pause import WritePause
from headrace._core.cache.writer import Writer
from headrace._core.eventloop.blocking import run_blocking
from headrace._core.store.request_stats import RequestStats, second_attempt, session_stats
from headrace.errors import CacheFolderError

T = TypeVar("T")

# Seconds to wait for another task's or process's fetch of the same bytes; then they are fetched here as well, and not
# cached. A process that is stopped (SIGSTOP, a debugger) holds its locks for as long.
FETCH_TIMEOUT = 30.0
# Seconds between two attempts at a lock that another process holds. This is polling: waiting for a lock takes a thread
# for each entry, which cannot be cancelled; inotify does not see other machines' changes on a shared disk.
FIRST_PAUSE, LONGEST_PAUSE = 0.002, 0.1


class DiskCache:
    """Bytes by name in a folder, fetched once for all processes, however these end.

    May be used from several event loops and threads, and pickled. An error of the folder never costs a sample: its
    bytes are fetched and not cached, with one warning in each process.

    Args:
        folder: created for this user alone if it does not exist.
        max_bytes: the disk space that it may take, in bytes of whole blocks; None for no bound. The least recently read
            entries are evicted.
        fetch_timeout: seconds to wait for another fetch of the same bytes.

    Raises:
        CacheFolderError: the folder belongs to another user, or others may write to it.
        ValueError: `max_bytes` is not positive.
        OSError: the folder cannot be created.
    """

    def __init__(
        self, folder: str | os.PathLike[str], max_bytes: int | None = None, *, fetch_timeout: float = FETCH_TIMEOUT
    ) -> None:
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(f"max_bytes={max_bytes} must be at least 1, or None for no bound")
        self._folder = os.path.abspath(os.path.expanduser(folder))
        self._limit = max_bytes
        self._fetch_timeout = fetch_timeout
        secure_folder(self._folder)
        self._reset()
        _all.add(self)

    def _reset(self) -> None:
        self._locks = Locks(os.path.join(self._folder, "lock"))
        self._writer = Writer(self._folder, Quota(self._folder, self._limit, self._locks, _lock_number_of_hex))
        self.in_flight = InFlight(self._locks, _lock_number)
        self._not_validated = memoryview(bytearray(8)).cast("q")
        self._own_counts = RequestStats()  # outside a session
        self.pause = WritePause(self._folder)
        self._checked = False

    def __getstate__(self) -> dict[str, object]:
        return {"_folder": self._folder, "_limit": self._limit, "_fetch_timeout": self._fetch_timeout}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._reset()
        _all.add(self)

    def __repr__(self) -> str:
        bound = "" if self._limit is None else f", max_bytes={self._limit}"
        return f"{type(self).__name__}({self._folder!r}{bound})"

    async def get(
        self,
        name: bytes,
        fetch: Callable[[], Awaitable[memoryview]],
        accept: Callable[[memoryview], T],
        validated: memoryview | None = None,
        slot: int = 0,
    ) -> T:
        """The result of `accept` for an entry's bytes, which `fetch` gets if they are not cached.

        Args:
            name: 32 bytes that identify the content.
            fetch: its errors are raised.
            accept: raises if the bytes are wrong: then they are not cached.
            validated: as for `read_entry`; by default the checksum is verified at every read.
            slot: as for `read_entry`.
        """
        found = await self._start_read(name, validated, slot)
        if isinstance(found, memoryview):
            try:
                sample = accept(found)
            except Exception:  # fresh bytes will show whether the file was at fault
                self._remove(name)
                found = Lookup.CORRUPT
            else:
                self.counts().cache_hits += 1
                return sample
        if found is Lookup.CORRUPT:
            self.counts().cache_damaged += 1
        return await self.fetch(name, fetch, accept)

    async def find(self, name: bytes, accept: Callable[[memoryview], T]) -> T | None:
        """The result of `accept` for an entry's bytes; None if they are not cached, or are corrupt."""
        found = await self._start_read(name, None, 0)
        if isinstance(found, memoryview):
            with contextlib.suppress(Exception):  # `get` will remove them
                return accept(found)
        return None

    async def read_many(
        self, names: Sequence[bytes], validated: memoryview, slots: Sequence[int]
    ) -> list[memoryview | None]:
        """The bytes of those entries that are cached, None for the others and for empty names."""
        reads = [self._start_read(name, validated, slot) for name, slot in zip(names, slots, strict=True) if name]
        found = iter(await asyncio.gather(*reads))
        counts = self.counts()
        views: list[memoryview | None] = []
        for name in names:
            view = next(found) if name else None
            if isinstance(view, memoryview):
                counts.cache_hits += 1
            else:
                counts.cache_damaged += view is Lookup.CORRUPT
                view = None
            views.append(view)
        return views

    async def fetch(
        self, name: bytes, fetch: Callable[[], Awaitable[memoryview]], accept: Callable[[memoryview], T]
    ) -> T:
        """As `get`, for an entry that is known to be missing."""
        counts = self.counts()
        if self.pause.active:
            return await self._fetch_uncached(fetch, accept, counts)
        deadline = self.deadline()
        waited = False
        hedge = second_attempt.get()
        while True:
            flight, fetches = self.in_flight.join(name, hedge=hedge)
            if fetches:
                try:
                    # A hedged second attempt waits for no lock; it publishes if the first attempt holds it.
                    found = None if flight.users > 1 else await self._lock(flight, name, deadline, counts)
                    if found is not None:
                        flight.set_result(found)
                        sample = accept(found)
                        counts.cache_hits += 1
                        return sample
                    counts.cache_misses += 1
                    data = await fetch()
                    sample = accept(data)
                    flight.set_result(data)
                    if flight.locked:
                        await self._publish(flight, name, data, counts)
                    return sample
                finally:
                    self.in_flight.leave(name, flight)
            if not waited:
                waited = True
                counts.cache_waits += 1
            found = await flight.wait(deadline - time.monotonic())
            if found is not None:
                counts.cache_hits += 1
                return accept(found)
            if time.monotonic() > deadline:
                return await self._fetch_uncached(fetch, accept, counts)

    async def _fetch_uncached(
        self, fetch: Callable[[], Awaitable[memoryview]], accept: Callable[[memoryview], T], counts: RequestStats
    ) -> T:
        counts.cache_misses += 1
        return accept(await fetch())

    async def _lock(self, flight: Flight, name: bytes, deadline: float, counts: RequestStats) -> memoryview | None:
        """Wait for the entry's lock; returns the bytes if another process has published them meanwhile."""
        pause = FIRST_PAUSE
        while True:
            try:
                found = await self.lock_and_read(flight, name)
            except OSError as error:
                self.pause.on_error(error)
                return None
            if isinstance(found, memoryview):
                return found
            if flight.locked or time.monotonic() > deadline:
                return None
            if pause == FIRST_PAUSE:
                counts.cache_waits += 1
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(1.5 * pause, LONGEST_PAUSE)

    async def _publish(self, flight: Flight, name: bytes, data: memoryview, counts: RequestStats) -> None:
        write = functools.partial(self._writer.write, name, data)
        try:
            counts.cache_evicted += await run_blocking(flight.write, write, 0)
        except OSError as error:
            self.pause.on_error(error)

    # For `get_many`.

    def deadline(self) -> float:
        """The time until which a fetch that starts now waits for others."""
        return time.monotonic() + self._fetch_timeout

    def counts(self) -> RequestStats:
        """The counters of the running session."""
        return session_stats.get(self._own_counts)

    def lock_and_read(self, flight: Flight, name: bytes) -> asyncio.Future[memoryview | Lookup]:
        """Start to acquire an entry's lock, and to read what its last holder may have published."""
        return run_blocking(self._lock_and_read, flight, name)

    def write_all(self, entries: Sequence[tuple[Flight, bytes, memoryview]]) -> asyncio.Future[int]:
        """Start to publish entries, each under its lock; the result is the number of entries evicted."""
        return run_blocking(self._writer.write_all, entries)

    def _start_read(self, name: bytes, validated: memoryview | None, slot: int) -> asyncio.Future[memoryview | Lookup]:
        if not self._checked:
            return run_blocking(self._check_and_read, name)
        return run_blocking(
            read_entry, self._folder, name, self._not_validated if validated is None else validated, slot
        )

    # The rest blocks, and runs in threads.

    def _check_and_read(self, name: bytes) -> memoryview | Lookup:
        try:
            secure_folder(self._folder)  # its owner may have changed since another process created the cache
        except CacheFolderError:
            raise
        except OSError:
            return Lookup.MISS  # it cannot be created; the first write will warn
        self._checked = True
        return self._read(name)

    def _read(self, name: bytes) -> memoryview | Lookup:
        return read_entry(self._folder, name, self._not_validated, 0)

    def _lock_and_read(self, flight: Flight, name: bytes) -> memoryview | Lookup:
        try:
            flight.lock()
        except FileNotFoundError:  # the folder was deleted
            secure_folder(self._folder)
            flight.lock()
        return self._read(name)  # after locking: the last holder may have published it

    def _remove(self, name: bytes) -> None:
        with contextlib.suppress(OSError):  # gone already; or it stays, and is rejected again
            os.unlink(entry_path(self._folder, name))


def _lock_number(name: bytes) -> int:
    return int.from_bytes(name[:8], "little") % ENTRY_LOCKS


def _lock_number_of_hex(name: str) -> int:
    return _lock_number(bytes.fromhex(name[:16]))


_all: weakref.WeakSet[DiskCache] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for cache in list(_all):  # the tasks of its flights are the parent's
        cache._reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
