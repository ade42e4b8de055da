"""How many fetches may be in flight: found by trying, as congestion control does. Pure, and told the time.

Growth while the rate grows, by doubling first, is slow start; multiplicative decrease on refusals is Jacobson's
("Congestion Avoidance and Control", 1988). The decrease is in proportion to what was refused: by Little's law, a store
that takes 2,000 of 3,200 requests a second is used fully by 2,000/3,200 of the fetches in flight.
"""

from __future__ import annotations

ROUND = 0.1  # seconds at least over which a rate is measured; some hundred completions, at the rates that matter
PASSES = 2  # how often the whole window is fetched in a round, at least: rates over one latency come in bursts
RAMP_UP_FACTOR = 2  # how many times shorter a round is while the window is doubled: what is looked for then is no tenth
GROWN = 1.1  # by how much the rate must have grown where the window was doubled; short of that, half of it is as good
UNBOUND = 1.5  # what has grown by so much is bound by latency alone: a trial of fewer would lose what it takes away
STEP = 1.5  # by how much the window is changed later, for a trial
BETTER = 1.05  # by how much a trial of more must have raised the rate; less is noise
HOLD, LONGEST_HOLD = 1.0, 30.0  # seconds without a trial, behind a decrease or a trial in vain; doubled each time
GRACE = 0.5  # seconds behind a decrease in which refusals are those of requests that were made before
LEAST_DECREASE, MOST_DECREASE = 0.9, 0.5  # what one decrease leaves
CAUTIOUS_STEP = 1.1  # a trial of more, where the store has refused requests before
PATIENCE = 5.0  # seconds after which a trial that the consumer does not let run is given up


class AdaptiveLimit:
    """Finds the number of fetches in flight that a store serves best.

    It is told totals, again and again, and never looks at a clock. A window that is not full, because the consumer is
    slow or memory is short, says nothing of the store: such times do not count.

    Args:
        start: fetches in flight at first.
        most: fetches in flight at most.

    Attributes:
        limit: how many there may be now; at least 1.

    Example:
        >>> control = AdaptiveLimit(start=8, most=64)
        >>> for tenth in range(12):  # a store that takes any number at once, in 100 ms
        ...     limit = control.update(tenth / 5, completed=tenth * 16, throttle_events=0, full=True)
        >>> control.update(2.4, completed=200, throttle_events=100, full=True) < limit
        True
    """

    def __init__(self, start: int, most: int) -> None:
        self.limit = min(start, most)
        self._most = most
        self._base: tuple[int, float] | None = None  # what the running trial is compared with: window and rate
        self._doubling = True
        self._refused = False
        self._up_next = True
        self._hold = HOLD
        self._next_probe_at = 0.0
        self._ignore_throttles_until = 0.0
        self._changed = 0.0
        self._settling = 0
        self._began: tuple[float, int] | None = None  # the round's first moment, and the total then
        self._told = (0, 0)

    def update(self, now: float, *, completed: int, throttle_events: int, full: bool) -> int:
        """Take note of the state of things; at any times, some ten to a hundred a second.

        Args:
            now: seconds, of any clock that only goes forward.
            completed: fetches that have ended, in all.
            throttle_events: how often a store has asked for fewer requests, or has not answered in time, in all.
            full: whether as many fetches as may be are in flight, and more could be begun.

        Returns:
            The new `limit`.
        """
        ended, refused = completed - self._told[0], throttle_events - self._told[1]
        self._told = (completed, throttle_events)
        if refused > 0:
            if now >= self._ignore_throttles_until:
                self._back_off(now, ended, refused)
            return self.limit
        if not full:
            self._began = None
            if self._base is not None and now - self._changed > PATIENCE:
                self._settle_on(self._base[0], now, wait=True)
            return self.limit
        self._settling -= ended
        if self._began is None:
            if self._settling <= 0:
                self._began = (now, completed)
            return self.limit
        since, before = self._began
        haste = RAMP_UP_FACTOR if self._doubling else 1
        if now - since >= ROUND / haste and completed - before >= PASSES * self.limit / haste:
            self._began = None
            self._judge(now, (completed - before) / (now - since))
        return self.limit

    def successor(self) -> AdaptiveLimit:
        """One that begins with what this one has found; an unfinished trial of fewer does not count."""
        other = AdaptiveLimit(self.limit if self._base is None else max(self.limit, self._base[0]), self._most)
        other._doubling, other._refused, other._up_next = self._doubling, self._refused, self._up_next
        other._hold, other._next_probe_at = self._hold, self._next_probe_at
        return other

    def _back_off(self, now: float, ended: int, refused: int) -> None:
        kept = min(LEAST_DECREASE, max(MOST_DECREASE, ended / (ended + refused)))
        target = max(1, int(self.limit * kept))
        if self._refused and self._base is not None and self._base[0] < self.limit:
            target = self._base[0]  # the trial was refused, and what was before it was not
        self._hold = min(LONGEST_HOLD, self._hold * 2) if self._refused else HOLD
        self._refused = True
        self._ignore_throttles_until = now + GRACE
        self._settle_on(target, now, wait=True)

    def _judge(self, now: float, rate: float) -> None:
        if self._base is None:
            if now >= self._next_probe_at:
                self._try_another(now, rate)
            return
        window, before = self._base
        if self.limit > window:
            if rate >= before * (GROWN if self._doubling else 1.0 + (BETTER - 1.0) * self._share_of_step(window)):
                self._base = None
                self._hold = HOLD
                if self._doubling and self.limit < self._most:
                    self._try_another(now, rate)
                elif self._doubling and rate >= before * UNBOUND:
                    self._next_probe_at = now + LONGEST_HOLD
                return
        elif rate >= before:  # fewer do as well: less memory, and a store less burdened
            self._settle_on(self.limit, now, wait=False)
            return
        self._doubling = False
        self._hold = min(LONGEST_HOLD, self._hold * 2)
        self._settle_on(window, now, wait=True)

    def _share_of_step(self, window: int) -> float:
        return min(1.0, (self.limit / window - 1.0) / (STEP - 1.0))

    def _try_another(self, now: float, rate: float) -> None:
        if self._doubling:
            wanted = self.limit * 2
        else:
            up, self._up_next = self._up_next, not self._up_next
            step = CAUTIOUS_STEP if self._refused else STEP
            wanted = max(self.limit + 1, int(self.limit * step)) if up else int(self.limit / step)
        wanted = max(1, min(self._most, wanted))
        if wanted == self.limit:
            self._doubling = False
            return
        self._base = (self.limit, rate)
        self._go_to(wanted, now)

    def _settle_on(self, window: int, now: float, *, wait: bool) -> None:
        self._base = None
        self._doubling = self._doubling and not wait
        self._next_probe_at = now + (self._hold if wait else 0.0)
        self._go_to(window, now)

    def _go_to(self, window: int, now: float) -> None:
        # What was in flight before the change has to end before the new window's rate can be seen.
        self._settling = max(self.limit, window)
        self.limit = window
        self._changed = now
        self._began = None
