"""Types passed between the stages, a frozen type for each hop.

::

    sampling ─BatchPlan─▶ fetch ─RawBatch─▶ assemble ─HostBatch─▶ handoff ─▶ claim ─▶ your loop
"""

from __future__ import annotations

import operator
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, cast

import cloudpickle

from headrace._base.array_types import COMPUTED_INDICES
from headrace._records.failure import Failure, Stage

StreamState = Mapping[str, object] | bytes
"""Position of a stream.

A position from another process stays pickled, because most positions are never read.
"""


def dump_state(state: StreamState | None) -> bytes | None:
    """Pickle the position of a stream, or raise the pickling error."""
    if state is None or isinstance(state, bytes):
        return state
    try:
        return pickle.dumps(state, protocol=5)
    except Exception:
        # Cloudpickle pickles classes of a script by value, at a fifth of the speed.
        return cast(bytes, cloudpickle.dumps(state, protocol=5))


def load_state(state: StreamState) -> Mapping[str, object]:
    """Unpickle the position of a stream, or raise the unpickling error."""
    if isinstance(state, bytes):
        return cast("Mapping[str, object]", pickle.loads(state))
    return state


class BatchPlan(NamedTuple):
    """The content of a batch, as sampled without I/O.

    Attributes:
        number: position of the batch in the epoch, from 0.
        indices: the sampler's index for each slot. For a stream, None for each slot before reading,
            and the position of the sample after reading.
        seed: seed of `random`, NumPy and torch for the transforms of the batch.
        epoch: number of the epoch, from 0.
        positions: for each slot, position of the sample among the samples of all ranks in the
            epoch. For a stream before reading, positions of all samples of the rank.
        random_key: key of the epoch's `randomized` functions, a number of 128 bits.
        planned: time of sampling, in seconds of `time.perf_counter`, as in `StageTimes`.
        taken: number of the last batch taken by the consumer at the time of sampling. With
            `in_order=False`, number of batches taken.
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
        """Whether the plan holds no user objects.

        The indices of a plain plan are numbers, strings or None.
        """
        return isinstance(self.indices, COMPUTED_INDICES) or _PLAIN.issuperset(
            map(type, self.indices)
        )


_PLAIN = frozenset({int, str, type(None)})


class FetchLoad(NamedTuple):
    """Load of a fetch stage at a moment.

    Attributes:
        in_flight: number of running fetches.
        limit: number of allowed fetches.
        queued: number of samples waiting for a fetch.
        held_plans: number of plans waiting for memory.
        unused: number of allowed fetches in stages without further planned samples.
    """

    in_flight: int = 0
    limit: int = 0
    queued: int = 0
    held_plans: int = 0
    unused: int = 0


class StageTimes(NamedTuple):
    """Times of a batch in each stage of the engine.

    Points in time are seconds of `time.perf_counter`, or 0.0 if unknown. On Linux and macOS, all
    processes of a machine share this clock.

    Attributes:
        admitted: the engine received the plan.
        began: the first fetch began.
        fetched: the last sample arrived.
        work_began: transforms and collation began, or reading a torch dataset in a worker.
        work_ended: collation ended.
        assembled: the engine had the result.
        fetch_seconds: duration of a fetch of the batch, in seconds.
        nbytes: approximate size of the fetched samples, in bytes.
        engine_cpu: CPU seconds of the engine's thread so far.
        blocked: seconds in which user code blocked the event loop, since the session began.
        blocked_in: the line of user code that blocked the event loop last.
        worker_deaths: number of workers that died since the previous batch was assembled.
        engine_queued: seconds in which the engine's thread has waited for a core so far.
        work_cpu: CPU seconds of transforms and collation.
        work_queued: seconds in which the thread of the transforms has waited for a core so far;
            0.0 if unknown, or if this batch took hardly longer than its CPU seconds.
        worked_by: process, native thread and worker (-1 without a worker); None if unknown.
        functions_seconds: seconds in a stream's functions before batching, since the session began.
        load: load of the fetch stage when the last sample arrived.
    """

    admitted: float = 0.0
    began: float = 0.0
    fetched: float = 0.0
    work_began: float = 0.0
    work_ended: float = 0.0
    assembled: float = 0.0
    fetch_seconds: float = 0.0
    nbytes: int = 0
    engine_cpu: float = 0.0
    blocked: float = 0.0
    blocked_in: str | None = None
    worker_deaths: int = 0
    engine_queued: float = 0.0
    work_cpu: float = 0.0
    work_queued: float = 0.0
    worked_by: tuple[int, int, int] | None = None
    functions_seconds: float = 0.0
    load: FetchLoad = FetchLoad()


NO_TIMES = StageTimes()
# Sums over the life of an engine or session, of which several engines have a mean.
GROWING = ("engine_cpu", "engine_queued", "blocked")


class FetchTimes(NamedTuple):
    """Times of single fetches, measured during a trace.

    Attributes:
        pid: process of the engine.
        thread: native id of the engine's thread.
        rows: four doubles for each fetch: number of the batch, slot in the batch, beginning and
            end. The slot is 0 for a call of `agets`, and the number of the object for a range.
    """

    pid: int
    thread: int
    rows: bytes


class SessionStart(NamedTuple):
    """Epoch and starting position of a session.

    Attributes:
        batch: number of the first batch.
        streams: state of the stream for each worker that reads a stream. The key None stands for
            the engine or the consumer's thread. Empty for a map-style dataset, and at the beginning
            of an epoch.
        next_worker: the worker that gets the first plan, if each worker reads a stream.
        epoch: number of the epoch.
        set_epoch: whether to call `set_epoch` also on datasets without ``wants_epoch``.
        seed: seed of a stream's functions before batching. The seed does not depend on the starting
            position.
    """

    batch: int = 0
    streams: Mapping[int | None, Mapping[str, object]] = {}
    next_worker: int = 0
    epoch: int = 0
    set_epoch: bool = False
    seed: int = 0

    @property
    def own_state(self) -> dict[str, Any] | None:
        """State of a stream read by no worker.

        None if the stream begins with the epoch.
        """
        state = self.streams.get(None)
        return None if state is None else dict(state)


@dataclass(frozen=True, slots=True)
class Rows(Sequence[Any]):
    """Samples of a batch as rows of a tensor or table.

    Default collate functions need no copy of the rows. A sample of a `pyarrow.Table` is a table
    with a single row.

    Attributes:
        whole: an unshared tensor, or a `pyarrow.Table`.
    """

    whole: Any

    def __len__(self) -> int:
        return len(self.whole)

    def __getitem__(self, position: Any) -> Any:
        rows = range(len(self.whole))[position]
        if isinstance(rows, int):
            return self.whole.slice(rows, 1) if self.is_table else self.whole[rows]
        if self.is_table:
            return Rows(self.whole.slice(rows.start, len(rows)))
        return Rows(self.whole[position])

    def __iter__(self) -> Iterator[Any]:
        rows = range(len(self))
        return (
            map(self.__getitem__, rows) if self.is_table else iter(self.whole.unbind(0))
        )

    @property
    def is_table(self) -> bool:
        return is_table(self.whole)


def is_table(sample: object) -> bool:
    """Whether an object is a `pyarrow.Table`.

    The check does not import pyarrow.
    """
    pyarrow = sys.modules.get("pyarrow")
    return pyarrow is not None and isinstance(sample, pyarrow.Table)


class RawBatch(NamedTuple):
    """A batch of fetched samples before transforms.

    Attributes:
        plan: the plan of the batch.
        samples: for each slot, the sample or a `Failure`. The last batch of a stream may have
            fewer samples than slots. None if the worker fetches the samples itself.
        end: whether the stream has ended.
        worker: the worker that has the dataset and must get the batch; None for any worker.
        whole: whether `samples` is the argument of `collate_fn`, as returned by the dataset.
        stream_state: state of the stream after the batch; None for a map-style dataset.
        began: beginning of the first fetch, as in `StageTimes`; 0.0 if unknown.
        fetch_seconds: duration of a fetch of the batch, in seconds.
        origin: function that names samples of a stream by index; None in a worker.
    """

    plan: BatchPlan
    samples: Any
    end: bool = False
    worker: int | None = None
    whole: bool = False
    stream_state: Mapping[str, object] | None = None
    began: float = 0.0
    fetch_seconds: float = 0.0
    origin: Callable[[Any], str | None] | None = None

    def without_failures(self) -> tuple[RawBatch, tuple[Failure, ...]]:
        """Separate the failed samples from the batch.

        Returns:
            The batch without failed samples, and the failures.
        """
        samples, plan = self.samples, self.plan
        if self.whole or type(samples) is Rows or Failure not in map(type, samples):
            return self, ()
        # A single Failure may stand for all samples of a single fetch call.
        good = [
            slot for slot, sample in enumerate(samples) if type(sample) is not Failure
        ]
        plan = plan._replace(
            indices=tuple(plan.indices[slot] for slot in good),
            positions=plan.positions and [plan.positions[slot] for slot in good],
        )
        failures = tuple(sample for sample in samples if type(sample) is Failure)
        return self._replace(
            plan=plan, samples=[samples[slot] for slot in good]
        ), failures


@dataclass(slots=True)
class RequestCounts:
    """Counts of store requests and cache lookups between two batches.

    Attributes:
        requests: number of requests, including retries.
        retries: number of retries.
        throttled: number of responses 429 and 503.
        timed_out: number of requests without a byte within the time-out.
        hedges: number of fetches started a second time.
        hedges_won: number of hedges that finished first.
        cache_hits: number of objects, or blocks of shards, read from a disk cache.
        cache_misses: number of objects, or blocks of shards, fetched for a disk cache.
        cache_damaged: number of damaged objects or blocks in a cache, fetched again.
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
# `dataclasses.astuple` would take 40 µs, for each batch within `next()`.
counts_of = operator.attrgetter(*COUNTED)


