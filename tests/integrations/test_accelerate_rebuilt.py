"""Loaders that accelerate rebuilds: with one process and with two ranks every sample is seen, transformed."""

import pytest

pytest.importorskip("accelerate")

from tests.integrations import accelerate_rebuilt as prepared
from tests.integrations.harness import Launcher

SAMPLES = list(range(0, 10 * prepared.SAMPLES, 10))


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two ranks"])
def world(request):
    return request.param


@pytest.fixture(scope="module")
def launcher():
    with Launcher("accelerate", prepared.__name__) as launcher:
        yield launcher


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    for shard in range(4):
        (folder / f"{shard}.txt").write_text("".join(f"{10 * shard + line}\n" for line in range(10)))
    return str(folder / "*.txt")


@pytest.fixture(scope="module")
def report(launcher, files, world):
    return launcher.run(prepared.main, ranks=world, LINES=files)[0]


@pytest.mark.parametrize("dispatch", [None, False])
@pytest.mark.parametrize("name", [*prepared.NAMES, "torch's loader"])
def test_each_sample_of_a_prepared_stream_is_seen_once(report, name, dispatch):
    assert sorted(report[f"{name}, dispatch {dispatch}"]) == SAMPLES


def test_each_sample_of_a_prepared_stream_is_seen_with_spawned_workers(launcher, files):
    report = launcher.run(prepared.spawned, ranks=2, LINES=files)[0]
    assert len(report) == 2
    for name, samples in report.items():
        assert sorted(set(samples)) == SAMPLES, name  # accelerate pads


@pytest.mark.parametrize("dispatch", [None, False])
def test_each_sample_of_a_prepared_stream_is_seen_with_forked_workers(report, dispatch):
    assert sorted(set(report[f"forked, dispatch {dispatch}"])) == SAMPLES


def test_stream_with_an_explicit_rank_is_an_error_if_accelerate_divides_it(report, world):
    outcome = report["given"]
    if world == 1:
        assert sorted(outcome) == SAMPLES
    else:
        assert "rank=0, world_size=2" in outcome
        assert "accelerator.prepare()" in outcome


@pytest.mark.parametrize("workers", [0, 2])
def test_each_sample_of_a_prepared_dataset_is_seen_once_in_another_order_each_epoch(report, workers):
    first, second = report[f"map, {workers} workers"]
    assert sorted(first) == sorted(second) == SAMPLES
    assert first != second
    assert report["map, 0 workers"] == report["map, 2 workers"]


@pytest.mark.parametrize("workers", [0, 2])
def test_skip_first_batches_skips_the_delivered_batches(report, workers):
    assert sorted(report[f"map resumed, {workers} workers"]) == SAMPLES


def test_skip_first_batches_of_an_unprepared_loader_skips_the_delivered_batches(report, world):
    if world == 2:
        pytest.skip("each rank would read all")
    assert sorted(report["unprepared resumed"]) == SAMPLES
