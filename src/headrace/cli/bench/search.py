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
SAME, SAME_WITH_NOISE = 0.97, 0.92  # of the best rate: settings above are as good, and the smallest of them is taken
CLOSE = 0.85  # of the best rate; two trials differ by as much on a busy machine
STEPS = (2**0.5, 2**0.25)  # between settings, around the best one after the doublings
POSSIBLE = 0.5  # of the best rate, in a single trial, from which a setting is repeated
FINALISTS, FEWEST_ROUNDS, ROUNDS = 6, 3, 8

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
        self._candidates: list[int] = []

    @property
    def best(self) -> int | None:
        """The smallest setting that is as good as any, by the medians of its trials; None before the first."""
        medians = self.medians()
        top = max(medians.values(), default=0.0)
        same = top * self._same()
        return min((setting for setting, rate in medians.items() if top and rate >= same), default=None)

    def _same(self) -> float:
        """The part of the best rate from which a setting is as good: less where trials of one setting differ."""
        errors = [
            (max(rates) - min(rates)) / statistics.median(rates) / (2 * len(rates) ** 0.5)
            for _, trials in self._counted()
            if len(rates := [trial.rate for trial in trials if trial.rate]) > 2
        ]
        return max(SAME_WITH_NOISE, min(SAME, 1.0 - statistics.median(errors))) if errors else SAME

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
        last = [(setting, self.repeated.get(setting, [])) for setting in self._candidates]
        rounds = min((len(trials) for _, trials in last), default=0)  # without one that was not completed
        if rounds >= 2:
            return [(setting, trials[:rounds]) for setting, trials in last]
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
        self._candidates = self._finalists()
        for number in range(ROUNDS):
            if not self._candidates:
                return
            extra = sum(self._extra[setting] for setting in self._candidates)
            spare = self._seconds_left() / (ROUNDS - number) - extra
            seconds = min(2.0, max(0.3, spare / len(self._candidates)))
            for setting in self._candidates if number % 2 == 0 else reversed(self._candidates):
                if self._seconds_left() < seconds + self._extra[setting]:
                    self.complete = self.complete and number >= FEWEST_ROUNDS
                    return
                self.repeated.setdefault(setting, []).append(await self._try(setting, seconds))
            if number:
                self._drop_slow()

    def _drop_slow(self) -> None:
        """Repeat no more those that are slower than the best one in all their trials, and by much."""
        medians = self.medians()
        top = max(medians.values())
        self._candidates = [
            setting
            for setting in self._candidates
            if medians[setting] >= CLOSE * top or max(trial.rate for trial in self.repeated[setting]) >= top
        ]

    def _finalists(self) -> list[int]:
        """The smallest good setting and its neighbours, and others whose trial may have been an unlucky one."""
        medians, best = self.medians(), self.best
        if best is None:
            return []
        settings = sorted(medians)
        position = settings.index(best)
        fastest = sorted(settings, key=medians.__getitem__, reverse=True)
        first = [fastest[0], *settings[max(0, position - 1) : position + 2]]
        possible = [setting for setting in fastest if medians[setting] >= POSSIBLE * medians[fastest[0]]]
        return sorted([*dict.fromkeys([*first, *possible])][:FINALISTS])
