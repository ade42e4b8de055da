"""The line of one iteration, and the thread that draws it."""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from headrace.telemetry.batch_log import BatchRecord
from headrace.telemetry.counters import Counters
from headrace.telemetry.diagnosis import BATCHES_AT_LEAST
from headrace.telemetry.displays import Display, Field, Tone
from headrace.telemetry.formatting import duration, rate, seconds, share
from headrace.telemetry.report import Report

__all__ = ["LiveLine"]

WINDOW = 10.0  # seconds of rate and waiting share, at least
LIMIT_INTERVAL = 1.0  # seconds, at least
LIMIT_SHARE = 500  # and at least so many times what it takes
STALLED = 2.0  # seconds of one wait, which are then shown
_GONE = (OSError, ValueError)  # of a terminal or file that is closed: training goes on


class _Mark(NamedTuple):
    """The sums at a moment."""

    at: float
    samples: int
    waited: float


class LiveLine:
    """The line on one iteration, and the thread that draws it until `end`.

    Args:
        counters: the loader's.
        display: where it is shown.
        report: the report on the last batches.
        name: what it begins with.
        epoch: the epoch's number.
        batches: number of batches of the epoch; None if unknown.
        interval: seconds between two lines.
        clock: seconds, as of `time.perf_counter`.
    """

    def __init__(
        self,
        counters: Counters,
        display: Display,
        *,
        report: Callable[[], Report],
        name: str,
        epoch: int,
        batches: int | None,
        interval: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._counters = counters
        self._display = display
        self._report = report
        self._head = f"{name} epoch {epoch}".lstrip()
        self._batches = batches
        self._interval = interval
        self._clock = clock
        self._position = 0  # of the last batch in its epoch, from 1
        self._delivered = self._samples = 0
        self._waited = 0.0  # seconds in `next()`
        self._first: BatchRecord | None = None
        self._limit: Report | None = None
        self._limit_due = 0.0
        self._stopped = threading.Event()
        self._ending = threading.Lock()

    def begin(self) -> LiveLine:
        """Follow the loader's batches, and start the thread."""
        self._began = self._clock()
        self._marks = deque([_Mark(self._began, 0, 0.0)])
        self._unsubscribe = self._counters.log.subscribe(self._on_batch)
        # In the caller's context: a notebook knows by it which cell the output belongs to.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._run,), name="headrace-progress", daemon=True)
        self._thread.start()
        return self

    def _on_batch(self, record: BatchRecord) -> None:
        self._first = self._first or record
        self._delivered += 1
        self._samples += record.size
        self._position = max(self._position, record.number + 1)
        self._waited += record.returned - record.called

    def _run(self) -> None:
        if self._interval < 5:  # otherwise the first line would say nothing
            self.update()
        while not self._stopped.wait(self._interval):
            self.update()

    def update(self) -> None:
        """Show the line as it is now."""
        fields = self._now()
        with contextlib.suppress(*_GONE):
            self._display.show(fields)

    def end(self, *, complete: bool = False) -> None:
        """Show the line for the last time; any number of times.

        Args:
            complete: whether the iteration has ended; otherwise it was left.
        """
        if not self._ending.acquire(blocking=False):
            return
        self._unsubscribe()
        self._stopped.set()
        if threading.current_thread() is not self._thread:  # otherwise its garbage collection has called this
            self._thread.join()
        fields = self._summary(complete)
        with contextlib.suppress(*_GONE):
            self._display.end(fields)

    def _now(self) -> list[Field]:
        now = self._clock()
        since = self._counters.waiting_since
        stalled = 0.0 if since is None else now - since
        if self._first is None:
            waits = seconds(max(now - self._began, 1e-3))
            return [Field(self._head, 5), Field(f"waiting for the first batch for {waits}", 0, "dim")]
        fields = [Field(self._head, 5), Field(self._counted(self._position))]
        self._marks.append(_Mark(now, self._samples, self._waited + stalled))
        while len(self._marks) > 2 and self._marks[1].at <= now - WINDOW:
            self._marks.popleft()
        before, after = self._marks[0], self._marks[-1]
        passed = max(after.at - before.at, 1e-9)
        fields.append(Field(f"{rate((after.samples - before.samples) / passed)} samples/s", 2))
        fields.append(Field(self._remaining(now), 3))
        fields.append(_waiting("waiting", (after.waited - before.waited) / passed))
        if stalled > STALLED:
            return [*fields, Field(f"no batch for {seconds(stalled)}", 1, "bad")]
        self._find_limit(now)
        return [*fields, *self._limits()]

    def _summary(self, complete: bool) -> list[Field]:
        now = self._clock()
        passed = max(now - self._began, 1e-9)
        if complete and self._first is not None:
            self._find_limit(now, force=True)
        if self._first is None:
            return [
                Field(self._head, 5),
                Field("ended without a batch" if complete else "stopped before the first batch"),
            ]
        per_second = f"{rate(self._samples / passed)} samples/s"
        fields = [
            Field(self._head, 5),
            Field(("" if complete else "stopped at ") + self._counted(self._position)),
            Field(per_second, 2),
            Field(f"in {duration(passed)}", 3),
        ]
        return [*fields, _waiting("waited", self._waited / passed), *self._limits()]

    def _counted(self, position: int) -> str:
        total = self._batches
        return f"batch {position:,}" + (f"/{total:,}" if total is not None and position <= total else "")

    def _remaining(self, now: float) -> str:
        assert self._first is not None
        passed = now - self._first.returned
        if self._batches is None or self._batches < self._position or self._delivered < 2:
            return f"in {duration(now - self._began)}"
        return f"ETA {duration((self._batches - self._position) * passed / (self._delivered - 1))}"

    def _find_limit(self, now: float, *, force: bool = False) -> None:
        if self._delivered <= BATCHES_AT_LEAST or (now < self._limit_due and not force):
            return
        self._limit = self._report()
        self._limit_due = now + max(LIMIT_INTERVAL, LIMIT_SHARE * (self._clock() - now))

    def _limits(self) -> list[Field]:
        if self._limit is None:
            return []
        fields = [Field(f"limit: {self._limit.limit}", 1)]
        if self._limit.change and self._limit.limit != "consumer":
            change = ", ".join(f"{name}={value!r}" for name, value in self._limit.change.items())
            fields.append(Field(f"try {change}", 6, "dim"))
        return fields


def _waiting(word: str, part: float) -> Field:
    tone: Tone = "good" if part < 0.05 else "fair" if part < 0.25 else "bad"
    return Field(f"{word} {share(min(1.0, part))}", 0, tone)
