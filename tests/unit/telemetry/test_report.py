"""`loader.report()` and `loader.stats()` of real loaders, in each placement."""

import asyncio
import contextlib
import copy
import logging
import os
import pickle
import subprocess
import sys
import threading
import time

import pytest
import torch

import headrace as hr
from headrace.telemetry.counters import KEPT
from tests.datasets import Numbers, SlowDataset
from tests.unit.streams.reading import Count


def double(sample):
    return 2 * sample


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Numbers(64), {}),
        (Numbers(64), {"placement": "process"}),
        (Count(64), {"transform": double, "num_workers": 1}),
        (list(range(64)), {}),
        (list(range(64)), {"num_workers": 1}),
    ],
)
def test_times_of_a_batch_are_in_the_order_of_the_stages(dataset, options):
    with hr.DataLoader(dataset, 2, **options) as loader:
        assert sum(len(batch) for batch in loader) == 64
        report = loader.report()
        log = loader._control.counters.records()
    assert (report.batches, report.samples) == (31, 62)
    for record in log:
        times = record.times
        assert record.called <= record.taken <= record.refilled <= record.returned
        fetched = [times.admitted, times.began, times.fetched, times.assembled]
        if any(fetched):
            assert fetched == sorted(fetched)
            assert record.planned <= times.admitted <= record.taken
        if "transform" in options or isinstance(dataset, list):
            assert 0.0 < times.work_began <= times.work_ended <= record.taken


def test_start_up_of_an_iteration_of_more_batches_than_are_kept():
    with hr.DataLoader(range(KEPT + 1)) as loader:
        for count, _ in enumerate(loader, 1):
            if count == KEPT:
                whole = loader.report()
        later = loader.report()
    assert whole.start_up > 0.0
    assert later.start_up == 0.0
    assert whole.batches == later.batches == KEPT - 1


def test_report_is_of_the_last_iteration():
    with hr.DataLoader(Numbers(64), 4) as loader:
        list(loader)
        for number, _ in enumerate(loader):
            if number == 7:
                break
        assert loader.report().batches == 7


class Unsuspended(Numbers):
    """Fetches that never suspend; that of sample 8 blocks until `taken` is set."""

    def __init__(self):
        super().__init__(64)
        self.taken = threading.Event()
        self.in_time = False

    async def aget(self, index):
        if index == 8:
            self.in_time = self.taken.wait(10)
        return index


def test_batch_is_delivered_before_later_fetches_that_never_suspend():
    dataset = Unsuspended()
    with hr.DataLoader(dataset, 2, concurrency=1, collate_fn=list) as loader:
        batches = iter(loader)
        assert next(batches) == [0, 1]
        dataset.taken.set()
        assert sum(1 for _ in batches) == 31
    assert dataset.in_time


def cpu_and_sleep(sample):
    time.sleep(0.001)  # time without CPU, which the report keeps apart
    return sample


def test_cpu_of_the_workers_is_timed():
    with hr.DataLoader(Numbers(24), 2, transform=cpu_and_sleep, num_workers=1) as loader:
        list(loader)
        report = loader.report()
    assert 0.0 < report.workers_cpu < report.workers_busy


def spin(sample):
    os.sched_setaffinity(0, {CORE})
    until = time.thread_time() + 0.005
    while time.thread_time() < until:
        pass
    return sample


CORE = min(os.sched_getaffinity(0))


def test_cores_that_other_processes_take_are_the_limit():
    hog = f"import os\nos.sched_setaffinity(0, {{{CORE}}})\nprint(flush=True)\nwhile True: pass"
    options = {"collate_fn": len, "transform": spin, "num_workers": 1}
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            command = [sys.executable, "-c", hog]
            process = stack.enter_context(
                subprocess.Popen(command, stdout=subprocess.PIPE)
            )
            stack.callback(process.kill)
            process.stdout.readline()
        loader = stack.enter_context(hr.DataLoader(Numbers(24), 1, **options))
        list(loader)
        report = loader.report()
    assert report.limit == "cores"
    assert report.workers_queued > report.workers_cpu
    assert not report.advice


