"""The types passed between the stages, one frozen type for each hop.

::

    sampling ──BatchPlan──▶ fetch ──RawBatch──▶ assemble ──HostBatch──▶ handoff ──▶ claim ──▶ your loop
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from headrace._core.notes import add_note, has_note
from headrace._core.text import LIST_ITEMS, short_repr, shorten_list
from headrace._core.torchcompat.error_text import set_torch_error_text, torch_error_text
from headrace.errors import ControlFlowError, RemoteError, WorkerDiedError

if TYPE_CHECKING:
    import torch

KEY_LIMIT = 500  # characters of a key in an error; an URL of an object has fewer


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The content of one batch, as sampled; made without I/O.

    Attributes:
        number: the batch's position in its epoch, from 0.
        indices: the sampler's index for each slot. Of a stream, None for each slot until it is read, then its position.
        seed: the seed of `random`, NumPy and torch for the batch's transforms.
        epoch: the epoch's number, from 0.
        positions: for each slot, the sample's position among the samples of all ranks in the epoch. Of a stream, those
            of all its samples until the batch is read.
        repeat: whether it replaces a batch that lost all its samples; a stream is read from its beginning for these.
        random_key: the key of the epoch's `randomized` functions, a number of 128 bits.
    """

    number: int
    indices: Sequence[object]
    seed: int
    epoch: int = 0
    positions: Sequence[int] = ()
    repeat: bool = False
    random_key: int = 0


@dataclass(frozen=True, slots=True)
class SessionStart:
    """Where a session begins within its epoch.

    Attributes:
        batch: the number of its first batch.
        streams: the state of the stream, by the worker that reads it (None: the engine, or the consumer's thread).
            Empty where the dataset is map-style, or the session begins with the epoch.
        ended: workers whose streams have ended.
        next_worker: the worker that gets the first plan, where each reads a stream.
        delivered: samples that were delivered out of order, as ranges of their positions in the stream, ascending; they
            are read and dropped.
    """

    batch: int = 0
    streams: Mapping[int | None, Mapping[str, object]] = field(default_factory=dict)
    ended: frozenset[int] = frozenset()
    next_worker: int = 0
    delivered: tuple[range, ...] = ()

    def state_of(self, worker: int | None) -> dict[str, object] | None:
        """The state of the stream that a worker reads; None if that begins with the epoch."""
        state = self.streams.get(worker)
        return None if state is None else dict(state)


class Stage(enum.StrEnum):
    """The step in which user code failed; the values are the words in errors and records."""

    SAMPLING = "sampling"
    FETCH = "fetch"
    TRANSFORM = "transform"
    COLLATE = "collate"
    ASSEMBLE = "assemble"  # in a worker, outside of transform and collate
    WORKER_START = "worker start"
    SAVE_STATE = "state_dict"  # of a stream, after a batch
    RESTORE = "load_state_dict"
    CLAIM = "claim"  # unpickling in the consumer's thread
    PIN = "pin"
    COPY = "copy"  # to a device
    ON_ERROR = "on_error"

    @property
    def is_of_samples(self) -> bool:
        """Whether another sample may succeed in this stage, so that this one may be skipped."""
        return self in (Stage.FETCH, Stage.TRANSFORM, Stage.COLLATE)


