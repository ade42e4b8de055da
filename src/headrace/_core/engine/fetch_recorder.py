"""The times of single fetches, which are measured only while a trace is written."""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections.abc import Awaitable, Callable
from typing import Any

from headrace._core.batches import FetchTimes


class FetchRecorder:
    """The fetches of a session that have ended, until they travel with the next batch; used on the engine's loop."""

    def __init__(self) -> None:
        self._rows = array("d")

    def add(self, batch: int, slot: int, began: float) -> None:
        """Add a fetch that ends now; arguments as in `FetchTimes`."""
        self._rows.extend((batch, slot, began, time.perf_counter()))

    def take(self) -> FetchTimes:
        """The fetches since the last call."""
        rows = self._rows.tobytes()
        del self._rows[:]
        return FetchTimes(os.getpid(), threading.get_native_id(), rows)

    def around(
        self, fetch: Callable[[Any], Awaitable[Any]], on_result: Callable[[Any, int, Any], bool]
    ) -> tuple[Callable[[Any], Awaitable[Any]], Callable[[Any, int, Any], bool]]:
        """The two functions of one fetcher, which calls them in turn, with the times recorded.

        Args:
            fetch: fetches a job.
            on_result: takes the target, the slot and the result of it; targets have the `number` of their batch.
        """
        clock, add = time.perf_counter, self._rows.extend
        began = 0.0

        def timed_fetch(argument: Any) -> Awaitable[Any]:
            nonlocal began
            began = clock()
            return fetch(argument)

        def timed_result(target: Any, slot: int, result: Any) -> bool:
            add((target.number, slot, began, clock()))  # first: this may complete the batch
            return on_result(target, slot, result)

        return timed_fetch, timed_result
