"""The search of `headrace bench`, over stores that are functions and a clock that only trials advance."""

import asyncio
import random

import pytest

from headrace.cli.bench.limits import Ceiling, bound_of
from headrace.cli.bench.search import Search
from headrace.cli.bench.trials import Trial

LATENCY = 0.02


class SimulatedStore:
    """Answers trials by a function from fetches in flight to the rate and the share of throttled requests."""

    def __init__(self, rate, *, seconds=40.0, noise=0.0, latency=LATENCY):
        self._rate, self._noise, self._latency = rate, noise, latency
        self._random = random.Random(1)
        self.left = seconds

    async def measure(self, concurrency, seconds):
        rate, throttled = self._rate(concurrency)
        self.left -= seconds + 4 * self._latency
        rate *= 1 + self._noise * self._random.uniform(-1, 1)
        reads = round(rate * seconds)
        refused = round(reads * throttled / (1 - throttled))
        return Trial(concurrency, seconds, reads, reads * 1000, throttled=refused)

    def search(self, most=2048):
        search = Search(self.measure, most, lambda: self.left)
        asyncio.run(search.run())
        return search


def limited(most):
    return lambda concurrency: (min(concurrency / LATENCY, most), 0.0)


def throttling(most):
    """A store that serves fewer requests the more are refused, as where clients back off."""

    def rate(concurrency):
        wanted = concurrency / LATENCY
        return (wanted, 0.0) if wanted <= most else (most * (most / wanted) ** 2, 1 - most / wanted)

    return rate


def overloaded(best):
    """A machine whose rate falls beyond a number of fetches in flight."""
    return lambda concurrency: (concurrency / LATENCY / (1 + (concurrency / best) ** 2), 0.0)


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize(
    ("store", "top"),
    [(limited(357), 357), (limited(20_000), 20_000), (throttling(2000), 2000), (overloaded(300), 7500)],
    ids=["bandwidth", "fast", "throttled", "overloaded"],
)
def test_found_setting_has_nine_tenths_of_the_best_rate(store, top, noise):
    search = SimulatedStore(store, noise=noise).search()
    rate, _ = store(search.best)
    assert rate >= 0.9 * top
    assert search.complete


def test_settings_far_beyond_the_best_one_are_not_tried():
    search = SimulatedStore(limited(400)).search()
    assert max(trial.concurrency for trial in search.trials) <= 32


def test_throttled_store_is_not_asked_for_more_and_more():
    search = SimulatedStore(throttling(2000)).search()
    assert max(trial.concurrency for trial in search.trials) <= 64


def test_smallest_of_equally_good_settings_is_taken():
    assert SimulatedStore(limited(400)).search().best in (8, 9)


def test_fewer_than_the_first_setting_are_tried_if_that_is_the_best():
    assert SimulatedStore(lambda concurrency: (1000 / concurrency**0.5, 0.0)).search().best == 1


def test_ceiling_is_not_exceeded():
    search = SimulatedStore(limited(20_000)).search(most=100)
    assert search.best == 100
    assert max(trial.concurrency for trial in search.trials) == 100


def test_best_settings_are_repeated_in_turn():
    search = SimulatedStore(limited(1000)).search()
    assert len(search.repeated) >= 4
    assert len(search.of(search.best)) >= 5
    last = [trial.concurrency for trial in search.trials[-8:]]
    assert len(set(last)) > 2


def test_lucky_trial_is_corrected_by_the_repetitions():
    lucky = iter([True])

    def rate(concurrency):
        return (1500.0 if concurrency == 128 and next(lucky, False) else min(concurrency / LATENCY, 1000.0)), 0.0

    assert rate(64)[0] == 1000
    assert SimulatedStore(rate).search().best <= 32


@pytest.mark.parametrize("seed", range(5))
def test_disturbances_of_the_machine_do_not_lead_to_a_setting_far_beyond_the_best(seed):
    dice = random.Random(seed)
    store = SimulatedStore(overloaded(150))
    quiet = store._rate
    store._rate = lambda concurrency: (quiet(concurrency)[0] * dice.uniform(0.6, 1.0), 0.0)
    best = store.search().best
    assert quiet(best)[0] >= 0.75 * quiet(150)[0]


def test_slow_store_and_little_time_give_a_result_that_is_marked_as_incomplete():
    search = SimulatedStore(limited(20_000), seconds=5, latency=0.5).search()
    assert not search.complete
    assert search.best is not None


def test_setting_whose_requests_fail_ends_the_growth():
    async def measure(concurrency, seconds):
        if concurrency > 20:
            return Trial(concurrency, failed="too many open files")
        return Trial(concurrency, seconds, round(seconds * concurrency / LATENCY), 1)

    left = iter(range(1000, 0, -1))
    search = Search(measure, 2048, lambda: next(left))
    asyncio.run(search.run())
    assert search.best in range(14, 21)


def test_without_any_result_there_is_no_best_setting():
    async def measure(concurrency, seconds):
        return Trial(concurrency, failed="no read was completed in time")

    search = Search(measure, 64, lambda: 10.0)
    asyncio.run(search.run())
    assert search.best is None


CEILING = Ceiling(2048, "more loaders")


def trial(concurrency, rate, **values):
    return Trial(concurrency, 1.0, rate, rate * 50_000, **values)


@pytest.mark.parametrize(
    ("best", "others", "halves", "name"),
    [
        (trial(40, 2000), [trial(64, 1500, throttled=200)], trial(80, 3900), "throttling"),
        (trial(64, 9000, loop=0.95), [], trial(128, 9500), "cpu"),
        (trial(64, 9000, cores=3.6), [], trial(128, 9500), "cpu"),
        (trial(64, 9000, starved=3.5), [], trial(128, 9500), "cpu"),
        (trial(2048, 9000), [trial(1024, 5000)], trial(2048, 9100), "in-flight"),
        (trial(16, 400), [trial(8, 250), trial(32, 401)], trial(32, 795), "bandwidth"),
        (trial(16, 400), [trial(8, 250), trial(32, 401)], trial(32, 405), "requests"),
        (trial(16, 400), [trial(8, 250), trial(32, 401)], trial(32, 540), "unknown"),
        (trial(16, 400), [trial(8, 250), trial(32, 401)], trial(32, 405, starved=4.0), "unknown"),
        (trial(16, 400), [], None, "unknown"),
    ],
)
def test_limit_is_found_by_its_evidence(best, others, halves, name):
    assert bound_of(best, [best, *others], halves, CEILING, cores=4).name == name
