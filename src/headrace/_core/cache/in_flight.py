"""Who fetches an entry of a disk cache, so that others wait for it: in this process, and by a lock among processes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from headrace._core.cache.locks import Locks

T = TypeVar("T")


class Claim:
    """One entry that is being fetched, by one task, or by two where the first was slow.

    It owns the entry's lock among processes, which a thread may take or still need when the task that asked for it has
    been cancelled; so whoever is last lets go of it.

    Args:
        locks: the cache's.
        number: of the entry's lock.
    """

    __slots__ = ("_data", "_gone", "_locks", "_mutex", "_number", "_settled", "_waiting", "_writing", "locked", "users")

    def __init__(self, locks: Locks, number: int) -> None:
        self.users = 0
        self.locked = False
        self._locks = locks
        self._number = number
        self._mutex = threading.Lock()
        self._gone = False
        self._writing = False
        self._settled = False
        self._data: memoryview | None = None
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def lock(self) -> bool:
        """Take the lock, from a thread; returns whether it is held. Raises `OSError` if there can be none."""
        with self._mutex:
            if not self._gone and not self.locked:
                self.locked = self._locks.take(self._number)
            return self.locked

    def write(self, write: Callable[[], T], nothing: T) -> T:
        """Run `write`, in a thread, with the lock held until it is done; `nothing` if all have left before."""
        with self._mutex:
            if self._gone or self._writing:
                return nothing
            self._writing = True
        try:
            return write()
        finally:
            with self._mutex:
                self._writing = False
                self._let_go()

    def settle(self, data: memoryview | None) -> None:
        """Give those who wait the data, or None: they must look after it themselves."""
        with self._mutex:
            if self._settled:
                return
            self._settled, self._data = True, data
            waiting, self._waiting = self._waiting, []
        for loop, future in waiting:
            with contextlib.suppress(RuntimeError):  # that loop is closed
                loop.call_soon_threadsafe(_wake, future)

    def leave(self) -> None:
        """Say that nobody fetches this any more."""
        self.settle(None)
        with self._mutex:
            self._gone = True
            self._let_go()

    async def wait(self, seconds: float) -> memoryview | None:
        """Wait until somebody has fetched it; None if nobody has."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._mutex:
            if self._settled:
                return self._data
            self._waiting.append((loop, future))
        with contextlib.suppress(TimeoutError):  # nobody has; whoever waited fetches it himself
            async with asyncio.timeout(seconds):
                await future
        return self._data

    def _let_go(self) -> None:
        if self._gone and self.locked and not self._writing:
            self.locked = False
            self._locks.free(self._number)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Claims:
    """The claims of one process on one cache, by entry; to be used from any thread.

    Args:
        locks: the cache's.
        number_of: the lock of an entry.
    """

    def __init__(self, locks: Locks, number_of: Callable[[bytes], int]) -> None:
        self._locks = locks
        self._number_of = number_of
        self._mutex = threading.Lock()
        self._claims: dict[bytes, Claim] = {}

    def enter(self, name: bytes, *, second: bool) -> tuple[Claim, bool]:
        """The claim on an entry, and whether the caller now has it, and so must `leave`.

        Args:
            name: the entry's.
            second: share the claim that another task has.
        """
        with self._mutex:
            claim = self._claims.get(name)
            mine = claim is None or second
            if claim is None:
                claim = self._claims[name] = Claim(self._locks, self._number_of(name))
            claim.users += mine
            return claim, mine

    def leave(self, name: bytes, claim: Claim) -> None:
        """Have it no longer."""
        with self._mutex:
            claim.users -= 1
            if claim.users:
                return
            del self._claims[name]
        claim.leave()
