"""The simulation of benchmarks/ against closed forms: latency, CPU, network, rate limit, workers, consumer, order."""

import importlib
import sys
from dataclasses import replace

import pytest

from tests.documents import ROOT


@pytest.fixture(scope="module")
def simulation():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("simulation")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def host(simulation):
    return simulation.Host(engines=1, concurrency=32, batch=8, look_ahead=16)


@pytest.fixture(scope="module")
def run(simulation):
    """Batches a second of one host, or of several of that kind."""

    def run(host, latency=0.02, spread=0.0, hosts=1, seed=0, seconds=10.0, **store):
        source = simulation.SimulatedStore(simulation.Latency(latency, spread), **store)
        return simulation.simulate([host] * hosts, source, seconds=seconds, warm_up=2.0, seed=seed)

    return run


def near(value):
    return pytest.approx(value, rel=0.01)


@pytest.mark.parametrize("engines", [1, 2, 4])
def test_one_host_reads_as_many_as_are_in_flight_in_each_latency(engines, host, run):
    result = run(replace(host, engines=engines))
    assert result.rates[0] == near(32 / 0.02 / 8)
    assert result.in_flight[0] == near(32)


def test_cores_are_a_limit_of_all_engines_together(host, run):
    result = run(replace(host, engines=4, loop_cpu=2e-3, native_cpu=2e-3, cores=2), latency=1e-3)
    assert result.rates[0] == near(2 / 4e-3 / 8)
    assert result.cores[0] == near(2.0)


def test_network_is_a_limit_of_all_engines_together(host, run):
    result = run(replace(host, engines=4, read_bytes=100_000, network=50e6), latency=1e-3)
    assert result.rates[0] == near(500 / 8)
    assert result.network[0] == near(1.0)


def test_consumer_that_is_slower_waits_for_nothing(host, run):
    result = run(replace(host, step=0.1))
    assert result.rates[0] == near(10)
    assert result.waits[0] == pytest.approx(0, abs=1e-9)


def test_order_costs_where_latencies_differ(host, run):
    spread = {"latency": 0.02, "spread": 1.0, "seconds": 40.0}
    ordered, unordered = run(host, **spread).rates[0], run(replace(host, in_order=False), **spread).rates[0]
    wide = run(replace(host, look_ahead=1000), **spread).rates[0]
    assert ordered < 0.95 * unordered
    assert wide == pytest.approx(32 / (0.02 * 2.71828**0.5) / 8, rel=0.03)  # the mean of a log-normal


def test_seed_gives_the_same_result_again(host, run):
    assert run(host, spread=1.0, seed=5) == run(host, spread=1.0, seed=5)
    assert run(host, spread=1.0, seed=5) != run(host, spread=1.0, seed=6)
