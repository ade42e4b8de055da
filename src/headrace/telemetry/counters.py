"""The counts of a loader, and the frozen copy that `stats()` returns."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from headrace._core.batches import HostBatch, RequestCounts
from headrace._core.failure import Failure, Stage
from headrace._core.text import short_repr, shorten
from headrace.telemetry.batch_log import BatchLog

__all__ = ["Counters", "LoaderStats", "SkipRecord", "counters_of"]

KEPT = 100  # skips of which a record is kept
MESSAGE_LIMIT = 500  # characters of an exception's message in it


@dataclass(frozen=True, slots=True)
class SkipRecord:
    """A skipped failure as text, without references to the exception, its traceback or the sample.

    Attributes:
        error: the name of the exception's type.
        message: the exception's message, shortened to 500 characters.
        stage: the step that failed. A `Stage` is a str: ``record.stage == "fetch"``.
        batch: the batch's number.
        index: the sampler's index, or the position in a stream; None where the whole batch failed. Anything but an int
            or a str is shortened text.
        key: the dataset's name for that index, shortened; None if it has none.
        worker: the worker's number; None outside a worker.
        attempt: number of the attempt, from 1.
        where: the location as text: stage, batch, index, key, worker, attempt.
    """

    error: str
    message: str
    stage: Stage
    batch: int
    index: int | str | None
    key: str | None
    worker: int | None
    attempt: int
    where: str

    @classmethod
    def of(cls, failure: Failure) -> SkipRecord:
        """The record of a failure."""
        index = failure.index
        if index is not None and type(index) is not int:
            index = shorten(index) if type(index) is str else short_repr(index)
        return cls(
            error=failure.type_name,
            message=shorten(failure.message, MESSAGE_LIMIT),
            stage=failure.stage,
            batch=failure.batch,
            index=index,
            key=None if failure.key is None else shorten(failure.key),
            worker=failure.worker,
            attempt=failure.attempt,
            where=failure.where,
        )

    def __str__(self) -> str:
        return f"{self.error}: {self.message} ({self.where})"


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """A loader's counts since it was made, over all its epochs.

    Attributes:
        epochs: iterations begun.
        batches: batches delivered.
        samples: samples delivered.
        skipped_samples: samples left out by ``on_error="skip"``.
        skipped: the last 100 failures that were skipped, oldest first.
        replaced_batches: batches delivered a second time in place of batches that lost all their samples.
        wait_seconds: seconds that the consumer waited in `next()` or `anext()`. Overlapping waits of several iterators
            count once.
        elapsed_seconds: from the first `iter()` to the last batch delivered, or to the end of the last wait.
        placement: the engine's placement, and the reason.
        requests: requests of headrace's own datasets to stores, hedges, and cache lookups.
        discarded_batches: batches that were ready and not delivered, since the epoch had ended on another rank, with
            ``coordinated=True``.
        worker_deaths: worker processes that died, those included whose batch another worker has made since; counted
            with the next batch that arrives.
    """

    epochs: int
    batches: int
    samples: int
    skipped_samples: int
    skipped: tuple[SkipRecord, ...] = field(repr=False)
    replaced_batches: int
    wait_seconds: float
    elapsed_seconds: float
    placement: str
    requests: RequestCounts = field(default_factory=RequestCounts)
    discarded_batches: int = 0
    worker_deaths: int = 0

    @property
    def wait_share(self) -> float:
        """The part of the elapsed time that the consumer spent waiting for data, from 0 to 1."""
        return min(1.0, self.wait_seconds / self.elapsed_seconds) if self.elapsed_seconds else 0.0


@dataclass(slots=True, weakref_slot=True, eq=False)
class Counters:
    """The counts of one loader, written on the consumer's thread by whichever iterator delivers."""

    name: str = "loader"
    placement: str = "not started"
    epochs: int = 0
    batches: int = 0
    samples: int = 0
    skipped_samples: int = 0
    skipped: deque[SkipRecord] = field(default_factory=lambda: deque(maxlen=KEPT))
    replaced_batches: int = 0
    discarded_batches: int = 0
    worker_deaths: int = 0
    requests: RequestCounts = field(default_factory=RequestCounts)
    log: BatchLog = field(init=False)
    _counted: RequestCounts | None = None
    _began: float | None = None
    last: float = 0.0  # the end of the last delivery or wait
    _waited: float = 0.0
    _waiting: int = 0  # consumers, in threads or tasks of their own
    _waiting_since: float = 0.0
    _lock: threading.RLock = field(default_factory=threading.RLock)  # stats() in a signal handler
    _open: set[object] = field(default_factory=set)  # iterations that are neither over nor closed

    def __post_init__(self) -> None:
        self.log = BatchLog(self.name)

    def __getstate__(self) -> dict[str, object]:
        """A copy of a loader has its counts, no iteration, and no consumer that waits."""
        left = ("_lock", "_open", "_waiting", "_waiting_since", "log")
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in left}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Counters.__init__(self)
        for name, value in state.items():
            setattr(self, name, value)
        self.log = BatchLog(self.name)

    def begin(self) -> None:
        """Count an iteration."""
        self.epochs += 1
        if self._began is None:
            self._began = self.last = time.perf_counter()

    @property
    def iterating(self) -> bool:
        """Whether an iteration is open."""
        return bool(self._open)

    def open_iteration(self) -> object:
        """Count an iteration as open; returns the argument of `close_iteration`."""
        iteration = object()
        self._open.add(iteration)
        return iteration

    def close_iteration(self, iteration: object) -> None:
        """Count it as closed; without a lock, as the garbage collector may call this at any time."""
        self._open.discard(iteration)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure, inside the block, that a consumer waits; overlapping waits of several count once."""
        with self._lock:
            if not self._waiting:
                self._waiting_since = time.perf_counter()
            self._waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1
                self.last = time.perf_counter()
                if not self._waiting:
                    self._waited += self.last - self._waiting_since

    def skip(self, host: HostBatch) -> None:
        """Count the skipped samples of a batch."""
        self.skipped_samples += len(host.plan.indices) - host.size
        self.skipped.extend(map(SkipRecord.of, host.failures[-KEPT:]))
        if host.requests is not None:
            self.add_requests(host.requests)

    def add_requests(self, more: RequestCounts) -> None:
        """Add the requests of a batch, once, though it may be skipped in part and delivered."""
        if more is not self._counted:
            self._counted = more
            self.requests = self.requests + more

    def snapshot(self) -> LoaderStats:
        """A frozen copy; a wait in progress counts up to now."""
        with self._lock:
            last = time.perf_counter() if self._waiting else self.last
            waited = self._waited + (last - self._waiting_since if self._waiting else 0.0)
        counts = {each.name: getattr(self, each.name) for each in fields(LoaderStats) if hasattr(self, each.name)}
        elapsed = last - self._began if self._began is not None else 0.0
        counts |= {"skipped": tuple(self.skipped), "wait_seconds": waited, "elapsed_seconds": elapsed}
        return LoaderStats(**counts)


def counters_of(loader: Any, function: str) -> Counters:
    """The counters of a loader.

    Raises:
        TypeError: it is no `DataLoader`.
    """
    counters = getattr(getattr(loader, "_control", None), "counters", None)
    if not isinstance(counters, Counters):
        kind = type(loader)
        raise TypeError(
            f"{function}() needs a headrace.DataLoader, but got {kind.__module__}.{kind.__qualname__}; "
            f"of a loader that a trainer has wrapped, give the one that it was made of"
        )
    return counters
