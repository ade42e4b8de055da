"""Times and processes of another machine, in terms of this one's."""

from __future__ import annotations

import math

import numpy as np

from headrace._core.batches import FetchTimes, StageTimes

_MOMENTS = ("admitted", "began", "fetched", "work_began", "work_ended", "assembled")
_PIDS = 1 << 22  # the most of a Linux machine


class RemoteClock:
    """Bounds the difference of two clocks by causes and effects, and corrects times by it.

    A plan arrives there after it was sent here; a batch arrives here after it was made there. Each batch so gives a
    lower and an upper bound of the difference (as in Cristian, "Probabilistic clock synchronization", 1989, with the
    bounds of all exchanges). While no difference is within the bounds, as on one machine, there is none.

    Example:
        >>> clock = RemoteClock()
        >>> there = StageTimes(admitted=1000.1, assembled=1000.3)
        >>> clock.bound(there, sent=0.0, received=0.4)
        >>> round(clock.stages(there).admitted, 3)
        0.1
    """

    def __init__(self) -> None:
        self._least, self._most = -math.inf, math.inf  # of their clock, less ours

    @property
    def ahead(self) -> float:
        """By how many seconds the other clock is ahead of this one; 0.0 if it may be the same clock."""
        if self._least <= 0.0 <= self._most:
            return 0.0
        return (self._least + self._most) / 2

    def bound(self, times: StageTimes, sent: float, received: float) -> None:
        """Note the times of a batch by the other clock, and when its plan was sent and it was received by this one."""
        if times.admitted:
            self._most = min(self._most, times.admitted - sent)
        if times.assembled:
            self._least = max(self._least, times.assembled - received)

    def stages(self, times: StageTimes) -> StageTimes:
        """Times of a batch, by this process's clock."""
        if not (ahead := self.ahead):
            return times
        moments = {name: getattr(times, name) for name in _MOMENTS}
        return times._replace(**{name: moment - ahead for name, moment in moments.items() if moment})

    def fetches(self, fetches: FetchTimes | None) -> FetchTimes | None:
        """Times of single fetches, by this process's clock."""
        if fetches is None or not (ahead := self.ahead):
            return fetches
        rows = np.frombuffer(fetches.rows).reshape(-1, 4) - (0.0, 0.0, ahead, ahead)
        return fetches._replace(rows=rows.tobytes())


def distinct_pid(pid: int, engine: int) -> int:
    """A number for a process on another node that no process of this one has, nor one of another engine's node."""
    return pid + (engine + 1) * _PIDS
