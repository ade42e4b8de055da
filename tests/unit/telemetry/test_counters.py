"""What a loader counts: the share of the time that consumers waited is between 0 and 1, whatever they do."""

import contextlib
import copy
import pickle

import pytest

from headrace.telemetry import counters as module
from headrace.telemetry.counters import Counters


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""

    class Clock:
        now = 100.0

        def perf_counter(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_overlapping_waits_count_once_and_a_wait_in_progress_counts_up_to_now(clock):
    counters = Counters()
    counters.begin()
    clock.now += 1
    with contextlib.suppress(TimeoutError), counters.waiting():
        clock.now += 3
        stats = counters.snapshot()
        assert (stats.wait_seconds, stats.elapsed_seconds, stats.wait_share) == (3.0, 4.0, 0.75)
        with counters.waiting():
            clock.now += 2
        clock.now += 4
        raise TimeoutError
    stats = counters.snapshot()
    assert (stats.wait_seconds, stats.elapsed_seconds, stats.wait_share) == (9.0, 10.0, 0.9)


def test_pause_of_the_consumer_is_not_a_wait(clock):
    counters = Counters()
    counters.begin()
    with counters.waiting():
        clock.now += 1
    clock.now += 1000
    assert counters.snapshot().wait_share == 1.0  # nothing has been asked for since
    with counters.waiting():
        clock.now += 1
    assert counters.snapshot().wait_share == pytest.approx(2 / 1002)


@pytest.mark.parametrize("through", [copy.copy, lambda obj: pickle.loads(pickle.dumps(obj))])
def test_copy_has_the_counts_and_no_wait_in_progress(clock, through):
    counters = Counters()
    counters.begin()
    with counters.waiting():
        clock.now += 1
        copied = through(counters)
    clock.now += 1
    with copied.waiting():
        clock.now += 1
    assert (copied.snapshot().epochs, copied.snapshot().wait_seconds) == (1, 1.0)
