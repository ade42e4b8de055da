"""`headrace.telemetry.prometheus`: what the client's own parsers read of it."""

import gc
import re
import sys
import threading

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families

import headrace as hr


class Numbers(hr.AsyncDataset):
    def __len__(self):
        return 64

    async def aget(self, index):
        if not index:
            hr.report_throttled()
        return index


@pytest.fixture
def registry():
    return CollectorRegistry()


def test_both_parsers_accept_two_loaders_in_one_registry(registry):
    with hr.DataLoader(Numbers(), 4) as train, hr.DataLoader(Numbers(), 8) as test:
        hr.telemetry.prometheus(train, name="train", registry=registry)
        hr.telemetry.prometheus(test, name='a "test"\\\n', registry=registry)
        batches = iter(train)
        next(batches)
        list(test)
        families = list(text_string_to_metric_families(generate_latest(registry).decode()))
        also = list(openmetrics_parser.text_string_to_metric_families(openmetrics.generate_latest(registry).decode()))
    assert [family.name for family in families] == [family.name for family in also]
    (samples,) = (family for family in families if family.name == "headrace_samples")
    assert {sample.labels["loader"]: sample.value for sample in samples.samples} == {"train": 4, 'a "test"\\\n': 64}


def test_rules_of_promtool_hold(registry):
    with hr.DataLoader(Numbers(), 4) as loader:
        hr.telemetry.prometheus(loader, registry=registry)
        list(loader)
        text = generate_latest(registry).decode()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    helps = re.findall(r"^# HELP (\S+) \S", text, re.M)
    assert sorted(helps) == sorted(kinds)
    assert set(kinds.values()) == {"counter", "gauge", "histogram"}
    for name, kind in kinds.items():
        assert re.fullmatch("headrace(_[a-z]+)+", name)
        assert name.endswith("_total") == (kind == "counter")
        assert not re.search("_(count|sum|bucket|milliseconds|ms|kb|mb|percent|counter|gauge)(_|$)", name)
    assert kinds["headrace_memory_bytes"] == "gauge"
    assert kinds["headrace_wait_seconds_total"] == kinds["headrace_fetched_bytes_total"] == "counter"
    assert kinds["headrace_next_seconds"] == kinds["headrace_fetch_seconds"] == "histogram"


@pytest.mark.parametrize("options", [{}, {"placement": "process"}])
def test_numbers_are_those_of_the_stats(registry, options):
    with hr.DataLoader(Numbers(), 4, **options) as loader:
        hr.telemetry.prometheus(loader, registry=registry)
        list(loader)
        stats = loader.stats()

        def value(name, **labels):
            return registry.get_sample_value(name, {"loader": "default", **labels})

        assert value("headrace_batches_total") == stats.batches == 16
        assert value("headrace_throttled_requests_total") == stats.requests.throttled == 1
        assert value("headrace_wait_seconds_total") == stats.wait_seconds
        assert value("headrace_fetched_bytes_total") > 0
        assert value("headrace_event_loop_cpu_seconds_total") > 0
        counts = value("headrace_next_seconds_count"), value("headrace_fetch_seconds_bucket", le="+Inf")
        assert counts == (16, 16)


def test_scrape_on_another_thread_in_mid_iteration(registry):
    texts = []
    with hr.DataLoader(Numbers(), 4) as loader:
        hr.telemetry.prometheus(loader, registry=registry)
        for number, _ in enumerate(loader):
            if number == 5:
                thread = threading.Thread(target=lambda: texts.append(generate_latest(registry).decode()))
                thread.start()
                thread.join()
    assert 'headrace_batches_total{loader="default"} 6.0' in texts[0]


def test_last_loader_takes_the_metrics_with_it(registry):
    loader = hr.DataLoader(Numbers(), 4)
    with hr.telemetry.prometheus(loader, registry=registry):
        assert "headrace_batches_total" in generate_latest(registry).decode()
    assert generate_latest(registry) == b""
    hr.telemetry.prometheus(loader, registry=registry)
    del loader
    gc.collect()
    assert generate_latest(registry) == b""
    other = hr.DataLoader(Numbers(), 4)
    hr.telemetry.prometheus(other, registry=registry)
    assert "headrace_batches_total" in generate_latest(registry).decode()
    other.close()


def test_refused_loader_leaves_nothing_in_the_registry(registry):
    with pytest.raises(TypeError, match=r"headrace\.telemetry\.prometheus\(\) needs"):
        hr.telemetry.prometheus([1, 2], registry=registry)
    prometheus_client.Counter("headrace_batches", "The user's own.", registry=registry)
    with hr.DataLoader(Numbers(), 4) as loader, pytest.raises(ValueError, match="Duplicated timeseries"):
        hr.telemetry.prometheus(loader, registry=registry)


def test_multiprocess_mode_of_the_client_is_a_warning(registry, monkeypatch, tmp_path):
    monkeypatch.setattr(prometheus_client, "REGISTRY", registry)
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    with hr.DataLoader(Numbers(), 4) as loader:
        with pytest.warns(RuntimeWarning, match="leaves out the metrics of loaders") as caught:
            export = hr.telemetry.prometheus(loader)
        assert caught[0].filename == __file__
        export.close()
        hr.telemetry.prometheus(loader, registry=registry)  # on purpose: no warning


def test_missing_client_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(hr.errors.MissingExtraError, match=r"headrace\[prometheus\]"):
        hr.telemetry.prometheus(hr.DataLoader([1]))


def test_unknown_exporter_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'statsd'"):
        hr.telemetry.statsd  # noqa: B018
