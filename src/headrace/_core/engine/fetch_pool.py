"""The fetch loop: a pool of long-lived coroutines that take jobs from one queue."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import time
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Protocol

from headrace._core.batches import FetchLoad, FetchTimes
from headrace._core.engine.concurrency import AdaptiveLimit
from headrace._core.store.request_stats import RequestStats

CONTROL_INTERVAL = 0.02  # seconds between two updates of an `AdaptiveLimit`, which measures over 0.05 at least

Job = tuple[Any, int, Any]
"""The target of a result, the slot in it, and the argument of the fetch."""
Spawn = Callable[[Callable[[], Coroutine[Any, Any, None]]], object]


class FetchRecorder:
    """The fetches of a session that have ended, until they travel with the next batch; only while a trace is written.

    Used on the engine's loop.
    """

    def __init__(self) -> None:
        self._rows = array("d")

    def add(self, batch: int, slot: int, began: float) -> None:
        """Add a fetch that ends now; arguments as in `FetchTimes`."""
        self._rows.extend((batch, slot, began, time.perf_counter()))

    def take(self) -> FetchTimes:
        rows = self._rows.tobytes()
        del self._rows[:]
        return FetchTimes(os.getpid(), threading.get_native_id(), rows)

    def around(
        self, fetch: Callable[[Any], Awaitable[Any]], on_result: Callable[[Any, int, Any], bool]
    ) -> tuple[Callable[[Any], Awaitable[Any]], Callable[[Any, int, Any], bool]]:
        """Two functions of a `FetchPolicy`, with the times recorded; their targets have the `number` of their batch."""
        began: dict[asyncio.Task[Any] | None, float] = {}

        def timed_fetch(argument: Any) -> Awaitable[Any]:
            began[asyncio.current_task()] = time.perf_counter()
            return fetch(argument)

        def timed_result(target: Any, slot: int, result: Any) -> bool:
            if (since := began.pop(asyncio.current_task(), None)) is not None:  # else it began before the trace
                self.add(target.number, slot, since)  # first: this may complete the batch
            return on_result(target, slot, result)

        return timed_fetch, timed_result


class FetchPolicy(Protocol):
    """The part of a fetch that differs between stages: its request, and the use of its result."""

    def fetch(self, argument: Any, /) -> Awaitable[Any]:
        """Fetch; errors go to `on_error`."""

    def on_result(self, target: Any, slot: int, result: Any, /) -> bool:
        """Take a result; returns whether it completes a batch. Runs once for each job unless `on_error` raises."""

    def on_first(self, target: Any, began: float, seconds: float, /) -> None:
        """Take when the job of slot 0 began, by `time.perf_counter`, and its duration; called before `on_result`."""

    def on_error(self, error: BaseException, target: Any, argument: Any, /) -> Any:
        """The result in place of an error of user code; raises an error of our own."""


class FetcherPool:
    """At most `size` fetchers, each of which runs one job after the other; idle ones park.

    A fetcher that starts wakes the next one while more jobs are queued. So the pool grows as fast as fetches begin to
    wait, and a store that answers at once is served by one fetcher without waking others.

    Args:
        concurrency: the number of fetchers, or an `AdaptiveLimit` that finds it.
        requests: the session's counters, whose throttle events lower an `AdaptiveLimit`.

    Attributes:
        size: fetchers that may run.
        stopped: no job is begun any more; errors of running ones are those of their cancellation.
    """

    def __init__(
        self,
        concurrency: int | AdaptiveLimit,
        policy: FetchPolicy,
        spawn: Spawn,
        requests: RequestStats,
    ) -> None:
        self._limit = concurrency if isinstance(concurrency, AdaptiveLimit) else None
        self.size = concurrency.limit if isinstance(concurrency, AdaptiveLimit) else concurrency
        self.stopped = False
        self._policy = policy
        self._spawn = spawn
        self._requests = requests
        self._queue: deque[Job] = deque()
        self._parked: list[asyncio.Future[None]] = []
        self._spawned = 0
        self._fetch, self._on_result = policy.fetch, policy.on_result
        self._traced = False
        self._interrupted = False  # fetchers must check whether to park, and which functions to call
        self._submitted = 0
        self._controlled = False

    def submit(self, jobs: Iterable[Job], *, first: bool = False) -> None:
        """Queue jobs, with `first` ahead of all others and in reverse order."""
        queue = self._queue
        before = len(queue)
        if first:
            queue.extendleft(jobs)
        else:
            queue.extend(jobs)
        self._submitted += len(queue) - before
        self._wake_one()
        if self._limit is not None and not self._controlled:
            self._controlled = True
            self._spawn(functools.partial(self._control, self._limit))

    def stop(self) -> None:
        """Begin no more jobs; the owner of the tasks cancels them next."""
        self.stopped = True
        self._queue.clear()

    def count_timeout(self, error: BaseException) -> None:
        """Count an error if it is a time-out, which is a sign of too many requests."""
        if isinstance(error, TimeoutError):
            self._requests.throttle_events += 1

    def resize(self, size: int) -> None:
        """Change `size`; surplus fetchers park after their current job."""
        grows = size > self.size
        self.size = size
        self._interrupted = self._traced or self.busy > size
        if grows:
            self._wake_one()

    def trace(self, recorder: FetchRecorder | None) -> None:
        """Record the times of each job from now on, or no longer."""
        self._fetch, self._on_result = self._policy.fetch, self._policy.on_result
        if recorder is not None:
            self._fetch, self._on_result = recorder.around(self._fetch, self._on_result)
        self._traced = self._interrupted = True  # from now on: it takes some 0.1 µs for each fetch

    def load(self) -> FetchLoad:
        busy, queued = self.busy, len(self._queue)
        return FetchLoad(busy, self.size, queued, unused=0 if queued else max(0, self.size - busy))

    @property
    def busy(self) -> int:
        """Fetchers that are not parked."""
        return self._spawned - len(self._parked)

    async def _run(self) -> None:
        queue, clock = self._queue, time.perf_counter
        while True:
            fetch, on_result = self._fetch, self._on_result
            if len(queue) > 1:
                self._wake_one()
            while queue:
                target, slot, argument = queue.popleft()
                began = 0.0 if slot else clock()  # of one job of each batch: that is enough for percentiles
                try:
                    result = await fetch(argument)
                except BaseException as error:  # user code
                    if self.stopped:
                        return
                    self.count_timeout(error)
                    result = self._policy.on_error(error, target, argument)
                if began:
                    self._policy.on_first(target, began, clock() - began)
                if on_result(target, slot, result):
                    await asyncio.sleep(0)  # the batch gets its turn, also if no fetch ever waits
                if self._interrupted:
                    fetch, on_result = self._fetch, self._on_result
                    self._interrupted = self._traced or self.busy > self.size
                    if self.busy > self.size:
                        break
            woken = asyncio.get_running_loop().create_future()
            self._parked.append(woken)
            await woken

    def _wake_one(self) -> None:
        """Wake a parked fetcher, or spawn one."""
        if self.busy >= self.size:
            return
        if self._parked:
            fetcher = self._parked.pop()
            if not fetcher.done():  # else it is being cancelled
                fetcher.set_result(None)
        else:
            self._spawned += 1
            self._spawn(self._run)

    async def _control(self, limit: AdaptiveLimit) -> None:
        """Measure at intervals while there is work; nothing is counted for a single job."""
        while self._queue or self.busy:
            await asyncio.sleep(CONTROL_INTERVAL)
            queued = len(self._queue)
            size = limit.update(
                time.monotonic(),
                completed=self._submitted - queued - self.busy,
                throttle_events=self._requests.throttle_events,
                full=bool(queued) and self.busy >= self.size,
            )
            if size != self.size:
                self.resize(size)
        self._controlled = False
