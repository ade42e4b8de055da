"""Short blocking calls, such as reading a small file, in threads: waiting calls share a trip to a thread and back.

That trip, two wake-ups with a system call and a switch of threads each, takes longer than the call.
One `loop.run_in_executor` for each of 64 calls in flight takes 23 µs of CPU where this takes 2, and
70 instead of 33 with a file of 56 KB; see docs/design/0004. So a thread makes calls as long as
there are any, and returns results in batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple, Unpack, cast

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MAX_THREADS = min(32, (os.cpu_count() or 1) + 4)  # as many as the loop's default executor has
RESIZE_INTERVAL = (
    0.02  # seconds between checks of the number of threads; a busy machine may delay one by 10 ms
)
# Seconds for a call, above which threads are doubled. A cached file of 56 KB takes 0.01 ms, and 0.1
# ms where ten processes share two cores; there, four threads finished half as much CPU time again
# as one: they contend for the GIL. A network file system or a hard disk takes some ms.
SLOW_CALL = 0.00025
# seconds for which a thread of the executor makes calls before other users of the executor get a
# turn
MAX_RUN = 0.05
FLUSH_INTERVAL = (
    0.0005  # seconds that a result may wait for others before it is returned to the loop
)


def run_blocking(function: Callable[[Unpack[Ts]], T], *args: *Ts) -> asyncio.Future[T]:
    """Call ``function(*args)`` in a thread. For short internal functions only.

    A call whose future is cancelled before it starts is not made; the result of one that has
    started is dropped.
    """
    loop = asyncio.get_running_loop()
    executor: _BatchedExecutor | None = getattr(_local, "executor", None)
    if executor is None or executor.loop is not loop:
        executor = _local.executor = _BatchedExecutor(loop)
    return cast("asyncio.Future[T]", executor.submit(function, args))


_local = threading.local()


class _BatchedExecutor:
    """The calls of one loop. Only `_work` runs in other threads; everything else runs on the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._calls: deque[
            tuple[asyncio.Future[object], Callable[..., object], tuple[object, ...]]
        ] = deque()
        self._results: deque[tuple[asyncio.Future[object], BaseException | None, object]] = deque()
        self._threads = 0
        self._wanted = 1
        self._resizing = False
        self._finished = 0
        self._flushing = False  # whether `_set_results` is scheduled

    def submit(
        self, function: Callable[..., object], args: tuple[object, ...]
    ) -> asyncio.Future[object]:
        future = self.loop.create_future()
        self._calls.append((future, function, args))
        if not self._threads:
            self._start_thread()
        if not self._resizing:
            self._resizing = True
            self._seen = self._finished
            self.loop.call_later(RESIZE_INTERVAL, self._resize)
        return future

    def _start_thread(self) -> None:
        self._threads += 1
        self.loop.run_in_executor(None, self._work)

    def _resize(self) -> None:
        """Add threads if calls are slow (a disk, a call that hangs); else use fewer."""
        if not self._calls:
            self._resizing = False
            return
        finished, self._seen = self._finished - self._seen, self._finished
        enough = self._threads * RESIZE_INTERVAL / SLOW_CALL
        if finished < enough:
            self._wanted = min(2 * self._threads, MAX_THREADS)
            for _ in range(min(self._wanted - self._threads, len(self._calls))):
                self._start_thread()
        elif finished > 2 * enough:
            self._wanted = max(1, self._threads // 2)
        self.loop.call_later(RESIZE_INTERVAL, self._resize)

    def _work(self) -> None:
        since = 0.0
        until = time.perf_counter() + MAX_RUN
        while True:
            try:
                future, function, args = self._calls.popleft()
            except IndexError:
                break
            if future.cancelled():
                continue
            error: BaseException | None = None
            result: object = None
            try:
                result = function(*args)
            except StopIteration as caught:  # a future rejects it
                error = RuntimeError(f"{function!r} raised {caught!r}")
            except BaseException as caught:
                error = caught
            self._results.append((future, error, result))
            self._finished += 1
            del future, function, args, result, error
            now = time.perf_counter()
            if not since:
                since = now
            if now - since >= FLUSH_INTERVAL:
                since = 0.0
                if now > until:
                    break
                if not self._flushing:
                    self._flushing = True
                    self._call_on_loop(self._set_results)
        self._call_on_loop(self._on_end)

    def _call_on_loop(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: no caller is left
            self.loop.call_soon_threadsafe(callback)

    def _set_results(self) -> None:
        self._flushing = False  # first, so that later results schedule another flush
        results = self._results
        while results:
            future, error, result = results.popleft()
            if future.done():
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    def _on_end(self) -> None:
        """A thread has ended: replace it if there are calls, unless there are more threads than needed."""
        self._set_results()
        self._threads -= 1
        if self._calls and self._threads < self._wanted:
            self._start_thread()
