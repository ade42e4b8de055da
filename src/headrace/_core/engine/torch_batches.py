"""Reading torch's own datasets: a plan in, a batch out, in whatever process the dataset lives."""

from __future__ import annotations

from typing import Any

from headrace._core.batches import NO_TIMES, BatchPlan, HostBatch
from headrace._core.engine.assemble import Assembler, Moment, now, times_since
from headrace._core.engine.tensor_gather import tensor_fast_path
from headrace._core.engine.torch_readers import MapReader, StreamReader
from headrace._core.interface.resumable import State
from headrace._core.seeding import TransformGenerators, seed_everything
from headrace.collate import is_default, stacks_tensors


class BatchReader:
    """Reads and assembles the batches of one epoch.

    Args:
        dataset: a map-style or iterable-style dataset of torch's.
        iterable: which of the two; a stream is started here.
        assembler: the CPU work.
        drop_last: whether a stream's last batch is left out when it is not full.
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
