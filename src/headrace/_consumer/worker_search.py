"""The search for the number of workers, with ``num_workers="auto"``.

The search adds half as many workers as there are, at least one, if transforms and collation limit
the rate according to the diagnosis of the last batches. The workers stay if the measured gain is at
least half of the predicted gain. A single worker is ended if the other workers have little to do.
The search is pure: the records of the batches have the time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from headrace.telemetry.counters import BatchRecord

# Imported at the first look: `import headrace` takes a fifteenth less time.
if TYPE_CHECKING:
    from headrace.telemetry.diagnosis import Setup
    from headrace.telemetry.figures import Figures

_log = logging.getLogger("headrace")

LOOK_SECONDS = 0.25  # minimum interval of looks; a look takes a millisecond or two
MEASURE_SECONDS = 2.0  # minimum duration of a measurement
RECORDS = 1024  # maximum number of records in a look
LEAST_GAIN = 0.5  # minimum gain, as a share of the predicted gain
# If fewer workers are busy than this share of the remaining workers, a worker is not needed.
IDLE = 0.5
# Maximum time until a new worker counts, if the worker makes no batch.
START_SECONDS = 10.0
# Seconds between two looks without a change, doubled after each look.
PAUSE, LONGEST_PAUSE = 1.0, 30.0
# Seconds without a trial after a failed trial, doubled after each failed trial.
HOLD, LONGEST_HOLD = 5.0, 1800.0


class _Trial(NamedTuple):
    """A trial with additional workers."""

    before: int  # number of workers before
    rate: float  # batches a second before
    predicted: float  # factor of the rate
    since: float  # time of the request for the workers


class WorkerSearch:
    """Searches the number of workers.

    Attributes:
        number: The present number of workers.
        least: The minimum number of workers.
        next_look: Earliest time of the next change by `look`, by the clock of the records.
    """

    def __init__(self, least: int, number: int) -> None:
        self.least = least
        self.number = number
        self.next_look = 0.0
        self._trial: _Trial | None = None
        # Only batches planned later count. None until all workers make batches.
        self._since: float | None = None
        self._pause, self._hold = PAUSE, HOLD

    def look(self, records: Sequence[BatchRecord], setup: Setup) -> bool:
        """Look at the records, and return whether `number` has changed."""
        from headrace.telemetry.diagnosis import BATCHES_AT_LEAST
        from headrace.telemetry.figures import figures_of

        now = records[-1].returned
        if now < self.next_look:
            return False
        self.next_look = now + LOOK_SECONDS
        if self._since is None:
            if self._trial is None:
                self._since = now
            elif self._has_begun(self._trial, records):
                self._since = records[-1].planned
            return False
        measured = [record for record in records if record.planned >= self._since]
        # After a change within the epoch, batches planned before the change come first.
        since = (
            self._since if len(measured) in (0, len(records)) else measured[0].returned
        )
        if len(measured) <= BATCHES_AT_LEAST or now - since < MEASURE_SECONDS:
            return False
        figures = figures_of(measured)
        if self._trial is not None:
            return self._end_trial(self._trial, figures, now)
        return self._propose(figures, setup, now)

    def _has_begun(self, trial: _Trial, records: Sequence[BatchRecord]) -> bool:
        """Whether the last new worker has made a batch, or had time enough."""
        last = records[-1]
        # The other workers make all batches fetched before, however long this takes.
        if last.planned >= trial.since and last.returned >= trial.since + START_SECONDS:
            return True
        return any(
            record.times.worked_by is not None
            and record.times.worked_by[2] == self.number - 1
            and record.times.work_began >= trial.since
            for record in records
        )

    def _propose(self, figures: Figures, setup: Setup, now: float) -> bool:
        from headrace.telemetry.diagnosis import diagnose

        self.next_look, self._pause = (
            now + self._pause,
            min(2 * self._pause, LONGEST_PAUSE),
        )
        number, busy = self.number, figures.workers_busy + figures.functions_busy
        if number > self.least and busy < IDLE * (number - 1):
            self._change(number - 1)
            _log.info(
                f"num_workers={number - 1}: {busy:.1f} of {number} workers were busy"
            )
            return True
        # Each worker needs memory, and a core beside the trainer's cores.
        most = setup.cores - round(figures.consumer_cpu)
        if figures.nbytes and setup.memory_budget:
            most = min(most, setup.memory_budget * figures.batches // figures.nbytes)
        if number >= most:
            return False
        cores = min(most, number + max(1, number // 2))
        found = diagnose(figures, setup._replace(cores=cores))
        wanted = found.change.get("num_workers", 0)
        if wanted <= number or found.predicted is None:
            return False
        gain = (1 - found.predicted) / max(1e-9, 1 - figures.wait_share)
        rate = figures.batches / figures.seconds
        self._trial = _Trial(number, rate, min(gain, wanted / number), now)
        self._change(wanted)
        return True

    def _end_trial(self, trial: _Trial, figures: Figures, now: float) -> bool:
        self._trial, number = None, self.number
        gain = figures.batches / figures.seconds / trial.rate
        measured = (
            f"{gain:.2f} times the rate with {trial.before}, where {trial.predicted:.2f} were "
            "predicted"
        )
        if gain - 1 >= LEAST_GAIN * (trial.predicted - 1):
            _log.info(
                f"num_workers={number}: transforms and collation were the limit; {measured}"
            )
            self._pause, self._hold = PAUSE, HOLD
            return False
        self._change(trial.before)
        _log.info(f"num_workers={trial.before}, not {number}: {measured}")
        self.next_look, self._hold = now + self._hold, min(2 * self._hold, LONGEST_HOLD)
        return True

    def _change(self, number: int) -> None:
        self.number, self._since, self._pause = number, None, PAUSE
