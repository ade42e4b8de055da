"""Loaders prepared by accelerate: with one process and with two ranks every sample is seen, transformed."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("accelerate")

from tests.integrations import prepared

SAMPLES = list(range(0, 10 * prepared.SAMPLES, 10))


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two ranks"])
def world(request):
    return request.param


@pytest.fixture(scope="module")
def report(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    for shard in range(4):
        (folder / f"{shard}.txt").write_text("".join(f"{10 * shard + line}\n" for line in range(10)))
    path = folder / "report.json"
    launcher = [] if world == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "LINES": str(folder / "*.txt"), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, *launcher, prepared.__file__, str(path)],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(path.read_text())


@pytest.mark.parametrize("dispatch", [None, False])
@pytest.mark.parametrize("name", [*prepared.NAMES, "torch's loader"])
def test_each_sample_of_a_prepared_stream_is_seen_once(report, name, dispatch):
    assert sorted(report[f"{name}, dispatch {dispatch}"]) == SAMPLES


@pytest.mark.parametrize(
    ("dispatch", "name"), [(dispatch, name) for dispatch, names in prepared.SPAWNED.items() for name in names]
)
def test_each_sample_of_a_prepared_stream_is_seen_with_spawned_workers(report, world, name, dispatch):
    if world == 1:
        pytest.skip("nothing is divided")
    assert sorted(set(report[f"{name}, 2 spawned workers, dispatch {dispatch}"])) == SAMPLES  # accelerate pads


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
