"""Failures of an epoch on the consumer's thread: raised or skipped, as the `on_error` policy decides."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

from headrace._core.batches import BatchPlan, HostBatch
from headrace._core.call_site import users_stacklevel
from headrace._core.consumer.replacements import Replacements
from headrace._core.error_policy import EpochFailures, ErrorPolicy
from headrace._core.failure import Failure
from headrace._core.text import shorten
from headrace.errors import WorkerDiedError
from headrace.telemetry.counters import Counters

# Batches in a row that may be skipped because they killed their workers; after more it is not the samples.
DEATHS_IN_A_ROW = 3
_NO_COUNTS = (0, 0, 0, 0, 0)


class FailureHandler:
    """Decides for each batch of an epoch whether it is delivered, skipped or raised, and counts it.

    Args:
        policy: the loader's `on_error`.
        repeat: makes a plan of the indices of an earlier one, or of a stream, of None.
        stream: whether the dataset is a stream.
        as_torch: whether errors from workers are put in torch's words.
        counters: the loader's.
    """

    def __init__(
        self,
        policy: ErrorPolicy,
        repeat: Callable[[Sequence[object] | None], BatchPlan],
        *,
        stream: bool,
        as_torch: bool,
        counters: Counters,
    ) -> None:
        self._policy = policy
        self._as_torch = as_torch
        self._counters = counters
        self._epoch = EpochFailures(counts_runs=policy.limits_runs)
        self._replacements = Replacements(repeat, self._epoch, stream=stream) if policy.tolerance.skips else None
        self._deaths_in_a_row = 0

    def resume(self, counts: tuple[int, ...], before: Callable[[], Sequence[Sequence[object]]]) -> None:
        """Continue from the `counts` of a restored epoch; `before` returns the indices of its last batches."""
        if self._replacements is not None:
            epoch = self._epoch
            epoch.delivered, epoch.skipped, epoch.in_a_row, missing, repeated = counts
            self._replacements.resume(missing, repeated, before)

    @property
    def counts(self) -> tuple[int, ...]:
        """The epoch's counts: samples delivered, skipped, and skipped in a row; batches not replaced; replacements."""
        if self._replacements is None:
            return _NO_COUNTS
        epoch = self._epoch
        return epoch.delivered, epoch.skipped, epoch.in_a_row, *self._replacements.counts

    def replacement(self) -> BatchPlan | None:
        """A plan in place of a batch that lost all its samples; None if there is nothing to replace."""
        return None if self._replacements is None else self._replacements.plan()

    def delivers(self, host: HostBatch) -> bool:
        """Count a batch; whether it is delivered to the consumer.

        Raises:
            TooManySkippedError: the policy allows no more skipped samples.
            Exception: a failure that is not skipped.
        """
        self._counters.worker_deaths += host.times.worker_deaths
        if self._replacements is not None:
            self._replacements.on_batch(host)
        if host.failures:
            self._handle(host)
        if host.empty:
            if not host.failures and self._replacements is not None:
                self._replacements.on_end(host.plan)
            return False
        self._deaths_in_a_row = 0
        if self._replacements is not None:
            if not host.failures:
                self._epoch.add(host)
            self._replacements.on_delivered(host)
        return True

    def check_epoch(self, *, whole: bool) -> None:
        """Check the counts at the end of the epoch.

        Args:
            whole: whether there is nothing left; otherwise another rank has ended the epoch.

        Raises:
            TooManySkippedError: the policy allows fewer skipped samples, or nothing could be delivered.
        """
        if self._replacements is not None:
            if whole:
                self._replacements.check()
            self._check(ended=True)

    def _handle(self, host: HostBatch) -> None:
        died = any(isinstance(failure.error, WorkerDiedError) for failure in host.failures)
        self._deaths_in_a_row = self._deaths_in_a_row + 1 if died else 0
        raised = next((failure for failure in host.failures if self._raises(failure)), None)
        if self._replacements is None or (raised is not None and raised.unskippable is None):
            assert raised is not None
            raise raised.exception(as_torch=self._as_torch)
        first = not self._epoch.skipped
        self._counters.skip(host)
        self._epoch.add(host)
        self._check(ended=False)
        if raised is not None:
            raise raised.exception(as_torch=self._as_torch)
        lost = self._replacements.on_skipped(host)
        if first or (lost and self._replacements.lost == 1):
            _warn_of_skip(host.failures[0], lost=lost)

    def _raises(self, failure: Failure) -> bool:
        if not failure.is_skippable or self._deaths_in_a_row > DEATHS_IN_A_ROW:
            return True
        return self._policy.decide(failure) == "raise"

    def _check(self, *, ended: bool) -> None:
        reason = self._policy.excess(self._epoch, ended=ended)
        if reason is not None:
            self._epoch.in_a_row = 0  # iteration may go on
            raise self._epoch.error(reason)


def _warn_of_skip(failure: Failure, *, lost: bool) -> None:
    skipped = f"batch {failure.batch} lost all its samples, the first" if lost else "a sample was skipped, owing"
    message = f"{skipped} to {failure.type_name}: {shorten(failure.message)} ({failure.where}). "
    if lost:
        message += (
            "So that the number of batches stays the same, another batch is delivered twice in this epoch: "
            "loader.stats().replaced_batches counts these. "
        )
    message += (
        "Samples that are skipped later in this epoch are counted in loader.stats().skipped_samples, and the last "
        "errors are in loader.stats().skipped."
    )
    warnings.warn(message, RuntimeWarning, stacklevel=users_stacklevel())
