"""Readers of torch datasets: plain functions of a plan, for workers and for the consumer's thread."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from headrace._core.batches import BatchPlan, Failure, RawBatch, Stage
from headrace._core.error_policy import Tolerance


class MapReader:
    """Reads a map-style dataset, by `__getitems__` where it has one and batches are automatic.

    Args:
        dataset: the dataset.
        batched: whether a plan is a batch.
        tolerance: how failed samples are treated.
        catch: what is caught from user code.
    """

    def __init__(
        self,
        dataset: Any,
        tolerance: Tolerance,
        *,
        batched: bool,
        catch: type[BaseException] | tuple[type[BaseException], ...],
    ) -> None:
        self._dataset = dataset
        self._many = getattr(dataset, "__getitems__", None) if batched else None
        self._tolerance = tolerance
        self._border = catch

    def __call__(self, plan: BatchPlan) -> RawBatch:
        """Fetch the samples of one plan."""
        if not self._many:
            return RawBatch(plan, [*self._one_by_one(plan)])
        try:
            samples = self._many(list(plan.indices))
        except self._border as error:
            if self._tolerance.skips and hasattr(self._dataset, "__getitem__"):
                return RawBatch(plan, [*self._one_by_one(plan)])  # to find the sample that failed
            return RawBatch(plan, [Failure.caught(error, stage=Stage.FETCH, batch=plan.number)])
        # Any other type is a batch that the dataset has assembled; collate_fn receives it unchanged.
        return RawBatch(plan, samples, whole=not isinstance(samples, list | tuple))

    def _one_by_one(self, plan: BatchPlan) -> Iterator[Any]:
        for index in plan.indices:
            try:
                sample = self._dataset[index]
            except self._border as error:
                sample = Failure.caught(error, stage=Stage.FETCH, batch=plan.number, index=index)
            yield sample
            if isinstance(sample, Failure) and not self._tolerance.skips:
                return


class StreamBatch:
    """A batch that is filled from a stream, sync or async.

    Args:
        plan: the batch's plan.
        progress: the stream's progress, shared by its batches.
        tolerance: whether the batch is filled up after a failure; otherwise the next batch begins there, as in torch.
    """

    def __init__(self, plan: BatchPlan, progress: Progress, tolerance: Tolerance) -> None:
        self._plan = plan
        self._progress = progress
        self._tolerance = tolerance
        self._broken = False
        self._first = progress.position
        self._samples: list[Any] = []
        self._failures = 0

    @property
    def room(self) -> int:
        """The number of samples that are still to be read."""
        return 0 if self._progress.ended or self._broken else self._missing

    @property
    def _missing(self) -> int:
        return len(self._plan.indices) - len(self._samples) + self._failures

    def add(self, sample: Any) -> None:
        """Add the stream's next sample."""
        self._samples.append(sample)
        self._progress.position += 1
        self._progress.failures_in_a_row = 0

    def fail(self, error: BaseException) -> None:
        """Add an error in place of the next sample; the stream ends if it only raises errors."""
        progress = self._progress
        in_a_row = progress.failures_in_a_row + 1
        unskippable = None
        if in_a_row >= self._tolerance.max_in_a_row:  # an iterator that always raises would be read for ever
            unskippable = f"{in_a_row} failures in a row"
        if self._tolerance.skips and _ended_a_generator(error):  # skipping it would skip all samples after it
            unskippable = "the error ended the stream, samples after it are missing"
        failure = Failure.caught(error, stage=Stage.FETCH, batch=self._plan.number, index=progress.position)
        self.add(replace(failure, unskippable=unskippable))
        self._failures += 1
        progress.failures_in_a_row = in_a_row
        progress.ended |= unskippable is not None
        self._broken = not self._tolerance.skips

    def raw(self, *, drop_last: bool) -> RawBatch:
        """The batch; with `drop_last`, only the failures of an incomplete one."""
        slots = list(enumerate(self._samples, self._first))
        if drop_last and self._missing:
            slots = [slot for slot in slots if isinstance(slot[1], Failure)]
        plan = replace(self._plan, indices=tuple(position for position, _ in slots))
        return RawBatch(plan, [sample for _, sample in slots], self._progress.ended)


def _ended_a_generator(error: BaseException) -> bool:
    """Whether `error` came out of a generator function of the user's, which gives nothing more then.

    It is found by the first frame outside of headrace that the error passed through. A generator further inside may
    have served a single sample. `headrace.pipe` calls its function again.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        if module == "headrace._core.interface.repeat_and_pipe":
            return False
        if module.partition(".")[0] != "headrace":
            return bool(frame.f_code.co_flags & (inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR))
    return False


@dataclass(slots=True)
class Progress:
    """The progress of reading a stream.

    Attributes:
        position: samples and failures so far.
        failures_in_a_row: failures since the last sample.
        ended: whether the stream has ended.
    """

    position: int = 0
    failures_in_a_row: int = 0
    ended: bool = False


class StreamReader:
    """Reads an iterable-style dataset from its beginning.

    Args:
        dataset: the dataset; `iter()` is called on it here.
        drop_last: whether an incomplete last batch is dropped.
        tolerance: how failed samples are treated.
        catch: what is caught from user code.
    """

    def __init__(
        self,
        dataset: Any,
        tolerance: Tolerance,
        *,
        drop_last: bool,
        catch: type[BaseException] | tuple[type[BaseException], ...],
    ) -> None:
        self._dataset = dataset
        self._stream = iter(dataset)
        self._repeats = False
        self._drop_last = drop_last
        self._tolerance = tolerance
        self._border = catch
        self._progress = Progress()

    def __call__(self, plan: BatchPlan) -> RawBatch:
        """Read as many samples as the plan has slots, or as are left; the first repeated plan restarts the stream."""
        if plan.repeat and not self._repeats:
            self._repeats = True
            self._stream = iter(self._dataset)
            self._progress = Progress()
        batch = StreamBatch(plan, self._progress, self._tolerance)
        while batch.room:
            try:
                for _ in range(batch.room):
                    batch.add(next(self._stream))
            except StopIteration:
                self._progress.ended = True
            except self._border as error:
                batch.fail(error)
        return batch.raw(drop_last=self._drop_last)