class HostBatch(NamedTuple):
    """A finished batch in host memory, or the failures.

    Attributes:
        plan: the plan of the batch.
        data: result of `collate_fn`; None if the batch is `empty`.
        size: number of samples in `data`.
        failures: failures of the missing samples.
        end: whether the stream has ended.
        empty: whether there is nothing to deliver. A batch without samples from a batch sampler is
            not `empty`, and is delivered.
        requests: counts of requests since the previous batch; None without requests.
        worker: the worker that read the batch, if each worker reads a copy of the dataset.
        stream_state: state of the stream, or of the worker's copy, after the batch. The key
            ``"ended"`` marks an ended stream. A map-style dataset has a state only if stateful.
        times: times of the batch in the stages.
        fetches: times of single fetches since the previous batch; None without a trace.
    """

    plan: BatchPlan
    data: Any
    size: int
    failures: tuple[Failure, ...] = ()
    end: bool = False
    empty: bool = False
    requests: RequestCounts | None = None
    worker: int | None = None
    stream_state: StreamState | None = None
    times: StageTimes = NO_TIMES
    fetches: FetchTimes | None = None

    @property
    def skipped(self) -> int:
        """Number of missing samples, including lost rests of shards."""
        return (
            len(self.plan.indices)
            - self.size
            + sum((failure.lost or 1) - 1 for failure in self.failures)
        )

    def flat(self, requested: BatchPlan) -> tuple[Any, ...]:
        """Return the batch as a tuple of plain values, without the plan.

        The receiving process has the plan.
        After reading a stream, the plan of the batch differs from the `requested` plan. The tuple
        then has the indices and positions of the plan.
        """
        plan, times = self.plan, self.times
        read = None if plan is requested else (plan.indices, plan.positions)
        requests = self.requests and counts_of(self.requests)
        return (
            plan.number,
            read,
            self.data,
            self.size,
            self.failures,
            self.end,
            self.empty,
            requests,
            self.worker,
            self.stream_state,
            self.fetches,
            times[:-1],
            tuple(times.load),
        )

    @classmethod
    def from_flat(cls, flat: tuple[Any, ...], plan: BatchPlan) -> HostBatch:
        _, read, data, size, failures, end, empty, *rest = flat
        requests, worker, state, fetches, times, load = rest
        if read is not None:
            plan = plan._replace(indices=read[0], positions=read[1])
        counts = requests and RequestCounts(*requests)
        stages = StageTimes._make((*times, FetchLoad(*load)))
        return cls(
            plan, data, size, failures, end, empty, counts, worker, state, stages, fetches
        )

    @classmethod
    def nothing(
        cls, plan: BatchPlan, failures: tuple[Failure, ...] = (), *, end: bool = False
    ) -> HostBatch:
        return cls(plan, None, 0, failures, end, empty=True)

    @classmethod
    def failed(cls, plan: BatchPlan, error: BaseException, stage: Stage) -> HostBatch:
        return cls.nothing(plan, (Failure.caught(error, stage, plan.number),))

    def replaced_by(self, error: BaseException, stage: Stage) -> HostBatch:
        """Return an error in place of the batch, with the batch's failures."""
        return HostBatch.failed(self.plan, error, stage).with_failures_of(self)

    def with_failures_of(self, earlier: HostBatch) -> HostBatch:
        """Return this batch with the other fields of `earlier`.

        This batch was made from `earlier`. The result has the failures of both batches.
        """
        return earlier._replace(
            data=self.data,
            size=self.size,
            failures=earlier.failures + self.failures,
            empty=self.empty,
        )

    def located(self, sample_key: Callable[[object], str | None]) -> HostBatch:
        if not self.failures:
            return self
        located = (
            failure.located(self.plan.indices, sample_key) for failure in self.failures
        )
        return self._replace(failures=tuple(located))

    def with_lost(self, raw: RawBatch, failures: tuple[Failure, ...]) -> HostBatch:
        """Add failures from an earlier stage.

        This batch was made from `raw` without the samples of `failures`. The result has the plan of
        `raw` and all failures. Without `failures`, the batch is returned unchanged.
        """
        if failures:
            return self._replace(plan=raw.plan, failures=failures + self.failures)
        return self
