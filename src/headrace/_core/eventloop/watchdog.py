"""Detection of user code that blocks an engine's event loop.

While a session runs, a callback on the loop (the beat) notes the time every 25 ms. A thread wakes when
a beat is late by 25 ms, and samples the stack of the loop's thread every 10 ms until the beat comes. A late beat alone
is no evidence: the process may have been stopped, other processes may use the cores, or another thread may hold
the GIL. Of the time between two samples in one function of user code, only two things count:

- CPU time of the loop's thread, in one step of the loop (the same frame, and no beat between);
- all of the time, if the thread slept at both samples, and the watchdog woke on time. A watchdog that has to wait
  for the GIL wakes late.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import queue
import sys
import threading
import time
import types
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

BEAT = 0.025  # seconds between beats
GRACE = 0.025  # seconds by which a beat is late when sampling begins
TICK = 0.01  # seconds between samples
STILL_BLOCKED = 1.0  # seconds after which a block is reported before it has ended
REPORTED = 0.1  # seconds: shorter blocks are not reported
PROVEN = 0.075  # seconds of them that samples must show; the first part passes before the first sample
PROMPT = 0.004  # seconds by which the watchdog is late at most where no thread holds the GIL, for 5 ms at least
WARNING = (
    "%s: %s blocked the loader's event loop for %.2f s%s, in which nothing else was fetched. Instead, use an async "
    "client, await anyio.sleep(seconds), or await anyio.to_thread.run_sync(function); do CPU work in transform= (or "
    "dataset.map) with num_workers=. (One warning for each function in a process.)"
)

_HEADRACE = os.path.join(str(Path(__file__).parents[2]), "")
_STANDARD_LIBRARY = os.path.join(os.path.dirname(os.__file__), "")  # `sysconfig` takes 1.6 ms to import
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_LOOPS = (f"{os.sep}anyio{os.sep}", f"{os.sep}uvloop{os.sep}")
_OWN_TIMES = Path("/proc/thread-self/schedstat")  # nanoseconds on a core, and waiting for one
_log = logging.getLogger("headrace")
_reported: set[tuple[str, int]] = set()  # file and first line of a function: one report for each


class Spot(NamedTuple):
    """User code on a sampled stack: the innermost function and its line, and the outermost frame of this step."""

    code: types.CodeType
    line: int
    step: types.FrameType


class Sample(NamedTuple):
    """The loop's thread at one moment: its stack, and what it has done since it started."""

    time: float
    spot: Spot | None
    ran: float  # seconds on a core; 0 if unknown
    sleeps: bool  # whether the thread waits for something else than a core


def _usage(native_id: int) -> tuple[float, bool]:
    """`Sample.ran` and `Sample.sleeps` of a thread of this process."""
    try:
        ran = Path(f"/proc/self/task/{native_id}/schedstat").read_bytes().split()[0]
        state = Path(f"/proc/self/task/{native_id}/stat").read_bytes().rpartition(b")")[2].split()[0]
        return int(ran) / 1e9, state in (b"S", b"D")
    except (OSError, ValueError, IndexError):  # not Linux, or the thread has ended
        return 0.0, False


@dataclass(slots=True)
class Block:
    """Seconds for which a function has blocked the loop during one late beat."""

    spot: Spot
    seconds: float = 0.0
    counted: float = 0.0  # of them, in `LoopWatch.blocked_seconds`


