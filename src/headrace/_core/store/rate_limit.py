"""A limit on the number of calls that begin in a second."""

from __future__ import annotations

import asyncio
import functools
import math
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

TIMER = 0.001  # seconds; uvloop's timers are not finer


class RateLimit:
    """At most `per_second` calls a second, after a burst: a context manager around a call, or a decorator.

    Callers proceed in the order of their calls, and late timers do not add up. All event loops of a process
    share the limit. Copies in other processes count on their own: give each rank its share.

    Args:
        per_second: calls in a second, over any time longer than a burst; need not be an integer.
        burst: calls that may begin at once after an idle time.

    Raises:
        ValueError: a number is out of its range.

    Example:
        >>> from headrace import AsyncDataset
        >>> limit = RateLimit(per_second=300, burst=30)
        >>> class Pages(AsyncDataset):
        ...     def __len__(self): return 1000
        ...     async def aget(self, index):
        ...         async with limit:
        ...             return index  # await session.get(...)
        >>> Pages()[3]
        3
    """

    def __init__(self, per_second: float, burst: int = 1) -> None:
        if isinstance(per_second, bool) or not isinstance(per_second, int | float) or not 0 < per_second < math.inf:
            raise ValueError(f"per_second must be a number above 0, but got {per_second!r}")
        if isinstance(burst, bool) or not isinstance(burst, int) or burst < 1:
            raise ValueError(f"burst must be an int of at least 1, but got {burst!r}")
        self.per_second = per_second
        self.burst = burst
        self._slots = _Slots(1 / per_second, burst)
        self._queues: dict[asyncio.AbstractEventLoop, _Queue] = {}

    async def __aenter__(self) -> None:
        loop = asyncio.get_running_loop()
        queue = self._queues.get(loop)
        if queue is None:
            for closed in [other for other in self._queues if other.is_closed()]:
                self._queues.pop(closed, None)
            queue = self._queues[loop] = _Queue(loop, self._slots)
        await queue.turn()

    async def __aexit__(self, *_: object) -> None:
        """Do nothing: only the beginning of calls is limited."""

    def __call__(self, function: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        """Decorate an async function: each call waits for its turn first."""

        @functools.wraps(function)
        async def limited(*args: P.args, **kwargs: P.kwargs) -> T:
            async with self:
                return await function(*args, **kwargs)

        return limited

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.per_second, self.burst)

    def __repr__(self) -> str:
        return f"RateLimit(per_second={self.per_second}, burst={self.burst})"


class _Slots:
    """The slots at which calls may begin: one each interval, of which `burst` may be in the past. Thread-safe.

    The generic cell rate algorithm: all that is kept is the time of the next slot.

    Args:
        interval: seconds between two slots.
        burst: the number of slots at once after an idle time.
        clock: seconds, as `time.monotonic`.
    """

    def __init__(self, interval: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._interval = interval
        self._saved = (burst - 1) * interval
        # Waiting callers are woken up to one timer tick late; the slots that passed meanwhile are still theirs.
        self._late = max(interval, 2 * TIMER)
        self._next = -math.inf
        self._lock = threading.Lock()

    def take(self, *, waited: bool) -> float:
        """Take a slot and return 0; or the seconds until there is one."""
        with self._lock:
            now = self._clock()
            slot = max(self._next, now - self._saved - (self._late if waited else 0.0))
            if slot > now:
                return slot - now
            self._next = slot + self._interval
            return 0.0

    def give_back(self) -> None:
        """Give back a slot that was taken and not used."""
        with self._lock:
            self._next -= self._interval


class _Queue:
    """The callers that wait on one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, slots: _Slots) -> None:
        self._loop = loop
        self._slots = slots
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    async def turn(self) -> None:
        """Wait for a slot."""
        if not self._waiting and not self._slots.take(waited=False):
            return
        mine: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(mine)
        if self._timer is None:
            self._serve()
        try:
            await mine
        except asyncio.CancelledError:
            if mine.cancelled():
                if self._waiting and self._waiting[-1] is mine:
                    self._waiting.pop()
            else:  # its turn had just come
                self._slots.give_back()
                if self._timer is not None:
                    self._timer.cancel()
                self._serve()
            raise

    def _serve(self) -> None:
        """Wake the callers whose turn it is, and set the timer for the next."""
        self._timer = None
        while self._waiting:
            if self._waiting[0].done():  # cancelled
                self._waiting.popleft()
                continue
            seconds = self._slots.take(waited=True)
            if seconds:
                self._timer = self._loop.call_later(max(seconds, TIMER), self._serve)
                return
            self._waiting.popleft().set_result(None)
