"""What samples of a loop's thread show of one late beat: which user code has blocked the loop, and for how long.

Of each interval between two samples only this counts:

- CPU time of the loop's thread, if both samples are in one step of the loop (the same frame, and no beat between);
- time in which it neither ran nor waited for a core, if it slept at both samples, less the time by which the watchdog
  itself was late without waiting for a core (the process was stopped), and, if it was late at all, less 6 ms for each
  voluntary context switch of the loop's thread: a thread that waits for the GIL wakes every 5 ms
  (`sys.getswitchinterval`), one that sleeps or waits for a socket does not.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace._core.eventloop.stack_places import Place, Spot

GRACE = 0.025  # seconds by which a beat is late when sampling begins
REPORTED = 0.1  # seconds: shorter blocks are not reported
PROVEN = 0.075  # seconds of them that samples must show; the first part passes before the first sample
PROMPT = 0.0025  # seconds by which the watchdog is late at most where no thread holds the GIL for long
GIL_WAIT = 1.2  # switch intervals for each voluntary context switch; timers are late


class ThreadUsage(NamedTuple):
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
    def of(cls, native_id: int) -> ThreadUsage | None:
        """None where the system does not say (it is not Linux), or the thread has ended."""
        try:
            with open(f"/proc/self/task/{native_id}/status", "rb") as file:
                status = file.read()
            with open(f"/proc/self/task/{native_id}/schedstat", "rb") as file:
                ran, queued, _ = map(int, file.read().split())
            switches = int(status.rpartition(b"\nvoluntary_ctxt_switches:")[2].split()[0])
            state = status.partition(b"\nState:")[2].split()[0]
        except (OSError, ValueError, IndexError):  # not Linux, or the thread has ended
            return None
        return cls(ran / 1e9, queued / 1e9, switches, sleeps=state in (b"S", b"D"))


class Sample(NamedTuple):
    time: float
    usage: ThreadUsage | None
    own: ThreadUsage | None  # the watchdog's
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
class Lateness:
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
    last: Sample
    contended: bool
    in_step: dict[Place, _Blocked] = field(default_factory=dict)
    waited: dict[Place, float] = field(default_factory=dict)
    spots: dict[Place, Spot] = field(default_factory=dict)
    spot: Spot | None = None
    computes: bool = False
    seconds: float = 0.0
    counted: float = 0.0

    def take(self, sample: Sample, late: float) -> None:
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

    def _used(self, before: Sample, sample: Sample, late: float) -> tuple[float, float]:
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
