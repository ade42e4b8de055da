"""The command `headrace`: its exit status, and what it says where something is wrong."""

import json
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
    "arguments", [["bench"], ["bench", "s3://b", "--seconds", "1"], ["bench", "s3://b", "--objects", "0"]]
)
def test_invalid_arguments_end_with_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: headrace" in capsys.readouterr().err


def test_malformed_store_option_is_not_repeated(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "s3://bucket", "--store-options", "hush"])
    assert "hush" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "status"),
    [
        ("s3://me:hush@bucket/prefix?signature=hush", 1),
        ("file:///no/such/folder", 1),
        ("nonsense://hush@bucket", 2),
        ("", 2),
    ],
)
def test_what_goes_wrong_is_one_line_without_secrets(url, status, capsys):
    options = {
        "endpoint": "http://127.0.0.1:9",  # nothing listens there
        "client_options": {"allow_http": True},
        "aws_access_key_id": "hush",
        "aws_secret_access_key": "hush-hush",
    }
    assert main(["bench", url, *(["--store-options", json.dumps(options)] if url.startswith("s3") else [])]) == status
    said = capsys.readouterr()
    assert said.err.startswith("headrace: ")
    assert said.err.count("\n") == 1
    assert "hush" not in said.out + said.err
