"""The counts of a loader and its last batches: the source of `stats()`, reports, traces and exporters."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple, TypeAlias

from headrace._core.batches import FetchTimes, HostBatch, RequestCounts, StageTimes
from headrace._core.failure import Failure

__all__ = ["KEPT", "BatchRecord", "Counters", "LoaderStats", "counters_of"]

KEPT = 4096  # batches
SKIPS = 100  # of which a record is kept


class BatchRecord(NamedTuple):
    """A batch that `next()` returned; times are in seconds of `time.perf_counter`."""

    iteration: int  # number of the loader's iteration, from 1
    number: int  # of the batch, in its epoch
    size: int  # number of samples
    planned: float  # when it was sampled
    times: StageTimes  # when it passed the stages of the engine
    called: float  # when `next()` was called
    taken: float  # when the batch was there
    refilled: float  # when the next plans had been sampled and sent
    returned: float  # when `next()` returned it
    ready: int  # number of batches that were ready after it was taken
    requests: RequestCounts | None  # to stores, since the batch before it
    cpu: float = 0.0  # CPU seconds of the consumer's thread until `returned`
    fetches: FetchTimes | None = (
        None  # single fetches since then; measured only while a trace is written
    )


Subscriber: TypeAlias = "Callable[[Counters, BatchRecord], None]"


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """A loader's counts since it was made, over all its epochs.

    Attributes:
        epochs: iterations begun.
        batches: batches delivered.
        samples: samples delivered.
        skipped_samples: samples left out by ``on_error="skip"``, with those of the rest of each
            shard that ended early.
        skipped: the last 100 failures that were skipped, oldest first; text alone, without
            exceptions and samples.
        lost_batches: batches skipped by ``on_error="skip"``, since all their samples were.
        wait_seconds: seconds in `next()` or `anext()` for the batches delivered, as in
            `Report.waited`; the first batch of each iteration included.
        elapsed_seconds: from the first `iter()` to the last batch delivered.
        placement: where fetching runs: ``"thread"``, ``"process"``, ``"ray"``; ``"inline"`` in the
            caller's thread.
        requests: requests of headrace's own datasets to stores, hedges, and cache lookups.
        discarded_batches: batches that were ready and not delivered, since the epoch had ended on
            another rank, with ``coordinated=True``.
        worker_deaths: worker processes that died, those included whose batch another worker has
            made since; counted with the next batch that arrives.
    """

    epochs: int
    batches: int
    samples: int
    skipped_samples: int
    skipped: tuple[Failure, ...] = field(repr=False)
    lost_batches: int
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


class Counters:
    """The counts of one loader and its last batches, written on the consumer's thread by whichever iterator delivers.

    Subscribers are given each batch of all loaders as it is delivered, on that thread. Attributes
    that `LoaderStats` has too are described there. A copy of a loader has counts of its own.
    """

    # A dict changes in one step, in whichever thread.
    _subscribers: ClassVar[dict[Subscriber, None]] = {}

    def __init__(self, name: str = "loader") -> None:
        self.name = name  # of the dataset's class
        self.placement = "not started"
        self.epochs = self.batches = self.samples = self.skipped_samples = 0
        self.lost_batches = self.discarded_batches = self.worker_deaths = 0
        self.nbytes = 0  # approximate size of the samples fetched
        self.wait_seconds = self.fetch_seconds = 0.0  # `fetch_seconds`: of one fetch of each batch
        self.skipped: deque[Failure] = deque(maxlen=SKIPS)
        self.requests = RequestCounts()
        self._counted: RequestCounts | None = None
        self._began: float | None = None
        self._ended = 0.0  # when the last batch was returned
        self._kept: deque[BatchRecord] = deque(
            maxlen=KEPT + 1
        )  # with the one before those that `records` returns

    @property
    def last(self) -> BatchRecord:
        """The last batch; `IndexError` before the first one."""
        return self._kept[-1]

    @property
    def traced(self) -> bool:
        """Whether single fetches are measured."""
        return bool(self._subscribers)

    def begin(self) -> None:
        """Count an iteration."""
        self.epochs += 1
        if self._began is None:
            self._began = self._ended = time.perf_counter()

    def delivered(self, record: BatchRecord) -> None:
        """Count a batch that `next()` returns."""
        self.batches += 1
        self.samples += record.size
        self.nbytes += record.times.nbytes
        self.fetch_seconds += record.times.fetch_seconds
        self.wait_seconds += record.returned - record.called
        self._ended = record.returned
        if record.requests is not None:
            self._add(record.requests)
        self._kept.append(record)
        for subscriber in tuple(self._subscribers):
            subscriber(self, record)

    def skip(self, host: HostBatch) -> None:
        """Count the skipped samples of a batch."""
        self.skipped_samples += host.skipped
        self.skipped.extend(failure.as_text() for failure in host.failures[-SKIPS:])
        if host.requests is not None:
            self._add(host.requests)

    def _add(self, more: RequestCounts) -> None:
        """Add the requests of a batch, once, though it may be skipped in part and delivered."""
        if more is not self._counted:
            self._counted = more
            self.requests = self.requests + more

    def snapshot(self) -> LoaderStats:
        """A frozen copy."""
        counts = {
            each.name: getattr(self, each.name)
            for each in fields(LoaderStats)
            if hasattr(self, each.name)
        }
        counts["skipped"] = tuple(self.skipped)
        counts["elapsed_seconds"] = self._ended - self._began if self._began is not None else 0.0
        return LoaderStats(**counts)

    def records(self, last: int = KEPT) -> list[BatchRecord]:
        """The batches of the iteration begun last, at most so many (4,096).

        The first of them has a wait of 0 s where it is not the first of its iteration, whose wait
        is the start-up.
        """
        kept = list(self._kept)[-last - 1 :]
        found = [each for each in kept if each.iteration == kept[-1].iteration]
        if len(found) > last:
            found[:2] = [found[1]._replace(called=found[1].returned)]
        return found

    @staticmethod
    def subscribe(subscriber: Subscriber) -> Callable[[], object]:
        """Call `subscriber` with each batch of every loader from its next one on; returns what ends it."""
        Counters._subscribers[subscriber] = None
        return lambda: Counters._subscribers.pop(subscriber, None)


def counters_of(loader: Any, function: str) -> Counters:
    """The counters of a loader; `TypeError` if it is no `DataLoader`."""
    counters = getattr(getattr(loader, "_control", None), "counters", None)
    if not isinstance(counters, Counters):
        kind = type(loader)
        raise TypeError(
            f"{function}() needs a headrace.DataLoader, but got {kind.__module__}.{kind.__qualname__}; "
            f"of a loader that a trainer has wrapped, give the one that it was made of"
        )
    return counters
