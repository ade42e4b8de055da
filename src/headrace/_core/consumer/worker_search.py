"""The searches for the number of workers and of engines, with ``num_workers="auto"`` and ``engines="auto"``.

A search begins without workers, or one engine, or with what an earlier run found, and follows the diagnosis of the
last batches: where that says that transforms and collation, or the event loop, are the limit, and so many make the loop
faster by a predicted factor, they are tried. They stay if at least half of the predicted gain is measured; otherwise
half as many more are tried. Workers that an earlier run found end where what they do takes less time than sending a
batch to them. The searches are pure: records have the time.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace._core.links.comparison import Comparison
from headrace._core.links.select import PlacementSelector
from headrace._core.links.session import ChangingSession, Session
from headrace._core.messages import WorkersRequest
from headrace._core.text import seconds
from headrace.errors import NotPicklableError
from headrace.telemetry.counters import BatchRecord

if TYPE_CHECKING:  # imported at the first look: `import headrace` takes a fifteenth less time
    from headrace.telemetry.diagnosis import Diagnosis, Setup
    from headrace.telemetry.figures import Figures

_log = logging.getLogger("headrace")

LOOK_SECONDS = 0.25  # between two looks, at least: one takes a millisecond or two
MEASURE_SECONDS = 2.0  # over which a rate is measured, at least
RECORDS = 1024  # that are looked at, at most
NEGLIGIBLE = 1e-4  # seconds of transforms and collation for a batch, below which sending it to a worker takes longer
LEAST_GAIN = 0.5  # of the predicted one
START_SECONDS = 10.0  # that what is new may take until all of it has made a batch, and is counted on
PAUSE, LONGEST_PAUSE = 1.0, 30.0  # seconds between two looks without a change; doubled each time
HOLD, LONGEST_HOLD = 30.0, 1800.0  # seconds without a trial after one that failed; doubled each time


class _Trial(NamedTuple):
    before: int  # their number
    tried: int
    rate: float  # batches a second before
    predicted: float  # factor of the rate
    since: float


class Search:
    """Proposes numbers of workers, or of engines.

    Attributes:
        chosen: a sentence for each number that was kept, or tried in vain.
        next_look: when `look` has a result again, by the clock of the records.
    """

    option = ""  # the argument whose value is searched
    stage = ""  # what the limit was, where a number is kept
    cores = 1  # of each
    least = 0  # without any that was found or asked for

    def __init__(self) -> None:
        self.chosen: list[str] = []
        self.next_look = 0.0
        self._trial: _Trial | None = None
        self._settled = True  # whether all that is tried makes batches
        self._failed: int | None = None  # the fewest that were tried in vain
        self._since = 0.0  # when the present number was there; later batches count
        self._pause, self._hold = PAUSE, HOLD

    @property
    def tries(self) -> bool:
        """Whether a number is being tried."""
        return self._trial is not None

    def look(self, records: Sequence[BatchRecord], setup: Setup, most: int) -> int | None:
        """The number to have from now on, `most` at most, after the batches of `records`; None to change nothing."""
        from headrace.telemetry.diagnosis import BATCHES_AT_LEAST
        from headrace.telemetry.figures import figures_of

        now = records[-1].returned
        if now < self.next_look:
            return None
        self._since, self.next_look = self._since or now, now + LOOK_SECONDS
        if self._trial is not None and not self._settled:
            # What was fetched before is still made without them, however long that takes.
            early = records[-1].planned < self._trial.since or now < self._trial.since + START_SECONDS
            if early and not self._has_begun(self._trial, records):
                return None
            self._settled, self._since = True, records[-1].planned
        measured = [record for record in records if record.planned >= self._since]
        if len(measured) <= BATCHES_AT_LEAST or now - self._since < MEASURE_SECONDS:
            return None
        # After a change within the epoch the batches that were planned before come first.
        if len(measured) < len(records) and now - measured[0].returned < MEASURE_SECONDS:
            return None
        figures = figures_of(measured)
        if self._trial is not None:
            return self._end_trial(self._trial, figures, now)
        return self._propose(figures, setup, most, now)

    def begin_trial(self, now: float) -> None:
        """What is tried begins now, and not when it was proposed."""
        self._trial = None if self._trial is None else self._trial._replace(since=now)

    def measure_anew(self) -> None:
        """Count batches from the next look on: something else was changed."""
        self._since = 0.0

    def end(self, why: str) -> None:
        """Give up: more of them cannot be started."""
        self._say(f"{self.option}={self.least if self._trial is None else self._trial.before}: {why}")
        self._trial, self.next_look = None, math.inf

    def _has_begun(self, trial: _Trial, records: Sequence[BatchRecord]) -> bool:
        """Whether all that is tried has made a batch."""
        raise NotImplementedError  # each search has its own

    def _most(self, figures: Figures, setup: Setup, most: int) -> int:
        """How many there may be."""
        return most

    def _propose(self, figures: Figures, setup: Setup, most: int, now: float) -> int | None:
        from headrace.telemetry.diagnosis import diagnose

        self.next_look, self._pause = now + self._pause, min(2 * self._pause, LONGEST_PAUSE)
        number: int = getattr(setup, self.option)
        most = self._most(figures, setup, most)
        if self._failed is not None:
            most = min(most, (number + self._failed) // 2)
        found: Diagnosis = diagnose(figures, setup._replace(cores=max(1, most * self.cores)))
        wanted: int = min(most, found.change.get(self.option, 0))
        if wanted <= number or found.predicted is None:
            if self._failed is not None:  # what is between was tried
                self._failed, self.next_look = None, now + self._hold
                self._hold = min(2 * self._hold, LONGEST_HOLD)
            return None
        predicted = (1 - found.predicted) / max(1e-9, 1 - figures.wait_share)
        predicted = min(predicted, wanted / number) if number else predicted
        self._trial = _Trial(number, wanted, figures.batches / figures.seconds, predicted, now)
        self._settled = False
        return wanted

    def _end_trial(self, trial: _Trial, figures: Figures, now: float) -> int | None:
        self._trial, self._pause = None, PAUSE
        gain = figures.batches / figures.seconds / trial.rate
        measured = f"{gain:.2f} times the rate with {trial.before}, where {trial.predicted:.2f} were predicted"
        if gain - 1 >= LEAST_GAIN * (trial.predicted - 1):
            self._say(f"{self.option}={trial.tried}: {self.stage} the limit; {measured}")
            self._hold = HOLD
            return None
        self._say(f"{self.option}={trial.before}, not {trial.tried}: {measured}")
        self._failed, self._since = trial.tried, now
        return trial.before

    def _say(self, sentence: str) -> None:
        self.chosen.append(sentence)
        _log.info("%s", sentence)


class WorkerSearch(Search):
    """Proposes numbers of workers.

    Attributes:
        asked: whether the program has asked for workers.
        moves: whether functions may move to them: it has, or a batch made in one was the same.
        proposed: the number of workers to have once one was; 0 for none.
    """

    option = "num_workers"
    stage = "transforms and collation were"

    def __init__(self, *, asked: bool = True) -> None:
        super().__init__()
        self.asked = self.moves = asked
        self.proposed = 0

    @property
    def tries(self) -> bool:
        """Whether a number is being tried, or waits for a comparison."""
        return super().tries or self.proposed > 0

    def end(self, why: str) -> None:
        super().end(why)
        self.proposed = 0

    def _has_begun(self, trial: _Trial, records: Sequence[BatchRecord]) -> bool:
        seen = {
            record.times.worked_by[2]
            for record in records
            if record.times.worked_by is not None and record.times.work_began >= trial.since
        }
        return set(range(trial.before, trial.tried)) <= seen

    def _most(self, figures: Figures, setup: Setup, most: int) -> int:
        """As many as have a core beside the trainer's, and memory; 0 where work is too little to send it to them."""
        if _work(figures) < NEGLIGIBLE:
            return 0
        trainers = figures.consumer_cpu - figures.workers_cpu * figures.in_call
        most = max(1, most - round(trainers))
        if figures.nbytes and setup.memory_budget:
            most = max(1, min(most, setup.memory_budget * figures.batches // figures.nbytes))
        return most

    def _propose(self, figures: Figures, setup: Setup, most: int, now: float) -> int | None:
        work = _work(figures)
        if work < NEGLIGIBLE and setup.num_workers > setup.least_workers:
            self._say(f"{self.option}={setup.least_workers}: transforms and collation take {seconds(work)} for a batch")
            return setup.least_workers
        return super()._propose(figures, setup, most, now)


def _work(figures: Figures) -> float:
    """Seconds of transforms, collation, and functions before batching, for a batch."""
    return figures.work_seconds + figures.steps_busy * figures.period


class EngineSearch(Search):
    """Proposes numbers of engines."""

    option = "engines"
    stage = "the event loop was"
    cores = 2  # with what belongs to an engine beside its thread, as in the diagnosis
    least = 1

    def _has_begun(self, trial: _Trial, records: Sequence[BatchRecord]) -> bool:
        return sum(record.planned >= trial.since for record in records) >= 2 * trial.tried


class WorkerChanges:
    """Applies a search to the sessions of a loader.

    Workers that the program has not asked for get functions once a batch that one has made was the same.
    """

    def __init__(self, search: WorkerSearch, placements: PlacementSelector) -> None:
        self._search = search
        self._placements = placements

    @property
    def next_look(self) -> float:
        return 0.0 if self._search.proposed else self._search.next_look

    def begin(self, session: Session | ChangingSession) -> None:
        """Have a worker make the session's next batch too, if a comparison is due."""
        if not self._search.proposed:
            return
        try:
            request = self._placements.workers_request(self._search.proposed, compares=True)
            session.send(request)
        except (NotPicklableError, OSError) as error:
            self._search.end(str(error))
        else:
            session.compare(Comparison(functools.partial(self._unchanged, request.functions)))

    def _unchanged(self, functions: Any) -> bool:
        try:
            return self._placements.workers_request(self._search.proposed).functions is functions
        except (NotPicklableError, OSError):
            return False

    def keep(self, session: Session | ChangingSession, number: int) -> bool:
        """Have workers in an epoch that begins; False, and the end of the search, if they cannot have the functions."""
        try:
            session.send(self._placements.workers_request(number))
        except (NotPicklableError, OSError) as error:
            self._search.end(str(error))
            return False
        return True

    def look(self, session: Session | ChangingSession, records: Sequence[BatchRecord], setup: Setup) -> int | None:
        """The number of workers that the engine has from now on; None if that stays."""
        search = self._search
        number = search.proposed or search.look(records, setup, setup.cores)
        if number is None:
            return None
        try:
            if not search.moves:
                search.proposed = number
                if not self._may_move(session, records[-1]):
                    return None
                search.begin_trial(records[-1].returned)
            if number or not self._placements.needs_workers:  # otherwise the next epoch is without
                session.send(self._placements.workers_request(number))
        except (NotPicklableError, OSError) as error:
            search.end(str(error))
            return None
        return number

    def _may_move(self, session: Session | ChangingSession, last: BatchRecord) -> bool:
        search, compared = self._search, session.comparison
        if last.times.steps_seconds:
            why: str | None = "functions before batching are not compared"
        elif compared is None or compared.again:
            self.begin(session)
            return False
        elif (why := compared.difference) is None:
            return False
        search.moves, search.proposed = not why, 0
        if why:
            if compared is not None:
                session.send(WorkersRequest(0))
            search.end(f'{why}; num_workers="auto", or a number, moves them to workers all the same')
        return search.moves
