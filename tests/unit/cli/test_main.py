"""The command `headrace`: its exit status, and what it says where something is wrong."""

import subprocess
import sys

import pytest

import headrace
from headrace.cli.main import main


def test_python_m_headrace_is_the_command(capsys):
    command = [sys.executable, "-m", "headrace", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"headrace {headrace.__version__}\n"
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("usage: headrace")


@pytest.mark.parametrize(
    "arguments",
    [["index"], ["index", "a", "--format", "zip"], ["index", "a", "--processes", "x"]],
)
def test_invalid_arguments_end_with_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: headrace" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "status"),
    [
        ("http://me:hush@127.0.0.1:9/0.tar", 1),  # nothing listens there
        ("file:///no/such/folder", 1),
        ("nonsense://hush@bucket", 2),
        ("", 2),
    ],
)
def test_what_goes_wrong_is_one_line_without_secrets(url, status, capsys, tmp_path):
    assert main(["index", url, "--output", str(tmp_path / "out")]) == status
    said = capsys.readouterr()
    assert said.err.startswith("headrace: ")
    assert said.err.count("\n") == 1
    assert "hush" not in said.out + said.err
