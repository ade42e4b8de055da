"""Delivery of batches on the consumer's thread.

Failures are raised or skipped, batches are unpickled and pinned, and torch's warnings are given.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sized
from typing import Any

import torch

from headrace._base.text import shorten, warn_user
from headrace._order.progress import EpochProgress
from headrace._order.spec import LoaderSpec
from headrace._order.state import LOST_KEPT, Losses, LostBatch, SkipCounts
from headrace._records.batches import HostBatch
from headrace._records.error_policy import EpochFailures
from headrace._records.failure import Failure, Stage
from headrace._transport.pickling import PickledPayload
from headrace.errors import NotPicklableError, ShardError, WorkerDiedError
from headrace.telemetry.counters import Counters

# Maximum number of batches in a row to skip after the death of the batch's worker. After more
# deaths, the cause is not the samples.
DEATHS_IN_A_ROW = 3
# Maximum number of lost batches in a row. Batches of a row group count once. A stream is given up
# after the same number of failures.
LOST_IN_A_ROW = 100


class FailureHandler:
    """Decides whether to deliver, skip or raise each batch.

    Attributes:
        skips: Whether the policy can skip samples. Only then each batch has to pass `judge`.
        lost: Whether the last batch in `judge` lost all samples.
    """

    def __init__(
        self,
        arguments: LoaderSpec,
        progress: EpochProgress,
        counters: Counters,
        *,
        coordinated: bool,
    ) -> None:
        self._policy, self.skips = arguments.policy, arguments.policy.tolerance.skips
        self._counters = counters
        self._stream = arguments.kind.is_iterable
        # Whether errors from workers are put in torch's words.
        self._as_torch = not arguments.kind.is_async
        # Whether ranks would make different numbers of steps.
        self._uncoordinated = progress.rank.world_size > 1 and not coordinated
        self._epoch_number = progress.begun.epoch
        self._epoch = EpochFailures(*progress.begun.skipped)
        self._lost_batches = progress.begun.lost
        self.lost = False
        self._warned_of_loss = False
        self._deaths_in_a_row = self._lost_in_a_row = 0  # batches
        # Shard and member in the error of the last lost batch.
        self._lost_place: object = None

    @property
    def losses(self) -> Losses:
        """The losses of the epoch for a state."""
        epoch = self._epoch
        skipped = SkipCounts(epoch.delivered, epoch.skipped, epoch.in_a_row)
        return Losses(skipped, self._lost_batches)

    def judge(self, host: HostBatch) -> Exception | None:
        """Count a batch, and return the error to raise in place of the batch, if any.

        The error is returned and not raised. A traceback would make a cycle of this frame, the
        batch and the error, and the iterator would live until the next garbage collection.
        """
        self.lost = False
        try:
            raised = self._handle(host) if host.failures else None
            if raised is not None:
                return raised.exception(as_torch=self._as_torch)
            if not host.empty:
                self._deaths_in_a_row = self._lost_in_a_row = 0
                if not host.failures:
                    self._epoch.add(host)
            return None
        except Exception as error:  # from a function in `on_error`, or from the limits
            return error

    def skip_step(self, number: int) -> None:
        """Record that no rank delivers the batch with this number."""
        lost = LostBatch(self._epoch_number, number)
        if lost not in self._lost_batches:  # Ctrl-C may have interrupted the call before
            self._lost_batches = (*self._lost_batches, lost)[-LOST_KEPT:]

    def check_epoch(self, *, whole: bool) -> None:
        """Check the counts at the end of the epoch.

        If the epoch is not `whole`, another rank has ended the epoch.
        """
        if not self.skips:
            return
        nothing = whole and self._epoch.examples and not self._epoch.delivered
        if nothing and not self._policy.all_may_fail:
            raise self._epoch.error(
                "every sample failed, and no batch could be delivered: if this is acceptable, give "
                "on_error=headrace.SkipErrors(max_share=1)"
            )
        self._check(ended=True)

    def _handle(self, host: HostBatch) -> Failure | None:
        """Count the failures of a batch, and warn of skipped samples.

        Return the failure to raise, if any.
        """
        died = any(
            isinstance(failure.error, WorkerDiedError) for failure in host.failures
        )
        self._deaths_in_a_row = self._deaths_in_a_row + 1 if died else 0
        raised = next(
            (failure for failure in host.failures if self._raises(failure)), None
        )
        if not self.skips or (raised is not None and raised.unskippable is None):
            return raised
        first = not self._epoch.skipped
        self._counters.skip(host)
        self._epoch.add(host)
        self._check(ended=False)
        if raised is not None:
            return raised
        # A batch of a stream is filled further after unreadable samples. A batch without samples is
        # therefore the end of the stream.
        at_end = self._stream and all(
            failure.stage is Stage.FETCH for failure in host.failures
        )
        lost = host.empty and not at_end
        if lost:
            self._on_lost(host)
        rests = [failure for failure in host.failures if failure.lost is not None]
        for failure in (
            rests or host.failures[: first or (lost and not self._warned_of_loss)]
        ):
            _warn_of_skip(failure, lost=lost)
        self._warned_of_loss = self._warned_of_loss or lost
        return None

    def _on_lost(self, host: HostBatch) -> None:
        if self._uncoordinated:
            raise self._epoch.error(
                f"batch {host.plan.number} lost all its samples, so that this rank would make "
                "fewer steps than the others: with coordinated=True all ranks skip the step"
            )
        error = host.failures[0].error
        place = (error.shard, error.member) if isinstance(error, ShardError) else None
        # A large row group has many batches.
        if place is None or place != self._lost_place:
            self._lost_in_a_row += 1
        self._lost_place = place
        if self._lost_in_a_row >= LOST_IN_A_ROW:
            self._lost_in_a_row = 0
            raise self._epoch.error(
                f"each of the last {LOST_IN_A_ROW} batches lost all its samples"
            )
        self._counters.stats.lost_batches += 1
        self.lost = True

    def _raises(self, failure: Failure) -> bool:
        if not failure.is_skippable or self._deaths_in_a_row > DEATHS_IN_A_ROW:
            return True
        return self._policy.decide(failure) == "raise"

    def _check(self, *, ended: bool) -> None:
        reason = self._policy.excess(self._epoch, ended=ended)
        if reason is not None:
            self._epoch.in_a_row = 0  # the program may go on with the iteration
            raise self._epoch.error(reason)


def _warn_of_skip(failure: Failure, *, lost: bool) -> None:
    what = (
        "a sample was skipped"
        if failure.lost is None
        else "the rest of a shard was skipped"
    )
    if lost:
        what = f"batch {failure.batch} lost all its samples"
    warn_user(
        f"{what}, owing to {failure.type_name}: {shorten(failure.message)} ({failure.where}). "
        "Later ones of this epoch are counted in loader.stats(): skipped_samples, lost_batches, "
        "and the last errors as skipped.",
        RuntimeWarning,
    )


def opened(host: HostBatch) -> Any:
    """Return the data of a batch, unpickled with the consumer's classes."""
    if not isinstance(host.data, PickledPayload):
        return host.data
    try:
        return host.data.loads()
    except Exception as error:
        unpicklable = NotPicklableError(
            what="the return value of collate_fn",
            reason=f"{type(error).__name__}: {error}",
            remedy="Its classes have to be importable, or picklable by value, in this process too.",
        )
        raise Failure.caught(
            unpicklable, Stage.CLAIM, host.plan.number
        ).exception() from error


