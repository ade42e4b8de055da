"""Detection of user code that blocks an engine's event loop.

While a session runs, a callback on the loop (the beat) notes the time every 25 ms. A thread wakes
when a beat is late by 25 ms. Then the thread samples the stack of the loop's thread every 10 ms
until the beat comes. The time between samples counts for the function of user code in which the
samples find the loop. If the process was stopped, or another thread held the GIL, the watchdog
wakes late too: at most 20 ms count for a sample.
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
import traceback
import types
from contextlib import suppress
from pathlib import Path

from headrace._base.cgroup import queued_seconds

BEAT = 0.025  # seconds between beats
GRACE = 0.025  # seconds by which a beat is late when sampling begins
TICK = 0.01  # seconds between samples
# Seconds of a late beat in a function; up to 0.05 pass before the first sample.
REPORTED = 0.08
CLOSING = 1.0  # seconds for the thread to end
WARNING = (
    "%s: %s has blocked the loader's event loop for %.2f s so far, in which nothing else was "
    "fetched. Instead, use an async client, await anyio.sleep(seconds), or await "
    "anyio.to_thread.run_sync(function); do CPU work in transform= (or dataset.map) with "
    "num_workers=. (One warning for each function in a process.)"
)

_HEADRACE = os.path.join(str(Path(__file__).parents[2]), "")
# Importing `sysconfig`: 1.6 ms.
_STANDARD_LIBRARY = os.path.join(os.path.dirname(os.__file__), "")
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_LOOPS = (f"{os.sep}anyio{os.sep}", f"{os.sep}uvloop{os.sep}")
_log = logging.getLogger("headrace")
_reported: set[tuple[str, int]] = set()  # file and first line of each function reported


class LoopWatch:
    """Watch on an engine's loop while sessions run.

    The engine's placement owns the watch, and calls `close`.
    """

    def __init__(self, dataset: str) -> None:
        # Seconds in which user code has blocked the loop so far.
        self.blocked_seconds = 0.0
        # Seconds in which the loop's thread could have computed and had no core. 0.0 if unknown.
        self.queued_seconds = 0.0
        self.place: str | None = None  # line of user code that blocked the loop last
        self.due = math.inf  # time of the next beat; infinite while no session runs
        self._dataset = dataset
        self._thread = 0
        self._sessions = 0
        self._beats: asyncio.TimerHandle | None = None
        self._watchdog: threading.Thread | None = None
        # False ends the thread. Not a Queue: a fork may copy the locks of a Queue while held.
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
        # Seconds of the late beat, by function.
        self._late: dict[types.CodeType, float] = {}

    def begin(self) -> None:
        self._sessions += 1
        if self._sessions == 1:
            self._loop = asyncio.get_running_loop()
            self._thread = threading.get_ident()
            self._beat()
            if self._watchdog is None:
                self._watchdog = threading.Thread(
                    target=self._run, name="headrace-watchdog", daemon=True
                )
                self._watchdog.start()
            self._wake.put(True)

    def end(self) -> None:
        self._sessions -= 1
        if not self._sessions and self._beats is not None:
            self._beats.cancel()
            self._beats = None
            self.due = math.inf

    def close(self) -> None:
        """Stop watching, and end the thread.

        Any thread may call `close`, any number of times. So may the garbage collector.
        """
        self.due = math.inf
        self._wake.put(False)
        thread = self._watchdog
        if (
            thread is not None
            and thread is not threading.current_thread()
            and thread.is_alive()
        ):
            # The watchdog may be in a log handler that waits for this thread.
            thread.join(CLOSING)

    def _beat(self) -> None:
        self._beats = self._loop.call_later(BEAT, self._beat)
        self.queued_seconds = queued_seconds() or self.queued_seconds
        self.due = time.monotonic() + BEAT

    def _run(self) -> None:
        watched, pause, looked = math.inf, None, 0.0
        awake = True
        while awake:
            with suppress(queue.Empty):
                awake = self._wake.get(timeout=pause)
            due, now = self.due, time.monotonic()
            if due != watched:
                self._late.clear()
                watched = due
            pause = None if math.isinf(due) else due + GRACE - now
            if pause is not None and pause <= 0:
                self._sample(due, min(now - looked, 2 * TICK))
                pause, looked = TICK, now

    def _sample(self, due: float, seconds: float) -> None:
        """Add `seconds` to the function in which the loop is."""
        top = sys._current_frames().get(self._thread)
        frame = None if top is None else find_user_code(top)
        # If the loop has gone on, the stack may belong to other code.
        if frame is None or self.due != due:
            return
        code, line = frame.f_code, frame.f_lineno or frame.f_code.co_firstlineno
        before = self._late.get(code, 0.0)
        late = self._late[code] = before + seconds
        if late < REPORTED:
            return
        self.blocked_seconds += seconds if before >= REPORTED else late
        self.place = f"{code.co_filename}:{line} in {code.co_qualname}"
        key = code.co_filename, code.co_firstlineno
        if key not in _reported:
            _reported.add(key)
            _log.warning(WARNING, self._dataset, self.place, late)


def find_user_code(top: types.FrameType) -> types.FrameType | None:
    """Return the frame of user code in a stack, or None.

    The result is the innermost frame of user code. Without user code, the result is the outermost
    frame of an installed package. None if there is neither.
    """
    user: types.FrameType | None = None
    installed: types.FrameType | None = None
    # The whole stack at once: the other thread goes on, and CPython 3.11 may find something else in
    # place of a frame that has ended.
    for frame in [frame for frame, _ in traceback.walk_stack(top)]:
        file = frame.f_code.co_filename
        if file.startswith(_HEADRACE):
            if user or installed:  # the caller of user code
                return user or installed
        elif any(part in file for part in _INSTALLED):
            if not any(part in file for part in _LOOPS):
                installed = frame
        elif not file.startswith(("<frozen ", _STANDARD_LIBRARY)):
            user = user or frame
    return None  # the stack has no code of headrace below user code
