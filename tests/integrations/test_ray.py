"""Engines on a real cluster of Ray, any of which may be lost; and Ray Train, of whose two workers one is killed."""

import importlib.util
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import ROOT
from tests.faults.watching import digest
from tests.integrations import on_ray
from tests.integrations.on_ray import (
    BATCHES,
    EPOCHS,
    KILLED_AT,
    SAMPLES,
    SAVED_AT,
    made_loader,
)

IMPORTS = (on_ray.__name__,)
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed"
)

LINES = 400
COLUMN = "Ray Train"
TIMEOUT = 280  # seconds
LOST = re.compile(
    r"engine (\d) of 2 \(on (?:node [\d.]+|a machine that has not been found yet)\) was lost: .*: another is "
    r"asked for\. Its batches are made again\.$",
    re.DOTALL,
)


@pytest.fixture(scope="module")
def address():
    """A cluster of one node, without spilling."""
    from ray.cluster_utils import Cluster

    options = {
        "num_cpus": 4,
        "include_dashboard": False,
        "object_store_memory": on_ray.STORE,
    }
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            **options,
            "_system_config": {"automatic_object_spilling_enabled": False},
        },
    )
    yield cluster.address
    cluster.shutdown()


@pytest.fixture(scope="module")
def report(launcher, address, pattern, tmp_path_factory):
    return launcher.run(
        on_ray.engines, address, tmp_path_factory.mktemp("engines"), pattern
    )[0]


@pytest.fixture(scope="module")
def on_one_machine():
    """The digests of two epochs of the same loader without Ray."""
    with made_loader() as loader:
        return [digest(loader) for _ in range(2)]


def test_engines_give_the_same_bytes_as_without_ray_and_the_errors_of_the_program(
    report, on_one_machine
):
    assert report["two epochs"] == on_one_machine
    assert on_one_machine[0] != on_one_machine[1]


def test_state_is_continued_without_ray(report):
    with made_loader() as whole, made_loader() as rest:
        # The state is of the third epoch.
        batches = [batch for _ in range(3) for batch in whole]
        rest.load_state_dict(report["state"])
        assert digest(rest) == digest(batches[2 * BATCHES + 3 :])


@pytest.mark.parametrize("loss", on_ray.LOSSES)
def test_lost_engine_is_replaced_and_the_batches_do_not_change(
    report, on_one_machine, loss
):
    found, warned = report[loss]
    assert found == on_one_machine[0]
    matches = [LOST.match(warning) for warning in warned]
    assert matches
    assert all(matches), warned
    assert {match[1] for match in matches} >= (
        {"0", "1"} if loss == "SIGKILL of all actors" else set()
    )


def test_stream_whose_engine_is_lost_is_continued_from_a_state(report, pattern):
    with on_ray.made_stream_loader(pattern) as here:
        assert report["stream"] == digest(here)


def test_example_of_a_cluster_loses_a_node_and_no_batch():
    program = (ROOT / "examples" / "30_ray_cluster.py").read_text()
    # whose end Ray prints, too
    killed = program.replace("allow_graceful=True", "allow_graceful=False")
    assert killed != program
    run = subprocess.run(
        [sys.executable, "-c", killed], capture_output=True, text=True, timeout=TIMEOUT
    )
    assert run.returncode == 0, run.stdout + run.stderr
    found = [
        line.split()[-1]
        for line in run.stdout.splitlines()
        if line.startswith(("one process", "two engines"))
    ]
    assert len(found) == 3
    assert len(set(found)) == 1
    assert "was lost" in run.stdout


# Ray Train.


class Reports:
    """What the workers wrote, by name."""

    def __init__(self, folder, alive):
        self._folder = folder
        self.alive = alive

    def __getitem__(self, name):
        return json.loads(Path(self._folder, f"{name}.json").read_text())

    def of_ranks(self, name, item):
        return [self[f"{name} rank{rank}"][item] for rank in range(2)]


