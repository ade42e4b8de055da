"""Loaders prepared by Ray Train: its two workers see every sample once, transformed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytest.importorskip("pandas", reason="ray.train needs pandas")

PROGRAM = Path(__file__).with_name("on_ray.py")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    for shard in range(4):
        (folder / f"{shard}.txt").write_text("".join(f"{10 * shard + line}\n" for line in range(10)))
    report = folder / "report.json"
    command = [sys.executable, PROGRAM, str(folder / "*.txt"), str(report)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(report.read_text())


@pytest.mark.parametrize("name", ["map", "duck", "lines"])
def test_each_sample_of_a_loader_prepared_by_ray_train_is_seen_once(report, name):
    parts = report[name]
    assert sorted(number for part in parts for number in part) == list(range(0, 400, 10))
    assert len(parts[0]) == len(parts[1]) == 20
