"""Short calls that block, such as reading a small file, made in threads: those that wait share a trip to a thread.

The way to a thread and back costs more than what is done there: two wake-ups, each a system call and a switch of
threads. So a thread takes calls as long as there are any, and what is done meanwhile goes back to the loop together.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple, Unpack, cast

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MOST = min(32, (os.cpu_count() or 1) + 4)  # threads: as many as the loop's executor has
LOOK = 0.02  # seconds between two looks whether the threads are enough; a busy machine may well let one wait for 10 ms
# Seconds for a call, above which threads are doubled. A file of 56 KB out of memory takes 0.01 ms, 0.1 where ten
# processes share two cores, and there four threads took half as much CPU time again as one: they contend for the
# interpreter. A network's file system, or a disk that turns, takes some ms.
SLOW = 0.00025
TRIP = 0.05  # seconds for which a thread takes calls, before others get a turn at the executor
TOGETHER = 0.0005  # seconds that a result may wait for others before it goes back to the loop


def run_blocking(function: Callable[[Unpack[Ts]], T], *args: *Ts) -> asyncio.Future[T]:
    """Call ``function(*args)`` in a thread; await what this returns. Only for functions of ours, that take short.

    A call whose future is cancelled before its turn is not made; one that has begun goes on, and nobody hears of it.

    Example:
        >>> async def main():
        ...     return await asyncio.gather(run_blocking(abs, -1), run_blocking(abs, -2))
        >>> asyncio.run(main())
        [1, 2]
    """
    loop = asyncio.get_running_loop()
    trips: _BatchedExecutor | None = getattr(_of_this_thread, "trips", None)
    if trips is None or trips.loop is not loop:
        trips = _of_this_thread.trips = _BatchedExecutor(loop)
    return cast("asyncio.Future[T]", trips.add(function, args))


_of_this_thread = threading.local()


class _BatchedExecutor:
    """The calls of one loop. Only `_work` runs in other threads; all else on the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._calls: deque[tuple[asyncio.Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()
        self._results: deque[tuple[asyncio.Future[Any], BaseException | None, Any]] = deque()
        self._threads = 0
        self._wanted = 1
        self._looking = False
        self._finished = 0
        self._told = False  # whether the loop has been told of results it has not taken

    def add(self, function: Callable[..., Any], args: tuple[Any, ...]) -> asyncio.Future[Any]:
        future = self.loop.create_future()
        self._calls.append((future, function, args))
        if not self._threads:
            self._send()
        if not self._looking:
            self._looking = True
            self._seen = self._finished
            self.loop.call_later(LOOK, self._look)
        return future

    def _send(self) -> None:
        self._threads += 1
        self.loop.run_in_executor(None, self._work)

    def _look(self) -> None:
        """Send more threads where those under way are slow: they wait for a disk, or for a call that hangs."""
        self._looking = False
        if not self._calls:
            return
        took, self._seen = self._finished - self._seen, self._finished
        enough = self._threads * LOOK / SLOW
        if took < enough:
            self._wanted = min(2 * self._threads, MOST)
            for _ in range(min(self._wanted - self._threads, len(self._calls))):
                self._send()
        elif took > 2 * enough:
            self._wanted = max(1, self._threads // 2)
        self._looking = True
        self.loop.call_later(LOOK, self._look)

    def _work(self) -> None:
        since = 0.0
        until = time.perf_counter() + TRIP
        while True:
            try:
                future, function, args = self._calls.popleft()
            except IndexError:
                break
            if future.cancelled():
                continue
            error: BaseException | None = None
            result: Any = None
            try:
                result = function(*args)
            except StopIteration as caught:  # no future takes that
                error = RuntimeError(f"{function!r} raised {caught!r}")
            except BaseException as caught:
                error = caught
            self._results.append((future, error, result))
            self._finished += 1
            del future, function, args, result, error
            now = time.perf_counter()
            if not since:
                since = now
            if now - since >= TOGETHER:
                since = 0.0
                if now > until:
                    self._tell(self._take_turn)
                    return
                if not self._told:
                    self._told = True
                    self._tell(self._take)
        self._tell(self._take_last)

    def _tell(self, take: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits for results
            self.loop.call_soon_threadsafe(take)

    def _take(self) -> None:
        self._told = False  # before looking: what comes from now on tells again
        results = self._results
        while results:
            future, error, result = results.popleft()
            if future.done():
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    def _take_last(self) -> None:
        self._take()
        self._threads -= 1
        if self._calls and not self._threads:  # they came when the thread had seen none
            self._send()

    def _take_turn(self) -> None:
        """A thread's time is up; another trip takes its place, unless there are more than need be."""
        self._take()
        self._threads -= 1
        if self._calls and self._threads < self._wanted:
            self._send()
