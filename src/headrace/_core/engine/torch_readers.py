"""Readers of torch datasets: plain functions of a plan, for workers and for the consumer's thread."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from headrace._core.batches import BatchPlan, HostBatch, RawBatch
from headrace._core.engine.stream_batch import Catch, Progress, StreamBatch, without_state
from headrace._core.error_policy import Tolerance
from headrace._core.failure import Failure, Stage
from headrace._core.interface.resumable import Reread, State, UserState, expect_int, expect_state, is_stateful, name_of


class MapReader:
    """Reads a map-style dataset, by `__getitems__` where it has one and batches are automatic.

    Args:
        dataset: the dataset.
        batched: whether a plan is a batch.
        tolerance: how failed samples are treated.
        catch: what is caught from user code.
        state: a stateful dataset's, from another reader after one of its batches.

    Raises:
        StateError: the dataset is not stateful.
    """

    def __init__(
        self, dataset: Any, tolerance: Tolerance, *, batched: bool, catch: Catch, state: State | None = None
    ) -> None:
        self._dataset = dataset
        self._many = getattr(dataset, "__getitems__", None) if batched else None
        self._tolerance = tolerance
        self._border = catch
        user = UserState(dataset)
        if state is not None:
            user.restore(state, lambda: None)
        self._state = functools.partial(user.of, None, 0) if is_stateful(dataset) else None

    @property
    def has_state(self) -> bool:
        """Whether the dataset is stateful: its state comes with each batch."""
        return self._state is not None

    def state_dict(self) -> State | None:
        """The state of a stateful dataset; None of another."""
        return None if self._state is None else self._state()

    def __call__(self, plan: BatchPlan) -> RawBatch:
        """Fetch the samples of one plan."""
        raw = self._fetch(plan)
        if self._state is None:
            return raw
        try:
            return raw._replace(stream_state=self._state())
        except self._border as error:
            return without_state(raw, error)

    def _fetch(self, plan: BatchPlan) -> RawBatch:
        if not self._many:
            return RawBatch(plan, self._one_by_one(plan))
        try:
            samples = self._many(list(plan.indices))
        except self._border as error:
            if self._tolerance.skips and hasattr(self._dataset, "__getitem__"):
                return RawBatch(plan, self._one_by_one(plan))  # to find the sample that failed
            return RawBatch(plan, [Failure.caught(error, stage=Stage.FETCH, batch=plan.number)])
        # Any other type is a batch that the dataset has assembled; collate_fn receives it unchanged.
        return RawBatch(plan, samples, whole=not isinstance(samples, list | tuple))

    def _one_by_one(self, plan: BatchPlan) -> list[Any]:
        samples: list[Any] = []
        indices = iter(plan.indices)
        while len(samples) < len(plan.indices):
            try:
                for index in indices:
                    samples.append(self._dataset[index])
            except self._border as error:
                samples.append(Failure.caught(error, stage=Stage.FETCH, batch=plan.number, index=index))
                if not self._tolerance.skips:
                    break
        return samples


class StreamReader:
    """Reads an iterable-style dataset, from its beginning or from a state.

    Args:
        dataset: the dataset; `iter()` is called on it here.
        drop_last: whether an incomplete last batch is dropped.
        tolerance: how failed samples are treated.
        catch: what is caught from user code.
        state: that of an earlier reader, after one of its batches; None for the beginning.

    Raises:
        StateError: the state is of another stream, or damaged.
    """

    def __init__(
        self, dataset: Any, tolerance: Tolerance, *, drop_last: bool, catch: Catch, state: State | None = None
    ) -> None:
        self._dataset = dataset
        self._user = UserState(dataset)
        self._drop_last = drop_last
        self._tolerance = tolerance
        self._border = catch
        self._progress = Progress() if state is None else Progress.restored(state)
        self._read_before = 0  # samples that `position` does not count
        self._errors = 0  # of those read
        self._stream: Iterator[Any]
        if state is None:
            self._stream = iter(dataset)
        elif self._progress.ended:
            self._stream = iter(())  # nothing is read of it
            self._user.restore_dataset(expect_state(state, "stream"))  # for the next epoch
        else:
            stream = expect_state(state, "stream")
            self._stream, again = self._user.restore(stream, lambda: iter(dataset))
            self._read_before = expect_int(stream, "read") - self._progress.position
            self._errors = expect_int(stream, "errors")
            self._read_again(again)

    def _read_again(self, count: int) -> None:
        again = Reread(count, self._errors)
        while again.left:
            try:
                next(self._stream)
            except StopIteration:
                again.fail(name_of(self._dataset))
            except Exception as error:
                again.error(error)
            else:
                again.sample()

    def __call__(self, plan: BatchPlan) -> RawBatch:
        """Read as many samples as the plan has slots, or as are left; the first repeated plan restarts the stream."""
        if plan.repeat and not self._progress.repeats:
            self._stream = iter(self._dataset)
            self._progress, self._read_before, self._errors = Progress(repeats=True), 0, 0
        batch = StreamBatch(plan, self._progress, self._tolerance)
        while batch.room:
            try:
                for _ in range(batch.room):
                    batch.add(next(self._stream))
            except StopIteration:
                self._progress.ended = True
            except self._border as error:
                self._errors += 1
                batch.fail(error)
        return batch.raw(self._state, drop_last=self._drop_last, catch=self._border)

    def state_dict(self) -> State | None:
        """The progress, with the state of a stateful dataset and iterator; None if nothing was read of another."""
        state = self._state()
        return None if state == {"read": 0} else self._progress.state_dict(state)

    def _state(self) -> State:
        state = self._user.of(self._stream, self._read_before + self._progress.position)
        state["errors"] = self._errors
        return state


class CannotStart:
    """Stands in for a reader that could not be made, and reports the error once.

    Args:
        error: the error.
        restoring: whether it was made from a state.
    """

    def __init__(self, error: BaseException, *, restoring: bool) -> None:
        self._error: BaseException | None = error
        self._restoring = restoring

    def __call__(self, plan: BatchPlan) -> HostBatch:
        """The failure of the first plan; an end for the others."""
        error, self._error = self._error, None
        if error is None:
            return HostBatch.nothing(plan, end=True)
        stage, index = (Stage.RESTORE, None) if self._restoring else (Stage.FETCH, 0)
        return HostBatch.nothing(plan, (Failure.caught(error, stage=stage, batch=plan.number, index=index),), end=True)
