"""Metrics of loaders for Prometheus and OpenTelemetry: one table, and a collector each."""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from headrace._core.batches import FetchLoad
from headrace._version import __version__
from headrace.telemetry.counters import BatchRecord, Counters, counters_of
from headrace.telemetry.figures import WAITS, waits_of

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from prometheus_client import CollectorRegistry

__all__ = ["METRICS", "Export", "Metric", "opentelemetry", "prometheus"]


class Export(contextlib.AbstractContextManager["Export"]):
    """A loader's metrics, exported until `close`, the end of a ``with`` block, or the end of the loader."""

    def __init__(self, exports: dict[str, Export], counters: Counters, name: str) -> None:
        for other in list(exports.values()):
            if other.name == name or other._counters() is counters:
                raise ValueError(
                    f"the name {name!r} or this loader is exported already, as {other.name!r}: give each loader a "
                    f"name= of its own, or close() the other export"
                )
        self.name: str = name
        self.stats = counters.snapshot()
        # Sums over the batches since then, and figures of the last of them:
        self.fetched = self.fetch_seconds = self.event_loop_cpu = self.event_loop_blocked = 0.0  # bytes, and seconds
        self.step_waits = dict.fromkeys(WAITS, 0.0)  # seconds of `next()`, by the step that the awaited batch was in
        self.load, self.ready = FetchLoad(), 0
        self._iteration, self._cpu, self._blocked = 0, 0.0, 0.0  # the engine's sums, which begin anew with an engine
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
        if record.iteration > self._iteration:
            if times.engine_cpu < self._cpu:
                self._cpu = self._blocked = 0.0
            self._iteration = record.iteration
        # Later batches may be complete before this one, and so have larger sums.
        self.event_loop_cpu += max(0.0, times.engine_cpu - self._cpu)
        self.event_loop_blocked += max(0.0, times.blocked - self._blocked)
        self._cpu, self._blocked = max(self._cpu, times.engine_cpu), max(self._blocked, times.blocked)
        self.load, self.ready = times.load, record.ready

    def read(self, metrics: Iterable[Metric]) -> Iterator[tuple[Metric, tuple[str, ...], float]]:
        """The values of metrics, each with those of its labels: the loader's name, and of `step_wait` the step."""
        if (counters := self._counters()) is None:
            return
        self.stats = counters.snapshot()
        iterating = bool(counters.open)
        for metric in metrics:
            value = operator.attrgetter(metric.source)(self) if metric.kind == "counter" or iterating else 0
            if isinstance(value, dict):
                for step, each in value.items():
                    yield metric, (self.name, step.replace(" ", "_").replace("-", "_")), each
            else:
                yield metric, (self.name,), value

    def close(self) -> None:
        """End the export; any number of times."""
        self._unsubscribe()
        if self._exports.get(self.name) is self:
            del self._exports[self.name]

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Metric(NamedTuple):
    """A counter, or a gauge, which is 0 while no iteration is open."""

    kind: Literal["counter", "gauge"]
    name: str  # without the prefix and the unit
    unit: str  # in UCUM: "s", "By", or what is counted, in braces
    help: str
    source: str  # the attribute of an `Export`; a dict there is by the value of the label `step`


COUNTERS = (
    ("epochs", "{epoch}", "Iterations begun.", "stats.epochs"),
    ("batches", "{batch}", "Batches delivered.", "stats.batches"),
    ("samples", "{sample}", "Samples delivered.", "stats.samples"),
    ("skipped_samples", "{sample}", "Samples left out by on_error.", "stats.skipped_samples"),
    ("lost_batches", "{batch}", "Batches that lost all samples.", "stats.lost_batches"),
    ("discarded_batches", "{batch}", "Batches after other ranks.", "stats.discarded_batches"),
    ("worker_deaths", "{process}", "Worker processes that died.", "stats.worker_deaths"),
    ("wait", "s", "Time that the consumer waited for batches.", "stats.wait_seconds"),
    ("step_wait", "s", "Time in next(), by the step of the awaited batch.", "step_waits"),
    ("fetch", "s", "Duration of one fetch of each batch.", "fetch_seconds"),
    ("fetched", "By", "Approximate size of the samples fetched.", "fetched"),
    ("event_loop_cpu", "s", "CPU time of the event loop's thread.", "event_loop_cpu"),
    ("event_loop_blocked", "s", "Time of blocking calls on it.", "event_loop_blocked"),
    ("requests", "{request}", "Requests to stores.", "stats.requests.requests"),
    ("retries", "{request}", "Those that were retries.", "stats.requests.retries"),
    ("throttled_requests", "{request}", "Responses 429, 503.", "stats.requests.throttled"),
    ("timed_out_requests", "{request}", "Without a byte in time.", "stats.requests.timed_out"),
    ("hedges", "{fetch}", "Fetches started a second time.", "stats.requests.hedges"),
    ("hedges_won", "{fetch}", "Hedges that finished first.", "stats.requests.hedges_won"),
    ("cache_hits", "{sample}", "Samples read from a cache.", "stats.requests.cache_hits"),
    ("cache_misses", "{sample}", "Samples fetched for a cache.", "stats.requests.cache_misses"),
    ("cache_damaged", "{sample}", "Damaged in a cache.", "stats.requests.cache_damaged"),
    ("cache_evicted", "{sample}", "Evicted from a cache.", "stats.requests.cache_evicted"),
)
GAUGES = (
    ("fetches_in_flight", "{fetch}", "At the last batch.", "load.in_flight"),
    ("fetch_limit", "{fetch}", "Fetches allowed, at the last batch.", "load.limit"),
    ("queued_samples", "{sample}", "Samples that waited for a fetch.", "load.queued"),
    ("held_plans", "{batch}", "Batches that waited for memory.", "load.held_plans"),
    ("memory", "By", "Of what is fetched and not consumed.", "load.memory"),
    ("ready_batches", "{batch}", "Batches ready after the last delivery.", "ready"),
)
METRICS = (
    *(Metric("counter", *each) for each in COUNTERS),
    *(Metric("gauge", *each) for each in GAUGES),
)


