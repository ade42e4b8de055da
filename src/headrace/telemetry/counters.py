"""Counts of a loader, and records of the last batches.

The source of `stats()`, reports and traces.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from headrace._records.batches import FetchTimes, HostBatch, RequestCounts, StageTimes
from headrace._records.failure import Failure

KEPT = 4096  # records of the last batches kept by a loader
SKIPS = 100  # records of the last skipped samples kept by a loader


class BatchRecord(NamedTuple):
    """A batch returned by `next()`.

    Times are in seconds of `time.perf_counter`.
    """

    iteration: int  # number of the loader's iteration, from 1
    number: int  # of the batch, in its epoch
    size: int  # number of samples
    planned: float  # time when the batch was sampled
    times: StageTimes  # times of the engine's stages
    called: float  # time when `next()` was called
    taken: float  # time when the batch was available
    refilled: float  # time when the next plans had been sampled and sent
    returned: float  # time when `next()` returned the batch
    ready: int  # number of ready batches after this batch was taken
    requests: RequestCounts | None  # requests to stores, since the batch before
    cpu: float = 0.0  # CPU seconds of the consumer's thread until `returned`
    # Single fetches since the batch before. Measured only while a trace is written.
    fetches: FetchTimes | None = None


@dataclass(slots=True)
class LoaderStats:
    """Counts of a loader since its creation, over all epochs.

    Attributes:
        epochs: iterations begun.
        batches: batches delivered.
        samples: samples delivered.
        skipped_samples: samples left out by ``on_error="skip"``, including the remaining samples of
            each shard that ended early.
        skipped: the last 100 skipped failures, oldest first. Text alone, without exceptions and
            samples.
        lost_batches: batches skipped by ``on_error="skip"`` because all samples were skipped.
        wait_seconds: seconds in `next()` or `anext()` for the delivered batches, as in
            `Report.waited`, but including the first batch of each iteration.
        elapsed_seconds: seconds from the first `iter()` to the last delivered batch.
        placement: where fetching runs: ``"thread"``, ``"process"`` or ``"ray"``. ``"inline"`` is
            the caller's thread.
        requests: requests of headrace's own datasets to stores, hedges, and cache lookups. Counted
            with the next arriving batch.
        discarded_batches: ready batches that were not delivered because the epoch had ended on
            another rank, with ``coordinated=True``.
        worker_deaths: worker processes that died, including workers whose batch another worker has
            made since. Counted with the next arriving batch.
    """

    epochs: int = 0
    batches: int = 0
    samples: int = 0
    skipped_samples: int = 0
    skipped: tuple[Failure, ...] = field(default=(), repr=False)
    lost_batches: int = 0
    wait_seconds: float = 0.0
    elapsed_seconds: float = 0.0
    placement: str = "not started"
    requests: RequestCounts = field(default_factory=RequestCounts)
    discarded_batches: int = 0
    worker_deaths: int = 0

    @property
    def wait_share(self) -> float:
        """Share of the time spent waiting, from 0 to 1."""
        if self.elapsed_seconds:
            return min(1.0, self.wait_seconds / self.elapsed_seconds)
        return 0.0


class Counters:
    """Counts of a loader, and records of the last batches.

    The iterator that delivers a batch writes the counts, on the consumer's thread. A copy of a
    loader has counts of its own.

    Attributes:
        subscribers: Functions of each delivered batch of all loaders, called on the same thread.
        name: Name of the dataset's class.
        stats: The counts. `DataLoader.stats` returns a copy.
    """

    subscribers: ClassVar[set[Callable[[Counters, BatchRecord], None]]] = set()

    def __init__(self, name: str = "loader") -> None:
        self.name = name
        self.stats = LoaderStats()
        self._began = 0.0  # time of the first `begin`
        # One record more than `records` returns.
        self._kept: deque[BatchRecord] = deque(maxlen=KEPT + 1)

    @property
    def traced(self) -> bool:
        """Whether single fetches are measured."""
        return bool(self.subscribers)

    def begin(self) -> None:
        """Count an iteration."""
        if not self.stats.epochs:
            self._began = time.perf_counter()
        self.stats.epochs += 1

    def delivered(self, record: BatchRecord) -> None:
        """Count a batch to be returned by `next()`."""
        stats = self.stats
        stats.batches += 1
        stats.samples += record.size
        stats.wait_seconds += record.returned - record.called
        stats.elapsed_seconds = record.returned - self._began
        self._kept.append(record)
        for subscriber in tuple(self.subscribers):
            subscriber(self, record)

    def skip(self, host: HostBatch) -> None:
        """Count the skipped samples of a batch."""
        failures = (failure.as_text() for failure in host.failures[-SKIPS:])
        self.stats.skipped_samples += host.skipped
        self.stats.skipped = (*self.stats.skipped, *failures)[-SKIPS:]

    def records(self, last: int = KEPT) -> list[BatchRecord]:
        """Return at most `last` batches of the latest iteration.

        The wait of an iteration's first batch is the start-up. If the iteration's first batch is no
        longer among the records, the first returned record has a wait of 0 s.
        """
        kept = list(self._kept)[-last - 1 :]
        found = [each for each in kept if each.iteration == kept[-1].iteration]
        if len(found) > last:
            found[:2] = [found[1]._replace(called=found[1].returned)]
        return found
