"""Hugging Face's Trainer, resumed in mid-epoch, continues with the remaining samples."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

PROGRAM = Path(__file__).with_name("resumed.py")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resumed")
    run = subprocess.run([sys.executable, PROGRAM, folder], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads((folder / "report.json").read_text())


def test_trainer_resumed_in_mid_epoch_sees_every_sample_once_transformed(report):
    assert len(report["begun"]) == 12
    assert report["begun"] + report["rest"] == report["whole"]
    first, second = report["whole"][:32], report["whole"][32:]
    assert sorted(first) == sorted(second) == list(range(0, 320, 10))
    assert first != second