# What shows the exports of a registry, or of a provider of meters: one for each.
_collectors: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def prometheus(loader: object, *, name: str = "default", registry: CollectorRegistry | None = None) -> Export:
    """Export a loader's metrics to a registry of the Prometheus client.

    The registry has to be served in the process that iterates over the loader. Counters continue over all iterations,
    also after `close()`; gauges are then 0. A loader that is no longer referenced leaves the registry.

    Args:
        loader: a `DataLoader`.
        name: the value of the label ``loader``. Each loader of a registry needs another.
        registry: the client's default registry if None.

    Returns:
        The export, whose `close()` removes the loader from the registry.

    Raises:
        ImportError: `headrace[prometheus]` is not installed.
        TypeError: `loader` is no `DataLoader`.
        ValueError: the loader is exported to this registry already, or another one by this name; or the registry has
            metrics of these names from elsewhere.

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
        return self.describe() if self.exports else iter(())

    def describe(self) -> Iterator[Any]:
        """The metrics; without values when this is registered."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, Any] = {}
        for metric in METRICS:
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            unit = {"s": "seconds", "By": "bytes"}.get(metric.unit, "")
            labels = ["loader", "step"] if metric.name == "step_wait" else ["loader"]
            families[metric.name] = kind(f"headrace_{metric.name}", metric.help, labels=labels, unit=unit)
        for export in list(self.exports.values()):
            for metric, labelled, value in export.read(METRICS):
                families[metric.name].add_metric(labelled, value)
        yield from families.values()


def opentelemetry(loader: object, *, name: str = "default", meter_provider: MeterProvider | None = None) -> Export:
    """Export a loader's metrics to a meter provider of OpenTelemetry.

    The same metrics as of `prometheus`, with dots in their names. It needs only OpenTelemetry's API; the SDK is yours.

    Args:
        loader: a `DataLoader`.
        name: the value of the attribute ``headrace.loader``. Each loader of a provider needs another.
        meter_provider: the global one if None, which may be set later.

    Returns:
        The export, whose `close()` ends it.

    Raises:
        ImportError: `headrace[opentelemetry]` is not installed.
        TypeError: `loader` is no `DataLoader`.
        ValueError: the loader is exported to this provider already, or another one by this name.

    Example:
        >>> import headrace as hr
        >>> loader = hr.DataLoader(list(range(8)), batch_size=2)
        >>> with hr.telemetry.opentelemetry(loader, name="train"):
        ...     for batch in loader: pass
    """
    from opentelemetry import metrics

    counters = counters_of(loader, "headrace.telemetry.opentelemetry")
    globally = meter_provider is None or meter_provider is metrics.get_meter_provider()
    target: Any = metrics if globally else meter_provider  # the global provider may be a proxy until it is set
    if target not in _collectors:
        _collectors[target] = _Instruments(target.get_meter("headrace", __version__))
    return Export(_collectors[target].exports, counters, name)


class _Instruments:
    """The instruments of one provider, which cannot be removed, and the loaders that they show."""

    def __init__(self, meter: Any) -> None:
        self.exports: dict[str, Export] = {}
        make = {"counter": meter.create_observable_counter, "gauge": meter.create_observable_gauge}
        for metric in METRICS:
            callbacks = [functools.partial(self._observe, metric)]
            make[metric.kind](f"headrace.{metric.name}", callbacks, unit=metric.unit, description=metric.help)

    def _observe(self, metric: Metric, options: object) -> Iterator[Any]:
        from opentelemetry.metrics import Observation

        for export in list(self.exports.values()):
            for _, labels, value in export.read([metric]):
                yield Observation(value, dict(zip(("headrace.loader", "headrace.step"), labels, strict=False)))
