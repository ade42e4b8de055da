"""Reading torch's own datasets: a plan in, a batch out, in whatever process the dataset lives."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Subset, TensorDataset

from headrace._core.batches import NO_TIMES, BatchPlan, HostBatch, RawBatch
from headrace._core.engine.assemble import Assembler, Moment, now, times_since
from headrace._core.engine.stream_batch import Progress, StreamBatch, without_state
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


class BatchReader:
    """Reads and assembles the batches of one epoch of a torch dataset; made by `batch_reader`."""

    def __init__(self, dataset: Any, assembler: Assembler, *, seeds: bool) -> None:
        self._dataset = dataset
        self._assembler = assembler
        self._tolerance, self._catch = assembler.tolerance, assembler.catch
        self._user = UserState(dataset)
        self._generators = TransformGenerators((*assembler.transforms, assembler.collate)) if seeds else None

    def state_dict(self) -> State | None:
        """The state of a stateful dataset, or of its iterator; None if there is none."""
        raise NotImplementedError  # each kind has its own

    def __call__(self, plan: BatchPlan) -> HostBatch:
        """The batch of one plan, with the times of its reading and assembling."""
        began = now()
        if self._generators is not None:
            seed_everything(plan.seed)
            self._generators.seed(plan.seed)
        host = self._made(plan, began)
        return host if host.times is not NO_TIMES else host._replace(times=times_since(began))

    def _made(self, plan: BatchPlan, began: Moment) -> HostBatch:
        raw = self._read(plan)
        host = self._assembler.assemble(raw, began)
        return host if raw.stream_state is None else host._replace(stream_state=raw.stream_state)

    def _read(self, plan: BatchPlan) -> RawBatch:
        raise NotImplementedError  # each kind has its own


class MapReader(BatchReader):
    """Reads a map-style dataset, by `__getitems__` where it has one and batches are automatic."""

    def __init__(self, dataset: Any, assembler: Assembler, state: State | None, *, seeds: bool) -> None:
        super().__init__(dataset, assembler, seeds=seeds)
        self._many = getattr(dataset, "__getitems__", None) if assembler.batched else None
        if state is not None:
            self._user.restore(state, lambda: None)
        self._stateful = is_stateful(dataset)
        default = assembler.batched and not assembler.transforms and is_default(assembler.collate) and stacks_tensors()
        self._gather = tensor_fast_path(dataset) if default and not self._stateful else None

    def state_dict(self) -> State | None:
        return self._user.of(None, 0) if self._stateful else None

    def _made(self, plan: BatchPlan, began: Moment) -> HostBatch:
        if self._gather is not None:
            try:
                return HostBatch(plan, self._gather(plan.indices), len(plan.indices), times=times_since(began))
            except Exception:  # an index is wrong, or of an odd type: one by one says which, or knows what it means
                pass
        return super()._made(plan, began)

    def _read(self, plan: BatchPlan) -> RawBatch:
        raw = self._fetch(plan)
        if not self._stateful:
            return raw
        try:
            return raw._replace(stream_state=self.state_dict())
        except self._catch as error:
            return without_state(raw, error)

    def _fetch(self, plan: BatchPlan) -> RawBatch:
        if not self._many:
            return RawBatch(plan, self._one_by_one(plan))
        try:
            samples = self._many(list(plan.indices))
        except self._catch as error:
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
            except self._catch as error:
                samples.append(Failure.caught(error, stage=Stage.FETCH, batch=plan.number, index=index))
                if not self._tolerance.skips:
                    break
        return samples


class StreamReader(BatchReader):
    """Reads an iterable-style dataset, from its beginning or from a state; `iter()` is called on it here."""

    def __init__(
        self, dataset: Any, assembler: Assembler, state: State | None, *, drop_last: bool, seeds: bool
    ) -> None:
        super().__init__(dataset, assembler, seeds=seeds)
        self._drop_last = drop_last
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
                again.left -= 1

    def _read(self, plan: BatchPlan) -> RawBatch:
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
            except self._catch as error:
                self._errors += 1
                batch.fail(error)
        return batch.raw(self._state, drop_last=self._drop_last, catch=self._catch)

    def state_dict(self) -> State | None:
        """The progress, with the state of a stateful dataset and iterator; None if nothing was read of another."""
        state = self._state()
        return None if state == {"read": 0} else self._progress.state_dict(state)

    def _state(self) -> State:
        state = self._user.of(self._stream, self._read_before + self._progress.position)
        state["errors"] = self._errors
        return state


def batch_reader(
    dataset: Any,
    *,
    iterable: bool,
    assembler: Assembler,
    drop_last: bool,
    state: State | None = None,
    seeds: bool = False,
) -> BatchReader:
    """The reader of a torch dataset for one epoch.

    Args:
        dataset: the dataset.
        iterable: whether it is a stream, which is started here.
        assembler: the CPU work.
        drop_last: whether a stream's last batch is dropped if it is not full.
        state: that of an earlier reader, after one of its batches; None for the beginning.
        seeds: whether random generators are seeded for each batch, before it is read.

    Raises:
        StateError: the state is of another dataset, or damaged.
    """
    if iterable:
        return StreamReader(dataset, assembler, state, drop_last=drop_last, seeds=seeds)
    return MapReader(dataset, assembler, state, seeds=seeds)


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