@pytest.fixture(scope="module")
def reports(launcher, address, pattern, tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs")
    return Reports(folder, launcher.run(on_ray.train, address, folder, pattern)[0])


@pytest.fixture(scope="module")
def uninterrupted():
    """The steps of each rank, and the weights, of a job that nothing interrupts."""
    return on_ray.uninterrupted()


ALL = list(range(0, 10 * SAMPLES, 10))


def together(steps, epoch):
    """The samples of an epoch, of all workers."""
    return sorted(
        sample
        for mine in steps
        for number, samples in mine
        if number == epoch
        for sample in samples
    )


@pytest.mark.proves(COLUMN, "headrace fetches", "transform is applied once")
@pytest.mark.proves(
    COLUMN, "each sample once, on two ranks", "another order in each epoch"
)
def test_two_workers_share_the_samples_of_an_epoch_in_another_order(
    reports, uninterrupted
):
    assert min(reports.of_ranks("attempt1", "most")) > on_ray.TRAIN_BATCH
    steps, (orders, _) = reports.of_ranks("attempt1", "steps"), uninterrupted
    assert together(steps, 1) == ALL
    assert [step for step in steps[0] if step[0] == 1] == [
        step for step in orders[0] if step[0] == 1
    ]
    assert [samples for epoch, samples in orders[0] if epoch == 0] != [
        each for epoch, each in orders[0] if epoch == 1
    ]


@pytest.mark.proves(
    COLUMN, "exact resume in mid-epoch", "equal weights after an interruption"
)
def test_workers_that_are_restarted_after_a_kill_continue_after_the_checkpoint(
    reports, uninterrupted
):
    orders, weights = uninterrupted
    attempts = (
        reports.of_ranks(attempt, "steps") for attempt in ("attempt0", "attempt1")
    )
    for killed, resumed, whole in zip(*attempts, orders, strict=True):
        assert killed[:KILLED_AT] == whole[:KILLED_AT]
        assert resumed == whole[SAVED_AT:]
    assert reports.of_ranks("attempt1", "weights") == [weights, weights]


@pytest.mark.proves(
    COLUMN, "resume on another number of ranks", "resume at the end of an epoch"
)
def test_one_process_reads_the_rest_of_an_epoch_of_two_workers(reports):
    rest = reports["from middle"]["steps"]
    given = [steps[:SAVED_AT] for steps in reports.of_ranks("attempt0", "steps")]
    assert together([*given, rest], 0) == together([rest], 1) == ALL
    rest = reports["from end"]["steps"]
    assert {epoch for epoch, _ in rest} == {EPOCHS - 1}
    assert together([rest], EPOCHS - 1) == ALL


@pytest.mark.proves(COLUMN, "evaluation", "equal steps for streams of unknown length")
def test_two_workers_share_the_samples_of_other_loaders(reports):
    for name, samples in (
        ("evaluation", ALL),
        ("by engines on Ray", ALL),
        ("lines", list(range(0, 4000, 10))),
    ):
        parts = reports.of_ranks("others", name)
        assert sorted(itertools.chain(*parts)) == samples
        assert len(parts[0]) == len(parts[1])
    assert set(reports.of_ranks("others", "placement")) == {"ray"}
    assert reports.of_ranks("others", "steps of the stream") == [[5] * EPOCHS] * 2


@pytest.mark.proves(COLUMN, "nothing left behind")
def test_no_process_of_a_loader_outlives_the_job(reports):
    assert reports["attempt0 rank1"]["processes"], (
        "the killed worker's loader had no process"
    )
    assert reports.alive == []


def test_loader_prepared_by_ray_gives_each_sample_once_and_warns_with_the_remedy(reports):
    assert sorted(itertools.chain(*reports.of_ranks("others", "prepared by Ray"))) == ALL
    for (message,) in reports.of_ranks("others", "warnings"):
        assert "headrace.integrations.ray.prepare_data_loader" in message