Finish = Callable[[Any, int], Any]
"""The last step of a delivery: returns the consumer's batch for a batch and a number."""


def checked_length(finish: Finish | None, dataset: Sized, *, copies: bool) -> Finish:
    """Return `finish`, with torch's warning about the length of a stream.

    The warning is given if a stream yields more batches than `len(dataset)`. As in torch, a number
    of batches is compared with a length in samples.

    Args:
        finish: The last step of a delivery, or None.
        dataset: The stream.
        copies: Whether each worker reads a copy of the stream.
    """
    announced, given = len(dataset), itertools.count(1)
    several_copies = (
        "For multiprocessing data-loading, this could be caused by not properly configuring the "
        "IterableDataset replica at each worker. Please see "
        "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for examples."
    )

    def finish_and_count(batch: Any, number: int) -> Any:
        if (count := next(given)) > announced:
            hint = several_copies if copies else ""
            warn_user(
                f"Length of IterableDataset {dataset} was reported to be {announced}(when "
                f"accessing len(dataloader)), but {count} samples have been fetched. {hint}"
            )
        return batch if finish is None else finish(batch, number)

    return finish_and_count


def should_pin(pin_memory: bool, device: str) -> bool:
    """Whether to pin batches, with torch's warnings.

    A warning is given if batches cannot be pinned, or if `device` is set.
    """
    if not pin_memory:
        return False
    if device:
        warn_user(
            "pin_memory_device is deprecated, the current accelerator will be used as the device,"
            f"ignore pin_memory_device='{device}'."
        )
    available = torch.accelerator.is_available()
    accelerator = torch.accelerator.current_accelerator() if available else None
    on_mps = accelerator is not None and accelerator.type == "mps"
    if available and not on_mps:
        return True
    why = "not supported on MPS now," if on_mps else "no accelerator is found, then"
    warn_user(
        f"'pin_memory' argument is set as true but {why} device pinned memory won't be used."
    )
    return False
