"""Metrics of loaders for OpenTelemetry."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from headrace._version import __version__
from headrace.errors import MissingExtraError
from headrace.telemetry.exported import Export, ExportedLoaders
from headrace.telemetry.metrics import HISTOGRAMS, METRICS, Histogram, Metric

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation

__all__ = ["opentelemetry"]

LOADER = "headrace.loader"  # the attribute with the loader's name
_instruments: weakref.WeakKeyDictionary[object, _Instruments] = weakref.WeakKeyDictionary()


def opentelemetry(loader: object, *, name: str = "default", meter_provider: MeterProvider | None = None) -> Export:
    """Export a loader's metrics to a meter provider of OpenTelemetry.

    The same metrics as of `prometheus`, with dots in their names: counters and gauges are read when the provider
    collects; the histograms ``headrace.next`` and ``headrace.fetch`` are recorded at each batch. Of this needs only
    OpenTelemetry's API; the SDK, its readers and exporters are yours.

    Args:
        loader: a `DataLoader`.
        name: the value of the attribute ``headrace.loader``. Each loader of a provider needs another.
        meter_provider: the global one if None, which may be set later.

    Returns:
        The export, whose `close()` ends it.

    Raises:
        MissingExtraError: OpenTelemetry's API is not installed.
        TypeError: `loader` is no `DataLoader`.
        ValueError: the loader is exported to this provider already, or another one by this name.

    Example:
        >>> import headrace as hr
        >>> loader = hr.DataLoader(list(range(8)), batch_size=2)
        >>> with hr.telemetry.opentelemetry(loader, name="train"):
        ...     for batch in loader: pass
    """
    try:
        from opentelemetry import metrics
    except ImportError:
        what = "headrace.telemetry.opentelemetry"
        raise MissingExtraError(what=what, package="opentelemetry-api", extra="opentelemetry") from None
    globally = meter_provider is None or meter_provider is metrics.get_meter_provider()
    target: Any = metrics if globally else meter_provider  # the global provider may be a proxy until it is set
    instruments = _instruments.get(target)
    if instruments is None:
        instruments = _instruments[target] = _Instruments(target.get_meter("headrace", __version__))
    attributes = {LOADER: name}
    return instruments.loaders.add(
        loader,
        name,
        on_value=lambda histogram, value: instruments.histograms[histogram.name].record(value, attributes),
    )


class _Instruments:
    """The instruments of one provider, which cannot be removed, and the loaders that they show."""

    def __init__(self, meter: Any) -> None:
        self.loaders = ExportedLoaders("headrace.telemetry.opentelemetry")
        make = {"counter": meter.create_observable_counter, "gauge": meter.create_observable_gauge}
        for metric in METRICS:
            callback = functools.partial(self._observe, metric)
            make[metric.kind](metric.name, callbacks=[callback], unit=metric.unit, description=metric.help)
        self.histograms = {histogram.name: self._histogram(meter, histogram) for histogram in HISTOGRAMS}

    @staticmethod
    def _histogram(meter: Any, histogram: Histogram) -> Any:
        return meter.create_histogram(
            histogram.name,
            unit=histogram.unit,
            description=histogram.help,
            explicit_bucket_boundaries_advisory=list(histogram.bounds),
        )

    def _observe(self, metric: Metric, options: CallbackOptions) -> Iterable[Observation]:
        from opentelemetry.metrics import Observation

        for name, loader, reading in self.loaders.read():
            for label, value in loader.values(metric, reading):
                attributes = {LOADER: name}
                if metric.label is not None:
                    attributes[f"headrace.{metric.label}"] = label
                yield Observation(value, attributes)
