"""Loaders that are exported: the numbers of each, and the names under which an exporter's target has them."""

from __future__ import annotations

import bisect
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Self

from headrace.telemetry.batch_log import BatchRecord
from headrace.telemetry.counters import Counters, counters_of
from headrace.telemetry.metrics import HISTOGRAMS, METRICS, Histogram, Metric, Reading, Totals

__all__ = ["Distribution", "Export", "ExportedLoader", "ExportedLoaders"]


class Distribution:
    """The counts of a histogram.

    Attributes:
        counts: for each bucket, and for what is above the last bound.
        sum: of the values.
    """

    def __init__(self, histogram: Histogram) -> None:
        self._bounds = histogram.bounds
        self.counts = [0] * (len(histogram.bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect.bisect_left(self._bounds, value)] += 1
        self.sum += value


class ExportedLoader:
    """The numbers of one loader since it is exported. Read from any thread; does not keep the loader alive.

    Args:
        counters: the loader's.
        on_value: called with each value of a histogram, on the consumer's thread.
    """

    def __init__(self, counters: Counters, on_value: Callable[[Histogram, float], None] | None = None) -> None:
        self._counters = weakref.ref(counters)
        self._on_value = on_value
        self._totals = Totals()
        self._distributions = {histogram.name: Distribution(histogram) for histogram in HISTOGRAMS}
        self._lock = threading.RLock()  # a signal handler may read on the consumer's thread
        before = Reading(counters.snapshot(), Totals(), False)
        self._before = {metric.name: metric.values(before) for metric in METRICS if metric.kind == "counter"}
        self.unsubscribe = counters.log.subscribe(self._on_batch)

    def is_of(self, counters: Counters) -> bool:
        """Whether these are the loader's counters."""
        return self._counters() is counters

    def _on_batch(self, record: BatchRecord) -> None:
        values = [(histogram, seconds) for histogram in HISTOGRAMS if (seconds := histogram.observe(record)) > 0.0]
        with self._lock:
            self._totals.add(record)
            for histogram, seconds in values:
                self._distributions[histogram.name].add(seconds)
        if self._on_value is not None:
            for histogram, seconds in values:
                self._on_value(histogram, seconds)

    def read(self) -> Reading | None:
        """The numbers now; None if the loader is gone."""
        counters = self._counters()
        if counters is None:
            return None
        with self._lock:
            totals = self._totals.copy()
        return Reading(counters.snapshot(), totals, counters.iterating)

    def values(self, metric: Metric, reading: Reading) -> Iterator[tuple[str, float]]:
        """The values of a metric with those of its label (``""`` without one); counters since the export began."""
        before = self._before.get(metric.name, {})
        for label, value in metric.values(reading).items():
            yield label, value - before.get(label, 0)

    def distribution(self, histogram: Histogram) -> tuple[list[int], float]:
        """The counts of a histogram's buckets, and the sum of the values."""
        with self._lock:
            distribution = self._distributions[histogram.name]
            return list(distribution.counts), distribution.sum


class Export:
    """A loader's metrics, exported until `close`, the end of a ``with`` block, or the end of the loader.

    Args:
        name: the loader's name in the metrics.
        end: ends the export.
    """

    def __init__(self, name: str, end: Callable[[], object]) -> None:
        self.name = name
        self._end = end

    def close(self) -> None:
        """End the export."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


class ExportedLoaders:
    """The loaders that one registry or provider has, by their names. A loader that is dropped leaves.

    Args:
        exporter: the function's name, for errors.
    """

    def __init__(self, exporter: str) -> None:
        self._exporter = exporter
        self._by_name: dict[str, ExportedLoader] = {}

    @property
    def is_empty(self) -> bool:
        """Whether there is none."""
        return not self._by_name

    def add(
        self,
        loader: object,
        name: str,
        *,
        on_value: Callable[[Histogram, float], None] | None = None,
        on_empty: Callable[[], object] = lambda: None,
    ) -> Export:
        """Export a loader.

        Args:
            loader: the loader.
            name: its name in the metrics.
            on_value: called with each value of a histogram, on the consumer's thread.
            on_empty: called when the last export is closed; not when a loader is dropped.

        Raises:
            TypeError: it is no `DataLoader`.
            ValueError: the loader or the name is exported already.
        """
        counters = counters_of(loader, self._exporter)
        for other, exported in self._by_name.items():
            if exported.is_of(counters):
                raise ValueError(
                    f"this loader is exported already, as {other!r}, and would be counted twice: close() that export "
                    f"before"
                )
        if name in self._by_name:
            raise ValueError(
                f"another loader is exported as {name!r}: give each loader a name of its own, "
                f"{self._exporter}(loader, name=...), or close() the other export"
            )
        exported = self._by_name[name] = ExportedLoader(counters, on_value)
        dropped = weakref.finalize(counters, self._by_name.pop, name, None)
        dropped.atexit = False

        def end() -> None:
            if dropped.detach() is None:  # closed before, or dropped
                return
            exported.unsubscribe()
            self._by_name.pop(name, None)
            if not self._by_name:
                on_empty()

        return Export(name, end)

    def read(self) -> list[tuple[str, ExportedLoader, Reading]]:
        """The loaders that are still there, with their names and numbers; from any thread."""
        named = [(name, exported, exported.read()) for name, exported in list(self._by_name.items())]
        return [(name, exported, reading) for name, exported, reading in named if reading is not None]
