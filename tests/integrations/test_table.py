"""The tables of docs/trainers.md say what the tests here prove."""

import subprocess
import sys

import pytest

from tests.documents import ROOT

for package in ("lightning", "transformers", "ray", "ignite", "skorch", "fastai", "datasets", "timm", "monai"):
    pytest.importorskip(package, reason=f"{package} is not installed: make test-integrations")


def test_tables_are_those_of_the_tests():
    run = [sys.executable, "-m", "tests.integrations.table", "--check"]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
