"""Windows of fetchers: how many coroutines wait on a store at once."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine
from typing import Any

from headrace._core.engine.concurrency import AdaptiveLimit
from headrace._core.store.request_stats import RequestStats

LOOK = 0.02  # seconds between two looks at the rate; `AdaptiveLimit` measures over 0.05 at least

Spawn = Callable[[Callable[[], Coroutine[Any, Any, None]]], object]


class FetcherPool:
    """Fetchers that wait for work and call one more when there is more than they can take.

    At most `size` run; `resize` changes that. Each that starts calls the next, so that a window fills as fast as
    fetches begin to wait, and a store that answers at once is served by one fetcher without waking the others.
    """

    def __init__(self, size: int, work: Callable[[], Coroutine[Any, Any, None]], spawn: Spawn) -> None:
        self.size = size
        self.shrinking = False  # whether fetchers have to look if they are too many
        self._work = work
        self._spawn = spawn
        self._hired = 0
        self._idle: list[asyncio.Future[None]] = []

    def wake_one(self) -> None:
        """Wake an idle fetcher, or hire one."""
        if self.busy >= self.size:
            return
        if self._idle:
            fetcher = self._idle.pop()
            if not fetcher.done():  # else it is being cancelled
                fetcher.set_result(None)
        else:
            self._hired += 1
            self._spawn(self._work)

    @property
    def busy(self) -> int:
        """How many have not come to rest."""
        return self._hired - len(self._idle)

    def resize(self, size: int) -> None:
        """Let `size` run from now on; those that are too many rest when they have what they fetch."""
        grows = size > self.size
        self.size = size
        self.shrinking = self.busy > size
        if grows:
            self.wake_one()

    def should_park(self) -> bool:
        """Whether the fetcher that asks is one too many."""
        self.shrinking = self.busy > self.size
        return self.shrinking

    async def rest(self) -> None:
        """Wait to be called."""
        called = asyncio.get_running_loop().create_future()
        self._idle.append(called)
        await called


class AdaptiveFetcherPool(FetcherPool):
    """A window whose size is given, or found out while it fetches.

    Args:
        concurrency: how many fetchers may run, or what finds that out.
        work: a fetcher.
        spawn: starts one as a task.
        queued: how much has been admitted and not begun.
        requests: where refusals are noted.
    """

    def __init__(
        self,
        concurrency: int | AdaptiveLimit,
        work: Callable[[], Coroutine[Any, Any, None]],
        spawn: Spawn,
        queued: Callable[[], int],
        requests: RequestStats,
    ) -> None:
        super().__init__(concurrency.limit if isinstance(concurrency, AdaptiveLimit) else concurrency, work, spawn)
        self._control = concurrency if isinstance(concurrency, AdaptiveLimit) else None
        self._queued = queued
        self._requests = requests
        self._admitted = 0
        self._steering = False

    def admit(self, count: int) -> None:
        """Count what has been queued, and see to it that it is fetched."""
        self._admitted += count
        self.wake_one()
        if self._control is not None and not self._steering:
            self._steering = True
            self._spawn(functools.partial(self._steer, self._control))

    def note(self, error: BaseException) -> None:
        """Take note of an error that may say that fewer should be in flight."""
        if isinstance(error, TimeoutError):
            self._requests.throttle_events += 1

    async def _steer(self, control: AdaptiveLimit) -> None:
        """Look from time to time how the fetching goes; nothing is counted for a single sample."""
        while self._queued() or self.busy:
            await asyncio.sleep(LOOK)
            queued = self._queued()
            limit = control.tell(
                time.monotonic(),
                completed=self._admitted - queued - self.busy,
                throttle_events=self._requests.throttle_events,
                full=bool(queued) and self.busy >= self.size,
            )
            if limit != self.size:
                self.resize(limit)
        self._steering = False