class LoopWatch:
    """Watches the loop of one engine while its sessions run. The engine's placement owns it, and calls `close`."""

    def __init__(self, dataset: str) -> None:
        self.blocked_seconds = 0.0  # for which user code is known to have blocked the loop so far
        self.queued_seconds = 0.0  # for which its thread could have computed and had no core; 0.0 if that is unknown
        self.place: str | None = None  # the line of user code that has blocked it longest
        self.due = math.inf  # time of the next beat; infinite while no session runs
        self._dataset = dataset
        self._thread = self._native_id = 0
        self._sessions = 0
        self._beats: asyncio.TimerHandle | None = None
        self._watchdog: threading.Thread | None = None
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()  # False: it is to end; without locks, for forks
        self._by_code: dict[types.CodeType, float] = {}
        # Of a late beat, on the watchdog's thread:
        self._late: float | None = None  # when it was due
        self._blocks: dict[types.CodeType, Block] = {}
        self._last: Sample

    def begin(self) -> None:
        self._sessions += 1
        if self._sessions == 1:
            self._loop = asyncio.get_running_loop()
            self._thread, self._native_id = threading.get_ident(), threading.get_native_id()
            self._beat()
            if self._watchdog is None:
                self._watchdog = threading.Thread(target=self._run, name="headrace-watchdog", daemon=True)
                self._watchdog.start()
            self._wake.put(True)

    def end(self) -> None:
        self._sessions -= 1
        if not self._sessions and self._beats is not None:
            self._beats.cancel()
            self._beats = None
            self.due = math.inf

    def close(self) -> None:
        """Stop watching, and end the thread; from any thread, any number of times, by the garbage collector too."""
        self.due = math.inf
        self._wake.put(False)
        thread = self._watchdog
        if thread is not None and thread is not threading.current_thread() and thread.is_alive():
            thread.join(STILL_BLOCKED)  # it may be in a log handler that waits for this thread

    def _run(self) -> None:
        planned = time.monotonic()
        while True:
            timeout = None if math.isinf(planned) else max(0.0, planned - time.monotonic())
            with suppress(queue.Empty):
                if not self._wake.get(timeout=timeout):
                    break
                planned = time.monotonic()
            planned = self._look(max(0.0, time.monotonic() - planned))
        self._finish(time.monotonic())

    def _beat(self) -> None:
        self._beats = self._loop.call_later(BEAT, self._beat)
        with suppress(OSError, IndexError):  # not Linux, or no descriptor is left
            self.queued_seconds = int(_OWN_TIMES.read_bytes().split()[1]) / 1e9
        self.due = time.monotonic() + BEAT

    def _look(self, late: float) -> float:
        """Sample the stack if the beat is late; returns the time of the next look.

        On the watchdog's thread, which is itself so many seconds late.
        """
        due, now = self.due, time.monotonic()
        if self._late is not None and self._late != due:
            self._finish(min(due - BEAT, now))
        if now < due + GRACE:
            return due + GRACE
        top = sys._current_frames().get(self._thread)
        if top is None:  # its loop has died
            self.due = math.inf
            return math.inf
        sample = Sample(now, find_user_code(top), *_usage(self._native_id))
        del top
        if self.due != due:  # it has gone on: the stack may be of something else
            return self.due + GRACE
        if self._late is not None:
            self._add(self._last, sample, late, now - due)
        self._last, self._late = sample, due
        return time.monotonic() + TICK

    def _add(self, before: Sample, sample: Sample, late: float, since: float) -> None:
        """Add what two samples show to the block of their function, if they are of one; the beat is `since` due."""
        spot = sample.spot
        if spot is None or before.spot is None or spot.code is not before.spot.code:
            return
        computed = sample.ran - before.ran if spot.step is before.spot.step else 0.0
        asleep = before.sleeps and sample.sleeps and late < PROMPT
        block = self._blocks.setdefault(spot.code, Block(spot))
        block.spot = spot
        block.seconds += sample.time - before.time - late if asleep else computed
        if block.seconds >= PROVEN and since >= REPORTED:
            self._count(block, " so far" if block.seconds >= STILL_BLOCKED else None)

    def _finish(self, resumed: float) -> None:
        """The late beat has come, or will never come: warn of what has blocked it."""
        late, self._late, blocks, self._blocks = self._late, None, self._blocks, {}
        worst = max(blocks.values(), key=lambda each: each.seconds, default=None)
        if late is not None and worst is not None and worst.seconds >= PROVEN and resumed - late >= REPORTED:
            self._count(worst, "")

    def _count(self, block: Block, so_far: str | None) -> None:
        """Count the seconds of a block; with the words `so_far`, warn of it too, once for each function."""
        code, more = block.spot.code, block.seconds - block.counted
        block.counted = block.seconds
        self.blocked_seconds += more
        self._by_code[code] = self._by_code.get(code, 0.0) + more
        place = f"{code.co_filename}:{block.spot.line} in {code.co_qualname}"
        if self._by_code[code] == max(self._by_code.values()):
            self.place = place
        key = code.co_filename, code.co_firstlineno
        if so_far is not None and key not in _reported:
            _reported.add(key)
            _log.warning(WARNING, self._dataset, place, block.seconds, so_far)


def find_user_code(top: types.FrameType) -> Spot | None:
    """The user code of a stack, or the code of an installed package if there is none; None if there is neither."""
    user: list[types.FrameType] = []
    installed: list[types.FrameType] = []
    frame: types.FrameType | None = top
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_HEADRACE):
            if user or installed:  # the caller of user code
                break
        elif any(part in file for part in _INSTALLED):
            if not any(part in file for part in _LOOPS):
                installed = [frame]
        elif not file.startswith(("<frozen ", _STANDARD_LIBRARY)):
            user.append(frame)
        frame = frame.f_back
    if frame is None or not (user or installed):  # no loop of ours is below it
        return None
    frames = user or installed
    return Spot(frames[0].f_code, frames[0].f_lineno or frames[0].f_code.co_firstlineno, frames[-1])
