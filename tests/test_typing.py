"""The types of a user's program by pyright and mypy; `make lint` has mypy check those of tests/typed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import ROOT, python_blocks

TYPED = ROOT / "tests" / "typed"
IGNORED = "  # type: ignore"
WRONG = (TYPED / "wrong.py").read_text().splitlines()


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """The first programs of the documents, in a package: pyproject.toml names it, with what they leave out."""
    package = tmp_path_factory.mktemp("typed") / "documents"
    package.mkdir()
    files, photos, _, resumed = python_blocks("docs/quickstart.md")
    programs = {
        "readme": python_blocks("README.md")[0],
        "agents": python_blocks("AGENTS.md")[0],
    }
    for name, program in {
        **programs,
        "files": files + resumed,
        "photos": photos,
        "__init__": "",
    }.items():
        (package / f"{name}.py").write_text(program)
    return sorted(package.iterdir())


@pytest.fixture(scope="module")
def errors_of_pyright(documents):
    """The lines with errors, for each file; one start of pyright for all."""
    wrong = documents[0].parent.with_name("wrong.py")
    wrong.write_text("\n".join(line.removesuffix(IGNORED) for line in WRONG))
    programs = [TYPED / "program.py", wrong, *documents]
    command = [
        sys.executable,
        "-m",
        "pyright",
        "--outputjson",
        "--pythonpath",
        sys.executable,
        *map(str, programs),
    ]
    answer = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT
    )
    if not answer.stdout.startswith("{"):
        pytest.skip(f"pyright cannot be run: {answer.stderr.strip().splitlines()[-1:]}")
    lines = {program.name: {} for program in programs}
    for each in json.loads(answer.stdout)["generalDiagnostics"]:
        if each["severity"] == "error":
            lines[Path(each["file"]).name][each["range"]["start"]["line"]] = each[
                "message"
            ]
    return lines


def test_types_of_batches_are_known_without_annotations(errors_of_pyright):
    assert errors_of_pyright["program.py"] == {}


def test_mistakes_in_arguments_are_type_errors(errors_of_pyright):
    expected = {n for n, line in enumerate(WRONG) if line.endswith(IGNORED)}
    assert errors_of_pyright["wrong.py"].keys() == expected


def test_first_programs_of_the_documents_have_no_errors_by_pyright(
    errors_of_pyright, documents
):
    assert [errors_of_pyright[path.name] for path in documents] == [{}] * len(documents)


def test_first_programs_of_the_documents_have_no_errors_by_mypy(documents):
    command = [sys.executable, "-m", "mypy", *map(str, documents)]
    checked = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (
        checked.stdout == f"Success: no issues found in {len(documents)} source files\n"
    )