@dataclass(frozen=True, slots=True)
class Failure:
    """The record of an error of user code.

    Attributes:
        error: the exception; those that Python treats as control flow are replaced by a `ControlFlowError`.
        stage: the step in which it was raised. A `Stage` is a str: ``failure.stage == "fetch"``.
        batch: the batch's number.
        index: the sampler's index, or the position in a stream; None where the whole batch failed.
        key: the dataset's name for that index (an object's key, a path); None if it has none.
        samples: text with the first indices and keys, where the whole batch failed.
        worker: the worker's number, None outside a worker.
        attempt: number of the attempt, from 1.
        traceback: printed traceback of another process; None if the error is of this one.
        unskippable: the reason why it is raised under every `on_error`; None where the policy decides.
    """

    error: Exception
    stage: Stage
    batch: int
    index: object = None
    key: str | None = None
    samples: str | None = None
    worker: int | None = None
    attempt: int = 1
    traceback: str | None = None
    unskippable: str | None = None

    @classmethod
    def caught(cls, error: BaseException, *, stage: Stage, batch: int, index: object = None) -> Failure:
        """Record `error` where it was caught."""
        return cls(error=as_exception(error), stage=stage, batch=batch, index=index)

    def located(self, indices: Sequence[object], sample_key: Callable[[object], str | None]) -> Failure:
        """This record with the sample's key; where the whole batch failed, with the batch's indices and keys.

        Args:
            indices: the batch's indices.
            sample_key: gives the dataset's name for an index, or None.
        """
        if self.index is not None:
            return replace(self, key=sample_key(self.index))
        return replace(self, samples=describe_samples(indices, sample_key) if len(indices) else None)

    @property
    def is_skippable(self) -> bool:
        """Whether an `on_error` policy may skip it: it concerns samples, not the whole pipeline."""
        if isinstance(self.error, WorkerDiedError):
            return self.error.batch is not None or self.index is not None
        return self.unskippable is None and self.stage.is_of_samples

    @property
    def type_name(self) -> str:
        """The name of the error's type; in another process, where that type does not exist here."""
        remote = self.error.type_name if isinstance(self.error, RemoteError) else None
        return remote or type(self.error).__name__

    @property
    def message(self) -> str:
        """The error's message, or the name of its class."""
        try:
            return str(self.error)
        except Exception as error:  # user code: `__str__` of an exception
            return f"(no message: its __str__ raised {type(error).__name__})"

    @property
    def where(self) -> str:
        """Where it happened, in words: stage, batch, index, key, worker, attempt."""
        stage = f"stage {self.stage}" if self.unskippable is None else f"stage {self.stage} ({self.unskippable})"
        words = [stage, f"batch {self.batch}"]
        if self.index is not None:
            words.append(f"index {short_repr(self.index)}")
        if self.key is not None:
            words.append(f"key {short_repr(self.key, KEY_LIMIT)}")
        if self.samples is not None:
            words.append(self.samples)
        if self.worker is not None:
            words.append(f"worker {self.worker}")
        if self.attempt > 1:
            words.append(f"attempt {self.attempt}")
        return ", ".join(words)

    def exception(self, *, as_torch: bool = False) -> Exception:
        """The error, with its location as a note, to be raised to the consumer.

        Args:
            as_torch: whether the worker is named by torch's message; otherwise by another note.
        """
        note = f"headrace: {self.where}"
        if has_note(self.error, note):
            return self.error
        notes = [note]
        if self.traceback is not None and as_torch and self.worker is not None:
            words = torch_error_text(self.error, self.worker, self.traceback)
            if not set_torch_error_text(self.error, words):
                notes.insert(0, words.rstrip())
        elif self.traceback is not None:
            process = "the loader's" if self.worker is None else "a worker"
            notes.insert(0, f"in {process} process:\n{self.traceback.rstrip()}")
        for each in notes:
            add_note(self.error, each)
        return self.error

    def __str__(self) -> str:
        return f"{type(self.error).__name__}: {self.message} ({self.where})"


def describe_samples(indices: Sequence[object], sample_key: Callable[[object], str | None]) -> str:
    """The first of a batch's indices and their keys, in words.

    Example:
        >>> describe_samples([4, 5], "key-{}".format)
        "indices [4, 5], keys ['key-4', 'key-5']"
    """
    words = f"indices {shorten_list(indices, len(indices))}"
    keys = [key for index in indices[:LIST_ITEMS] if (key := sample_key(index)) is not None]
    return f"{words}, keys {shorten_list(keys, len(indices))}" if keys else words


