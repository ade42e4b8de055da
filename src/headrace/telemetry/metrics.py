"""The metrics of a loader: name, unit, help and reading of each, once for all exporters."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from headrace._core.batches import FetchLoad
from headrace.telemetry.batch_log import BatchRecord
from headrace.telemetry.counters import LoaderStats
from headrace.telemetry.figures import WAITS, waits_of

__all__ = ["HISTOGRAMS", "METRICS", "Histogram", "Metric", "Reading", "Totals"]

# Upper bounds of the buckets of durations, in seconds.
BOUNDS = (0.0001, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

_NO_LOAD = FetchLoad()


@dataclass(slots=True)
class Totals:
    """Sums over the batches that were delivered, and the last of them.

    Attributes:
        fetched: approximate bytes of the fetched samples.
        event_loop_cpu: CPU seconds of the engine's thread.
        event_loop_blocked: seconds for which user code blocked the event loop.
        step_waits: seconds of the calls of `next()`, by the step that the awaited batch was in.
        load: of the fetch stage, when the last batch was complete.
        ready: number of batches that were ready when the last one was delivered.
    """

    fetched: float = 0.0
    event_loop_cpu: float = 0.0
    event_loop_blocked: float = 0.0
    step_waits: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WAITS, 0.0))
    load: FetchLoad = _NO_LOAD
    ready: int = 0
    _iteration: int = 0
    _cpu: float = 0.0  # the engine's sums, which begin anew with an engine
    _blocked: float = 0.0

    def add(self, record: BatchRecord) -> None:
        """Add a batch."""
        times = record.times
        for step, seconds in waits_of(record):
            self.step_waits[step] += seconds
        self.fetched += times.nbytes
        if record.iteration > self._iteration:
            if times.engine_cpu < self._cpu:
                self._cpu = self._blocked = 0.0
            self._iteration = record.iteration
        # Later batches may be complete before this one, and so have larger sums.
        self.event_loop_cpu += max(0.0, times.engine_cpu - self._cpu)
        self.event_loop_blocked += max(0.0, times.blocked - self._blocked)
        self._cpu, self._blocked = max(self._cpu, times.engine_cpu), max(self._blocked, times.blocked)
        self.load, self.ready = times.load, record.ready

    def copy(self) -> Totals:
        """A copy that does not change."""
        return Totals(
            self.fetched,
            self.event_loop_cpu,
            self.event_loop_blocked,
            dict(self.step_waits),
            self.load,
            self.ready,
        )


@dataclass(frozen=True, slots=True)
class Reading:
    """The numbers of a loader at one moment.

    Attributes:
        stats: as from `DataLoader.stats`.
        totals: sums over the batches.
        iterating: whether an iteration is open; if not, nothing is in flight.
    """

    stats: LoaderStats
    totals: Totals
    iterating: bool


@dataclass(frozen=True, slots=True)
class Metric:
    """A counter or a gauge.

    Attributes:
        name: as OpenTelemetry writes it, without the unit.
        kind: counters begin with 0 when the loader is exported.
        unit: in UCUM: ``"s"``, ``"By"``, or what is counted, in braces.
        help: one line.
        read: the value; with a label, one for each of its values.
        label: the name of the label; None for a single value.
    """

    name: str
    kind: Literal["counter", "gauge"]
    unit: str
    help: str
    read: Callable[[Reading], float | Mapping[str, float]]
    label: str | None = None

    def values(self, reading: Reading) -> Mapping[str, float]:
        """The values by that of the label; ``""`` without one."""
        value = self.read(reading)
        return value if isinstance(value, Mapping) else {"": value}


@dataclass(frozen=True, slots=True)
class Histogram:
    """The distribution of a duration, one for each batch.

    Attributes:
        name: as OpenTelemetry writes it, without the unit.
        help: one line.
        observe: the seconds of a batch; 0.0 if they are unknown.
        unit: in UCUM.
        bounds: upper bounds of the buckets.
    """

    name: str
    help: str
    observe: Callable[[BatchRecord], float]
    unit: str = "s"
    bounds: tuple[float, ...] = BOUNDS


def _counter(name: str, unit: str, help: str, read: str) -> Metric:
    return Metric(f"headrace.{name}", "counter", unit, help, operator.attrgetter(read))


def _gauge(name: str, unit: str, help: str, read: str) -> Metric:
    value = operator.attrgetter(read)
    return Metric(f"headrace.{name}", "gauge", unit, help, lambda reading: value(reading) if reading.iterating else 0)


def _step_waits(reading: Reading) -> Mapping[str, float]:
    waits = reading.totals.step_waits.items()
    return {step.replace(" ", "_").replace("-", "_"): seconds for step, seconds in waits}


METRICS = (
    _counter("epochs", "{epoch}", "Iterations begun.", "stats.epochs"),
    _counter("batches", "{batch}", "Batches delivered.", "stats.batches"),
    _counter("samples", "{sample}", "Samples delivered.", "stats.samples"),
    _counter("skipped_samples", "{sample}", "Samples left out by on_error.", "stats.skipped_samples"),
    _counter(
        "replaced_batches",
        "{batch}",
        "Batches delivered a second time in place of batches that lost all their samples.",
        "stats.replaced_batches",
    ),
    _counter(
        "discarded_batches",
        "{batch}",
        "Batches not delivered, since the epoch had ended on another rank.",
        "stats.discarded_batches",
    ),
    _counter("worker_deaths", "{process}", "Worker processes that died.", "stats.worker_deaths"),
    _counter("wait", "s", "Time that the consumer waited for batches.", "stats.wait_seconds"),
    Metric(
        "headrace.step_wait",
        "counter",
        "s",
        "Time in next(), by the step that the awaited batch was in.",
        _step_waits,
        "step",
    ),
    _counter("fetched", "By", "Approximate size of the samples fetched.", "totals.fetched"),
    _counter("event_loop_cpu", "s", "CPU time of the event loop's thread.", "totals.event_loop_cpu"),
    _counter(
        "event_loop_blocked", "s", "Time for which user code blocked the event loop.", "totals.event_loop_blocked"
    ),
    _counter("requests", "{request}", "Requests to stores, retries included.", "stats.requests.requests"),
    _counter("retries", "{request}", "Requests to stores that were retries.", "stats.requests.retries"),
    _counter("throttled_requests", "{request}", "Responses 429 and 503 of stores.", "stats.requests.throttled"),
    _counter("timed_out_requests", "{request}", "Requests without a byte in time.", "stats.requests.timed_out"),
    _counter("hedges", "{fetch}", "Fetches started a second time.", "stats.requests.hedges"),
    _counter("hedges_won", "{fetch}", "Hedges that were the first to finish.", "stats.requests.hedges_won"),
    _counter("cache_hits", "{sample}", "Samples read from a disk cache.", "stats.requests.cache_hits"),
    _counter("cache_misses", "{sample}", "Samples fetched for a disk cache.", "stats.requests.cache_misses"),
    _counter(
        "cache_waits", "{sample}", "Samples that waited for a fetch of the same bytes.", "stats.requests.cache_waits"
    ),
    _counter("cache_damaged", "{file}", "Damaged files of a disk cache.", "stats.requests.cache_damaged"),
    _counter("cache_evicted", "{file}", "Files evicted from a disk cache.", "stats.requests.cache_evicted"),
    _gauge("fetches_in_flight", "{fetch}", "Fetches in flight, at the last batch.", "totals.load.in_flight"),
    _gauge("fetch_limit", "{fetch}", "Fetches allowed, at the last batch.", "totals.load.limit"),
    _gauge("queued_samples", "{sample}", "Samples that waited for a fetch, at the last batch.", "totals.load.queued"),
    _gauge("held_plans", "{batch}", "Batches held back by the memory budget.", "totals.load.held_plans"),
    _gauge("memory", "By", "Approximate size of what is fetched and not consumed.", "totals.load.memory"),
    _gauge("ready_batches", "{batch}", "Batches ready after the last delivery.", "totals.ready"),
)
HISTOGRAMS = (
    Histogram("headrace.next", "Duration of next().", lambda record: record.returned - record.called),
    Histogram("headrace.fetch", "Duration of one fetch of each batch.", lambda record: record.times.fetch_seconds),
)
