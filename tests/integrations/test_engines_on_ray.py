"""`placement=hr.RayPlacement(...)`: engines on a real cluster of two nodes, any of which may be lost."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest

import headrace as hr
from tests.documents import ROOT
from tests.integrations import engines_on_ray
from tests.integrations.engines_on_ray import BATCHES, digest, made_loader

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")

TIMEOUT = 280  # seconds; the cluster starts some twenty processes, and each engine imports torch


LOST = re.compile(
    r"engine (\d) of 2 \(on (?:node [\d.]+, process \d+|a node that Ray has not chosen yet)\) was lost: .*: another is "
    r"asked for\. Its batches are made again\.$",
    re.DOTALL,
)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    file = tmp_path_factory.mktemp("report") / "report.json"
    less = {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, engines_on_ray.__file__, str(file)],
        env={**os.environ, **less},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def on_one_machine():
    """The digests of two epochs of the same loader without Ray."""
    with made_loader() as loader:
        return [digest(loader) for _ in range(2)]


def test_batches_of_two_epochs_are_the_same_bytes_as_without_ray(report, on_one_machine):
    assert report["two epochs"] == on_one_machine
    assert on_one_machine[0] != on_one_machine[1]
    assert report["actors"] == 2
    assert report["placement"] == "ray: RayPlacement(engines=2)"


def test_loader_that_is_collected_in_a_thread_of_rays_ends_its_engines(report):
    assert report["collected by Ray"]


def test_state_is_continued_without_ray(report):
    with made_loader() as whole, made_loader() as rest:
        batches = [batch for _ in range(3) for batch in whole]  # the state is of the third epoch
        rest.load_state_dict(report["state"])
        assert digest(rest) == digest(batches[2 * BATCHES + 3 :])


@pytest.mark.parametrize(
    "loss", ["SIGKILL of an actor", "SIGKILL of an engine's process", "loss of a node", "SIGKILL of all actors"]
)
def test_lost_engine_is_replaced_and_the_batches_do_not_change(report, on_one_machine, loss):
    assert report[loss]["digest"] == on_one_machine[0]
    found = [LOST.match(warning) for warning in report[loss]["warnings"]]
    assert all(found), report[loss]["warnings"]
    # More than those: Ray may place an engine on a node that is lost already.
    assert {match[1] for match in found} >= ({"0", "1"} if loss == "SIGKILL of all actors" else set())
    assert found


def test_lanes_of_a_stream_are_read_on_by_the_other_engine(report, tmp_path):
    engines_on_ray.write_lines(tmp_path)
    with engines_on_ray.made_stream_loader(tmp_path) as here:
        expected = digest(here)
    assert report["stream"] == expected
    assert report["stream, SIGKILL of an actor"]["digest"] == expected
    assert report["placement of the stream"] == "ray: RayPlacement(engines=2), 2 lanes"
    (warning,) = report["stream, SIGKILL of an actor"]["warnings"]
    assert "Its batches are made again" in warning


def test_large_batches_arrive_writable_and_are_released(report):
    # Five times a node's store went through it, with spilling switched off.
    assert report["large batches"] == 400 // engines_on_ray.BATCH


def test_cluster_without_room_is_an_error_that_says_what_is_free(report):
    name, text, *_ = report["no room"]
    assert name == "EngineStartError"
    assert text.startswith("0 of 2 engines run 0.5 seconds after they were asked for"), text
    assert "each asks for 3 CPU; the cluster of 3 nodes has 4 CPU, of which 4 CPU are free" in text


def test_epoch_begins_with_the_least_number_of_engines(report):
    assert report["first of few engines"] == [0, 1, 2, 3, 4]


def test_error_of_a_sample_is_that_of_user_code(report):
    name, text, *notes = report["error of a sample"]
    assert (name, text) == ("LookupError", "no sample 7")
    assert any("batch 1, index 7" in note for note in notes), notes


def test_ray_is_never_started_by_headrace(report):
    name, text, *_ = report["without a cluster"]
    assert name == "RuntimeError"
    assert "call ray.init(address='auto')" in text
    name, text, *_ = report["after ray.shutdown"]
    assert name == "RuntimeError"
    assert not report["started by headrace"]


def test_example_of_a_cluster_loses_a_node_and_no_batch():
    program = ROOT / "examples" / "30_ray_cluster.py"
    run = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=TIMEOUT)
    assert run.returncode == 0, run.stdout + run.stderr
    here, there, lost, loss = run.stdout.splitlines()[-4:]
    assert here.split()[-1] == there.split()[-1] == lost.split()[-1]
    assert "was lost" in loss


def test_arguments_that_exclude_each_other_are_refused():
    placement = hr.RayPlacement(engines=4)
    for options, reason in (
        ({"engines": 2}, r"use RayPlacement\(engines=2"),
        ({"num_workers": 2}, "num_workers must be 0 or at least 4, but got 2"),
    ):
        with pytest.raises(ValueError, match=reason):
            made_loader(placement=placement, **options)
    with pytest.raises(ValueError, match="a torch dataset is read by num_workers"):
        hr.DataLoader([1, 2], placement=placement)