def as_exception(error: BaseException) -> Exception:
    """An exception that can be raised to a consumer without ending its loop, its task or its process."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    stopped = ControlFlowError(error=error)
    stopped.__cause__ = error
    return stopped


@dataclass(frozen=True, slots=True)
class Rows(Sequence[Any]):
    """The samples of a batch that are the rows of one tensor: a default collate need not copy them.

    Attributes:
        tensor: of shape (samples, …); not shared.
    """

    tensor: torch.Tensor

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, position: Any) -> Any:
        return self.tensor[position]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tensor.unbind(0))


@dataclass(frozen=True, slots=True)
class RawBatch:
    """A batch whose samples have been fetched and not been transformed.

    Attributes:
        plan: the batch's plan.
        samples: for each slot, in the plan's order, the sample or the `Failure` that stands in its place. A stream's
            last batch may have fewer. None where the samples are fetched by the worker itself.
        end: the stream this came from has nothing more.
        worker: the worker this has to go to, where its dataset lives; None for any.
        whole: `samples` is the argument of `collate_fn`, as the dataset returned it, and not a list of samples.
        stream_state: the stream's state after this batch; None of a map-style dataset.
    """

    plan: BatchPlan
    samples: Sequence[Any] | Any | None
    end: bool = False
    worker: int | None = None
    whole: bool = False
    stream_state: Mapping[str, object] | None = None

    def without_failures(self) -> tuple[RawBatch, tuple[Failure, ...]]:
        """The batch without its failed samples, and their failures."""
        if self.whole or type(self.samples) is Rows:
            return self, ()
        assert self.samples is not None
        failures = tuple(sample for sample in self.samples if isinstance(sample, Failure))
        if not failures:
            return self, ()
        # Not strict: one Failure may stand for a whole batch that was fetched in one call.
        slots = enumerate(zip(self.plan.indices, self.samples, strict=False))
        good = [(slot, index, sample) for slot, (index, sample) in slots if not isinstance(sample, Failure)]
        positions = self.plan.positions and [self.plan.positions[slot] for slot, _, _ in good]
        plan = replace(self.plan, indices=tuple(index for _, index, _ in good), positions=positions)
        return replace(self, plan=plan, samples=[sample for _, _, sample in good]), failures


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """Requests to stores and lookups in caches, between one batch and the next.

    Attributes:
        requests: requests sent, retries included.
        retries: retries among them.
        throttled: responses 429 and 503.
        timed_out: requests without a byte within the time-out.
        hedges: fetches started a second time.
        hedges_won: hedges that were the first to finish.
        cache_hits: samples read from a disk cache.
        cache_misses: samples fetched for a disk cache.
        cache_waits: samples that waited for a fetch of the same bytes, in this process or another.
        cache_damaged: damaged files of a cache, which were fetched again.
        cache_evicted: files evicted from a cache.
    """

    requests: int = 0
    retries: int = 0
    throttled: int = 0
    timed_out: int = 0
    hedges: int = 0
    hedges_won: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    cache_waits: int = 0
    cache_damaged: int = 0
    cache_evicted: int = 0

    def __add__(self, other: RequestCounts) -> RequestCounts:
        return RequestCounts(*map(operator.add, counts_of(self), counts_of(other)))


COUNTED = tuple(each.name for each in fields(RequestCounts))
counts_of = operator.attrgetter(*COUNTED)  # not `astuple`, which takes 40 µs, for each batch within `next()`


@dataclass(frozen=True, slots=True)
class HostBatch:
    """A batch in host memory, ready for the consumer, or its failures.

    Attributes:
        plan: the batch's plan.
        data: the return value of `collate_fn`; None where the batch is `empty`.
        size: how many samples are in `data`.
        failures: the samples that are not in it, and why.
        end: the stream this came from has nothing more.
        empty: there is nothing to deliver. (A batch sampler may ask for a batch of no samples: that is delivered.)
        requests: requests to stores since the batch before it; None for none.
        worker: the worker that read it, where each reads a copy of the dataset; None elsewhere.
        stream_state: the state of the stream, or of that worker's, after this batch; ``"ended"`` is in it if it has
            nothing more. Of a map-style dataset only where that is stateful.
    """

    plan: BatchPlan
    data: Any
    size: int
    failures: tuple[Failure, ...] = ()
    end: bool = False
    empty: bool = False
    requests: RequestCounts | None = None
    worker: int | None = None
    stream_state: Mapping[str, object] | None = None

    @classmethod
    def nothing(cls, plan: BatchPlan, failures: tuple[Failure, ...] = (), *, end: bool = False) -> HostBatch:
        """A batch with nothing to deliver."""
        return cls(plan, None, 0, failures, end, empty=True)

    @classmethod
    def failed(cls, plan: BatchPlan, error: BaseException, *, stage: Stage) -> HostBatch:
        """The empty batch of a plan that failed with `error`."""
        return cls.nothing(plan, (Failure.caught(error, stage=stage, batch=plan.number),))

    def with_failures_of(self, earlier: HostBatch) -> HostBatch:
        """This batch in place of `earlier`, from which it was made: with its failures, and all but its data."""
        return replace(
            earlier, data=self.data, size=self.size, failures=earlier.failures + self.failures, empty=self.empty
        )

    def located(self, sample_key: Callable[[object], str | None]) -> HostBatch:
        """This batch with the keys of the samples that failed."""
        if not self.failures:
            return self
        located = (failure.located(self.plan.indices, sample_key) for failure in self.failures)
        return replace(self, failures=tuple(located))

    def with_lost(self, raw: RawBatch, failures: tuple[Failure, ...]) -> HostBatch:
        """This batch with the `failures` of `raw`, from which it was made, and its plan."""
        return replace(self, plan=raw.plan, failures=failures + self.failures) if failures else self
