"""The types of a user's program, by mypy and pyright."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mypy import api

PROGRAMS = Path(__file__).parent / "typed"
SETTINGS = Path(__file__).parents[1] / "pyproject.toml"


def errors_of_mypy(program):
    out, err, _ = api.run(["--strict", "--config-file", str(SETTINGS), "--no-error-summary", str(program)])
    assert not err
    return {int(re.match(r".*?:(\d+): error", line)[1]): line for line in out.splitlines() if ": error" in line}


def errors_of_pyright(program):
    if importlib.util.find_spec("pyright") is None:
        pytest.skip("pyright is not installed: pip install 'pyright[nodejs]'")
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, str(program)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if not answer.stdout.startswith("{"):
        pytest.skip(f"pyright cannot be run: {answer.stderr.strip().splitlines()[-1:]}")
    found = json.loads(answer.stdout)["generalDiagnostics"]
    return {each["range"]["start"]["line"] + 1: each["message"] for each in found if each["severity"] == "error"}


CHECKERS = pytest.mark.parametrize("errors", [errors_of_mypy, errors_of_pyright])


@CHECKERS
def test_types_of_batches_are_known_without_annotations(errors):
    assert errors(PROGRAMS / "program.py") == {}


@CHECKERS
def test_mistakes_in_arguments_are_type_errors(errors):
    program = PROGRAMS / "wrong.py"
    marked = {n for n, line in enumerate(program.read_text().splitlines(), 1) if line.endswith("# error")}
    assert errors(program).keys() == marked
