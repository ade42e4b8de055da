"""`headrace.telemetry.prometheus`: what the real client reads of a loader."""

import dataclasses
import gc
import operator
import os
import re
import signal

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families

import headrace as hr
from headrace._records.batches import RequestCounts
from headrace.telemetry.counters import Counters, LoaderStats
from headrace.telemetry.exporters import COUNTERS
from tests import datasets


class Numbers(datasets.Numbers):
    async def aget(self, index):
        if not index:
            hr.report_throttled()
        return index


@pytest.fixture
def registry():
    return CollectorRegistry()


def value(registry, name, loader="default", **labels):
    return registry.get_sample_value(f"headrace_{name}", {"loader": loader, **labels})


def test_each_number_of_the_stats_is_a_metric():
    counters = Counters()
    left_out = {"elapsed_seconds"}  # time() knows it
    requests = RequestCounts(*range(100, 100 + len(dataclasses.fields(RequestCounts))))
    names = [each.name for each in dataclasses.fields(LoaderStats) if each.type in ("int", "float")]
    counts = {name: number for number, name in enumerate(names, 200)}
    vars(counters).update(counts, requests=requests)
    wanted = {
        *dataclasses.astuple(requests),
        *(number for name, number in counts.items() if name not in left_out),
    }
    assert wanted <= {operator.attrgetter(source)(counters) for _, _, source in COUNTERS}


def test_numbers_are_those_of_the_stats_with_dead_workers_whose_batch_another_makes(
    registry, tmp_path
):
    def die_once(sample, folder=tmp_path):
        if sample == 5 and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return sample

    with hr.DataLoader(Numbers(64), 4, transform=die_once, num_workers=1) as loader:
        hr.telemetry.prometheus(loader, registry=registry)
        assert sum(len(batch) for batch in loader) == 64
        stats = loader.stats()
    assert value(registry, "worker_deaths_total") == stats.worker_deaths == 1
    assert value(registry, "batches_total") == stats.batches == 16
    assert value(registry, "throttled_requests_total") == stats.requests.throttled == 1
    assert value(registry, "wait_seconds_total") == stats.wait_seconds
    assert value(registry, "fetched_bytes_total") > 0
    assert value(registry, "fetch_seconds_total") > 0


def test_counters_continue_over_iterations_and_gauges_are_those_of_the_last_batch(registry):
    with hr.DataLoader(Numbers(64), 4, concurrency=7) as loader:
        hr.telemetry.prometheus(loader, registry=registry)
        assert value(registry, "fetch_limit") is None
        next(iter(loader))
        assert value(registry, "fetch_limit") == 7
        list(loader)
        assert value(registry, "fetch_limit") == 7
    list(loader)
    loader.close()
    assert (value(registry, "epochs_total"), value(registry, "samples_total")) == (3, 4 + 128)


def test_both_parsers_accept_two_loaders_in_one_registry_and_the_names_follow_the_conventions(
    registry,
):
    with hr.DataLoader(Numbers(64), 4) as train, hr.DataLoader(Numbers(64), 8) as test:
        hr.telemetry.prometheus(train, name="train", registry=registry)
        hr.telemetry.prometheus(test, name='a "test"\\\n', registry=registry)
        batches = iter(train)
        next(batches)
        list(test)
        text = generate_latest(registry).decode()
        families = list(text_string_to_metric_families(text))
        also = list(
            openmetrics_parser.text_string_to_metric_families(
                openmetrics.generate_latest(registry).decode()
            )
        )
    assert [family.name for family in families] == [family.name for family in also]
    (samples,) = (family for family in families if family.name == "headrace_samples")
    assert {sample.labels["loader"]: sample.value for sample in samples.samples} == {
        "train": 4,
        'a "test"\\\n': 64,
    }
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    assert sorted(re.findall(r"^# HELP (\S+) \S", text, re.M)) == sorted(kinds)
    for name, kind in kinds.items():
        assert re.fullmatch("headrace(_[a-z]+)+", name)
        assert name.endswith("_total") == (kind == "counter")
        assert not re.search(
            "_(count|sum|bucket|milliseconds|ms|kb|mb|percent|counter|gauge)(_|$)", name
        )
    assert kinds["headrace_memory_bytes"] == "gauge"


def test_closed_and_dropped_loaders_leave_and_their_names_are_free(registry):
    loader = hr.DataLoader(Numbers(64), 4)
    hr.telemetry.prometheus(loader, registry=registry)
    with hr.DataLoader(Numbers(64), 8) as other:
        list(other)
        del loader
        gc.collect()
        assert b"{" not in generate_latest(registry)
        export = hr.telemetry.prometheus(other, registry=registry)
        assert value(registry, "batches_total") == 8
        export.close()
        assert b"{" not in generate_latest(registry)


def test_name_twice_and_names_of_the_users_are_errors(registry):
    with hr.DataLoader(Numbers(64), 4) as loader, hr.DataLoader(Numbers(64), 4) as other:
        export = hr.telemetry.prometheus(loader, name="train", registry=registry)
        with pytest.raises(ValueError, match="the name 'train' is exported already"):
            hr.telemetry.prometheus(other, name="train", registry=registry)
        export.close()
        hr.telemetry.prometheus(other, name="train", registry=registry)
        with pytest.raises(TypeError, match=r"headrace\.telemetry\.prometheus\(\) needs"):
            hr.telemetry.prometheus([1, 2], registry=registry)
        users = CollectorRegistry()
        prometheus_client.Counter("headrace_batches", "The user's own.", registry=users)
        with pytest.raises(ValueError, match="Duplicated timeseries"):
            hr.telemetry.prometheus(loader, registry=users)
