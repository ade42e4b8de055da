"""Times of another machine's clock, in terms of this one's."""

from __future__ import annotations

import math

from headrace._core.batches import StageTimes

_MOMENTS = ("admitted", "began", "fetched", "work_began", "work_ended", "assembled")


class RemoteClock:
    """Bounds the difference of two clocks by causes and effects, and corrects times by it.

    A plan arrives there after it was sent here; a batch arrives here after it was made there. Each batch so gives a
    lower and an upper bound of the difference (as in Cristian, "Probabilistic clock synchronization", 1989, with the
    bounds of all exchanges). While no difference is within the bounds, as on one machine, there is none.

    Example:
        >>> clock = RemoteClock()
        >>> there = StageTimes(admitted=1000.1, assembled=1000.3)
        >>> round(clock.translated(there, sent=0.0, received=0.4).admitted, 3)
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

    def translated(self, times: StageTimes, sent: float, received: float) -> StageTimes:
        """Times of a batch by this process's clock.

        Args:
            times: by the other clock.
            sent: when its plan was sent, here.
            received: when it arrived, here.
        """
        if times.admitted:
            self._most = min(self._most, times.admitted - sent)
        if times.assembled:
            self._least = max(self._least, times.assembled - received)
        if not (ahead := self.ahead):
            return times
        moments = {name: getattr(times, name) for name in _MOMENTS}
        return times._replace(**{name: moment - ahead for name, moment in moments.items() if moment})
