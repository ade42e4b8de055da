"""The search for the number of fetches in flight that a store serves best; it knows nothing of stores or time."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence

from headrace.cli.bench.trials import Trial

__all__ = ["Search"]

FIRST = 4  # fetches in flight of the first trial; fewer are tried only if that is the best
GAIN = 1.1  # of the rate by a doubling; below it twice, the end of growth is found
THROTTLED = 0.1  # share of throttled requests from which no more are tried, unless the rate has grown
SAME = 0.97  # of the best rate: settings above are as good, and the smallest of them is taken
CLOSE = 0.85  # of the best rate, in a single trial, from which a setting may be as good
STEPS = (2**0.5, 2**0.25)  # between settings, around the best one after the doublings
FEWEST_FINALISTS, FINALISTS = 4, 5
FEWEST_ROUNDS, ROUNDS = 3, 5

Measure = Callable[[int, float], Awaitable[Trial]]


class Search:
    """Doubles while the rate grows, tries settings between, and repeats the best ones in turn.

    Args:
        measure: makes a trial, given the fetches in flight and the seconds to measure.
        most: the highest number of fetches in flight.
        seconds_left: the time left for all trials.

    Attributes:
        trials: all trials, in their order.
        repeated: those of the last stage, by the number of fetches in flight.
        complete: whether each stage had the time that it needs.
    """

    def __init__(self, measure: Measure, most: int, seconds_left: Callable[[], float]) -> None:
        self._measure = measure
        self._most = most
        self._seconds_left = seconds_left
        self._total = seconds_left()
        self.trials: list[Trial] = []
        self.repeated: dict[int, list[Trial]] = {}
        self.complete = True
        self._extra: dict[int, float] = {}  # seconds of a setting's last trial besides those that were asked for
        self._finalists_count = 0

    @property
    def best(self) -> int | None:
        """The smallest setting that is as good as any, by the medians of its trials; None before the first."""
        medians = self.medians()
        top = max(medians.values(), default=0.0)
        return min((setting for setting, rate in medians.items() if top and rate >= SAME * top), default=None)

    def medians(self) -> dict[int, float]:
        """The median rate of each setting: of the last stage, once each of its settings was repeated."""
        return {setting: statistics.median_low(trial.rate for trial in trials) for setting, trials in self._counted()}

    def of(self, setting: int) -> Sequence[Trial]:
        """The trials that count for a setting."""
        return dict(self._counted()).get(setting, ())

    def count(self, setting: int) -> int:
        """The number of trials that count for a setting, or that it had in earlier stages."""
        return len(self.of(setting)) or sum(trial.concurrency == setting for trial in self.trials)

    def range(self, setting: int) -> tuple[float, float]:
        """The lowest and the highest rate of a setting."""
        rates = [trial.rate for trial in self.of(setting)]
        return min(rates), max(rates)

    async def run(self) -> None:
        """Search; may be cancelled, and has its results so far."""
        await self._double()
        await self._confirm()
        for step in STEPS:
            await self._narrow(step)
        await self._repeat()

    def _counted(self) -> list[tuple[int, list[Trial]]]:
        rounds = min(map(len, self.repeated.values()), default=0)  # without one that was not completed
        if rounds >= 2 and len(self.repeated) == self._finalists_count:
            return [(setting, trials[:rounds]) for setting, trials in self.repeated.items()]
        found: dict[int, list[Trial]] = defaultdict(list)
        for trial in self.trials:
            if not trial.failed:
                found[trial.concurrency].append(trial)
        return list(found.items())

    async def _try(self, setting: int, seconds: float) -> Trial:
        before = self._seconds_left()
        trial = await self._measure(setting, seconds)
        self._extra[setting] = before - self._seconds_left() - seconds
        self.trials.append(trial)
        return trial

    async def _double(self) -> None:
        """Double until the rate has not grown twice, within half of the time."""
        seconds = min(1.0, self._total / 60)
        top, stalled, setting = 0.0, 0, min(FIRST, self._most)
        while self._seconds_left() > self._total / 2:
            trial = await self._try(setting, seconds)
            grew = trial.rate >= GAIN * top
            stalled = 0 if grew else stalled + 1
            top = max(top, trial.rate)
            if trial.failed or stalled == 2 or (trial.throttled_share > THROTTLED and not grew):
                break
            if setting == self._most:
                break
            setting = min(self._most, setting * 2)
        else:
            self.complete = False
        setting = min(FIRST, self._most)
        while self.best == setting and setting > 1 and self._seconds_left() > self._total / 2:
            setting //= 2
            await self._try(setting, seconds)

    async def _confirm(self) -> None:
        """Repeat the best one, so that the search does not continue around one that was lucky."""
        for _ in range(2):
            best = self.best
            if best is None or self._seconds_left() < self._total / 3:
                return
            first = self.medians()[best]
            again = await self._try(best, min(1.0, self._total / 60))
            if CLOSE <= again.rate / first <= 1 / CLOSE:
                return

    async def _narrow(self, step: float) -> None:
        """Try the settings one step above and below the best one, and again if one of them is better."""
        for _ in range(2):
            best = self.best
            tried = {trial.concurrency for trial in self.trials}
            for setting in (round(best / step), round(best * step)) if best is not None else ():
                if 1 <= setting <= self._most and setting not in tried:
                    if self._seconds_left() < self._total / 3:
                        self.complete = False
                        return
                    await self._try(setting, min(1.0, self._total / 60))
            if self.best == best:
                return

    async def _repeat(self) -> None:
        """Measure the best settings several times in turn, so that what disturbs the machine disturbs all of them."""
        finalists = self._finalists()
        self._finalists_count = len(finalists)
        if not finalists:
            return
        extra = sum(self._extra[setting] for setting in finalists)  # seconds of a round besides those that are measured
        spare = self._seconds_left() / ROUNDS - extra
        seconds = min(2.0, max(0.3, spare / len(finalists)))
        for number in range(ROUNDS):
            for setting in finalists if number % 2 == 0 else reversed(finalists):
                if self._seconds_left() < seconds + self._extra[setting]:
                    self.complete = self.complete and number >= FEWEST_ROUNDS
                    return
                self.repeated.setdefault(setting, []).append(await self._try(setting, seconds))

    def _finalists(self) -> list[int]:
        """The smallest good setting and its neighbours, and those with the highest rates: some may have been lucky."""
        medians, best = self.medians(), self.best
        if best is None:
            return []
        settings = sorted(medians)
        position = settings.index(best)
        fastest = sorted(settings, key=medians.__getitem__, reverse=True)
        first = [fastest[0], *settings[max(0, position - 1) : position + 2]]
        close = [setting for setting in fastest if medians[setting] >= CLOSE * medians[fastest[0]]]
        wanted = dict.fromkeys([*first, *close, *fastest[:FEWEST_FINALISTS]])
        return sorted([*wanted][:FINALISTS])
