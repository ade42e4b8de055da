"""Short blocking calls in threads, made and returned in batches.

A short call reads a small file, for example. A trip to a thread and back takes two wake-ups, each
with a system call and a switch of threads. The trip takes longer than the call. With 64 calls in
flight, a `loop.run_in_executor` for each call takes 23 µs of CPU, and 70 µs with a file of 56 KB.
This module takes 2 µs and 33 µs; see docs/design/0004. So a thread makes calls while calls wait,
and returns results in batches.
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

MAX_THREADS = min(32, (os.cpu_count() or 1) + 4)  # as in the loop's default executor
# Seconds between checks of the number of threads. A busy machine may delay a check by 10 ms.
RESIZE_INTERVAL = 0.02
# Seconds for a call, above which threads are doubled. A cached file of 56 KB takes 0.01 ms, and 0.1
# ms where ten processes share two cores. There, four threads took 1.5 times the CPU time of a
# single thread, since threads contend for the GIL. A network file system or a hard disk takes some
# ms.
SLOW_CALL = 0.00025
# Seconds of calls in a thread of the executor, before other users of the executor get a turn.
MAX_RUN = 0.05
# Seconds that a result may wait for other results before the loop gets the results.
FLUSH_INTERVAL = 0.0005


def run_blocking(function: Callable[[Unpack[Ts]], T], *args: *Ts) -> asyncio.Future[T]:
    """Call ``function(*args)`` in a thread.

    Only for short internal functions.

    If the future is cancelled before the call starts, the call is not made. If the future is
    cancelled after the call has started, the result is dropped.
    """
    loop = asyncio.get_running_loop()
    executor: _BatchedExecutor | None = getattr(_local, "executor", None)
    if executor is None or executor.loop is not loop:
        executor = _local.executor = _BatchedExecutor(loop)
    return cast("asyncio.Future[T]", executor.submit(function, args))


_local = threading.local()


class Results:
    """Results of calls in other threads, given to a loop in batches."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[tuple[asyncio.Future[Any], object, BaseException | None]] = (
            deque()
        )
        self._flushing = False  # whether `deliver` is scheduled

    def add(
        self,
        future: asyncio.Future[Any],
        result: object,
        error: BaseException | None = None,
    ) -> None:
        self._waiting.append((future, result, error))

    def flush(self) -> None:
        """Schedule `deliver` on the loop. Any thread may call `flush`."""
        if not self._flushing:
            self._flushing = True
            # If the loop is closed, no caller is left.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self.deliver)

    def deliver(self) -> None:
        """Set the results of all futures. Runs on the loop."""
        self._flushing = False  # first, so that later results schedule another call
        while self._waiting:
            future, result, error = self._waiting.popleft()
            if future.done():
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)


class _BatchedExecutor:
    """Executor for the calls of a loop.

    Only `_work` runs in other threads. All other methods run on the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._calls: deque[
            tuple[asyncio.Future[object], Callable[..., object], tuple[object, ...]]
        ] = deque()
        self._results = Results(loop)
        self._threads = 0
        self._wanted = 1
        self._resizing = False
        self._finished = 0

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
        """Add threads if calls are slow, or use fewer threads.

        Calls are slow on a disk, for example, or if a call hangs.
        """
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
            except StopIteration as caught:  # a future rejects StopIteration
                error = RuntimeError(f"{function!r} raised {caught!r}")
            except BaseException as caught:
                error = caught
            self._results.add(future, result, error)
            self._finished += 1
            del future, function, args, result, error
            now = time.perf_counter()
            if not since:
                since = now
            if now - since >= FLUSH_INTERVAL:
                since = 0.0
                if now > until:
                    break
                self._results.flush()
        # If the loop is closed, no caller is left.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._on_end)

    def _on_end(self) -> None:
        """Set results after the end of a thread.

        If calls wait and fewer threads than wanted are left, a new thread starts.
        """
        self._results.deliver()
        self._threads -= 1
        if self._calls and self._threads < self._wanted:
            self._start_thread()
