"""The types of a user's program by pyright; `make lint` has mypy check the same programs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "typed"
IGNORED = "  # type: ignore"


def errors_of_pyright(program):
    pytest.importorskip("pyright", reason="pyright is not installed: pip install 'pyright[nodejs]'")
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, str(program)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if not answer.stdout.startswith("{"):
        pytest.skip(f"pyright cannot be run: {answer.stderr.strip().splitlines()[-1:]}")
    found = json.loads(answer.stdout)["generalDiagnostics"]
    return {each["range"]["start"]["line"]: each["message"] for each in found if each["severity"] == "error"}


def test_types_of_batches_are_known_without_annotations():
    assert errors_of_pyright(PROGRAMS / "program.py") == {}


def test_mistakes_in_arguments_are_type_errors(tmp_path):
    lines = (PROGRAMS / "wrong.py").read_text().splitlines()
    program = tmp_path / "wrong.py"
    program.write_text("\n".join(line.removesuffix(IGNORED) for line in lines))
    assert errors_of_pyright(program).keys() == {n for n, line in enumerate(lines) if line.endswith(IGNORED)}
