"""What runs in a worker process: the assembler alone, or with a torch dataset that lives there."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from headrace._core.batches import BatchPlan, HostBatch, RawBatch, dump_state
from headrace._core.engine.assemble import Assembler, SeededAssembler, set_worker
from headrace._core.engine.stepping import StepsInWorker, WorkerRequest
from headrace._core.engine.torch_readers import BatchReader, CannotStart, batch_reader
from headrace._core.failure import Failure, Stage
from headrace._core.pool.worker import Plain
from headrace._core.ranks.rankinfo import RankInfo, adopt_rank
from headrace._core.streams.kinds import propagate_epoch
from headrace._core.streams.resumable import State, session_epoch
from headrace._core.torchcompat.datapipes import divide_pipe, seed_pipe
from headrace._core.torchcompat.private import become_worker, numpy_seed
from headrace._core.transport.pickling import PickledPayload, format_error, picklable_error
from headrace.errors import NotPicklableError


@dataclass(kw_only=True)
class AssembleTask:
    """Transforms and collates what was fetched on the loop; randomness belongs to the batch, not to the worker.

    Attributes:
        rank: the rank of the consumer's process.
        worker_init_fn: called with the worker's number.
        seeds: whether the process's random generators are seeded by this task.
        copies: whether the next batch may be made before this one is sent: in the same memory, if `collate_fn` keeps
            some.
    """

    assembler: Assembler
    rank: RankInfo
    worker_init_fn: Callable[[int], Any] | None = None
    seeds: bool = True
    copies: bool = False

    def start(self, worker: int, workers: int) -> None:
        """Set the rank and call `worker_init_fn`."""
        adopt_rank(self.rank)
        set_worker(worker)
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker)

    def __call__(self, request: Any) -> Any:
        """Assemble one batch, sent flat, or apply steps to samples that are not yet in one."""
        if type(request) is WorkerRequest:
            return self._steps(request)
        if type(request) is RawBatch:  # in a thread
            return to_wire(self._assemble(request), copied=self.copies)
        raw = RawBatch.from_flat(request)
        return _flat(self._assemble(raw), raw.plan)

    @functools.cached_property
    def _steps(self) -> StepsInWorker:
        return StepsInWorker(seeds=self.seeds)

    @functools.cached_property
    def _assemble(self) -> Callable[[RawBatch], HostBatch]:
        return SeededAssembler(self.assembler) if self.seeds else self.assembler


class StartEpoch(NamedTuple):
    """The request to a worker to begin a new pass over its dataset.

    Attributes:
        epoch: the epoch that begins.
        running: the passes still being read.
        set_epoch: whether to call `set_epoch` of every dataset, or only of those with `wants_epoch`.
        pipe_seed: the seed of a data pipe's random pipes; None for other datasets.
        state: of the worker's stream, or of a stateful dataset, which it continues from; pickled, so that the worker
            reports an error of a class in it.
    """

    epoch: int
    running: frozenset[int]
    set_epoch: bool
    pipe_seed: int | None = None
    state: PickledPayload | None = None


@dataclass(kw_only=True)
class ReadTask(AssembleTask):
    """Reads a torch dataset inside the worker, as torch's own loader does, then transforms and collates.

    Attributes:
        seeds: whether random generators are seeded for each batch, before it is read.
        base_seed: worker `w` is seeded with ``base_seed + w`` at its start, by torch's rules.
    """

    dataset: Any
    iterable: bool
    drop_last: bool
    base_seed: int
    _readers: dict[int, BatchReader | CannotStart] = field(default_factory=dict)

    def start(self, worker: int, workers: int) -> None:
        """Set the rank, seed as torch does, set `get_worker_info()`, and call `worker_init_fn`."""
        self._worker = worker
        seed = self.base_seed + worker
        random.seed(seed)
        torch.manual_seed(seed)
        np.random.seed(numpy_seed(self.base_seed, worker))
        become_worker(worker, workers, seed=seed, dataset=self.dataset)
        divide_pipe(self.dataset, self.rank, worker=worker, workers=workers)
        super().start(worker, workers)

    def __call__(self, request: Any) -> Any:
        """Start an epoch, or read and assemble one batch, sent flat, of the epoch that its plan names."""
        if type(request) is StartEpoch:
            self._readers = {epoch: self._readers[epoch] for epoch in request.running & self._readers.keys()}
            seed_pipe(self.dataset, request.pipe_seed)
            self._readers[request.epoch] = self._reader(request.epoch, request.state, set_epoch=request.set_epoch)
            return None
        plan = RawBatch.from_flat(request).plan
        if self.iterable:  # each worker counts the samples of its own part
            plan = plan._replace(random_key=plan.random_key ^ self._worker)
        epoch = plan.epoch
        if epoch not in self._readers:  # the worker was replaced in mid-epoch
            self._readers[epoch] = self._reader(epoch, None, set_epoch=False)
        session_epoch.set(epoch)
        return _flat(self._readers[epoch](plan), plan)

    def _reader(self, epoch: int, state: PickledPayload | None, *, set_epoch: bool) -> BatchReader | CannotStart:
        session_epoch.set(epoch)
        try:
            propagate_epoch(self.dataset, epoch, only_wanted=not set_epoch)
            return batch_reader(
                self.dataset,
                iterable=self.iterable,
                assembler=self.assembler,
                drop_last=self.drop_last,
                state=None if state is None else cast(State, state.loads()),
                seeds=self.seeds,
            )
        except BaseException as error:  # user code: set_epoch, __iter__ of a stream, load_state_dict
            return CannotStart(error, restoring=state is not None)


def _flat(host: HostBatch, plan: BatchPlan) -> Any:
    """The answer to the request for a batch."""
    host = to_wire(host)
    flat = host.flat(plan)
    return flat if host.failures else Plain(flat)


def to_wire(host: HostBatch, *, copied: bool = False) -> HostBatch:
    """The batch with pickled data and state, and picklable errors, to be sent to another process.

    Args:
        host: the batch.
        copied: whether the data's memory may change before the batch is sent.
    """
    if not host.empty and not isinstance(host.data, PickledPayload):
        try:
            host = host._replace(data=PickledPayload.dumps(host.data, copied=copied))
        except BaseException as error:  # user code: __reduce__ of the result of transform or collate_fn
            remedy = "Return tensors, arrays, or classes that both processes can import, from transform and collate_fn."
            unpicklable = not_picklable("the return value of collate_fn", error, remedy)
            host = HostBatch.failed(host.plan, unpicklable, stage=Stage.COLLATE).with_failures_of(host)
    try:
        host = host._replace(stream_state=dump_state(host.stream_state))
    except BaseException as error:  # user code: __reduce__ of an object in the state
        remedy = "It is sent with each batch to the consumer's process: return plain values or arrays from state_dict."
        unpicklable = not_picklable("the state of the dataset", error, remedy)
        failed = HostBatch.failed(host.plan, unpicklable, stage=Stage.SAVE_STATE)
        host = failed.with_failures_of(host._replace(stream_state=None))
    if host.failures:
        host = host._replace(failures=tuple(map(_with_picklable_error, host.failures)))
    return host


def not_picklable(what: str, reason: BaseException, remedy: str) -> NotPicklableError:
    """The error for a value that cannot be sent to another process, caused by the error of pickling it."""
    error = NotPicklableError(what=what, reason=f"{type(reason).__name__}: {reason}", remedy=remedy)
    error.__cause__ = reason
    return error


def _with_picklable_error(failure: Failure) -> Failure:
    traceback = format_error(failure.error) if failure.traceback is None else failure.traceback  # the first process's
    return replace(failure, error=picklable_error(failure.error), traceback=traceback)
