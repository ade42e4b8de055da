"""Single flight: one fetch of a cache entry at a time, among tasks of a process and, by a lock, among processes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from headrace._core.cache.locks import Locks

T = TypeVar("T")


class Flight:
    """The fetch of one entry, by one task, or by two where the first is hedged.

    It owns the entry's lock among processes. A thread may acquire or still need that lock after the task that asked for
    it was cancelled, so the last of them releases it.

    Attributes:
        users: tasks that fetch.
        locked: whether the lock is held.
    """

    __slots__ = ("_data", "_done", "_landed", "_locks", "_mutex", "_number", "_waiters", "_writing", "locked", "users")

    def __init__(self, locks: Locks, number: int) -> None:
        self.users = 0
        self.locked = False
        self._locks = locks
        self._number = number
        self._mutex = threading.Lock()
        self._landed = False  # all users have left
        self._writing = False
        self._done = False  # there is a result, or no user will give one
        self._data: memoryview | None = None
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def lock(self) -> bool:
        """Try to acquire the lock, from a thread; returns whether it is held. `OSError` as for `Locks.acquire`."""
        with self._mutex:
            if not self._landed and not self.locked:
                self.locked = self._locks.acquire(self._number)
            return self.locked

    def write(self, write: Callable[[], T], nothing: T) -> T:
        """Run `write`, from a thread, under the lock; returns `nothing` if all users have left before."""
        with self._mutex:
            if self._landed or self._writing:
                return nothing
            self._writing = True
        try:
            return write()
        finally:
            with self._mutex:
                self._writing = False
                self._release()

    def set_result(self, data: memoryview | None) -> None:
        """Give the waiting tasks the data; None if they must fetch it themselves. The first call counts."""
        with self._mutex:
            if self._done:
                return
            self._done, self._data = True, data
            waiters, self._waiters = self._waiters, []
        for loop, future in waiters:
            with contextlib.suppress(RuntimeError):  # that loop is closed
                loop.call_soon_threadsafe(_wake, future)

    def land(self) -> None:
        """End the flight: no task fetches any more."""
        self.set_result(None)
        with self._mutex:
            self._landed = True
            self._release()

    async def wait(self, seconds: float) -> memoryview | None:
        """Wait for the data; None if no user fetches it within `seconds`."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._mutex:
            if self._done:
                return self._data
            self._waiters.append((loop, future))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await future
        return self._data

    def _release(self) -> None:
        if self._landed and self.locked and not self._writing:
            self.locked = False
            self._locks.release(self._number)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class InFlight:
    """The flights of one process on one cache, by entry name. Thread-safe."""

    def __init__(self, locks: Locks, lock_number: Callable[[bytes], int]) -> None:
        self._locks = locks
        self._lock_number = lock_number
        self._mutex = threading.Lock()
        self._flights: dict[bytes, Flight] = {}

    def join(self, name: bytes, *, hedge: bool) -> tuple[Flight, bool]:
        """The flight of an entry, and whether the caller has to fetch, and to `leave` afterwards.

        Args:
            name: the entry's name.
            hedge: fetch beside a task that already does.
        """
        with self._mutex:
            flight = self._flights.get(name)
            fetches = flight is None or hedge
            if flight is None:
                flight = self._flights[name] = Flight(self._locks, self._lock_number(name))
            flight.users += fetches
            return flight, fetches

    def leave(self, name: bytes, flight: Flight) -> None:
        """Leave a flight that `join` returned with a fetch to make; the last user ends it."""
        with self._mutex:
            flight.users -= 1
            if flight.users:
                return
            del self._flights[name]
        flight.land()
