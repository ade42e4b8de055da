"""Delivery of batches on the consumer's thread: failures raised or skipped, unpickling, pinning, torch's warnings.

The reasons for the replacement of batches that lost all their samples are in docs/design/0003-errors-of-user-code.md.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence, Sized
from typing import Any

import torch

from headrace._core.batches import BatchPlan, HostBatch
from headrace._core.error_policy import EpochFailures
from headrace._core.failure import Failure, Stage
from headrace._core.order.order import CANDIDATES
from headrace._core.order.restore import EpochSpec
from headrace._core.order.spec import LoaderSpec
from headrace._core.text import shorten, warn_user
from headrace._core.transport.pickling import PickledPayload
from headrace.errors import NotPicklableError, WorkerDiedError
from headrace.telemetry.counters import Counters

# Batches in a row that may be skipped because they killed their workers; after more it is not the samples.
DEATHS_IN_A_ROW = 3
LOST_IN_A_ROW = 100  # batches; a stream is given up after as many failures


class FailureHandler:
    """Decides for each batch of an epoch whether it is delivered, skipped or raised, and plans replacements.

    A batch that lost all its samples is replaced at the end of the epoch: of a map-style dataset by one of the last
    batches that were delivered, which is planned again. Of a stream only the engine knows the samples: it begins the
    stream again.

    `repeat` makes a plan of the indices of an earlier one, or of a stream, of None.

    Attributes:
        skips: whether the policy can skip samples; only then each batch has to be passed to `delivers`.
        counts: of the epoch, as in its state: `LoaderState.skipped`.
    """

    def __init__(
        self,
        arguments: LoaderSpec,
        spec: EpochSpec,
        repeat: Callable[[Sequence[object] | None], BatchPlan],
        counters: Counters,
    ) -> None:
        self._policy, self.skips = arguments.policy, arguments.policy.tolerance.skips
        self._repeat, self._counters = repeat, counters
        self._stream = arguments.kind.is_iterable
        self._as_torch = not arguments.kind.is_async  # whether errors from workers are put in torch's words
        # Of batches that lost all their samples: those without a replacement, and the replacements that came back.
        delivered, skipped, in_a_row, self._missing, self._repeated, *last = self.counts = spec.begun.skipped
        self._epoch = EpochFailures(delivered, skipped, in_a_row)
        self._owed = self._missing if self.skips else 0  # replacements to be planned
        self._candidates: deque[Sequence[object] | None] = deque(maxlen=1 if self._stream else CANDIDATES)
        if self.skips:
            before = spec.order.batches_before() or map(tuple, last)
            self._candidates.extend([None] if self._stream and delivered else before)
        self._keeps = spec.order.stateful is not None  # which goes on after the last batch, and does not draw it again
        self._last: tuple[Sequence[object], ...] = tuple(map(tuple, last))
        self._lost = False  # whether a batch has lost all its samples since it began
        self._deaths_in_a_row = self._lost_in_a_row = 0  # batches

    def replacement(self) -> BatchPlan | None:
        """A plan in place of a lost batch; None if none was lost, or if there is nothing to repeat."""
        if not (self._owed and self._candidates):
            return None
        self._owed -= 1
        # It is a candidate again once it is delivered; so a batch that fails each time is not planned for ever.
        return self._repeat(self._candidates[0] if self._stream else self._candidates.popleft())

    def delivers(self, host: HostBatch) -> bool:
        """Count a batch; whether it is delivered to the consumer. Raises what is not skipped."""
        try:
            self._repeated += host.plan.repeat
            if host.failures:
                self._handle(host)
            if host.empty:
                if not host.failures:
                    self._on_end(host.plan)
                return False
            self._deaths_in_a_row = self._lost_in_a_row = 0
            if not host.failures:
                self._epoch.add(host)
            self._missing -= host.plan.repeat
            if host.size:  # a batch sampler may ask for a batch of no samples
                self._candidates.append(None if self._stream else host.plan.indices)
                self._last = (host.plan.indices,) if self._keeps else ()
            return True
        finally:
            if self.skips:
                epoch = self._epoch
                counts = epoch.delivered, epoch.skipped, epoch.in_a_row, self._missing, self._repeated
                self.counts = *counts, *self._last

    def check_epoch(self, *, whole: bool) -> None:
        """Check the counts at the end of the epoch; if it is not `whole`, another rank has ended it."""
        if not self.skips:
            return
        if whole and self._epoch.examples and not self._epoch.delivered:
            raise self._epoch.error("every sample failed, and no batch could be delivered")
        if whole and self._owed:
            raise self._epoch.error(
                f"{self._owed} batches lost all their samples, and nothing could be delivered in their place, "
                f"so that this process has fewer batches than were planned"
            )
        self._check(ended=True)

    def _handle(self, host: HostBatch) -> None:
        died = any(isinstance(failure.error, WorkerDiedError) for failure in host.failures)
        self._deaths_in_a_row = self._deaths_in_a_row + 1 if died else 0
        raised = next((failure for failure in host.failures if self._raises(failure)), None)
        if not self.skips or (raised is not None and raised.unskippable is None):
            assert raised is not None
            raise raised.exception(as_torch=self._as_torch)
        first = not self._epoch.skipped
        self._counters.skip(host)
        self._epoch.add(host)
        self._check(ended=False)
        if raised is not None:
            raise raised.exception(as_torch=self._as_torch)
        lost = host.empty
        if lost and self._stream and all(failure.stage is Stage.FETCH for failure in host.failures):
            # A batch continues after unreadable samples: it is empty at the stream's end only.
            self._on_end(host.plan)
            lost = False
        if lost:
            self._owed += 1
            self._missing += not host.plan.repeat
            self._lost_in_a_row += 1
            if self._lost_in_a_row >= LOST_IN_A_ROW:
                self._lost_in_a_row = 0
                raise self._epoch.error(f"each of the last {LOST_IN_A_ROW} batches lost all its samples")
        rests = [failure for failure in host.failures if failure.lost is not None]
        for failure in rests or host.failures[: first or (lost and not self._lost)]:
            _warn_of_skip(failure, lost=lost)
        self._lost = self._lost or lost

    def _on_end(self, plan: BatchPlan) -> None:
        """Note that the stream had no samples left for `plan`."""
        if plan.repeat:
            self._owed += 1
            self._candidates.clear()

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
    one = "a sample" if failure.lost is None else "the rest of a shard"
    skipped = f"batch {failure.batch} lost all its samples, the first" if lost else f"{one} was skipped, owing"
    message = f"{skipped} to {failure.type_name}: {shorten(failure.message)} ({failure.where}). "
    if lost:
        message += (
            "So that the number of batches stays the same, another batch is delivered twice in this epoch: "
            "loader.stats().replaced_batches counts these. "
        )
    message += (
        "Later ones of this epoch are counted in loader.stats().skipped_samples, with those of other epochs, and the "
        "last errors are in loader.stats().skipped."
    )
    warn_user(message, RuntimeWarning)


def opened(host: HostBatch) -> Any:
    """The batch's data, on the consumer's thread: its classes are the consumer's."""
    if not isinstance(host.data, PickledPayload):
        return host.data
    try:
        return host.data.loads()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        remedy = "Its classes have to be importable, or picklable by value, in this process too."
        unpicklable = NotPicklableError(what="the return value of collate_fn", reason=reason, remedy=remedy)
        raise Failure.caught(unpicklable, stage=Stage.CLAIM, batch=host.plan.number).exception() from error


