"""The types passed between the stages, one frozen type for each hop.

::

    sampling ──BatchPlan──▶ fetch ──RawBatch──▶ assemble ──HostBatch──▶ handoff ──▶ claim ──▶ your
    loop
"""

from __future__ import annotations

import operator
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, cast

import cloudpickle

from headrace._core.array_types import COMPUTED_INDICES
from headrace._core.failure import Failure, Stage

StreamState = Mapping[str, object] | bytes
"""The position of a stream; pickled, if it comes from another process: most are never read."""


def dump_state(state: StreamState | None) -> bytes | None:
    """The position of a stream, pickled; errors of pickling are raised."""
    if state is None or isinstance(state, bytes):
        return state
    try:
        return pickle.dumps(state, protocol=5)
    except Exception:  # a class of a script, by value; a fifth as fast
        return cast(bytes, cloudpickle.dumps(state, protocol=5))


def load_state(state: StreamState) -> Mapping[str, object]:
    """The position of a stream; errors of unpickling are raised."""
    return cast("Mapping[str, object]", pickle.loads(state)) if isinstance(state, bytes) else state


class BatchPlan(NamedTuple):
    """The content of one batch, as sampled; made without I/O.

    Attributes:
        number: the batch's position in its epoch, from 0.
        indices: the sampler's index for each slot. Of a stream, None for each slot until it is
            read, then its position.
        seed: the seed of `random`, NumPy and torch for the batch's transforms.
        epoch: the epoch's number, from 0.
        positions: for each slot, the sample's position among the samples of all ranks in the epoch.
            Of a stream, those of all its samples until the batch is read.
        random_key: the key of the epoch's `randomized` functions, a number of 128 bits.
        planned: when it was sampled, by `time.perf_counter`, as in `StageTimes`.
        taken: when it was sampled, the consumer had taken the batches up to this number; out of
            order, so many.
    """

    number: int
    indices: Sequence[object]
    seed: int
    epoch: int = 0
    positions: Sequence[int] = ()
    random_key: int = 0
    planned: float = 0.0
    taken: int = -1

    @property
    def is_plain(self) -> bool:
        """Whether it holds no object of the user's: its indices are numbers, strings or None."""
        return isinstance(self.indices, COMPUTED_INDICES) or _PLAIN.issuperset(
            map(type, self.indices)
        )


_PLAIN = frozenset({int, str, type(None)})


class FetchLoad(NamedTuple):
    """The load of a fetch stage at one moment."""

    in_flight: int = 0  # fetches that run
    limit: int = 0  # fetches that may run
    queued: int = 0  # samples that wait for one of them
    held_plans: int = 0  # plans that wait for memory
    # approximate bytes fetched or being fetched, and not consumed; 0 where they are not bounded
    memory: int = 0
    unused: int = 0  # fetches that may run, of stages that have no planned sample left to begin


class StageTimes(NamedTuple):
    """When a batch passed each stage of the engine, in seconds of `time.perf_counter`; 0.0 where it is unknown.

    That clock is the same in all processes of a machine on Linux and macOS.
    """

    admitted: float = 0.0  # the engine received the plan
    began: float = 0.0  # the first fetch began
    fetched: float = 0.0  # the last sample arrived
    work_began: float = (
        0.0  # transforms and collation began, or the reading of a torch dataset in a worker
    )
    work_ended: float = 0.0  # collation ended
    assembled: float = 0.0  # the engine had the result
    fetch_seconds: float = 0.0  # the duration of one of the batch's fetches
    nbytes: int = 0  # approximate size of the fetched samples
    engine_cpu: float = 0.0  # CPU seconds of the engine's thread until then
    blocked: float = (
        0.0  # seconds for which code of the user's has blocked the engine's event loop until then
    )
    blocked_in: str | None = None  # the line that has blocked it last
    worker_deaths: int = 0  # worker processes that died, since the batch assembled before it
    engine_queued: float = (
        0.0  # seconds for which the engine's thread could have computed and had no core, until then
    )
    work_cpu: float = 0.0  # CPU seconds of the transforms and the collation
    blocked_before: float = 0.0  # `blocked` when the iteration began
    worked_by: tuple[int, int, int] | None = (
        None  # process, native thread, worker (-1 for none); None if unknown
    )
    steps_seconds: float = 0.0  # of a stream's functions before batching, since the session began
    load: FetchLoad = FetchLoad()  # of the fetch stage, when the last sample arrived


NO_TIMES = StageTimes()
GROWING = (
    "engine_cpu",
    "engine_queued",
    "blocked",
    "blocked_before",
)  # sums since the engine's start
_LOAD = len(FetchLoad._fields)