class Throttled(Numbers):
    async def aget(self, index):
        hr.report_throttled()
        await asyncio.sleep(0.02)  # latency
        return index


class SlowSampler(torch.utils.data.Sampler):
    def __len__(self):
        return 64

    def __iter__(self):
        for index in range(64):
            time.sleep(0.01)  # the slowness that the report names
            yield index


def slow_transform(sample):
    time.sleep(0.01)  # the slowness that the report names
    return sample


class Limited(Numbers):
    gate = asyncio.Lock()

    async def aget(self, index):
        async with self.gate:  # a source that serves one at a time
            await asyncio.sleep(0.01)  # latency
        return index


@pytest.mark.parametrize(
    ("limit", "dataset", "options"),
    [
        ("latency", SlowDataset(64, 0.02), {"concurrency": 1}),
        ("source", Limited(64), {"concurrency": 32}),
        ("throttling", Throttled(64), {"concurrency": 1}),
        ("look-ahead", Numbers(64), {"sampler": SlowSampler(), "concurrency": 2}),
        ("workers", list(range(64)), {"collate_fn": slow_transform}),
    ],
)
def test_limit_of_a_loader_whose_loop_does_nothing(limit, dataset, options):
    with hr.DataLoader(dataset, 2, **options) as loader:
        list(loader)
        report = loader.report()
    assert report.limit == limit
    assert limit != "source" or "concurrency" not in report.change
    assert report.requests.throttled == (64 if limit == "throttling" else 0)
    assert ("Predicted wait" in str(report)) == (
        "Predicted wait after it, if " in str(report)
    )
    assert len(repr(report)) < 100
    assert limit in repr(report)


class Blocking(Numbers):
    async def aget(self, index):
        time.sleep(0.01)  # noqa: ASYNC251  # the blocking under test
        return index


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "transform": double}])
def test_blocking_call_is_the_limit_where_all_is_fetched_before_the_first_batch_too(
    options,
):
    with hr.DataLoader(Blocking(120), 5, **options) as loader:
        for _ in range(2):
            list(loader)
        report = loader.report()
    assert report.limit == "blocked-loop"
    assert "in Blocking.aget" in report.evidence


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "transform": float}])
def test_good_run_logs_one_record_for_an_epoch_at_debug_and_none_above(options, caplog):
    with (
        caplog.at_level(logging.DEBUG),
        hr.DataLoader(Numbers(64), 4, **options) as loader,
    ):
        for _ in range(2):
            assert len(list(loader)) == 16
        loader.report()
        loader.stats()
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []
    messages = [
        record.getMessage()
        for record in caplog.records
        if record.name.partition(".")[0] == "headrace"
    ]
    assert [message.partition(",")[0] for message in messages] == [
        f"epoch {epoch} begins with batch 0" for epoch in (0, 1)
    ]


def test_stats_count_requests_of_batches_whose_error_is_raised():
    class Refused(Numbers):
        async def aget(self, index):
            hr.report_throttled()
            if index < 4:
                raise ValueError("no such image")
            return index

    with hr.DataLoader(Refused(16), 4, concurrency=1) as loader:
        batches = iter(loader)
        with pytest.raises(ValueError, match="no such image"):
            next(batches)
        assert loader.stats().batches == 0
        assert loader.stats().requests.throttled > 0
        assert len(list(batches)) == 3
        assert loader.stats().requests.throttled == 16


@pytest.mark.parametrize(
    "through", [copy.copy, lambda obj: pickle.loads(pickle.dumps(obj))]
)
def test_share_of_waiting_is_that_of_the_time_and_a_copy_begins_to_count_anew(through):
    loader = hr.DataLoader(Numbers(64), 4)
    assert loader.stats().wait_share == 0.0
    with loader:
        several = [iter(loader) for _ in range(3)]
        for batches in several:
            next(batches)
        list(several[0])
        copied = through(loader)
    with copied:
        assert (
            copied.stats().epochs,
            copied.stats().batches,
            copied.report().batches,
        ) == (0, 0, 0)
        list(copied)
    stats = loader.stats()
    assert 0.0 < stats.wait_share <= 1.0
    assert (stats.epochs, stats.batches, copied.stats().batches) == (3, 18, 16)
