"""Detection of user code that blocks an engine's event loop.

While a session runs, a callback on the loop (the beat) notes the time every 25 ms. One thread of the process wakes when
a beat is late by 25 ms, and samples the stack of the loop's thread every 10 ms until the beat comes. A place in user
code is reported when it is shown to have blocked the loop, once: a late beat alone is no evidence, since the process
may have been stopped, other processes may use the cores, or another thread may hold the GIL. So of each interval
between two samples only this counts:

- CPU time of the loop's thread, if both samples are in one step of the loop (the same frame, and no beat between);
- time in which it neither ran nor waited for a core, if it slept at both samples, less the time by which the watchdog
  itself was late without waiting for a core (the process was stopped), and, if it was late at all, less 6 ms for each
  voluntary context switch of the loop's thread: a thread that waits for the GIL wakes every 5 ms
  (`sys.getswitchinterval`), one that sleeps or waits for a socket does not.

What that is measured against, and the cost: docs/design/0037.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import os
import sys
import threading
import time
from dataclasses import dataclass, field

from headrace._core.eventloop.stack_places import Place, Spot, advice_for, describe_call, find_user_code

BEAT = 0.025  # seconds between beats
GRACE = 0.025  # seconds by which a beat is late when sampling begins
TICK = 0.01  # seconds between samples
SLOW_TICK = 0.1  # of a loop that has been blocked for `STILL_BLOCKED`
REPORTED = 0.1  # seconds: shorter blocks are not reported
PROVEN = 0.075  # seconds of them that samples must show; the first part passes before the first sample
STILL_BLOCKED = 1.0  # seconds after which a block is reported before it has ended
PROMPT = 0.0025  # seconds by which the watchdog is late at most where no thread holds the GIL for long
GIL_WAIT = 1.2  # switch intervals for each voluntary context switch; timers are late
MOST_PLACES = 100

_PLACE = "headrace_place"  # the attribute of a warning's record

_log = logging.getLogger("headrace")
_reported: set[tuple[str, int]] = set()  # file and line: one report for each place and process


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


@dataclass(frozen=True, slots=True)
class _Usage:
    """What a thread has done since it started.

    Attributes:
        ran: seconds on a core.
        queued: seconds in which it waited for a core, without a wait that has not ended.
        switches: voluntary context switches.
        sleeps: whether it now waits for something else than a core.
    """

    ran: float
    queued: float
    switches: int
    sleeps: bool

    @classmethod
    def of(cls, native_id: int) -> _Usage | None:
        """None where the system does not say (it is not Linux), or the thread has ended."""
        try:
            with open(f"/proc/self/task/{native_id}/status", "rb") as file:
                status = file.read()
            with open(f"/proc/self/task/{native_id}/schedstat", "rb") as file:
                ran, queued, _ = map(int, file.read().split())
            switches = int(status.rpartition(b"\nvoluntary_ctxt_switches:")[2].split()[0])
            state = status.partition(b"\nState:")[2].split()[0]
        except (OSError, ValueError, IndexError):
            return None
        return cls(ran / 1e9, queued / 1e9, switches, sleeps=state in (b"S", b"D"))


@dataclass(frozen=True, slots=True)
class _Sample:
    time: float
    usage: _Usage | None
    own: _Usage | None  # the watchdog's
    collections: int  # of all objects, by the garbage collector: it holds the GIL, in whichever thread it begins
    spot: Spot | None


@dataclass(slots=True)
class _Blocked:
    """Seconds that a place has blocked the loop: computing and waiting, within one step or in all of them."""

    ran: float = 0.0
    waited: float = 0.0

    @property
    def seconds(self) -> float:
        return self.ran + self.waited


@dataclass(slots=True)
class _Lateness:
    """What samples show of one late beat.

    Attributes:
        due: the time of the beat.
        last: the last sample.
        contended: whether the watchdog was late: another thread may hold the GIL.
        in_step: what the places of the current step have used.
        waited: seconds blocked in calls, by place, in all steps.
        spots: the last spot of each place.
        spot: the user code that is known to block, once there is some.
        computes: whether it does so by computing.
        seconds: for how long.
        counted: those that were added to the watch.
    """

    due: float
    last: _Sample
    contended: bool
    in_step: dict[Place, _Blocked] = field(default_factory=dict)
    waited: dict[Place, float] = field(default_factory=dict)
    spots: dict[Place, Spot] = field(default_factory=dict)
    spot: Spot | None = None
    computes: bool = False
    seconds: float = 0.0
    counted: float = 0.0

    def take(self, sample: _Sample, late: float) -> None:
        """Add a sample, taken by a watchdog that was late by some seconds."""
        before, self.last = self.last, sample
        self.contended |= late > PROMPT
        if sample.spot is None or before.spot is None:
            self.in_step = {}
            return
        if sample.spot.step is not before.spot.step:
            self.in_step = {}
        place = sample.spot.place
        self.spots[place] = sample.spot
        ran, waited = self._used(before, sample, late)
        if sample.spot.step is before.spot.step:
            used = self.in_step.setdefault(place, _Blocked())
            used.ran += ran
            used.waited += waited
        if place == before.spot.place:
            self.waited[place] = self.waited.get(place, 0.0) + waited
        if sample.time - self.due < REPORTED:
            return
        in_step = sum(used.seconds for used in self.in_step.values())
        if max(in_step, self.waited.get(place, 0.0)) < PROVEN:
            return
        if self.waited.get(place, 0.0) >= in_step:
            self._found(place, self.waited[place], computes=False)
        else:
            worst = max(self.in_step, key=lambda each: self.in_step[each].seconds)
            self._found(worst, in_step, computes=self.in_step[worst].ran > self.in_step[worst].waited)

    def _found(self, place: Place, seconds: float, *, computes: bool) -> None:
        if seconds >= self.seconds:
            self.spot, self.seconds, self.computes = self.spots[place], seconds, computes

    def forget(self) -> None:
        """Begin again, after a report."""
        self.in_step, self.waited, self.spots = {}, {}, {}
        self.spot, self.seconds, self.counted = None, 0.0, 0.0

    def _used(self, before: _Sample, sample: _Sample, late: float) -> tuple[float, float]:
        """Seconds that the loop's thread ran, and that it waited for something else than a core or the GIL."""
        took = sample.time - before.time
        if sample.usage is None or before.usage is None:
            return 0.0, 0.0 if self.contended else took
        ran = sample.usage.ran - before.usage.ran
        queued = sample.usage.queued - before.usage.queued
        if late > GRACE and sample.collections != before.collections:
            return 0.0, 0.0
        for_gil = 0.0
        if self.contended:
            switches = sample.usage.switches - before.usage.switches
            for_gil = switches * GIL_WAIT * sys.getswitchinterval()
        if sample.own is not None and before.own is not None:
            late = max(0.0, late - (sample.own.queued - before.own.queued))
        sleeps = sample.usage.sleeps and before.usage.sleeps
        waited = max(0.0, took - ran - queued - late - for_gil) if sleeps else 0.0
        return ran, waited


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
        late_beats: dict[LoopWatch, _Lateness] = {}
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

    def _look(self, watch: LoopWatch, late: float, late_beats: dict[LoopWatch, _Lateness]) -> float:
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
        usage, own = _Usage.of(watch.native_id), _Usage.of(threading.get_native_id())
        sample = _Sample(now, usage, own, _collections(), spot)
        if watch.due != due:  # it has gone on: the stack may be of something else
            return watch.due + GRACE
        if lateness is None:
            late_beats[watch] = _Lateness(due, sample, late > PROMPT)
            self._after_lock(watch, sample, late, None)
            return time.monotonic() + TICK
        self._after_lock(watch, sample, late, lateness.last)
        lateness.take(sample, late)
        still = self._count(watch, lateness)
        return time.monotonic() + (SLOW_TICK if still else TICK)

    def _after_lock(self, watch: LoopWatch, sample: _Sample, late: float, before: _Sample | None) -> None:
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

    def _count(self, watch: LoopWatch, lateness: _Lateness) -> bool:
        """Count what was found; whether it was reported before and lasts."""
        spot = lateness.spot
        if spot is None:
            return False
        watch.add(spot.place, lateness.seconds - lateness.counted)
        lateness.counted = lateness.seconds
        known = _key(spot, computes=lateness.computes) in _reported
        if lateness.seconds >= STILL_BLOCKED:
            self._report(watch, spot, lateness.seconds, computes=lateness.computes, ended=False)
            lateness.forget()  # a stream that never awaits may block in other places too
        return known

    def _end(self, watch: LoopWatch, lateness: _Lateness, resumed: float) -> None:
        if lateness.spot is None:
            return
        rest = min(max(0.0, resumed - lateness.last.time), TICK)  # since the last sample
        watch.add(lateness.spot.place, rest)
        self._report(watch, lateness.spot, lateness.seconds + rest, computes=lateness.computes, ended=True)

    def _report(self, watch: LoopWatch, spot: Spot, seconds: float, *, computes: bool, ended: bool) -> None:
        key = _key(spot, computes=computes)
        if key in _reported:
            return
        _reported.add(key)
        call, advice = describe_call(spot)
        names = sorted({each.dataset for each in self._watches if each.thread == watch.thread} | {watch.dataset})
        _log.warning(
            "%s: %s%s %s the loader's event loop for %.2f s%s, in which nothing else was fetched. Instead, %s. "
            "(One warning for each place.)",
            " or ".join(names),
            spot.place,
            f", in {call}," if call else "",
            "computed on" if computes else "blocked",
            seconds,
            "" if ended else " so far",
            advice_for(advice, computes=computes),
            extra={_PLACE: key},
        )


def is_repeated(record: logging.LogRecord) -> bool:
    """Whether a warning from a loader's process names a place that was reported before, by another one for example."""
    key = record.__dict__.get(_PLACE)
    if not isinstance(key, tuple):
        return False
    known = key in _reported
    _reported.add(key)
    return known


def _key(spot: Spot, *, computes: bool) -> tuple[str, int]:
    """What is reported once: the line of a call, the function that computes on several lines."""
    return spot.place.file, spot.place.first_line if computes else spot.place.line


def _collections() -> int:
    return int(gc.get_stats()[2]["collections"])


watchdog = Watchdog()


def _reset() -> None:
    """A fork has no such thread, and its locks may be held by threads that it lacks."""
    global watchdog
    watchdog = Watchdog()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset)
