"""Tasks of worker processes, and readers of torch datasets.

The readers also run inline.
"""

from __future__ import annotations

import functools
import random
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset

from headrace._engine.assemble import Assembler, now, set_worker, times_since
from headrace._engine.streams import Progress, StreamBatch, without_state
from headrace._random.seeding import TransformGenerators, batch_seed
from headrace._ranks.rankinfo import RankInfo, set_process_rank
from headrace._records.batches import NO_TIMES, BatchPlan, HostBatch, RawBatch, dump_state
from headrace._records.failure import Failure, Stage
from headrace._streams.epochs import session_epoch
from headrace._streams.kinds import propagate_epoch
from headrace._streams.resumable import (
    Reread,
    State,
    is_stateful,
    name_of,
    restore_dataset,
    restore_user,
    user_state,
)
from headrace._torchcompat.private import become_worker, numpy_seed
from headrace._transport.pickling import (
    Message,
    PickledPayload,
    dump_message,
    format_error,
    not_picklable,
    picklable_error,
)
from headrace.collate import is_default, is_plain, output, stacks_tensors

Gather = Callable[[Sequence[Any]], list[torch.Tensor]]


@dataclass(kw_only=True)
class AssembleTask:
    """Transforms and collates fetched samples.

    Randomness belongs to the batch, and not to the worker.
    """

    assembler: Assembler
    rank: RankInfo  # the rank of the consumer's process
    worker_init_fn: Callable[[int], Any] | None = None

    def start(self, worker: int, workers: int) -> None:
        set_process_rank(self.rank)
        set_worker(worker)
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker)

    @functools.cached_property
    def _generators(self) -> TransformGenerators:
        return self.assembler.generators()

    def __call__(self, request: Any) -> Message:
        """Assemble a batch in a worker.

        The plan arrives as a plain tuple: a pickler that looks for user types takes 5 µs for each
        type.
        """
        plan, samples, end = request
        raw = RawBatch(BatchPlan._make(plan), samples, end)
        return dump_batch(self._assembled(raw), raw.plan)

    def in_thread(self, raw: RawBatch) -> HostBatch:
        """Assemble a batch in a thread of a sidecar.

        The thread does not wait until the batch is sent: a user's `collate_fn` may reuse memory.
        """
        return to_wire(
            self._assembled(raw), copied=not is_default(self.assembler.collate)
        )

    def _assembled(self, raw: RawBatch) -> HostBatch:
        self._generators.seed(raw.plan.seed)
        return self.assembler(raw)


class StartEpoch(NamedTuple):
    """A request to a worker: begin a new pass over the dataset."""

    epoch: int
    running: frozenset[int]  # epochs of the passes still being read
    # Whether to call `set_epoch` of every dataset, or only of datasets with `wants_epoch`.
    set_epoch: bool
    # The state of the worker's stream, or of a stateful dataset. Pickled, so that the worker
    # reports errors of unpickling.
    state: PickledPayload | None


@dataclass(kw_only=True)
class ReadTask(AssembleTask):
    """Reads a torch dataset inside the worker, then transforms and collates.

    Random generators are seeded as in torch when the worker starts. With `seeds`, random generators
    are also seeded before each batch is read.
    """

    seeds: bool
    dataset: Any
    iterable: bool
    drop_last: bool
    base_seeds: Mapping[int | None, int]  # by worker
    _readers: dict[int, Callable[[BatchPlan], HostBatch]] = field(default_factory=dict)

    def start(self, worker: int, workers: int) -> None:
        """Set up the process as a worker of torch.

        Set the rank, seed as torch does, set `get_worker_info()`, and call `worker_init_fn`.
        """
        self._worker = worker
        self._base_seed = self.base_seeds[worker]
        self._seed(self._base_seed)
        seed = self._base_seed + worker
        become_worker(worker, workers, seed=seed, dataset=self.dataset)
        super().start(worker, workers)

    def __call__(self, request: Any) -> Message:
        """Start an epoch, or read and assemble the batch of a plan.

        A plan arrives as a plain tuple, and names the epoch.
        """
        if type(request) is StartEpoch:
            self._readers = {
                epoch: self._readers[epoch]
                for epoch in request.running & self._readers.keys()
            }
            self._readers[request.epoch] = self._reader(
                request.epoch, request.state, set_epoch=request.set_epoch
            )
            return dump_message(None, plain=True)
        plan = BatchPlan._make(request)
        if self.iterable:  # each worker counts the samples of its own share
            plan = plan._replace(random_key=plan.random_key ^ self._worker)
        epoch = plan.epoch
        if epoch not in self._readers:  # the worker was replaced during the epoch
            self._readers[epoch] = self._reader(epoch, None, set_epoch=False)
            # A new seed: otherwise the worker would repeat the draws of the dead worker.
            self._seed(batch_seed(self._base_seed, epoch, plan.number) >> 1)
        session_epoch.set(epoch)
        return dump_batch(self._readers[epoch](plan), plan)

    def _seed(self, base_seed: int) -> None:
        random.seed(base_seed + self._worker)
        torch.manual_seed(base_seed + self._worker)
        np.random.seed(numpy_seed(base_seed, self._worker))

    def _reader(
        self, epoch: int, state: PickledPayload | None, *, set_epoch: bool
    ) -> Callable[[BatchPlan], HostBatch]:
        session_epoch.set(epoch)
        try:
            propagate_epoch(self.dataset, epoch, only_wanted=not set_epoch)
            restored = None if state is None else cast(State, state.loads())
            reader = StreamReader if self.iterable else MapReader
            return reader(
                self.dataset,
                self.assembler,
                restored,
                drop_last=self.drop_last,
                seeds=self.seeds,
            )
        except BaseException as error:
            # user code: set_epoch, __iter__ of a stream, load_state_dict
            return cannot_start(error, restoring=state is not None)


