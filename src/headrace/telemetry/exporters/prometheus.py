"""Metrics of loaders for the registry of the Prometheus client."""

from __future__ import annotations

import itertools
import os
import warnings
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

from headrace._core.call_site import users_stacklevel
from headrace.errors import MissingExtraError
from headrace.telemetry.exported import Export, ExportedLoaders
from headrace.telemetry.metrics import HISTOGRAMS, METRICS

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric as Family

__all__ = ["prometheus"]

_UNITS = {"s": "seconds", "By": "bytes"}
_collectors: weakref.WeakKeyDictionary[CollectorRegistry, _Collector] = weakref.WeakKeyDictionary()


def prometheus(loader: object, *, name: str = "default", registry: CollectorRegistry | None = None) -> Export:
    """Export a loader's metrics to a registry of the Prometheus client.

    Numbers are read when the registry is: a batch costs some microseconds, a sample nothing. Counters begin with 0 at
    this call, and continue over all iterations of the loader, also after its `close()`; gauges are then 0. A loader
    that is no longer referenced leaves the registry.

    Serve the registry in the process that iterates over the loader, as by ``prometheus_client.start_http_server``: its
    multiprocess mode reads files of other processes, which have no metrics of a loader. On several ranks each serves
    its own, at a port of its own.

    Args:
        loader: a `DataLoader`.
        name: the value of the label ``loader``. Each loader of a registry needs another.
        registry: the client's default registry if None.

    Returns:
        The export, whose `close()` removes the loader from the registry.

    Raises:
        MissingExtraError: `prometheus_client` is not installed.
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
    try:
        import prometheus_client
    except ImportError:
        what = "headrace.telemetry.prometheus"
        raise MissingExtraError(what=what, package="prometheus_client", extra="prometheus") from None
    if registry is None:
        registry = prometheus_client.REGISTRY
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ or "prometheus_multiproc_dir" in os.environ:
            warnings.warn(
                "PROMETHEUS_MULTIPROC_DIR is set: the Prometheus client's multiprocess mode exports files, and leaves "
                "out the metrics of loaders. Serve a registry of this process, and give it as registry=; or unset "
                "PROMETHEUS_MULTIPROC_DIR.",
                RuntimeWarning,
                stacklevel=users_stacklevel(),
            )
    collector = _collectors.get(registry) or _Collector()
    if registry not in _collectors:
        registry.register(collector)
        _collectors[registry] = collector
    registered = weakref.ref(registry)

    def unregister() -> None:
        there = registered()
        if there is not None and _collectors.pop(there, None) is not None:
            there.unregister(collector)

    try:
        return collector.loaders.add(loader, name, on_empty=unregister)
    except BaseException:  # of any kind: a collector without loaders is not to stay registered
        if collector.loaders.is_empty:
            unregister()
        raise


class _Collector:
    """The metrics of all loaders of one registry, in which each name may be there once."""

    def __init__(self) -> None:
        self.loaders = ExportedLoaders("headrace.telemetry.prometheus")

    def describe(self) -> Iterator[Family]:
        """The metrics without values."""
        return self._families(ExportedLoaders(""))

    def collect(self) -> Iterator[Family]:
        """The metrics."""
        return iter(()) if self.loaders.is_empty else self._families(self.loaders)

    def _families(self, loaders: ExportedLoaders) -> Iterator[Family]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
        from prometheus_client.utils import floatToGoString

        read = loaders.read()
        for metric in METRICS:
            labels = ["loader"] if metric.label is None else ["loader", metric.label]
            family = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}[metric.kind](
                metric.name.replace(".", "_"), metric.help, labels=labels, unit=_UNITS.get(metric.unit, "")
            )
            for name, loader, reading in read:
                for label, value in loader.values(metric, reading):
                    family.add_metric([name, label][: len(labels)], value)
            yield family
        for histogram in HISTOGRAMS:
            buckets = HistogramMetricFamily(
                histogram.name.replace(".", "_"), histogram.help, labels=["loader"], unit=_UNITS[histogram.unit]
            )
            bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
            for name, loader, _ in read:
                counts, total = loader.distribution(histogram)
                buckets.add_metric([name], list(zip(bounds, itertools.accumulate(counts), strict=True)), total)
            yield buckets
