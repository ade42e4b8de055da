"""Assembly of a batch: transform each sample, then collate.

Plain functions, the same in a thread, in a worker and inline.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace._base.cgroup import queued_seconds
from headrace._random.randomized import CurrentSample, current_sample
from headrace._random.seeding import TransformGenerators
from headrace._ranks.rankinfo import bound
from headrace._records.batches import BatchPlan, HostBatch, RawBatch, Rows, StageTimes
from headrace._records.error_policy import Tolerance
from headrace._records.failure import Failure, Stage, describe_samples, key_in
from headrace._torchcompat.portable_collate import collating
from headrace.collate import (
    collated,
    default_convert,
    draws_nothing,
    is_default,
    note_culprit,
)

# The exceptions caught from user code on the consumer's thread. On this thread, KeyboardInterrupt
# and SystemExit may come from a signal handler: Ctrl-C, or SIGTERM at the end of a job.
CONSUMER_CATCH = (Exception, GeneratorExit, asyncio.CancelledError)

Catch = type[BaseException] | tuple[type[BaseException], ...]
# Time by `time.perf_counter`, and CPU time of the thread by `time.thread_time`, in seconds.
Moment = tuple[float, float]
# Seconds without CPU time. With more, the thread may have waited for a core: reading this takes
# 35 µs.
LONG_WAIT = 1e-3


@dataclass(frozen=True, slots=True)
class Assembler:
    """Makes a `HostBatch` from a `RawBatch`: the CPU work."""

    transforms: tuple[Callable[[Any], Any], ...]  # applied in order to each sample
    # Makes a batch from a list of samples, or from a single sample if not `batched`.
    collate: Callable[[Any], Any]
    batched: bool  # whether a batch is a list of samples
    tolerance: Tolerance
    # Whether samples are rows of Arrow tables. A batch is then a single table.
    of_tables: bool = False
    # The exceptions to catch from user code. On the consumer's thread: `CONSUMER_CATCH`.
    catch: Catch = BaseException

    @property
    def runs_user_code(self) -> bool:
        """Whether a user's transform or collate function runs.

        A user's function may draw random numbers.
        """
        # If a batch is not a list, list() and tuple() call the iterator of the user's sample.
        lists = self.batched and self.collate in (list, tuple)
        return bool(self.transforms) or not (lists or draws_nothing(self.collate))

    def generators(self) -> TransformGenerators:
        return TransformGenerators((*self.transforms, self.collate))

    def __call__(self, raw: RawBatch, began: Moment | None = None) -> HostBatch:
        """Assemble a batch without missing samples.

        Errors of user code become failures of the batch.

        Args:
            raw: The batch, with all samples.
            began: When the work began, if reading is part of the work. Default: now.
        """
        current = CurrentSample(raw.plan.random_key)
        with bound(current_sample, current):
            return self._assemble(raw, current, began or now())

    def _assemble(
        self, raw: RawBatch, current: CurrentSample, began: Moment
    ) -> HostBatch:
        plan, size = raw.plan, len(raw.plan.indices)
        samples: Any = raw.samples
        failures: list[Failure] = []
        if raw.whole and self.transforms:
            got = type(samples).__name__
            error = TypeError(
                f"__getitems__ returned a {got}; a transform takes samples, and needs "
                "a list of them"
            )
            return HostBatch.failed(plan, error, Stage.TRANSFORM)
        if not raw.whole:
            samples, failures = self._transform(plan, samples, current)
            size = len(samples)
            if failures and (not self.tolerance.skips or not samples):
                return HostBatch.nothing(plan, tuple(failures), end=raw.end)
        current.position = plan.positions[0] if plan.positions else 0
        current.of_batch = True
        current.calls = 0
        try:
            with collating(self.transforms):
                if not self.batched:
                    data = self.collate(samples[0])
                elif raw.whole:
                    data = self.collate(samples)
                else:
                    data = collated(self.collate, samples, of_tables=self.of_tables)
                if data is None and is_default(self.collate):
                    raise TypeError(
                        "the samples are None: does aget, or a transform, lack a return?"
                    )
        except self.catch as error:
            if is_default(self.collate):
                note_culprit(error, samples, plan.indices)
            keys = [] if raw.whole else list(map(key_in, raw.samples or ()))
            of_each = iter(keys)
            described = (
                describe_samples(plan.indices, lambda _: next(of_each))
                if any(keys)
                else None
            )
            failures.append(
                Failure.caught(error, Stage.COLLATE, plan.number, samples=described)
            )
            return HostBatch.nothing(plan, tuple(failures), end=raw.end)
        return HostBatch(
            plan, data, size, tuple(failures), raw.end, times=times_since(began)
        )

    def passed_on(self, raw: RawBatch) -> HostBatch | None:
        """Return the batch if no CPU work is left, else None.

        No work is left for a list of samples, the rows of a tensor, or a single sample. Containers
        are excluded: converting the items may take long.
        """
        samples = raw.samples
        if self.transforms or raw.whole or not samples:
            return None
        if self.batched and type(samples) is Rows and is_default(self.collate):
            data = samples.whole
        elif Failure in map(type, samples):
            return None
        elif self.batched and self.collate in (list, tuple):
            data = self.collate(samples)
        elif (
            self.batched
            or self.collate is not default_convert
            or isinstance(samples[0], Mapping | Sequence)
        ):
            return None
        else:
            try:
                data = self.collate(samples[0])
            except Exception:
                # torch has no dtype for the array. The assembler makes a failure of this error.
                return None
        return HostBatch(raw.plan, data, len(samples), end=raw.end)

    def nothing_to_do(
        self, kept: RawBatch, lost: tuple[Failure, ...]
    ) -> HostBatch | None:
        """Return the batch if no CPU work exists, else None.

        There is no work if samples are lost and losses are not skipped, or if a loss or the end of
        the stream leaves no sample.
        """
        if not kept.whole and (
            (lost and not self.tolerance.skips)
            or (not kept.samples and (lost or kept.end))
        ):
            return HostBatch.nothing(kept.plan, end=kept.end)
        return None  # a batch sampler's own empty batch is collated, as in torch

    def assemble(self, raw: RawBatch, began: Moment | None = None) -> HostBatch:
        kept, lost = raw.without_failures()
        return (self.nothing_to_do(kept, lost) or self(kept, began)).with_lost(raw, lost)

    def _transform(
        self, plan: BatchPlan, samples: Sequence[Any], current: CurrentSample
    ) -> tuple[Sequence[Any], list[Failure]]:
        failures: list[Failure] = []
        if not self.transforms:
            return samples, failures
        transformed: list[Any] = []
        positions = plan.positions or (None,) * len(samples)
        for index, position, read in zip(plan.indices, positions, samples, strict=True):
            current.position, current.calls, sample = position, 0, read
            try:
                for transform in self.transforms:
                    sample = transform(sample)
                transformed.append(sample)
            except self.catch as error:
                key = key_in(read)
                failures.append(
                    Failure.caught(
                        error, Stage.TRANSFORM, plan.number, index=index, key=key
                    )
                )
                if not self.tolerance.skips:
                    break
        return transformed, failures


_worker = -1


def set_worker(number: int) -> None:
    global _worker
    _worker = number


def now() -> Moment:
    return time.perf_counter(), time.thread_time()


def times_since(began: Moment) -> StageTimes:
    at, cpu = began
    ended, cpu = time.perf_counter(), time.thread_time() - cpu
    return StageTimes(
        work_began=at,
        work_ended=ended,
        work_cpu=cpu,
        work_queued=queued_seconds() if ended - at - cpu > LONG_WAIT else 0.0,
        worked_by=(os.getpid(), threading.get_native_id(), _worker),
    )
