"""A cache on disk of bytes that come from elsewhere, shared by all processes of a machine that name its folder.

docs/design/0017-disk-cache.md says why it is made as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import random
import time
import warnings
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from headrace._core.cache.entry import Lookup, entry_path, read_entry
from headrace._core.cache.folder import secure_folder
from headrace._core.cache.in_flight import Claim, Claims
from headrace._core.cache.locks import Locks
from headrace._core.cache.quota import KEYS, Quota
from headrace._core.cache.writer import Writer
from headrace._core.eventloop.blocking import run_blocking
from headrace._core.store.request_stats import RequestStats, second_attempt, traffic
from headrace.errors import CacheFolderError

T = TypeVar("T")

# Seconds to wait for another's fetch of the same bytes; then it is fetched here as well, and not cached. A process that
# was stopped (SIGSTOP, a debugger) holds its locks for as long.
PATIENCE = 30.0
# Seconds between two looks whether another process has done. Nothing tells: a lock that can be waited for takes a
# thread for each entry, which cannot be cancelled; inotify does not see what another machine does on a shared disk.
FIRST_PAUSE, LONGEST_PAUSE = 0.002, 0.1
REST = 30.0  # seconds without an attempt to write, where a disk is full or read-only
PASSING = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.ESTALE})


class DiskCache:
    """Bytes by name in a folder, fetched once for all processes, however they end.

    It may be used from several event loops and threads, and be pickled. What goes wrong with the folder never costs a
    sample: then bytes are fetched, and not cached, with one warning for each process.

    Args:
        folder: where; made for this user alone if it does not exist.
        max_bytes: the room that it may take on the disk, in bytes, counted in whole blocks; None for no bound. What was
            read longest ago makes room.
        patience: seconds to wait for another's fetch of the same bytes.

    Raises:
        CacheFolderError: the folder belongs to another user, or others may write to it.
        ValueError: `max_bytes` is not positive.
        OSError: the folder cannot be made.
    """

    def __init__(
        self, folder: str | os.PathLike[str], max_bytes: int | None = None, *, patience: float = PATIENCE
    ) -> None:
        if max_bytes is not None and max_bytes < 1:
            raise ValueError(f"max_bytes={max_bytes} must be at least 1, or None for no bound")
        self._folder = os.path.abspath(os.path.expanduser(folder))
        self._most = max_bytes
        self._patience = patience
        secure_folder(self._folder)
        self._restart()
        _all.add(self)

    def _restart(self) -> None:
        self._locks = Locks(os.path.join(self._folder, "lock"))
        self._writer = Writer(self._folder, Quota(self._folder, self._most, self._locks, _number_in_hex))
        self.claims = Claims(self._locks, _number)
        self._no_marks = memoryview(bytearray(8)).cast("q")
        self._alone = RequestStats()
        self._rests_until = 0.0
        self._warned = False
        self._checked = False

    def __getstate__(self) -> dict[str, Any]:
        return {"_folder": self._folder, "_most": self._most, "_patience": self._patience}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._restart()
        _all.add(self)

    def __repr__(self) -> str:
        bound = "" if self._most is None else f", max_bytes={self._most}"
        return f"{type(self).__name__}({self._folder!r}{bound})"

    async def get(
        self, name: bytes, fetch: Callable[[], Awaitable[memoryview]], accept: Callable[[memoryview], T]
    ) -> T:
        """What `accept` makes of the bytes of that name; `fetch` gets them where they are not cached.

        Args:
            name: 32 bytes that stand for these bytes and no others.
            fetch: gets them; what it raises is raised.
            accept: looks at them and raises if they are wrong: then they are not cached.
        """
        found = await self.look(name, self._no_marks, 0)
        if isinstance(found, memoryview):
            try:
                sample = accept(found)
            except Exception:
                found = self.reject(name)
            else:
                self.hit()
                return sample
        return await self.fetch(name, found, fetch, accept)

    # The steps of `get`, for whoever counts microseconds.

    def look(self, name: bytes, marks: memoryview, slot: int) -> asyncio.Future[memoryview | Lookup]:
        """Start reading an entry; `hit`, `reject` or `fetch` follows. Arguments as for `read_entry`."""
        if not self._checked:
            return run_blocking(self._check_and_look, name)
        return run_blocking(read_entry, self._folder, name, marks, slot)

    async def find(self, name: bytes, accept: Callable[[memoryview], T]) -> T | None:
        """The result of `accept` for the bytes of that name; None if they are not cached, or are corrupt."""
        found = await self.look(name, self._no_marks, 0)
        if isinstance(found, memoryview):
            with contextlib.suppress(Exception):  # `get` will reject them
                return accept(found)
        return None

    def until(self) -> float:
        """The time until which a caller that begins now waits for others."""
        return time.monotonic() + self._patience

    def hit(self) -> None:
        """Count an entry that was read and is good."""
        self.counts().cache_hits += 1

    def counts(self) -> RequestStats:
        """Where this task counts."""
        return traffic.get(self._alone)

    @property
    def rests(self) -> bool:
        """Whether nothing is written for the moment."""
        return bool(self._rests_until) and time.monotonic() < self._rests_until

    def reject(self, name: bytes) -> Lookup:
        """Remove an entry that nobody could make anything of; fresh bytes will tell whether it was the file's fault."""
        with contextlib.suppress(OSError):  # gone already; or it stays, and is rejected again
            os.unlink(entry_path(self._folder, name))
        return Lookup.DAMAGED

    async def fetch(
        self, name: bytes, found: Lookup, fetch: Callable[[], Awaitable[memoryview]], accept: Callable[[memoryview], T]
    ) -> T:
        """Fetch an entry that was not there; arguments as for `get`.

        Args:
            name: as for `get`.
            found: why it was not.
            fetch: as for `get`.
            accept: as for `get`.
        """
        here = self.counts()
        if found is Lookup.DAMAGED:
            here.cache_damaged += 1
        if self.rests:
            return await self._uncached(fetch, accept, here)
        return await self._fetched(name, fetch, accept, here)

    async def _fetched(
        self,
        name: bytes,
        fetch: Callable[[], Awaitable[memoryview]],
        accept: Callable[[memoryview], T],
        here: RequestStats,
    ) -> T:
        until = self.until()
        waited = False
        second = second_attempt.get()
        while True:
            claim, mine = self.claims.enter(name, second=second)
            if mine:
                try:
                    # The second attempt at a sample waits for nobody; it publishes if the first has got the lock.
                    found = None if claim.users > 1 else await self._locked(claim, name, until, here)
                    if found is not None:
                        claim.settle(found)
                        sample = accept(found)
                        here.cache_hits += 1
                        return sample
                    here.cache_misses += 1
                    data = await fetch()
                    sample = accept(data)
                    claim.settle(data)
                    if claim.locked:
                        await self._publish(claim, name, data, here)
                    return sample
                finally:
                    self.claims.leave(name, claim)
            if not waited:
                waited = True
                here.cache_waits += 1
            found = await claim.wait(until - time.monotonic())
            if found is not None:
                here.cache_hits += 1
                return accept(found)
            if time.monotonic() > until:
                return await self._uncached(fetch, accept, here)

    async def _uncached(
        self, fetch: Callable[[], Awaitable[memoryview]], accept: Callable[[memoryview], T], here: RequestStats
    ) -> T:
        here.cache_misses += 1
        return accept(await fetch())

    async def _locked(self, claim: Claim, name: bytes, until: float, here: RequestStats) -> memoryview | None:
        """Wait for the lock; returns the bytes if another process has published them meanwhile."""
        pause = FIRST_PAUSE
        while True:
            try:
                found = await self.lock_and_look(claim, name)
            except OSError as error:
                self.note(error)
                return None
            if isinstance(found, memoryview):
                return found
            if claim.locked or time.monotonic() > until:
                return None
            if pause == FIRST_PAUSE:
                here.cache_waits += 1
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(1.5 * pause, LONGEST_PAUSE)

    async def _publish(self, claim: Claim, name: bytes, data: memoryview, here: RequestStats) -> None:
        try:
            here.cache_evicted += await run_blocking(claim.write, functools.partial(self._writer.write, name, data), 0)
        except OSError as error:
            self.note(error)

    def lock_and_look(self, claim: Claim, name: bytes) -> asyncio.Future[memoryview | Lookup]:
        """Start taking an entry's lock, and reading what its last holder may have published."""
        return run_blocking(self._lock_and_look, claim, name)

    def write_all(self, entries: Sequence[tuple[Claim, bytes, memoryview]]) -> asyncio.Future[int]:
        """Start publishing entries, each under its lock; the result is how many others had to go."""
        return run_blocking(self._writer.write_all, entries)

    def note(self, error: OSError) -> None:
        """Go on without caching; say so once."""
        if error.errno in PASSING:
            return
        self._rests_until = time.monotonic() + REST
        if not self._warned:
            self._warned = True
            with contextlib.suppress(Warning):  # as an error, by the user's filter: it must not cost the sample
                warnings.warn(
                    f"the disk cache in {self._folder} cannot be written, so what it does not have yet is fetched and "
                    f"not cached: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )

    # What follows blocks, and runs in threads.

    def _check_and_look(self, name: bytes) -> memoryview | Lookup:
        try:
            secure_folder(self._folder)  # it may have changed hands since another process made the cache
        except CacheFolderError:
            raise
        except OSError:
            return Lookup.ABSENT  # and cannot be made; whoever writes will say so
        self._checked = True
        return self._look(name)

    def _look(self, name: bytes) -> memoryview | Lookup:
        return read_entry(self._folder, name, self._no_marks, 0)

    def _lock_and_look(self, claim: Claim, name: bytes) -> memoryview | Lookup:
        try:
            claim.lock()
        except FileNotFoundError:  # somebody has deleted the folder
            secure_folder(self._folder)
            claim.lock()
        return self._look(name)  # behind the lock: its last holder may have published it


def _number(name: bytes) -> int:
    return int.from_bytes(name[:8], "little") % KEYS


def _number_in_hex(name: str) -> int:
    return _number(bytes.fromhex(name[:16]))


_all: weakref.WeakSet[DiskCache] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for cache in list(_all):  # the tasks that had claims are the parent's
        cache._restart()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
