"""docs/scale.md has the tables that benchmarks/simulate_scale.py prints."""

import importlib
import sys

import pytest

from tests.documents import ROOT, text_of

DOCUMENT = text_of("docs/scale.md")


@pytest.fixture(scope="module")
def benchmarks():
    """Imports a module of benchmarks/."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def sizing(benchmarks):
    return benchmarks("sizing")


def test_document_has_the_tables_that_the_program_computes(sizing):
    tables = [sizing.cost_table(), *sizing.host_tables()]
    assert [table for table in tables if f"\n\n{table}\n\n" not in DOCUMENT] == []


def test_requests_in_flight_are_the_rate_times_the_latency(sizing):
    resnet = sizing.Need(sizing.WORKLOADS[0], 8)
    assert resnet.requests == pytest.approx(8 * 400 / 0.224 * 0.9)
    assert resnet.in_flight(0.1) == pytest.approx(resnet.requests * (0.1 + 114_660 / 87.5e6))


def test_large_objects_are_counted_in_the_parts_in_which_they_are_read(sizing):
    assert [workload.requests for workload in sizing.WORKLOADS] == [1, 1, 18]


def test_bandwidths_are_those_of_mlperf_storage(sizing):
    rates = [sizing.Need(workload, 8).bandwidth / 1e9 for workload in sizing.WORKLOADS]
    assert rates == pytest.approx([1.474, 4.526, 22.87], rel=1e-3)
