"""The metrics of a loader, and the loaders that an exporter's target has."""

import dataclasses
import gc
import os
import pickle
import signal
import sys
import weakref

import pytest
from torch.utils.data import DataLoader as TorchDataLoader

import headrace as hr
from headrace._core.batches import FetchLoad, RequestCounts, StageTimes
from headrace.telemetry import exporters
from headrace.telemetry.batch_log import BatchRecord
from headrace.telemetry.counters import LoaderStats
from headrace.telemetry.exported import ExportedLoaders
from headrace.telemetry.metrics import HISTOGRAMS, METRICS, Reading, Totals


class Numbers(hr.AsyncDataset):
    def __len__(self):
        return 64

    async def aget(self, index):
        return index


def record(*, iteration=1, cpu=0.0, blocked=0.0, at=1.0, next_seconds=0.5, **times):
    passed = StageTimes(at, at, at, 0.0, 0.0, at, nbytes=100, engine_cpu=cpu, blocked=blocked, **times)
    end = at + next_seconds
    return BatchRecord(iteration, 0, 4, at, passed, at, end, end, end, 3, None)


def numbers(exported):
    """The values of the metrics, by name; of one with a label, a dict."""
    ((_, loader, reading),) = exported.read()
    values = {metric.name: dict(loader.values(metric, reading)) for metric in METRICS}
    return {name.removeprefix("headrace."): value.get("", value) for name, value in values.items()}


def test_each_number_of_the_stats_is_a_metric():
    left_out = {"elapsed_seconds"}  # time() knows it
    requests = RequestCounts(*range(100, 100 + len(dataclasses.fields(RequestCounts))))
    names = [each.name for each in dataclasses.fields(LoaderStats) if each.type in ("int", "float")]
    counts = {name: value for value, name in enumerate(names, 200)}
    stats = LoaderStats(**counts, skipped=(), placement="thread", requests=requests)
    values = {metric.read(Reading(stats, Totals(), True)) for metric in METRICS if metric.label is None}
    wanted = {*dataclasses.astuple(requests), *(value for name, value in counts.items() if name not in left_out)}
    assert wanted <= values


def test_names_and_units_follow_the_conventions():
    names = [metric.name for metric in (*METRICS, *HISTOGRAMS)]
    assert len(set(names)) == len(names)
    for metric in (*METRICS, *HISTOGRAMS):
        prefix, _, word = metric.name.partition(".")
        assert prefix == "headrace"
        assert word.replace("_", "").isalpha()
        assert word.islower()
        assert not word.endswith(("total", "seconds", "bytes", "count", "sum", "bucket"))  # which exporters append
        assert metric.unit in ("s", "By") or metric.unit[0] + metric.unit[-1] == "{}"
        assert metric.help.endswith(".")


def test_engine_seconds_continue_when_a_new_engine_counts_from_zero():
    totals = Totals()
    for iteration, cpu in [(1, 1.0), (1, 3.0), (1, 2.0), (2, 4.0), (3, 0.5), (3, 0.75), (2, 0.6)]:
        totals.add(record(iteration=iteration, cpu=cpu, blocked=cpu / 10))
    assert (totals.event_loop_cpu, round(totals.event_loop_blocked, 9)) == (4.75, 0.475)
    assert totals.fetched == 700


def test_waits_of_all_steps_sum_to_the_time_in_next():
    totals = Totals()
    totals.add(record(next_seconds=0.5))
    totals.add(record(next_seconds=0.25))
    assert sum(totals.step_waits.values()) == 0.75


def test_counters_begin_with_the_export_and_continue_over_iterations_and_close():
    exported = ExportedLoaders("export")
    with hr.DataLoader(Numbers(), 4) as loader:
        list(loader)
        exported.add(loader, "train")
        assert numbers(exported)["batches"] == numbers(exported)["epochs"] == 0
        list(loader)
        assert numbers(exported)["samples"] == 64
    list(loader)
    loader.close()
    counts = numbers(exported)
    assert (counts["epochs"], counts["batches"], counts["samples"]) == (2, 32, 128)
    ((_, exported_loader, _),) = exported.read()
    buckets, total = exported_loader.distribution(HISTOGRAMS[0])
    assert sum(buckets) == 32
    assert total == pytest.approx(sum(counts["step_wait"].values()))


