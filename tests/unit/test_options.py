"""The options are refused where they are given, and the look-ahead covers what is in flight."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.options import LEAST_AHEAD, MEMORY_BUDGET, MOST_CONCURRENCY, Options, look_ahead, most_concurrency


@pytest.mark.parametrize(
    ("option", "error", "says"),
    [
        ({"concurrency": 0}, ValueError, "at least 1"),
        ({"concurrency": -1}, ValueError, "-1"),
        ({"concurrency": "fast"}, TypeError, "'fast'"),
        ({"concurrency": True}, TypeError, "True"),
        ({"concurrency": 2.0}, TypeError, "2.0"),
        ({"concurrency": None}, TypeError, "None"),
        ({"memory_budget": 0}, ValueError, "at least 1 byte"),
        ({"memory_budget": -1}, ValueError, "-1"),
        ({"memory_budget": True}, TypeError, "True"),
        ({"memory_budget": 1e9}, TypeError, "1000000000.0"),
        ({"memory_budget": "1 GiB"}, TypeError, "1 GiB"),
        ({"on_error": "ignore"}, ValueError, "'ignore'"),
        ({"on_error": None}, ValueError, "None"),
        ({"placement": "moon"}, ValueError, "'moon'"),
        ({"executor": "gpu"}, ValueError, "'gpu'"),
        ({"seed": -1}, ValueError, "-1"),
        ({"seed": 2**63}, ValueError, "between"),
        ({"seed": "1"}, TypeError, "'1'"),
        ({"seed": True}, TypeError, "True"),
        ({"seed": 1.5}, TypeError, "1.5"),
        ({"transform": 3}, TypeError, "transform must be callable"),
        ({"retry": 3}, TypeError, "RetryPolicy"),
        ({"hedge": True}, ValueError, "True"),
        ({"hedge": "always"}, ValueError, "'always'"),
    ],
)
def test_a_bad_option_is_refused_with_its_name_and_value(option, error, says):
    (name,) = option
    with pytest.raises(error, match=says) as caught:
        Options(**option)
    assert name in str(caught.value)


def test_the_defaults_are_valid_and_frozen():
    options = Options()
    assert options.fetchers == most_concurrency(), "the look-ahead has to cover what it may grow to"
    assert options.memory_budget == MEMORY_BUDGET
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.seed = 3


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_the_range_of_seeds_is_closed(seed):
    assert Options(seed=seed).seed == seed


def test_a_given_prefetch_factor_counts_for_each_worker():
    assert look_ahead(prefetch_factor=3, num_workers=4, concurrency=1000, batch_size=1) == 12
    assert look_ahead(prefetch_factor=3, num_workers=0, concurrency=1000, batch_size=1) == 3
    assert look_ahead(prefetch_factor=0, num_workers=2, concurrency=1000, batch_size=1) == 1


def test_without_batches_the_look_ahead_is_in_samples():
    assert look_ahead(prefetch_factor=None, num_workers=0, concurrency=8, batch_size=None) == 9


@given(workers=st.integers(0, 64), concurrency=st.integers(0, 4096), batch_size=st.integers(1, 4096))
def test_the_look_ahead_covers_the_window_and_one_batch_more(workers, concurrency, batch_size):
    ahead = look_ahead(prefetch_factor=None, num_workers=workers, concurrency=concurrency, batch_size=batch_size)
    least = 2 * max(1, workers) if concurrency == 0 else max(LEAST_AHEAD, 2 * workers)
    assert ahead >= least
    assert concurrency == 0 or (ahead - 1) * batch_size >= concurrency
    assert ahead == least or (ahead - 2) * batch_size < concurrency


@pytest.mark.parametrize(("descriptors", "most"), [(600, 300), (4000, MOST_CONCURRENCY)])
def test_auto_leaves_half_of_the_descriptors_that_the_process_may_have(descriptors, most):
    resource = pytest.importorskip("resource", reason="not there on Windows")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < descriptors:
        pytest.skip(f"the hard limit of descriptors, {before[1]}, is lower than {descriptors}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, before[1]))
    try:
        assert most_concurrency() == most
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
