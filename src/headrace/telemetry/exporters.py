"""Metrics of loaders for Prometheus."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from headrace.telemetry.counters import Counters, counters_of

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["COUNTERS", "GAUGES", "Export", "prometheus"]

_Exports: TypeAlias = "weakref.WeakValueDictionary[str, Counters]"


class Export:
    """The export of a loader's metrics.

    The export lasts until `close`, or until the loader is garbage-collected.
    """

    def __init__(self, exports: _Exports, counters: Counters, name: str) -> None:
        if name in exports:
            raise ValueError(
                f"the name {name!r} is exported already: "
                f"give each loader a name= of its own, or close() the other export"
            )
        exports[name] = counters
        self._end = weakref.finalize(counters, exports.pop, name, None)

    def close(self) -> None:
        """End the export; may be called repeatedly."""
        self._end()


# Name without the prefix, help text, and attribute of `Counters`.
COUNTERS = (
    ("epochs", "Iterations begun.", "epochs"),
    ("batches", "Batches delivered.", "batches"),
    ("samples", "Samples delivered.", "samples"),
    ("skipped_samples", "Samples left out by on_error.", "skipped_samples"),
    ("lost_batches", "Batches that lost all samples.", "lost_batches"),
    ("discarded_batches", "Batches after other ranks.", "discarded_batches"),
    ("worker_deaths", "Worker processes that died.", "worker_deaths"),
    ("wait_seconds", "Time that the consumer waited for batches.", "wait_seconds"),
    ("fetch_seconds", "Duration of one fetch of each batch.", "fetch_seconds"),
    ("fetched_bytes", "Approximate size of the samples fetched.", "nbytes"),
    ("requests", "Requests to stores.", "requests.requests"),
    ("retries", "Those that were retries.", "requests.retries"),
    ("throttled_requests", "Responses 429, 503.", "requests.throttled"),
    ("timed_out_requests", "Without a byte in time.", "requests.timed_out"),
    ("hedges", "Fetches started a second time.", "requests.hedges"),
    ("hedges_won", "Hedges that finished first.", "requests.hedges_won"),
    ("cache_hits", "Objects, or blocks of shards, read from a cache.", "requests.cache_hits"),
    ("cache_misses", "Objects, or blocks of shards, fetched for a cache.", "requests.cache_misses"),
    ("cache_damaged", "Damaged in a cache.", "requests.cache_damaged"),
)
# All gauges describe the last batch.
GAUGES = (
    ("fetches_in_flight", "At the last batch.", "last.times.load.in_flight"),
    ("fetch_limit", "Fetches allowed, at the last batch.", "last.times.load.limit"),
    ("queued_samples", "Samples that waited for a fetch.", "last.times.load.queued"),
    ("held_plans", "Batches that waited for memory.", "last.times.load.held_plans"),
    ("memory_bytes", "Of what is fetched and not consumed.", "last.times.load.memory"),
    ("ready_batches", "Batches ready after the last delivery.", "last.ready"),
)

_collectors: weakref.WeakKeyDictionary[Any, _Collector] = weakref.WeakKeyDictionary()
"""The collector of each registry."""


def prometheus(
    loader: object, *, name: str = "default", registry: CollectorRegistry | None = None
) -> Export:
    """Export a loader's metrics to a registry of the Prometheus client.

    Serve the registry in the process that iterates over the loader. Counters continue over all
    iterations, also after `close()`. Gauges describe the last batch. A loader leaves the registry
    when the loader is no longer referenced.

    Args:
        loader: a `DataLoader`.
        name: value of the label ``loader``. Each loader of a registry needs a different name.
        registry: registry of the client. None for the client's default registry.

    Returns:
        The export. `close()` of the export removes the loader from the registry.

    Raises:
        ImportError: `headrace[prometheus]` is not installed.
        TypeError: `loader` is not a `DataLoader`.
        ValueError: a loader is exported to the registry by the same name already, or the registry
            has metrics of the same names from elsewhere.

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
    """Metrics of all loaders of a registry.

    A registry accepts each metric name only once.
    """

    def __init__(self) -> None:
        self.exports: _Exports = weakref.WeakValueDictionary()

    def collect(self) -> Iterator[Any]:
        """Yield the metrics."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        loaders = list(self.exports.items())
        begun = [(name, counters) for name, counters in loaders if counters.batches]
        for kind, metrics, of in (
            (CounterMetricFamily, COUNTERS, loaders),
            (GaugeMetricFamily, GAUGES, begun),
        ):
            for name, about, source in metrics:
                family = kind(f"headrace_{name}", about, labels=["loader"])
                for loader, counters in of:
                    family.add_metric([loader], operator.attrgetter(source)(counters))
                yield family

    describe = collect  # called at registration, before there are values
