"""`headrace.telemetry.opentelemetry`: what the SDK's reader sees is what Prometheus does."""

import gc
import sys

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, Sum
from prometheus_client import CollectorRegistry

import headrace as hr
from headrace.telemetry.metrics import HISTOGRAMS, METRICS


class Numbers(hr.AsyncDataset):
    def __len__(self):
        return 64

    async def aget(self, index):
        if not index:
            hr.report_throttled()
        return index


@pytest.fixture
def reader():
    return InMemoryMetricReader()


@pytest.fixture
def provider(reader):
    provider = MeterProvider([reader])
    yield provider
    provider.shutdown()


def metrics_of(reader):
    data = reader.get_metrics_data()
    return {m.name: m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics} if data else {}


def test_sdk_and_prometheus_see_the_same_numbers(reader, provider):
    registry = CollectorRegistry()
    with hr.DataLoader(Numbers(), 4) as loader:
        hr.telemetry.prometheus(loader, name="train", registry=registry)
        hr.telemetry.opentelemetry(loader, name="train", meter_provider=provider)
        batches = iter(loader)
        for _ in range(9):
            next(batches)
        read = metrics_of(reader)
        families = {sample.name: family for family in registry.collect() for sample in family.samples}
    assert set(read) == {metric.name for metric in (*METRICS, *HISTOGRAMS)}
    nonzero = 0
    for metric in METRICS:
        suffix = {"s": "_seconds", "By": "_bytes"}.get(metric.unit, "") + "_total" * (metric.kind == "counter")
        name = metric.name.replace(".", "_") + suffix
        samples = {
            tuple(value for key, value in sorted(sample.labels.items())): sample.value
            for sample in families[name].samples
        }
        points = {
            tuple(value for key, value in sorted(point.attributes.items())): point.value
            for point in read[metric.name].data.data_points
        }
        assert points == samples
        assert read[metric.name].unit == metric.unit
        assert isinstance(read[metric.name].data, Sum) == (metric.kind == "counter")
        nonzero += any(points.values())
    assert nonzero >= 8
    for histogram in HISTOGRAMS:
        (point,) = read[histogram.name].data.data_points
        name = histogram.name.replace(".", "_") + "_seconds"
        assert point.explicit_bounds == histogram.bounds
        assert point.count == registry.get_sample_value(f"{name}_count", {"loader": "train"}) == 9
        assert point.sum == registry.get_sample_value(f"{name}_sum", {"loader": "train"})


def test_closed_and_dropped_loaders_are_not_observed(reader, provider):
    loader = hr.DataLoader(Numbers(), 4)
    with hr.DataLoader(Numbers(), 8) as other:
        hr.telemetry.opentelemetry(loader, name="train", meter_provider=provider)
        export = hr.telemetry.opentelemetry(other, name="test", meter_provider=provider)
        names = [
            point.attributes["headrace.loader"] for point in metrics_of(reader)["headrace.batches"].data.data_points
        ]
        assert names == ["train", "test"]
        export.close()
        list(other)
        del loader
        gc.collect()
        assert "headrace.batches" not in metrics_of(reader)


def test_loader_twice_is_an_error(provider):
    with hr.DataLoader(Numbers(), 4) as loader:
        hr.telemetry.opentelemetry(loader, meter_provider=provider)
        with pytest.raises(ValueError, match="exported already"):
            hr.telemetry.opentelemetry(loader, name="again", meter_provider=provider)


def test_missing_api_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(hr.errors.MissingExtraError, match=r"headrace\[opentelemetry\]"):
        hr.telemetry.opentelemetry(hr.DataLoader([1]))