def dump_batch(host: HostBatch, plan: BatchPlan) -> Message:
    """Pickle a batch for a process with the batch's plan."""
    host = to_wire(host)
    return dump_message(host.flat(plan), plain=not host.failures)


def to_wire(host: HostBatch, *, copied: bool = False) -> HostBatch:
    """Return the batch with pickled data and state, and picklable errors.

    Another process can receive this batch. Buffers of the data are `copied` if they may change
    before the batch is sent.
    """
    if not host.empty and not isinstance(host.data, PickledPayload):
        try:
            host = host._replace(data=PickledPayload.dumps(host.data, copied=copied))
        except BaseException as error:
            # user code: __reduce__ of the result of transform or collate_fn
            remedy = (
                "Return tensors, arrays, or classes that both processes can import, from transform "
                "and collate_fn."
            )
            failed = not_picklable("the return value of collate_fn", error, remedy)
            host = host.replaced_by(failed, Stage.COLLATE)
    try:
        host = host._replace(stream_state=dump_state(host.stream_state))
    except BaseException as error:  # user code: __reduce__ of an object in the state
        remedy = (
            "It is sent with each batch to the consumer's process: return plain values or arrays "
            "from state_dict."
        )
        failed = not_picklable("the state of the dataset", error, remedy)
        host = host._replace(stream_state=None).replaced_by(failed, Stage.SAVE_STATE)
    failures = []
    for each in host.failures:
        # Keep the traceback of the process that raised the error.
        traceback = format_error(each.error) if each.traceback is None else each.traceback
        failures.append(
            replace(each, error=picklable_error(each.error), traceback=traceback)
        )
    return host._replace(failures=tuple(failures)) if failures else host


def tensor_fast_path(dataset: Any) -> Gather | None:
    """Return a function from indices to a default batch, or None.

    The function raises if an index is wrong. The result is None except for a `TensorDataset`, or a
    `Subset` of a `TensorDataset`. Subclasses are excluded, because a subclass may do more.
    """
    if type(dataset) is Subset:
        inner = tensor_fast_path(dataset.dataset)
        positions = dataset.indices
        if inner is None:
            return None
        return lambda indices: inner([positions[index] for index in indices])
    if (
        type(dataset) is not TensorDataset
        or not len(dataset)
        or not all(map(is_plain, dataset.tensors))
    ):
        return None
    length = len(dataset)
    rows = [(tensor, tensor[0], tensor.is_contiguous()) for tensor in dataset.tensors]

    def gather(indices: Sequence[Any]) -> list[torch.Tensor]:
        if not {int, np.int64}.issuperset(map(type, indices)):
            raise IndexError("not only numbers, each of which is the index of one sample")
        # `torch.tensor` takes four times as long. An empty batch raises.
        index = torch.frombuffer(array("q", indices), dtype=torch.int64)
        if bool((index < 0).any()):
            index = torch.where(index < 0, index + length, index)
        return [
            torch.index_select(
                tensor, 0, index, out=output(row, len(index), contiguous=contiguous)
            )
            for tensor, row, contiguous in rows
        ]

    return gather


