"""When a consumer is in `next()`, and what it does, as other threads see it."""

from __future__ import annotations

import threading
import time
from typing import Literal, NamedTuple


class Activity(NamedTuple):
    """What the consumer of an epoch does, as another thread sees it.

    Attributes:
        doing: in `next()`, in `next()` waiting for other ranks, in its own code, or done with the epoch.
        since: by `time.perf_counter`; 0.0 where the epoch is over.
        batch: the number of the oldest batch under way; None if there is none.
        thread: of the last call of `next()`; 0 before the first.
    """

    doing: Literal["next", "ranks", "step", "over"]
    since: float
    batch: int | None
    thread: int


class Calls:
    """The calls of an epoch's `next()`, by `time.perf_counter`; written on the consumer's thread.

    Attributes:
        waits_since: when the running call began to wait for a batch; 0.0 once it was taken, or if none runs.
        began: when the running call began; 0.0 if none runs.
        returned: when the last call returned; before the first, when the epoch began.
        thread: of the last call; 0 before the first.
    """

    __slots__ = ("began", "returned", "thread", "waits_since")

    def __init__(self) -> None:
        self.waits_since = self.began = 0.0
        self.returned = time.perf_counter()
        self.thread = 0

    def enter(self) -> None:
        """Note a call, or that the running one goes on after a wait."""
        self.waits_since = self.waits_since or time.perf_counter()
        if not self.began:
            self.began, self.thread = self.waits_since, threading.get_ident()

    def leave(self) -> None:
        """Note that the call returns, or raises."""
        self.waits_since = self.began = 0.0
        self.returned = time.perf_counter()
