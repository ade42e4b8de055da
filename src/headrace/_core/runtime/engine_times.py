"""The load and the CPU time of several engines, as the batches of each report its own."""

from __future__ import annotations

from headrace._core.batches import FetchLoad, StageTimes

_GROWING = ("engine_cpu", "engine_queued", "blocked", "blocked_before")  # of `StageTimes`: sums since an engine's start


class EngineTimes:
    """What `StageTimes` says of one engine, for all of them: the sum of their loads, the means of their times.

    Args:
        engines: their number.

    Example:
        >>> times = EngineTimes(2)
        >>> times.of_all(0, StageTimes(load=FetchLoad(in_flight=3), engine_cpu=1.0)).engine_cpu
        0.5
        >>> times.of_all(1, StageTimes(load=FetchLoad(in_flight=4), engine_cpu=2.0)).load.in_flight
        7
    """

    def __init__(self, engines: int) -> None:
        self._engines = engines
        self._last: dict[int, StageTimes] = {}  # of the last batch of each engine
        self._of_ended = dict.fromkeys(_GROWING, 0.0)

    def of_all(self, engine: int, times: StageTimes) -> StageTimes:
        """The times of an engine's batch, with the load and the means of all, those that have ended included."""
        self._last[engine] = times
        last = self._last.values()
        means = {
            name: (ended + sum(getattr(each, name) for each in last)) / self._engines
            for name, ended in self._of_ended.items()
        }
        return times._replace(load=FetchLoad(*map(sum, zip(*(each.load for each in last), strict=True))), **means)

    def waits_for_memory(self, engine: int) -> bool:
        """Whether plans of an engine waited for memory at its last batch."""
        last = self._last.get(engine)
        return last is not None and last.load.held_plans > 0

    def end(self, engine: int) -> None:
        """Note that an engine has ended: its load is gone, and its sums are kept."""
        if (last := self._last.pop(engine, None)) is not None:
            for name in _GROWING:
                self._of_ended[name] += getattr(last, name)