class FetchTimes(NamedTuple):
    """The times of single fetches, measured only while a trace is written."""

    pid: int  # the engine's process
    thread: int  # the native id of its thread
    # Four doubles for each fetch: the number of its batch, its slot there (0 for a call of `agets`;
    # for a range the number of its object), when it began, and when it ended.
    rows: bytes


class SessionStart(NamedTuple):
    """The epoch of a session, and where it begins within that."""

    batch: int = 0  # the number of its first batch
    # The state of the stream, by the worker that reads it (None: the engine, or the consumer's
    # thread). Empty where the dataset is map-style, or the session begins with the epoch.
    streams: Mapping[int | None, Mapping[str, object]] = {}
    next_worker: int = 0  # the worker that gets the first plan, where each reads a stream
    epoch: int = 0
    set_epoch: bool = (
        False  # whether to call `set_epoch` of a copy of the dataset even if it does not want it
    )
    # of the functions of a stream before batching; does not depend on where the session begins
    seed: int = 0

    @property
    def own_state(self) -> dict[str, Any] | None:
        """The state of a stream that no worker reads; None if the stream begins with the epoch."""
        state = self.streams.get(None)
        return None if state is None else dict(state)


@dataclass(frozen=True, slots=True)
class Rows(Sequence[Any]):
    """The samples of a batch that are the rows of one tensor or table: a default collate need not copy them.

    A sample of a `pyarrow.Table` is a table of one row.
    """

    whole: Any  # a tensor that is not shared, or a `pyarrow.Table`

    def __len__(self) -> int:
        return len(self.whole)

    def __getitem__(self, position: Any) -> Any:
        rows = range(len(self.whole))[position]
        if isinstance(rows, int):
            return self.whole.slice(rows, 1) if self.is_table else self.whole[rows]
        return Rows(
            self.whole.slice(rows.start, len(rows)) if self.is_table else self.whole[position]
        )

    def __iter__(self) -> Iterator[Any]:
        return (
            map(self.__getitem__, range(len(self))) if self.is_table else iter(self.whole.unbind(0))
        )

    @property
    def is_table(self) -> bool:
        return is_table(self.whole)


def is_table(sample: object) -> bool:
    """Whether an object is a `pyarrow.Table`; does not import pyarrow."""
    pyarrow = sys.modules.get("pyarrow")
    return pyarrow is not None and isinstance(sample, pyarrow.Table)


class RawBatch(NamedTuple):
    """A batch whose samples have been fetched and not been transformed."""

    plan: BatchPlan
    # For each slot the sample, or the `Failure` that stands in its place. A stream's last batch may
    # have fewer. None where the worker fetches them itself.
    samples: Any
    end: bool = False  # the stream this came from has nothing more
    worker: int | None = None  # the worker this has to go to, where its dataset lives; None for any
    whole: bool = False  # `samples` is the argument of `collate_fn`, as the dataset returned it
    stream_state: Mapping[str, object] | None = (
        None  # the stream's state after this batch; None of a map-style dataset
    )
    began: float = (
        0.0  # when the first of its fetches began, as in `StageTimes`; 0.0 if that is unknown
    )
    fetch_seconds: float = 0.0  # the duration of one of them
    origin: Callable[[Any], str | None] | None = (
        None  # names samples of a stream by their indices; not in a worker
    )

    @property
    def is_plain(self) -> bool:
        """Whether it holds no object of the user's: the samples are yet to be fetched."""
        return self.samples is None and self.stream_state is None and self.plan.is_plain

    def flat(self) -> tuple[Any, ...]:
        """The batch without types of ours, for each of which a pickler that looks for the user's takes 5 µs."""
        return (tuple(self.plan), *self[1:])

    @classmethod
    def from_flat(cls, flat: tuple[Any, ...]) -> RawBatch:
        plan, *rest = flat
        return cls(BatchPlan(*plan), *rest)

    def without_failures(self) -> tuple[RawBatch, tuple[Failure, ...]]:
        """The batch without its failed samples, and their failures."""
        if self.whole or type(self.samples) is Rows:
            return self, ()
        if Failure not in map(type, self.samples):
            return self, ()
        failures = tuple(sample for sample in self.samples if isinstance(sample, Failure))
        # Not strict: one Failure may stand for a whole batch that was fetched in one call.
        slots = enumerate(zip(self.plan.indices, self.samples, strict=False))
        good = [
            (slot, index, sample)
            for slot, (index, sample) in slots
            if not isinstance(sample, Failure)
        ]
        positions = self.plan.positions and [self.plan.positions[slot] for slot, _, _ in good]
        plan = self.plan._replace(indices=tuple(index for _, index, _ in good), positions=positions)
        return self._replace(plan=plan, samples=[sample for _, _, sample in good]), failures


