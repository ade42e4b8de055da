"""Metrics of loaders for Prometheus: a table, and a collector."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from headrace._core.batches import FetchLoad
from headrace.telemetry.counters import BatchRecord, Counters, counters_of
from headrace.telemetry.figures import WAITS, waits_of

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["COUNTERS", "GAUGES", "Export", "prometheus"]


class Export:
    """A loader's metrics, exported until `close`, or the end of the loader."""

    def __init__(self, exports: dict[str, Export], counters: Counters, name: str) -> None:
        if name in exports:
            raise ValueError(
                f"the name {name!r} is exported already: give each loader a name= of its own, or close() the other "
                f"export"
            )
        self.name: str = name
        self.stats = counters.snapshot()
        # Sums over the batches since then, and figures of the last of them:
        self.fetched = self.fetch_seconds = 0.0  # bytes, and seconds
        self.step_waits = dict.fromkeys(WAITS, 0.0)  # seconds of `next()`, by the step that the awaited batch was in
        self.load, self.ready = FetchLoad(), 0
        self._counters: weakref.ref[Counters] = weakref.ref(counters, lambda _: self.close())
        self._exports = exports
        self._unsubscribe = Counters.subscribe(self._on_batch)
        exports[name] = self

    def _on_batch(self, counters: Counters, record: BatchRecord) -> None:
        if counters is not self._counters():
            return
        times = record.times
        for step, seconds in waits_of(record).items():
            self.step_waits[step] += seconds
        self.fetched += times.nbytes
        self.fetch_seconds += times.fetch_seconds
        self.load, self.ready = times.load, record.ready

    def read(self, source: str) -> Iterator[tuple[list[str], float]]:
        """The values of a metric, each with the values of its labels: the loader's name, and the step."""
        if (counters := self._counters()) is None:
            return
        self.stats = counters.snapshot()
        value = operator.attrgetter(source)(self)
        if isinstance(value, dict):
            for step, each in value.items():
                yield [self.name, step.replace(" ", "_").replace("-", "_")], each
        else:
            yield [self.name], value

    def close(self) -> None:
        """End the export; any number of times."""
        self._unsubscribe()
        if self._exports.get(self.name) is self:
            del self._exports[self.name]


# The name without the prefix, the help, and the attribute of an `Export`: a dict there is by the value of `step`.
COUNTERS = (
    ("epochs", "Iterations begun.", "stats.epochs"),
    ("batches", "Batches delivered.", "stats.batches"),
    ("samples", "Samples delivered.", "stats.samples"),
    ("skipped_samples", "Samples left out by on_error.", "stats.skipped_samples"),
    ("lost_batches", "Batches that lost all samples.", "stats.lost_batches"),
    ("discarded_batches", "Batches after other ranks.", "stats.discarded_batches"),
    ("worker_deaths", "Worker processes that died.", "stats.worker_deaths"),
    ("wait_seconds", "Time that the consumer waited for batches.", "stats.wait_seconds"),
    ("step_wait_seconds", "Time in next(), by the step of the awaited batch.", "step_waits"),
    ("fetch_seconds", "Duration of one fetch of each batch.", "fetch_seconds"),
    ("fetched_bytes", "Approximate size of the samples fetched.", "fetched"),
    ("requests", "Requests to stores.", "stats.requests.requests"),
    ("retries", "Those that were retries.", "stats.requests.retries"),
    ("throttled_requests", "Responses 429, 503.", "stats.requests.throttled"),
    ("timed_out_requests", "Without a byte in time.", "stats.requests.timed_out"),
    ("hedges", "Fetches started a second time.", "stats.requests.hedges"),
    ("hedges_won", "Hedges that finished first.", "stats.requests.hedges_won"),
    ("cache_hits", "Samples read from a cache.", "stats.requests.cache_hits"),
    ("cache_misses", "Samples fetched for a cache.", "stats.requests.cache_misses"),
    ("cache_damaged", "Damaged in a cache.", "stats.requests.cache_damaged"),
)
# Of the last batch, also after its iteration.
GAUGES = (
    ("fetches_in_flight", "At the last batch.", "load.in_flight"),
    ("fetch_limit", "Fetches allowed, at the last batch.", "load.limit"),
    ("queued_samples", "Samples that waited for a fetch.", "load.queued"),
    ("held_plans", "Batches that waited for memory.", "load.held_plans"),
    ("memory_bytes", "Of what is fetched and not consumed.", "load.memory"),
    ("ready_batches", "Batches ready after the last delivery.", "ready"),
)

_collectors: weakref.WeakKeyDictionary[Any, _Collector] = weakref.WeakKeyDictionary()
"""The collector of each registry."""


def prometheus(loader: object, *, name: str = "default", registry: CollectorRegistry | None = None) -> Export:
    """Export a loader's metrics to a registry of the Prometheus client.

    The registry has to be served in the process that iterates over the loader. Counters continue over all iterations,
    also after `close()`; gauges are of the last batch. A loader that is no longer referenced leaves the registry.

    Args:
        loader: a `DataLoader`.
        name: the value of the label ``loader``. Each loader of a registry needs another.
        registry: the client's default registry if None.

    Returns:
        The export, whose `close()` removes the loader from the registry.

    Raises:
        ImportError: `headrace[prometheus]` is not installed.
        TypeError: `loader` is no `DataLoader`.
        ValueError: a loader is exported to this registry by this name already; or the registry has metrics of these
            names from elsewhere.

    Example:
        >>> import headrace as hr
        >>> from prometheus_client import CollectorRegistry
        >>> registry = CollectorRegistry()
        >>> loader = hr.DataLoader(list(range(8)), batch_size=2)
        >>> export = hr.telemetry.prometheus(loader, name="train", registry=registry)
        >>> for batch in loader: pass
        >>> registry.get_sample_value("headrace_samples_total", {"loader": "train"})
        8
    """
    import prometheus_client

    counters = counters_of(loader, "headrace.telemetry.prometheus")
    registry = prometheus_client.REGISTRY if registry is None else registry
    if registry not in _collectors:
        collector = _Collector()
        registry.register(collector)
        _collectors[registry] = collector
    return Export(_collectors[registry].exports, counters, name)


class _Collector:
    """The metrics of all loaders of one registry, in which each name may be there once."""

    def __init__(self) -> None:
        self.exports: dict[str, Export] = {}

    def collect(self) -> Iterator[Any]:
        """The metrics."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for kind, metrics in ((CounterMetricFamily, COUNTERS), (GaugeMetricFamily, GAUGES)):
            for name, about, source in metrics:
                labels = ["loader", "step"] if source == "step_waits" else ["loader"]
                family = kind(f"headrace_{name}", about, labels=labels)
                for export in list(self.exports.values()):
                    for of, value in export.read(source):
                        family.add_metric(of, value)
                yield family

    describe = collect  # without values when this is registered
