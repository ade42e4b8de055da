"""Detection of user code that blocks an engine's event loop.

While a session runs, a callback on the loop (the beat) notes the time every 25 ms. One thread of the process wakes when
a beat is late by 25 ms, and samples the stack of the loop's thread every 10 ms until the beat comes. A place in user
code is reported when it is shown to have blocked the loop, once: a late beat alone is no evidence, since the process
may have been stopped, other processes may use the cores, or another thread may hold the GIL. What counts is decided in
`lateness`, the warning is in `block_warnings`.

What that is measured against, and the cost: docs/design/0015.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import sys
import threading
import time

from headrace._core.eventloop.block_warnings import is_reported, warn
from headrace._core.eventloop.lateness import GRACE, PROMPT, PROVEN, REPORTED, Lateness, Sample, ThreadUsage
from headrace._core.eventloop.stack_places import Place, Spot, find_user_code

BEAT = 0.025  # seconds between beats
TICK = 0.01  # seconds between samples
SLOW_TICK = 0.1  # of a loop that has been blocked for `STILL_BLOCKED`
STILL_BLOCKED = 1.0  # seconds after which a block is reported before it has ended
MOST_PLACES = 100


class LoopWatch:
    """Watches the loop of one engine while its sessions run. The engine's placement owns it, and calls `close`.

    Args:
        dataset: the name of the dataset's class, for warnings.

    Attributes:
        blocked_seconds: seconds that user code is known to have blocked the loop so far.
        place: the line of user code that has blocked it longest, as text; None if none has.
        queued_seconds: seconds for which its thread could have computed and had no core; 0.0 where the system does not
            say.
    """

    def __init__(self, dataset: str) -> None:
        self.dataset = dataset
        self.blocked_seconds = 0.0
        self.queued_seconds = 0.0
        self._schedstat: int | None = None  # descriptor
        self.place: str | None = None
        self.due = math.inf  # time of the next beat; infinite while no session runs
        self.cpu = 0.0  # CPU seconds of the loop's thread at the last beat
        self.thread = 0
        self.native_id = 0
        self._sessions = 0
        self._beats: asyncio.TimerHandle | None = None
        self._by_place: dict[Place, float] = {}

    def begin(self) -> None:
        """A session begins; on the loop."""
        self._sessions += 1
        if self._sessions == 1:
            self._loop = asyncio.get_running_loop()
            self.thread, self.native_id = threading.get_ident(), threading.get_native_id()
            with contextlib.suppress(OSError):  # not Linux, or no descriptor is left
                self._schedstat = os.open(f"/proc/self/task/{self.native_id}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            self._beat()
            watchdog.add(self)

    def end(self) -> None:
        """A session has ended; on the loop."""
        self._sessions -= 1
        if not self._sessions and self._beats is not None:
            self._beats.cancel()
            self._beats = None
            self.due = math.inf
            if self._schedstat is not None:
                os.close(self._schedstat)
                self._schedstat = None

    def close(self) -> None:
        """Stop watching, and end the thread if it watches nothing else; from any thread, any number of times."""
        self.due = math.inf
        watchdog.remove(self)

    def _beat(self) -> None:
        self._beats = self._loop.call_later(BEAT, self._beat)
        self.cpu = time.thread_time()
        if self._schedstat is not None:
            self.queued_seconds = int(os.pread(self._schedstat, 64, 0).split()[1]) / 1e9
        self.due = time.monotonic() + BEAT

    def add(self, place: Place, seconds: float) -> None:
        """Count seconds for which a place blocked the loop."""
        self.blocked_seconds += seconds
        if place in self._by_place or len(self._by_place) < MOST_PLACES:
            self._by_place[place] = self._by_place.get(place, 0.0) + seconds
            self.place = str(max(self._by_place, key=self._by_place.__getitem__))


class Watchdog:
    """The thread that samples. It runs while there are watches; the one that is closed last ends it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # reentrant: the garbage collector may close a loader in any thread
        self._watches: list[LoopWatch] = []
        self._thread: threading.Thread | None = None
        self._seen_once: set[Place] = set()
        self._collections = 0

    def add(self, watch: LoopWatch) -> None:
        """Watch a loop that now beats."""
        with self._changed:
            if watch not in self._watches:
                self._watches.append(watch)
            if self._thread is not None:
                self._changed.notify()
                return
            thread = self._thread = threading.Thread(target=self._run, name="headrace-watchdog", daemon=True)
        # Without the lock: the garbage collector may run in the new thread before `start` returns, and close a loader.
        thread.start()
        if self._thread is not thread:  # the watch was closed meanwhile: the thread ends at once
            thread.join(STILL_BLOCKED)

    def remove(self, watch: LoopWatch) -> None:
        """Forget a watch. The thread has ended on return if that was the last one."""
        with self._changed:
            if watch not in self._watches:
                return
            self._watches.remove(watch)
            if self._watches:
                return
            thread, self._thread = self._thread, None
            self._changed.notify()
        if thread is not None and thread is not threading.current_thread() and thread.is_alive():
            thread.join(STILL_BLOCKED)  # it may be in a log handler that waits for this thread

    def _run(self) -> None:
        late_beats: dict[LoopWatch, Lateness] = {}
        planned = time.monotonic()
        while self._wait_until(planned):
            late = max(0.0, time.monotonic() - planned)
            watches = list(self._watches)
            for watch in late_beats.keys() - watches:
                self._end(watch, late_beats.pop(watch), time.monotonic())
            planned = min((self._look(watch, late, late_beats) for watch in watches), default=math.inf)
            self._collections = _collections()
        for watch, lateness in late_beats.items():
            self._end(watch, lateness, time.monotonic())

    def _wait_until(self, planned: float) -> bool:
        """Wait; False once this thread is no longer needed."""
        with self._changed:
            timeout = planned - time.monotonic()
            if timeout > 0 and self._thread is threading.current_thread():
                self._changed.wait(None if math.isinf(timeout) else timeout)
            return self._thread is threading.current_thread()

    def _look(self, watch: LoopWatch, late: float, late_beats: dict[LoopWatch, Lateness]) -> float:
        """Sample the stack if the beat is late; the time of the next look."""
        due = watch.due
        lateness = late_beats.get(watch)
        now = time.monotonic()
        if lateness is not None and lateness.due != due:
            del late_beats[watch]
            self._end(watch, lateness, min(due - BEAT, now))
            lateness = None
        if now < due + GRACE:
            return due + GRACE
        top = sys._current_frames().get(watch.thread)
        if top is None:  # its loop has died
            watch.due = math.inf
            return math.inf
        spot = find_user_code(top)
        del top
        usage, own = ThreadUsage.of(watch.native_id), ThreadUsage.of(threading.get_native_id())
        sample = Sample(now, usage, own, _collections(), spot)
        if watch.due != due:  # it has gone on: the stack may be of something else
            return watch.due + GRACE
        if lateness is None:
            late_beats[watch] = Lateness(due, sample, late > PROMPT)
            self._after_lock(watch, sample, late, None)
            return time.monotonic() + TICK
        self._after_lock(watch, sample, late, lateness.last)
        lateness.take(sample, late)
        still = self._count(watch, lateness)
        return time.monotonic() + (SLOW_TICK if still else TICK)

    def _after_lock(self, watch: LoopWatch, sample: Sample, late: float, before: Sample | None) -> None:
        """A call that does not release the GIL stops this thread too, and is seen after its end.

        The watchdog was then late by as long as the loop's thread has held the GIL. Which thread goes on first after
        the call is open, so a place counts when it is seen the second time.
        """
        if late < PROVEN or sample.spot is None or sample.usage is None or sample.collections != self._collections:
            return
        if before is None or before.usage is None:
            ran = holding = sample.usage.ran - watch.cpu
        elif before.spot is not None and before.spot.step is sample.spot.step:
            return  # counted as CPU time of the step
        else:
            ran = sample.usage.ran - before.usage.ran
            holding = ran + sample.usage.queued - before.usage.queued
        if ran < PROVEN or sample.time - watch.due < REPORTED or holding < 0.8 * late:
            return
        if sample.spot.place in self._seen_once:
            watch.add(sample.spot.place, ran)
            self._report(watch, sample.spot, ran, computes=True, ended=True)
        elif len(self._seen_once) < MOST_PLACES:
            self._seen_once.add(sample.spot.place)

    def _count(self, watch: LoopWatch, lateness: Lateness) -> bool:
        """Count what was found; whether it was reported before and lasts."""
        spot = lateness.spot
        if spot is None:
            return False
        watch.add(spot.place, lateness.seconds - lateness.counted)
        lateness.counted = lateness.seconds
        known = is_reported(spot, computes=lateness.computes)
        if lateness.seconds >= STILL_BLOCKED:
            self._report(watch, spot, lateness.seconds, computes=lateness.computes, ended=False)
            lateness.forget()  # a stream that never awaits may block in other places too
        return known

    def _end(self, watch: LoopWatch, lateness: Lateness, resumed: float) -> None:
        if lateness.spot is None:
            return
        rest = min(max(0.0, resumed - lateness.last.time), TICK)  # since the last sample
        watch.add(lateness.spot.place, rest)
        self._report(watch, lateness.spot, lateness.seconds + rest, computes=lateness.computes, ended=True)

    def _report(self, watch: LoopWatch, spot: Spot, seconds: float, *, computes: bool, ended: bool) -> None:
        datasets = sorted({each.dataset for each in self._watches if each.thread == watch.thread} | {watch.dataset})
        warn(datasets, spot, seconds, computes=computes, ended=ended)


def _collections() -> int:
    return int(gc.get_stats()[2]["collections"])


watchdog = Watchdog()


def _reset() -> None:
    """A fork has no such thread, and its locks may be held by threads that it lacks."""
    global watchdog
    watchdog = Watchdog()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset)
