"""The share of the time that a loop would wait if one stage of its loader were faster.

The loop computes for `u` seconds for each batch, and `next()` takes `c` seconds for a batch that is ready. If batches
come each `P` seconds, one step takes `max(P, u + c)`. A faster stage does not bring `P` below what the others allow:
their floor is known for the event loop's thread (its CPU time for a batch) and for the workers.
"""

from __future__ import annotations

from headrace.telemetry.figures import Figures
from headrace.telemetry.limits import Setup

__all__ = ["HEADROOM", "MOST", "Model"]

HEADROOM = 1.2  # of a change beyond what is needed
MOST = 16.0  # times as fast: no change beyond that is advised at once


class Model:
    """Predicts the waiting from the figures of an iteration.

    Args:
        figures: the figures.
        setup: the loader's arguments.
    """

    def __init__(self, figures: Figures, setup: Setup) -> None:
        self._figures = figures
        self.period = figures.period
        self.compute = figures.compute
        self.in_call = 0.0 if setup.placement == "inline" else figures.in_call_seconds
        workers = setup.num_workers if not figures.in_call else 0
        self.floor = max(
            figures.engine_cpu * figures.period,
            figures.mean_work_seconds / workers if workers else 0.0,
        )

    def needed(self, *, floor: float | None = None) -> float:
        """By how much the limiting stage has to be faster so that it is no longer the limit, with some to spare."""
        target = max(self.compute + self.in_call, self.floor if floor is None else floor, self.period / 100)
        return min(MOST, HEADROOM * self.period / target)

    def after(self, factor: float, *, floor: float | None = None) -> float:
        """The wait share if the limiting stage were faster by a factor."""
        return self.at_period(self.period / factor, floor=floor)

    def at_period(self, period: float, *, floor: float | None = None, in_call: float | None = None) -> float:
        """The wait share if batches came each so many seconds, and `next()` took `in_call` for those that are ready."""
        call = self.in_call if in_call is None else in_call
        step = max(period, self.floor if floor is None else floor, self.compute + call)
        return max(0.0, 1.0 - self.compute / step) if step else 0.0

    def without(self, *steps: str) -> float:
        """The wait share without the waiting for some steps."""
        figures = self._figures
        gone = sum(figures.waits.get(step, 0.0) for step in steps)
        return max(0.0, figures.waited - gone) / max(1e-9, figures.seconds - gone)
