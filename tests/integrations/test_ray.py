"""Ray Train: two workers, one of them killed, share each epoch; one process continues the epoch of two."""

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations import on_ray
from tests.integrations.on_ray import BATCH, EPOCHS, KILLED_AT, SAMPLES, SAVED_AT

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")

TIMEOUT = 550  # seconds; Ray starts some twenty processes
COLUMN = "Ray Train"


class Reports:
    """What the workers wrote, by name."""

    def __init__(self, folder):
        self._folder = folder

    def __getitem__(self, name):
        return json.loads(Path(self._folder, f"{name}.json").read_text())

    def steps(self, attempt):
        """The indices of each step, with its epoch, for both workers."""
        return [[step[:2] for step in self[f"attempt{attempt} rank{rank}"]["steps"]] for rank in range(2)]


@pytest.fixture(scope="module")
def uninterrupted():
    """The steps of each rank, and the weights, of a job that nothing interrupts."""
    return on_ray.uninterrupted()


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs")
    for shard in range(4):
        (folder / f"{shard}.txt").write_text("".join(f"{10 * shard + line}\n" for line in range(10)))
    less = {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, on_ray.__file__, str(folder), str(folder / "*.txt")],
        env={**os.environ, **less},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return Reports(folder)


def together(steps, epoch):
    """The indices of an epoch, of all workers."""
    return sorted(index for mine in steps for number, indices in mine if number == epoch for index in indices)


@pytest.mark.proves(COLUMN, "headrace fetches", "transform is applied once")
def test_workers_fetch_more_than_a_batch_at_once_and_transform(reports):
    for rank in range(2):  # the workers check the transform themselves
        assert max(most for *_, most in reports[f"attempt1 rank{rank}"]["steps"]) > BATCH


@pytest.mark.proves(COLUMN, "each sample once, on two ranks", "another order in each epoch")
def test_two_workers_share_the_samples_of_an_epoch_in_another_order(reports, uninterrupted):
    steps = reports.steps(1)
    assert together(steps, 1) == list(range(SAMPLES))
    orders, _ = uninterrupted
    assert [step for step in steps[0] if step[0] == 1] == [step for step in orders[0] if step[0] == 1]
    assert [indices for epoch, indices in orders[0] if epoch == 0] != [i for epoch, i in orders[0] if epoch == 1]


@pytest.mark.proves(COLUMN, "exact resume in mid-epoch")
def test_workers_that_are_restarted_after_a_kill_continue_after_the_checkpoint(reports, uninterrupted):
    orders, _ = uninterrupted
    for killed, resumed, whole in zip(reports.steps(0), reports.steps(1), orders, strict=True):
        assert killed[:KILLED_AT] == whole[:KILLED_AT]
        assert resumed == whole[SAVED_AT:]


@pytest.mark.proves(COLUMN, "equal weights after an interruption")
def test_weights_are_those_of_a_job_that_was_not_interrupted(reports, uninterrupted):
    _, weights = uninterrupted
    assert [reports[f"attempt1 rank{rank}"]["weights"] for rank in range(2)] == [weights, weights]


@pytest.mark.proves(COLUMN, "resume on another number of ranks")
def test_one_process_reads_the_rest_of_an_epoch_of_two_workers(reports):
    rest = [step[:2] for step in reports["from middle"]["steps"]]
    given = [steps[:SAVED_AT] for steps in reports.steps(0)]
    assert together([*given, rest], 0) == list(range(SAMPLES))
    assert together([rest], 1) == list(range(SAMPLES))


@pytest.mark.proves(COLUMN, "resume at the end of an epoch")
def test_checkpoint_at_the_end_of_an_epoch_is_followed_by_the_next(reports):
    rest = [step[:2] for step in reports["from end"]["steps"]]
    assert {epoch for epoch, _ in rest} == {EPOCHS - 1}
    assert together([rest], EPOCHS - 1) == list(range(SAMPLES))


@pytest.mark.proves(COLUMN, "evaluation")
def test_two_workers_share_the_samples_of_an_evaluation(reports):
    parts = [reports[f"others rank{rank}"]["evaluation"] for rank in range(2)]
    assert sorted(itertools.chain(*parts)) == list(range(SAMPLES))
    assert len(parts[0]) == len(parts[1])


def test_two_workers_share_the_samples_that_engines_on_ray_fetch(reports):
    parts = [reports[f"others rank{rank}"] for rank in range(2)]
    assert sorted(index for part in parts for index in part["by engines on Ray"]) == list(range(SAMPLES))
    assert {part["placement"].partition(":")[0] for part in parts} == {"ray"}


@pytest.mark.parametrize("name", ["own split", "lines"])
def test_two_workers_share_the_samples_of_a_stream(reports, name):
    parts = [reports[f"others rank{rank}"][name] for rank in range(2)]
    assert sorted(itertools.chain(*parts)) == list(range(0, 400, 10))
    assert len(parts[0]) == len(parts[1])


@pytest.mark.proves(COLUMN, "equal steps for streams of unknown length")
def test_two_workers_that_cannot_share_a_stream_evenly_take_the_same_steps(reports):
    steps = [reports[f"others rank{rank}"]["steps of the stream"] for rank in range(2)]
    assert steps == [[5] * EPOCHS] * 2


@pytest.mark.proves(COLUMN, "nothing left behind")
def test_no_process_of_a_loader_outlives_the_job(reports):
    assert reports["attempt0 rank1"]["processes"], "the killed worker's loader had no process"
    assert reports["left"]["alive"] == []


def test_loader_prepared_by_ray_gives_each_sample_once_and_warns_with_the_remedy(reports):
    parts = [reports[f"others rank{rank}"] for rank in range(2)]
    assert sorted(index for part in parts for index in part["prepared by Ray"]) == list(range(SAMPLES))
    for part in parts:
        (message,) = part["warnings"]
        assert "headrace.integrations.ray.prepare_data_loader" in message


def test_loader_whose_sampler_divides_its_order_is_returned_itself(reports):
    assert reports["others rank0"]["kept"]


def test_sampler_that_cannot_be_divided_is_refused(reports):
    assert "list cannot be divided among them. Give the loader a sampler" in reports["others rank0"]["refused"]
    assert reports["others rank0"]["left as it is"]
