"""`RemoteClock`: times of an engine on another machine."""

import random

import numpy as np
import pytest

from headrace._core.batches import FetchTimes, StageTimes
from headrace._core.links.ray_wire import RemoteClock, distinct_pid


def exchange(clock, ahead, sent, there, back):
    """A plan that takes `there` seconds, whose batch is made in one second and takes `back` seconds."""
    times = StageTimes(admitted=sent + there + ahead, assembled=sent + there + 1 + ahead)
    clock.bound(times, sent, sent + there + 1 + back)
    return times


@pytest.mark.parametrize("ahead", [-5e6, -0.7, 0.7, 5e6])
def test_difference_is_known_to_half_of_the_fastest_exchange(ahead):
    clock, draw = RemoteClock(), random.Random(0)
    for number in range(50):
        exchange(clock, ahead, 10.0 * number, draw.uniform(0.01, 2), draw.uniform(0.01, 2))
    assert clock.ahead == pytest.approx(ahead, abs=0.1)


def test_clock_that_may_be_the_same_is_taken_for_it():
    clock = RemoteClock()
    times = exchange(clock, 0.0, 100.0, 0.001, 0.5)
    assert clock.ahead == 0.0
    assert clock.stages(times) is times


def test_moments_are_moved_and_unknown_ones_stay_unknown():
    clock = RemoteClock()
    exchange(clock, 1000.0, 10.0, 0.0, 0.0)
    times = clock.stages(StageTimes(admitted=1010.0, assembled=1011.0, fetch_seconds=0.5))
    assert (times.admitted, times.assembled) == (10.0, 11.0)
    assert (times.work_began, times.fetch_seconds) == (0.0, 0.5)


def test_single_fetches_are_moved():
    clock = RemoteClock()
    exchange(clock, 1000.0, 10.0, 0.0, 0.0)
    rows = np.array([[3.0, 1.0, 1010.0, 1010.5]])
    fetches = clock.fetches(FetchTimes(1, 2, rows.tobytes()))
    assert fetches is not None
    assert np.frombuffer(fetches.rows).tolist() == [3.0, 1.0, 10.0, 10.5]


def test_processes_of_nodes_have_different_numbers():
    numbers = {distinct_pid(pid, engine) for pid in (1, 4_194_304 - 1) for engine in range(100)}
    assert len(numbers) == 200
    assert min(numbers) > 4_194_304
    assert max(numbers) < 2**31
