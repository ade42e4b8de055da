"""How torch's own datasets are read: plain functions of a plan, for a worker and for the consumer's thread alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from headrace.batches import BatchPlan, Failure, RawBatch

__all__ = ["MapReader", "StreamReader"]


class MapReader:
    """Reads a map-style dataset, by `__getitems__` where it has one and batches are automatic.

    Args:
        dataset: the dataset.
        batched: whether a plan is a batch.
        skip: whether to go on behind a sample that failed.
        border: what is caught from user code.
    """

    def __init__(self, dataset: Any, *, batched: bool, skip: bool, border: type[BaseException]) -> None:
        self._dataset = dataset
        self._many = getattr(dataset, "__getitems__", None) if batched else None
        self._skip = skip
        self._border = border

    def __call__(self, plan: BatchPlan) -> RawBatch:
        """Fetch the samples of one plan."""
        if self._many:
            try:
                samples = list(self._many(list(plan.indices)))
            except self._border as error:
                samples = [Failure.caught(error, stage="fetch", batch=plan.number)]
            return RawBatch(plan, samples)
        return RawBatch(plan, [*self._one_by_one(plan)])

    def _one_by_one(self, plan: BatchPlan) -> Iterator[Any]:
        for index in plan.indices:
            try:
                sample = self._dataset[index]
            except self._border as error:
                sample = Failure.caught(error, stage="fetch", batch=plan.number, index=index)
            yield sample
            if isinstance(sample, Failure) and not self._skip:
                return


class StreamReader:
    """Reads an iterable-style dataset from its beginning.

    Args:
        dataset: the dataset; `iter()` is called on it here.
        drop_last: whether a last batch that is not full is left out.
        border: what is caught from user code.
    """

    def __init__(self, dataset: Any, *, drop_last: bool, border: type[BaseException]) -> None:
        self._stream = iter(dataset)
        self._drop_last = drop_last
        self._border = border
        self._position = 0
        self._ended = False

    def __call__(self, plan: BatchPlan) -> RawBatch:
        """Read as many samples as the plan has slots, or as there are."""
        samples: list[Any] = []
        start = self._position
        while len(samples) < len(plan.indices) and not self._ended:
            try:
                samples.append(next(self._stream))
            except StopIteration:
                self._ended = True
                break
            except self._border as error:
                samples.append(Failure.caught(error, stage="fetch", batch=plan.number, index=self._position))
            self._position += 1
        if self._drop_last and len(samples) < len(plan.indices):
            samples = []
        return RawBatch(replace(plan, indices=range(start, start + len(samples))), samples, self._ended)
