"""The number of fetches in flight, found against simulated stores in virtual time."""

import heapq
import itertools
import random

import pytest

from headrace._engine.concurrency import AdaptiveLimit

START, MOST = 64, 512
TICK = 0.02


class SimulatedStore:
    """Answers after `latency`, at most `capacity` a second; above `rate` requests a second, with a refusal at once.

    A refused fetch waits in its place, with full jitter, and asks again.
    """

    def __init__(self, latency, capacity, rate=None):
        self.latency, self.capacity, self.rate = latency, capacity, rate
        self.jitter = random.Random(1)
        self.free_at = self.refilled = 0.0
        self.tokens = 50.0
        self.requests = self.refusals = 0

    def ask(self, now):
        self.requests += 1
        if self.rate is not None:
            self.tokens = min(50.0, self.tokens + (now - self.refilled) * self.rate)
            self.refilled = now
            if self.tokens < 1:
                self.refusals += 1
                return now + self.latency + self.jitter.uniform(0.0, 0.1), False
            self.tokens -= 1
        self.free_at = max(now, self.free_at) + 1 / self.capacity
        return max(self.free_at, now + self.latency * self.jitter.uniform(0.8, 1.2)), True

    def run(self, seconds, limit_at, busy_from=0.0):
        """Fetch for so many virtual seconds; returns the rate behind the first `busy_from` seconds."""
        return self.run_several(seconds, [limit_at], busy_from)[0]

    def run_several(self, seconds, limits_at, busy_from=0.0, starts=None):
        """The same for several engines, which start at `starts`; returns the rate of each."""
        count = len(limits_at)
        limits, in_flight, completed, refusals, late = ([0] * count for _ in range(5))
        events, order = [], itertools.count()

        def ask(now, engine):
            at, well = self.ask(now)
            refusals[engine] += not well
            heapq.heappush(events, (at, next(order), "done" if well else "again", engine))

        for engine, start in enumerate(starts or [0.0] * count):
            heapq.heappush(events, (start, next(order), "tick", engine))
        while True:
            now, _, what, engine = heapq.heappop(events)
            if now > seconds:
                return [each / (seconds - busy_from) for each in late]
            if what == "tick":
                limits[engine] = limits_at[engine](
                    now, completed[engine], refusals[engine]
                )
                heapq.heappush(events, (now + TICK, next(order), "tick", engine))
            elif what == "again":
                ask(now, engine)
            else:
                in_flight[engine] -= 1
                completed[engine] += 1
                late[engine] += now >= busy_from
            while in_flight[engine] < limits[engine]:
                ask(now, engine)
                in_flight[engine] += 1


def steered(control):
    return lambda now, completed, refused: control.update(
        now, completed=completed, throttle_events=refused, full=True
    )


STORES = {
    "0 ms": (0.0002, 6000, None),
    "20 ms": (0.020, 6000, None),
    "100 ms": (0.100, 4500, None),
    "throttles above 2,000/s": (0.020, 6000, 2000),
}


@pytest.mark.parametrize("store", STORES.values(), ids=STORES.keys())
def test_rate_is_within_a_tenth_of_what_the_store_gives(store):
    _, capacity, allowed = store
    # Behind 4 s: doubling from 64 to 512 at 100 ms takes 2 s.
    rate = SimulatedStore(*store).run(12, steered(AdaptiveLimit(START, MOST)), 4.0)
    assert rate >= 0.9 * (allowed or capacity)


def test_a_doubling_takes_one_latency_where_latency_is_the_limit():
    control = AdaptiveLimit(START, 1024)
    SimulatedStore(0.1, 12_000).run(0.12 + 4 * 0.12, steered(control))
    assert control.limit == 1024


def test_a_store_that_throttles_is_asked_little_more_than_once_for_each_object():
    store = SimulatedStore(*STORES["throttles above 2,000/s"])
    rate = store.run(20, steered(AdaptiveLimit(START, MOST)))
    assert store.refusals > 0, "it has throttled"
    assert store.requests / (rate * 20) <= 1.3


def engines_on(store, starts, limits, seconds, busy_from, steer=steered):
    """The rates of engines that share a store, and their controls."""
    controls = [
        AdaptiveLimit(limit, MOST, len(limits), random.Random(number).random)
        for number, limit in enumerate(limits)
    ]
    return store.run_several(
        seconds, [*map(steer, controls)], busy_from, starts
    ), controls


def jain(rates):
    """Jain's index of fairness: 1 for equal rates, 1/N if one has all."""
    return sum(rates) ** 2 / (len(rates) * sum(rate * rate for rate in rates))


SHARED = {
    "two engines": ([0.0] * 2, [32] * 2),
    "four engines": ([0.0] * 4, [16] * 4),
    "one that starts when the other has found its number": ([0.0, 8.0], [32, 32]),
}


@pytest.mark.parametrize(("starts", "limits"), SHARED.values(), ids=SHARED.keys())
def test_engines_that_share_a_store_that_throttles_get_equal_rates_and_keep_to_its_limit(
    starts, limits
):
    store = SimulatedStore(0.1, 6000, rate=400)
    rates, _ = engines_on(store, starts, limits, 40, busy_from=20.0)
    assert jain(rates) >= 0.95
    assert sum(rates) >= 0.9 * 400
    assert store.refusals / store.requests <= 0.05


@pytest.mark.parametrize(("starts", "limits"), SHARED.values(), ids=SHARED.keys())
def test_engines_that_share_a_store_that_is_used_fully_do_not_outbid_each_other(
    starts, limits
):
    store = SimulatedStore(0.1, 400)
    rates, controls = engines_on(store, starts, limits, 40, busy_from=20.0)
    assert jain(rates) >= 0.9
    assert sum(rates) >= 0.95 * 400
    assert sum(control.limit for control in controls) <= 5 * 400 * 0.1, (
        "fetches in flight, of those that are needed"
    )


def test_engines_that_were_throttled_once_do_not_climb_where_it_brings_nothing():
    def throttled_at_first(control):
        return lambda now, completed, refused: control.update(
            now, completed=completed, throttle_events=int(now >= 2.0), full=True
        )

    store = SimulatedStore(0.1, 400)
    _, controls = engines_on(store, *SHARED["two engines"], 60, 0.0, throttled_at_first)
    assert sum(control.limit for control in controls) <= 5 * 400 * 0.1


def test_a_store_that_grows_stronger_is_found_out():
    store = SimulatedStore(0.1, 200)
    control = AdaptiveLimit(START, MOST)

    def limit_at(now, completed, refused):
        store.capacity = 200 if now < 10 else 1200
        return control.update(
            now, completed=completed, throttle_events=refused, full=True
        )

    assert store.run(120, limit_at, 80.0) >= 0.9 * 1200


def test_refusals_halve_it_at_most_and_are_not_heard_twice():
    control = AdaptiveLimit(64, 512)
    assert control.update(1.0, completed=0, throttle_events=50, full=True) == 32
    assert control.update(1.1, completed=0, throttle_events=90, full=True) == 32, (
        "requests that were on their way"
    )
    assert control.update(2.0, completed=0, throttle_events=140, full=True) == 16


def test_a_consumer_that_is_slow_says_nothing_of_the_store():
    control = AdaptiveLimit(64, 512)
    for tick in range(1000):
        control.update(tick * TICK, completed=tick * 10, throttle_events=0, full=False)
    assert control.limit == 64