class BatchReader:
    """Reads and assembles the batches of an epoch of a torch dataset.

    With `seeds`, random generators are seeded before each batch is read.
    """

    # Makes a batch from indices, if no user code has to run.
    _gather: Gather | None = None

    def __init__(
        self,
        dataset: Any,
        assembler: Assembler,
        state: State | None = None,
        *,
        drop_last: bool = False,
        seeds: bool = False,
    ) -> None:
        self._dataset = dataset
        self._assembler = assembler
        self._tolerance, self._catch = assembler.tolerance, assembler.catch
        self._drop_last = drop_last
        self._generators = assembler.generators() if seeds else None
        self._start(state)

    def _start(self, state: State | None) -> None:
        """Begin to read, from a state or from the beginning."""
        raise NotImplementedError  # subclasses implement this

    def state_dict(self) -> State | None:
        """Return the state of a stateful dataset or iterator, or None."""
        raise NotImplementedError  # subclasses implement this

    def __call__(self, plan: BatchPlan) -> HostBatch:
        """Return the batch of a plan, with the times of reading and assembling."""
        began = now()
        if self._generators is not None:
            self._generators.seed(plan.seed)
        if self._gather is not None:
            try:
                return HostBatch(
                    plan,
                    self._gather(plan.indices),
                    len(plan.indices),
                    times=times_since(began),
                )
            except Exception:
                # An index is wrong or has an odd type. The dataset itself names the wrong index, or
                # understands the odd type.
                pass
        raw = self._read(plan)
        host = self._assembler.assemble(raw, began)
        if raw.stream_state is not None:
            host = host._replace(stream_state=raw.stream_state)
        if host.times is not NO_TIMES:
            return host
        return host._replace(times=times_since(began))

    def _read(self, plan: BatchPlan) -> RawBatch:
        raise NotImplementedError  # subclasses implement this


class MapReader(BatchReader):
    """Reads a map-style dataset.

    With automatic batching, `__getitems__` is used if the dataset has this method. `state` is the
    state of an earlier reader after a batch, or None for the beginning.
    """

    def _start(self, state: State | None) -> None:
        dataset, assembler = self._dataset, self._assembler
        self._many = getattr(dataset, "__getitems__", None) if assembler.batched else None
        if state is not None:
            restore_user(dataset, state, lambda: None)
        self._stateful = is_stateful(dataset)
        default = (
            assembler.batched
            and not assembler.transforms
            and is_default(assembler.collate)
            and stacks_tensors()
        )
        self._gather = (
            tensor_fast_path(dataset) if default and not self._stateful else None
        )

    def state_dict(self) -> State | None:
        return user_state(self._dataset, None, 0) if self._stateful else None

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
                # Find the sample that failed.
                return RawBatch(plan, self._one_by_one(plan))
            return RawBatch(plan, [Failure.caught(error, Stage.FETCH, plan.number)])
        # A result of another type is a batch assembled by the dataset. `collate_fn` receives the
        # batch unchanged.
        return RawBatch(plan, samples, whole=not isinstance(samples, list | tuple))

    def _one_by_one(self, plan: BatchPlan) -> list[Any]:
        samples: list[Any] = []
        indices = iter(plan.indices)
        while len(samples) < len(plan.indices):
            try:
                for index in indices:
                    samples.append(self._dataset[index])
            except self._catch as error:
                samples.append(
                    Failure.caught(error, Stage.FETCH, plan.number, index=index)
                )
                if not self._tolerance.skips:
                    break
        return samples


class StreamReader(BatchReader):
    """Reads an iterable-style dataset, from the beginning or from a state.

    The constructor calls `iter()` on the dataset.

    Raises:
        StateError: The state belongs to another dataset, or is damaged.
    """

    def _start(self, state: State | None) -> None:
        dataset = self._dataset
        self._progress = Progress.at(state)
        self._errors = 0  # number of errors among the samples read
        self._stream: Iterator[Any]
        if state is None:
            self._stream = iter(dataset)
        elif self._progress.ended:
            self._stream = iter(())  # nothing is left to read
            # The next epoch needs the restored dataset.
            restore_dataset(dataset, state["stream"])
        else:
            self._stream, again = restore_user(
                dataset, state["stream"], lambda: iter(dataset)
            )
            self._errors = state["stream"]["errors"]
            self._read_again(again)

    def _read_again(self, count: int) -> None:
        again = Reread(count, self._errors)
        while again.left:
            try:
                next(self._stream)
            except Exception as error:
                again.error(error, name_of(self._dataset))
            else:
                again.left -= 1

    def _read(self, plan: BatchPlan) -> RawBatch:
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
        """Return the progress, with the state of the dataset and the iterator.

        None if nothing was read and neither is stateful.
        """
        state = self._state()
        return None if state == {"read": 0} else self._progress.state_dict(state)

    def _state(self) -> State:
        state = user_state(self._dataset, self._stream, self._progress.position)
        state["errors"] = self._errors
        return state


def cannot_start(
    error: BaseException, *, restoring: bool
) -> Callable[[BatchPlan], HostBatch]:
    """Return a stand-in for a reader after a failed start.

    The stand-in returns the error for the first plan, and an end for other plans.
    """
    errors = [error]

    def read(plan: BatchPlan) -> HostBatch:
        if not errors:
            return HostBatch.nothing(plan, end=True)
        stage, index = (Stage.RESTORE, None) if restoring else (Stage.FETCH, 0)
        failure = Failure.caught(errors.pop(), stage, plan.number, index=index)
        return HostBatch.nothing(plan, (failure,), end=True)

    return read
