"""Search for the best number of fetches in flight.

As in congestion control, the search begins with slow start. Trials of more and of fewer fetches
follow. After throttling, the limit decreases by the share of throttled requests. The code is pure:
time is an argument.

Several engines may share a store and do not see each other. If the store is fully used, an engine
wins a larger share by any increase. A trial therefore has to win more. The reasons are in
docs/design/0002.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable

MEASURE_SECONDS = 0.1  # minimum duration of a measurement
# Minimum number of completions in a measurement, as a multiple of the limit. Completions come in
# bursts within a latency.
MEASURE_TURNS = 2
# Divisor of both minimums during slow start, where the effect of a trial is large.
RAMP_UP_FACTOR = 2
# Minimum factor of the rate for a doubling. Below this factor, half the limit is as good.
MIN_GAIN_DOUBLING = 1.1
# The same with several engines. Above 4/3: if two engines share a store, a doubling multiplies the
# engine's rate by 4/3.
MIN_GAIN_DOUBLING_SHARED = 1.4
# If a doubling gains this factor, latency limits the rate: fewer fetches would lose rate.
LATENCY_BOUND_GAIN = 1.5
# Share of the limit to complete after a doubling, before `LATENCY_BOUND_GAIN` counts at once.
CLEAR_SHARE = 0.75
STEP = 1.5  # factor of the limit for a trial after slow start
# Minimum gain of a trial, as a share of the possible gain beyond a larger share of a fully used
# store. A smaller gain may be noise.
MIN_GAIN = 0.1
# Maximum loss of a trial of fewer fetches, as a share of the loss by a smaller share of a fully
# used store. If the loss is smaller, the current share is too large.
MAX_LOSS = 0.75
# Seconds without a trial after a decrease or a failed trial, doubled after each failed trial.
HOLD, LONGEST_HOLD = (1.0, 30.0)
# Seconds after a decrease: throttling in this time concerns earlier requests.
GRACE = 0.5
LEAST_DECREASE, MOST_DECREASE = 0.9, 0.5  # factors of the limit
# Maximum number of counted engines; with more engines, a share is lost in noise.
MOST_PEERS = 8
CLIMB_INTERVAL = 0.5  # seconds between two increases after throttling
# An increase after throttling, as a multiple of the square root of the limit.
CLIMB_STEP = 0.25
# Seconds until a trial is given up, if a slow consumer prevents the trial.
TRIAL_TIMEOUT = 5.0

# A separate generator. Transforms seed the functions of the module `random`, and engines with the
# same seed would make trials together.
_dice = random.Random()


class AdaptiveLimit:
    """Finds the best number of fetches in flight for a store.

    If the consumer is slow or memory is short, fewer than `limit` fetches are in flight. Such times
    say nothing about the store and do not count.
    """

    def __init__(
        self,
        start: int,
        most: int,
        peers: int = 1,
        draw: Callable[[], float] = _dice.random,
    ) -> None:
        self.limit = min(start, most)  # allowed fetches in flight; at least 1
        self._most = most
        # Number of engines on the same store, including this engine.
        self._peers = min(peers, MOST_PEERS)
        self._draw = draw  # returns a random number in [0, 1)
        # Limit and rate before the running trial.
        self._base: tuple[int, float] | None = None
        self._doubling = True
        self._throttled = False
        self._up_next = True
        self._hold = HOLD
        self._next_probe_at = 0.0  # time of the next possible trial
        self._ignore_throttles_until = 0.0
        self._changed = 0.0
        self._settling = 0
        # Time and completions at the start of the measurement.
        self._began: tuple[float, int] | None = None
        self._last_totals = (0, 0)

    def update(
        self, now: float, *, completed: int, throttle_events: int, full: bool
    ) -> int:
        """Record a measurement, and return the new `limit`.

        Call 10 to 100 times a second.

        Args:
            now: The time in seconds.
            completed: Total of completed fetches.
            throttle_events: Total of throttled requests.
            full: Whether `limit` fetches are in flight and more fetches are queued.
        """
        ended, throttled = (
            completed - self._last_totals[0],
            throttle_events - self._last_totals[1],
        )
        self._last_totals = (completed, throttle_events)
        if throttled > 0:
            if now >= self._ignore_throttles_until:
                self._back_off(now, ended, throttled)
            return self.limit
        if not full:
            self._began = None
            if self._base is not None and now - self._changed > TRIAL_TIMEOUT:
                self._settle_on(self._base[0], now, wait=True)
            return self.limit
        self._settling -= ended
        if self._began is None:
            if self._settling <= 0:
                self._began = (now, completed)
            if self._doubling and self._base is not None:
                self._keep_early(now, self._base[1])
            return self.limit
        since, before = self._began
        haste = RAMP_UP_FACTOR if self._doubling else 1
        if (
            now - since >= MEASURE_SECONDS / haste
            and completed - before >= MEASURE_TURNS * self.limit / haste
        ):
            self._began = None
            self._evaluate(now, (completed - before) / (now - since))
        return self.limit

    def successor(self) -> AdaptiveLimit:
        """Return a new search that starts from this result.

        An unfinished trial of fewer fetches does not count.
        """
        other = copy.copy(self)
        if self._base is not None:
            other.limit = max(self.limit, self._base[0])
        other._base = other._began = None
        other._settling, other._last_totals = 0, (0, 0)
        return other

    def _back_off(self, now: float, ended: int, throttled: int) -> None:
        # A slow store ends few fetches in an update. Then take the share of the fetches in flight.
        well = max(ended, self.limit - throttled)
        kept = min(LEAST_DECREASE, max(MOST_DECREASE, well / (well + throttled)))
        target = max(1, int(self.limit * kept))
        self._hold = HOLD
        self._throttled = True
        self._ignore_throttles_until = now + GRACE
        self._settle_on(target, now, wait=True)

    def _evaluate(self, now: float, rate: float) -> None:
        if self._throttled:
            if now >= self._next_probe_at:
                self._climb(now, rate)
            return
        if self._base is None:
            if now >= self._next_probe_at:
                self._try_another(now, rate)
            return
        window, before = self._base
        if self.limit > window:
            if rate >= before * self._least_gain(self.limit / window):
                self._base = None
                self._hold = HOLD
                if self._doubling and self.limit < self._most:
                    self._try_another(now, rate)
                elif self._doubling and rate >= before * LATENCY_BOUND_GAIN:
                    self._next_probe_at = now + LONGEST_HOLD
                return
        elif rate >= before * (
            1 - MAX_LOSS * (1 - self._gain_of_share(self.limit / window))
        ):
            # The rate is as good with less memory, or the share of the store is fairer.
            self._settle_on(self.limit, now, wait=False)
            return
        self._doubling = False
        self._hold = min(LONGEST_HOLD, self._hold * 2)
        self._settle_on(window, now, wait=True)

    def _keep_early(self, now: float, before: float) -> None:
        """Keep a doubling early, if the gain is already clear.

        The gain may be clear within a latency, while fetches from before the doubling end. Half of
        the fetches are from before the doubling, and may end all at once. Added fetches end after a
        whole latency, or later if a connection is made first. The rate since the doubling is
        therefore rather too low, so a doubling is never given up because of this rate.
        """
        ended = self.limit - self._settling
        rate = ended / (now - self._changed)
        if ended >= CLEAR_SHARE * self.limit and rate >= before * LATENCY_BOUND_GAIN:
            self._evaluate(now, rate)

    def _climb(self, now: float, rate: float) -> None:
        """Add a few fetches, until the next throttling.

        A trial of more fetches in small steps.
        """
        window, before = self._base or (self.limit, rate)
        if self.limit >= window * STEP:
            if rate < before * self._least_gain(self.limit / window):
                self._throttled = False  # now something else limits the rate
                self._settle_on(window, now, wait=True)
                return
            window, before = self.limit, rate
        self._next_probe_at = now + CLIMB_INTERVAL
        wanted = min(
            self._most, self.limit + max(1, round(CLIMB_STEP * math.sqrt(self.limit)))
        )
        if wanted > self.limit:
            self._base = window, before
            self._go_to(wanted, now)

    def _gain_of_share(self, step: float) -> float:
        """Return the factor of the rate for a changed share.

        If the store is fully used, a gain of this engine is a loss of other engines.
        """
        return step * self._peers / (self._peers - 1 + step)

    def _least_gain(self, step: float) -> float:
        if self._doubling:
            return MIN_GAIN_DOUBLING if self._peers == 1 else MIN_GAIN_DOUBLING_SHARED
        share = self._gain_of_share(step)
        return share + MIN_GAIN * (step - share)

    def _try_another(self, now: float, rate: float) -> None:
        if self._doubling:
            wanted = self.limit * 2
        else:
            up, self._up_next = self._up_next, not self._up_next
            wanted = (
                max(self.limit + 1, int(self.limit * STEP))
                if up
                else int(self.limit / STEP)
            )
        wanted = max(1, min(self._most, wanted))
        if wanted == self.limit:
            self._doubling = False
            return
        self._base = (self.limit, rate)
        self._go_to(wanted, now)

    def _settle_on(self, window: int, now: float, *, wait: bool) -> None:
        self._base = None
        self._doubling = self._doubling and not wait
        # If several engines make trials at once, no engine can measure the gain of its own trial.
        jitter = 1.0 if self._peers == 1 else 0.5 + self._draw()
        self._next_probe_at = now + (self._hold * jitter if wait else 0.0)
        self._go_to(window, now)

    def _go_to(self, window: int, now: float) -> None:
        # The fetches in flight at the change must end before a measurement at the new limit.
        self._settling = max(self.limit, window)
        self.limit = window
        self._changed = now
        self._began = None