@dataclass(slots=True)
class RequestCounts:
    """Requests to stores and lookups in caches, between one batch and the next.

    Attributes:
        requests: requests sent, retries included.
        retries: retries among them.
        throttled: responses 429 and 503.
        timed_out: requests without a byte within the time-out.
        hedges: fetches started a second time.
        hedges_won: hedges that were the first to finish.
        cache_hits: objects, or blocks of shards, read from a disk cache.
        cache_misses: objects, or blocks of shards, fetched for a disk cache.
        cache_damaged: damaged objects or blocks of a cache, which were fetched again.
    """

    requests: int = 0
    retries: int = 0
    throttled: int = 0
    timed_out: int = 0
    hedges: int = 0
    hedges_won: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    cache_damaged: int = 0

    def __add__(self, other: RequestCounts) -> RequestCounts:
        return RequestCounts(*map(operator.add, counts_of(self), counts_of(other)))


COUNTED = tuple(each.name for each in fields(RequestCounts))
counts_of = operator.attrgetter(
    *COUNTED
)  # not `astuple`, which takes 40 µs, for each batch within `next()`


class HostBatch(NamedTuple):
    """A batch in host memory, ready for the consumer, or its failures."""

    plan: BatchPlan
    data: Any  # the return value of `collate_fn`; None where the batch is `empty`
    size: int  # how many samples are in `data`
    failures: tuple[Failure, ...] = ()  # the samples that are not in it, and why
    end: bool = False  # the stream this came from has nothing more
    # there is nothing to deliver; a batch of no samples, of a batch sampler, is delivered
    empty: bool = False
    requests: RequestCounts | None = (
        None  # requests to stores since the batch before it; None for none
    )
    worker: int | None = None  # that read it, where each reads a copy of the dataset
    # Of the stream, or of that worker's, after this batch; ``"ended"`` is in it if it has nothing
    # more. Of a map-style dataset only where that is stateful.
    stream_state: StreamState | None = None
    times: StageTimes = NO_TIMES  # when it passed the stages
    fetches: FetchTimes | None = (
        None  # single fetches that ended since the batch before it; None if none are measured
    )

    @property
    def skipped(self) -> int:
        """The number of samples that are not in it; with the rest of each shard that has ended."""
        return (
            len(self.plan.indices)
            - self.size
            + sum((failure.lost or 1) - 1 for failure in self.failures)
        )

    def flat(self, requested: BatchPlan) -> tuple[Any, ...]:
        """The batch as a flat tuple, for a process that has its plan, from which what was read of a stream differs."""
        plan, times = self.plan, self.times
        read = None if plan is requested else (plan.indices, plan.positions)
        requests = self.requests and counts_of(self.requests)
        own = (
            plan.number,
            read,
            self.data,
            self.size,
            self.failures,
            self.end,
            self.empty,
            requests,
        )
        return *own, self.worker, self.stream_state, self.fetches, *times[:-1], *times.load

    @classmethod
    def from_flat(cls, flat: tuple[Any, ...], plan: BatchPlan) -> HostBatch:
        _, read, data, size, failures, end, empty, requests, worker, state, fetches, *times = flat
        if read is not None:
            plan = plan._replace(indices=read[0], positions=read[1])
        counts = requests and RequestCounts(*requests)
        stages = StageTimes._make((*times[:-_LOAD], FetchLoad(*times[-_LOAD:])))
        return cls(plan, data, size, failures, end, empty, counts, worker, state, stages, fetches)

    @classmethod
    def nothing(
        cls, plan: BatchPlan, failures: tuple[Failure, ...] = (), *, end: bool = False
    ) -> HostBatch:
        return cls(plan, None, 0, failures, end, empty=True)

    @classmethod
    def failed(cls, plan: BatchPlan, error: BaseException, stage: Stage) -> HostBatch:
        return cls.nothing(plan, (Failure.caught(error, stage, plan.number),))

    def replaced_by(self, error: BaseException, stage: Stage) -> HostBatch:
        """An error in place of the batch, with the failures of the batch."""
        return HostBatch.failed(self.plan, error, stage).with_failures_of(self)

    def with_failures_of(self, earlier: HostBatch) -> HostBatch:
        """This batch in place of `earlier`, from which it was made: with its failures, and all but its data."""
        return earlier._replace(
            data=self.data,
            size=self.size,
            failures=earlier.failures + self.failures,
            empty=self.empty,
        )

    def located(self, sample_key: Callable[[object], str | None]) -> HostBatch:
        if not self.failures:
            return self
        located = (failure.located(self.plan.indices, sample_key) for failure in self.failures)
        return self._replace(failures=tuple(located))

    def with_lost(self, raw: RawBatch, failures: tuple[Failure, ...]) -> HostBatch:
        """This batch with the `failures` of `raw`, from which it was made, and its plan."""
        return self._replace(plan=raw.plan, failures=failures + self.failures) if failures else self
