"""A search for the best number of fetches in flight, as in congestion control. Pure: time is an argument.

Slow start, then trials up and down, and a decrease by the throttled share. Several engines that
share a store do not see each other: a trial has to win more than a larger share of a store that is
used fully. docs/design/0002 has the reasons.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

MEASURE_SECONDS = 0.1  # seconds over which a rate is measured, at least
# completions of a measurement, in limits, at least: within one latency they come in bursts
MEASURE_TURNS = 2
# by which measurements are shorter during slow start, where the effect of a trial is large
RAMP_UP_FACTOR = 2
MIN_GAIN_DOUBLING = 1.1  # of the rate after a doubling; below it, half the limit is as good
# the same with several engines: above 4/3, which half of a store gives to one of two
MIN_GAIN_DOUBLING_SHARED = 1.4
# of the rate after a doubling; above it, latency limits: fewer fetches would lose rate
LATENCY_BOUND_GAIN = 1.5
# of the limit that has to have ended since a doubling to see such a gain at once
CLEAR_SHARE = 0.75
STEP = 1.5  # by which the limit is changed for a trial after slow start
# of what a trial could win beyond a larger share of a store that is used fully; below it, noise
MIN_GAIN = 0.1
# of what a trial of fewer would lose by a smaller share; below it, the share is too large
MAX_LOSS = 0.75
# seconds without a trial after a decrease or a failed trial; doubled each time
HOLD, LONGEST_HOLD = (1.0, 30.0)
GRACE = 0.5  # seconds after a decrease in which throttling concerns earlier requests
LEAST_DECREASE, MOST_DECREASE = 0.9, 0.5  # factors of the limit
MOST_PEERS = 8  # engines that are counted; with more, a share is not to be distinguished from noise
CLIMB_INTERVAL = 0.5  # seconds between two additions after throttling
CLIMB_STEP = 0.25  # by which the square root of the limit is multiplied for an addition
TRIAL_TIMEOUT = 5.0  # seconds after which a trial is given up that a slow consumer prevents

# Not the module's functions: transforms seed those, and engines with one seed would make their
# trials together.
_dice = random.Random()


class AdaptiveLimit:
    """Finds the number of fetches in flight that a store serves best.

    Times when fewer than `limit` fetches are in flight, because the consumer is slow or memory is
    short, say nothing about the store and do not count.
    """

    def __init__(
        self, start: int, most: int, peers: int = 1, draw: Callable[[], float] = _dice.random
    ) -> None:
        self.limit = min(start, most)  # fetches that may be in flight now; at least 1
        self._most = most
        self._peers = min(peers, MOST_PEERS)  # the engines that read the same store, with this one
        self._draw = draw  # a random number in [0, 1)
        self._base: tuple[int, float] | None = None  # limit and rate before the running trial
        self._doubling = True
        self._throttled = False
        self._up_next = True
        self._hold = HOLD
        self._next_probe_at = 0.0  # the time before which no other number is tried
        self._ignore_throttles_until = 0.0
        self._changed = 0.0
        self._settling = 0
        # time and completions at the start of the measurement
        self._began: tuple[float, int] | None = None
        self._last_totals = (0, 0)

    def update(self, now: float, *, completed: int, throttle_events: int, full: bool) -> int:
        """Record a measurement; call 10 to 100 times a second. Returns the new `limit`.

        Counts are totals; `full` says whether `limit` fetches are in flight and more are queued.
        """
        ended, throttled = completed - self._last_totals[0], throttle_events - self._last_totals[1]
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
        """A new search that starts from this one's result; an unfinished trial of fewer fetches does not count."""
        start = self.limit if self._base is None else max(self.limit, self._base[0])
        other = AdaptiveLimit(start, self._most, self._peers, self._draw)
        other._doubling, other._throttled, other._up_next = (
            self._doubling,
            self._throttled,
            self._up_next,
        )
        other._hold, other._next_probe_at = self._hold, self._next_probe_at
        return other

    def _back_off(self, now: float, ended: int, throttled: int) -> None:
        # In one update a slow store ends few fetches: then the share is of those in flight.
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
        elif rate >= before * (1 - MAX_LOSS * (1 - self._gain_of_share(self.limit / window))):
            # As good with less memory, or a fairer share.
            self._settle_on(self.limit, now, wait=False)
            return
        self._doubling = False
        self._hold = min(LONGEST_HOLD, self._hold * 2)
        self._settle_on(window, now, wait=True)

    def _keep_early(self, now: float, before: float) -> None:
        """Keep a doubling whose gain is clear within one latency, while the fetches from before it end.

        The added fetches end after a whole latency, or later if they connect first, so the rate
        since the change is rather too low. By it no doubling is given up. Fetches from before,
        which may end all at once, are half of them.
        """
        ended = self.limit - self._settling
        rate = ended / (now - self._changed)
        if ended >= CLEAR_SHARE * self.limit and rate >= before * LATENCY_BOUND_GAIN:
            self._evaluate(now, rate)

    def _climb(self, now: float, rate: float) -> None:
        """Add a little: a trial of more fetches in small steps, until the next throttling."""
        window, before = self._base or (self.limit, rate)
        if self.limit >= window * STEP:
            if rate < before * self._least_gain(self.limit / window):
                self._throttled = False  # now something else limits the rate
                self._settle_on(window, now, wait=True)
                return
            window, before = self.limit, rate
        self._next_probe_at = now + CLIMB_INTERVAL
        wanted = min(self._most, self.limit + max(1, round(CLIMB_STEP * math.sqrt(self.limit))))
        if wanted > self.limit:
            self._base = window, before
            self._go_to(wanted, now)

    def _gain_of_share(self, step: float) -> float:
        """The factor of the rate at a store that is used fully, where what one engine wins the others lose."""
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
            wanted = max(self.limit + 1, int(self.limit * STEP)) if up else int(self.limit / STEP)
        wanted = max(1, min(self._most, wanted))
        if wanted == self.limit:
            self._doubling = False
            return
        self._base = (self.limit, rate)
        self._go_to(wanted, now)

    def _settle_on(self, window: int, now: float, *, wait: bool) -> None:
        self._base = None
        self._doubling = self._doubling and not wait
        # A trial of several engines at once does not show what one would win by it.
        jitter = 1.0 if self._peers == 1 else 0.5 + self._draw()
        self._next_probe_at = now + (self._hold * jitter if wait else 0.0)
        self._go_to(window, now)

    def _go_to(self, window: int, now: float) -> None:
        # The fetches in flight at the change must end before the rate at the new limit can be
        # measured.
        self._settling = max(self.limit, window)
        self.limit = window
        self._changed = now
        self._began = None