def test_gauges_are_zero_while_no_iteration_is_open():
    exported = ExportedLoaders("export")
    with hr.DataLoader(Numbers(), 4, concurrency=7) as loader:
        exported.add(loader, "train")
        batches = iter(loader)
        next(batches)
        assert numbers(exported)["fetch_limit"] == 7
        del batches
        gc.collect()
        assert numbers(exported)["fetch_limit"] == 0
        batches = iter(loader)
        next(batches)
        assert numbers(exported)["fetch_limit"] == 7
    assert numbers(exported)["fetch_limit"] == 0
    list(loader)
    assert numbers(exported)["fetch_limit"] == 0
    loader.close()


def test_memory_of_what_is_not_consumed_is_in_the_load():
    class Kilobytes(Numbers):
        async def aget(self, index):
            return bytes(1000)

    with hr.DataLoader(Kilobytes(), 4, collate_fn=len, memory_budget=1 << 20) as loader:
        batches = iter(loader)
        for _ in range(8):
            next(batches)
        load = loader._control.counters.log.records()[-1].times.load
    assert type(load) is FetchLoad
    assert 1000 <= load.memory <= 1 << 20


def test_dead_workers_are_counted_though_another_makes_their_batch(tmp_path):
    def die_once(sample, folder=tmp_path):
        if sample == 5:
            try:
                (folder / "died").touch(exist_ok=False)
            except FileExistsError:
                return sample
            os.kill(os.getpid(), signal.SIGKILL)
        return sample

    exported = ExportedLoaders("export")
    with hr.DataLoader(Numbers(), 4, transform=die_once, num_workers=1) as loader:
        exported.add(loader, "train")
        assert sum(len(batch) for batch in loader) == 64
        assert loader.stats().worker_deaths == numbers(exported)["worker_deaths"] == 1


def test_dropped_loader_leaves_and_its_name_is_free():
    exported = ExportedLoaders("export")
    loader = hr.DataLoader(Numbers(), 4)
    list(loader)
    export = exported.add(loader, "train")
    counters = weakref.ref(loader._control.counters)
    loader.close()
    del loader
    gc.collect()
    assert counters() is None
    assert exported.is_empty
    with hr.DataLoader(Numbers(), 4) as other:
        exported.add(other, "train")
        export.close()  # the first one's, which has ended
        assert not exported.is_empty


def test_loader_or_name_twice_is_an_error():
    exported = ExportedLoaders("export")
    with hr.DataLoader(Numbers(), 4) as loader, hr.DataLoader(Numbers(), 4) as other:
        with exported.add(loader, "train"):
            with pytest.raises(ValueError, match="exported already, as 'train'"):
                exported.add(loader, "again")
            with pytest.raises(ValueError, match=r"export\(loader, name=...\)"):
                exported.add(other, "train")
        assert exported.is_empty
        exported.add(loader, "train")


STATSD = """
from headrace.telemetry.exported import ExportedLoaders
from headrace.telemetry.metrics import METRICS

def statsd(loader, send):
    loaders = ExportedLoaders("headrace.telemetry.statsd")
    export = loaders.add(loader, "train")
    for name, exported, reading in loaders.read():
        for metric in METRICS:
            for label, value in exported.values(metric, reading):
                send(f"{name}.{metric.name}{'.' * bool(label)}{label}:{value}")
    return export
"""


def test_exporter_for_another_system_is_one_new_file(tmp_path, monkeypatch):
    (tmp_path / "statsd.py").write_text(STATSD)
    monkeypatch.setattr(exporters, "__path__", [*exporters.__path__, str(tmp_path)])
    sent = []
    with hr.DataLoader(Numbers(), 4) as loader, hr.telemetry.statsd(loader, sent.append):
        assert "train.headrace.batches:0" in sent
        assert "train.headrace.step_wait.fetch:0.0" in sent
    del sys.modules["headrace.telemetry.exporters.statsd"]


def test_wrapper_of_another_class_is_refused():
    with pytest.raises(TypeError, match=r"export\(\) needs a headrace.DataLoader, but got torch.*DataLoader"):
        ExportedLoaders("export").add(TorchDataLoader([1]), "train")


def test_pickled_loader_is_not_exported():
    exported = ExportedLoaders("export")
    with hr.DataLoader(Numbers(), 4) as loader, exported.add(loader, "train"):
        batches = iter(loader)
        next(batches)
        with pickle.loads(pickle.dumps(loader)) as other:
            assert not other._control.counters.iterating
            list(other)
        assert numbers(exported)["batches"] == 1
