"""The running percentile that hedging goes by."""

from hypothesis import given
from hypothesis import strategies as st

from headrace._core.engine.hedging import MIN_LATENCIES, Latencies


def test_too_few_fetches_tell_nothing():
    latencies = Latencies()
    for _ in range(MIN_LATENCIES - 1):
        latencies.add(1.0)
    assert latencies.percentile(0.95) is None
    latencies.add(1.0)
    assert latencies.percentile(0.95) == 1.0


@given(st.lists(st.floats(0, 10), min_size=MIN_LATENCIES, max_size=300))
def test_no_more_than_five_in_a_hundred_are_above_it(times):
    latencies = Latencies()
    for seconds in times:
        latencies.add(seconds)
    limit = latencies.percentile(0.95)
    assert limit in times
    assert sum(seconds > limit for seconds in times) <= 0.05 * len(times)


def test_what_was_long_ago_is_forgotten():
    latencies = Latencies(kept=100)
    for seconds in [9.0] * 100 + [1.0] * 100:
        latencies.add(seconds)
    assert latencies.percentile(0.95) == 1.0
