"""Time and queues of a discrete-event simulation."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

__all__ = ["Clock", "Servers"]


class Clock:
    """The time, and what happens at which time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[
            tuple[float, int, Callable[..., None], tuple[object, ...]]
        ] = []
        self._order = itertools.count()

    def at(self, time: float, call: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (time, next(self._order), call, arguments))

    def run(self, until: float) -> None:
        events = self._events
        while events and events[0][0] <= until:
            self.now, _, call, arguments = heapq.heappop(events)
            call(*arguments)
        self.now = until


class Servers:
    """Servers with one queue."""

    def __init__(self, number: int) -> None:
        self.free = [0.0] * number
        self.busy = 0.0

    def serve(self, now: float, seconds: float) -> float:
        """The time at which a job of so many seconds is done."""
        done = max(now, self.free[0]) + seconds
        heapq.heapreplace(self.free, done)
        self.busy += seconds
        return done