Finish = Callable[[Any, int], Any]
"""The claim's last step: given a batch and its number, returns the batch as the consumer gets it."""


def checked_length(finish: Finish | None, dataset: Sized, *, copies: bool) -> Finish:
    """`finish`, with torch's warning if a stream yields more batches than its `len`, which torch takes for samples.

    `copies` is whether each worker reads a copy of the stream.
    """
    announced, given = len(dataset), itertools.count(1)
    several_copies = (
        "For multiprocessing data-loading, this could be caused by not properly configuring the IterableDataset "
        "replica at each worker. Please see https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset "
        "for examples."
    )

    def finish_and_count(batch: Any, number: int) -> Any:
        if (count := next(given)) > announced:
            warn_user(
                f"Length of IterableDataset {dataset} was reported to be {announced}(when accessing len(dataloader)), "
                f"but {count} samples have been fetched. {several_copies if copies else ''}"
            )
        return batch if finish is None else finish(batch, number)

    return finish_and_count


def should_pin(pin_memory: bool, device: str) -> bool:
    """Whether batches will be pinned; warns, in torch's words, where they were to be and will not, and of `device`."""
    if not pin_memory:
        return False
    if device:
        warn_user(
            f"pin_memory_device is deprecated, the current accelerator will be used as the device,"
            f"ignore pin_memory_device='{device}'."
        )
    available = torch.accelerator.is_available()
    accelerator = torch.accelerator.current_accelerator() if available else None
    on_mps = accelerator is not None and accelerator.type == "mps"
    if available and not on_mps:
        return True
    why = "not supported on MPS now," if on_mps else "no accelerator is found, then"
    warn_user(f"'pin_memory' argument is set as true but {why} device pinned memory won't be used.")
    return False
