"""Reading torch's own datasets: a plan in, a batch out, in whatever process the dataset lives."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Subset, TensorDataset

from headrace._core.batches import NO_TIMES, BatchPlan, HostBatch, RawBatch
from headrace._core.engine.assemble import Assembler, Moment, now, times_since
from headrace._core.engine.stream_batch import Catch, Progress, StreamBatch, without_state
from headrace._core.error_policy import Tolerance
from headrace._core.failure import Failure, Stage
from headrace._core.seeding import TransformGenerators, seed_everything
from headrace._core.streams.resumable import Reread, State, UserState, expect_int, expect_state, is_stateful, name_of
from headrace.collate import is_default, stacks_tensors

Gather = Callable[[Sequence[Any]], list[torch.Tensor]]


def tensor_fast_path(dataset: Any) -> Gather | None:
    """A function from indices to what the default collate makes of those samples; None where there is no such way.

    Args:
        dataset: a `TensorDataset`, or a `Subset` of one, of exactly these classes: a subclass may do more in
            `__getitem__`.

    Returns:
        A function that raises where one of the indices is wrong; reading sample by sample then says which.
    """
    if type(dataset) is Subset:
        inner = tensor_fast_path(dataset.dataset)
        positions = dataset.indices
        if inner is None:
            return None
        return lambda indices: inner([positions[index] for index in indices])
    if type(dataset) is not TensorDataset or not all(map(_is_plain, dataset.tensors)):
        return None
    tensors, length = dataset.tensors, len(dataset)

    def gather(indices: Sequence[Any]) -> list[torch.Tensor]:
        if set(map(type, indices)) == {int}:
            index = torch.frombuffer(array("q", indices), dtype=torch.int64)  # `torch.tensor` takes four times as long
        else:
            index = torch.tensor(indices)
        # A tensor from a list of mixed types would round floats and take booleans; only integers mean one sample each.
        if index.dtype != torch.int64 or index.ndim != 1:
            raise IndexError("not a list of integers")
        if not len(indices):
            raise IndexError("an empty batch")
        if bool((index < 0).any()):
            index = torch.where(index < 0, index + length, index)
        return [tensor.index_select(0, index) for tensor in tensors]

    return gather


def _is_plain(tensor: torch.Tensor) -> bool:
    on_cpu = tensor.layout is torch.strided and tensor.device.type == "cpu"
    return type(tensor) is torch.Tensor and on_cpu and not tensor.requires_grad


class MapReader:
    """Reads a map-style dataset, by `__getitems__` where it has one and batches are automatic.

    Args:
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
        return None if self._state is None else self._state()

    def __call__(self, plan: BatchPlan) -> RawBatch:
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
    """Stands in for a reader that could not be made, and reports the error once."""

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


class BatchReader:
    """Reads and assembles the batches of one epoch.

    Args:
        iterable: which of the two; a stream is started here.
        state: that of an earlier reader, after one of its batches; None for the beginning.
        seeds: whether random generators are seeded for each batch, before it is read.

    Raises:
        StateError: the state is of another dataset, or damaged.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        iterable: bool,
        assembler: Assembler,
        drop_last: bool,
        state: State | None = None,
        seeds: bool = False,
    ) -> None:
        self._seeds = TransformGenerators((*assembler.transforms, assembler.collate)) if seeds else None
        self._assemble = assembler.assemble
        self._gather = None
        self._read: MapReader | StreamReader
        tolerance, catch = assembler.tolerance, assembler.catch
        if iterable:
            self._read = StreamReader(dataset, tolerance, drop_last=drop_last, catch=catch, state=state)
            return
        self._read = reader = MapReader(dataset, tolerance, batched=assembler.batched, catch=catch, state=state)
        default = assembler.batched and not assembler.transforms and is_default(assembler.collate) and stacks_tensors()
        if default and not reader.has_state:
            self._gather = tensor_fast_path(dataset)

    def state_dict(self) -> State | None:
        """The state of a stateful dataset, or of its iterator; None if there is none."""
        return self._read.state_dict()

    def __call__(self, plan: BatchPlan) -> HostBatch:
        """The batch of one plan, with the times of its reading and assembling."""
        began = now()
        host = self._made(plan, began)
        return host if host.times is not NO_TIMES else host._replace(times=times_since(began))

    def _made(self, plan: BatchPlan, began: Moment) -> HostBatch:
        if self._seeds is not None:
            seed_everything(plan.seed)
            self._seeds.seed(plan.seed)
        if self._gather is not None:
            try:
                data = self._gather(plan.indices)
            except Exception:  # an index is wrong, or of an odd type: one by one says which, or knows what it means
                return self._assemble(self._read(plan), began)
            return HostBatch(plan, data, len(plan.indices), times=times_since(began))
        raw = self._read(plan)
        host = self._assemble(raw, began)
        return host if raw.stream_state is None else host._replace(stream_state=raw.stream_state)
