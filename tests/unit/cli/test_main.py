"""The command `headrace`: its exit status, and what it says where something is wrong."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import headrace
from headrace.cli.main import main


def test_python_m_headrace_is_the_command():
    command = [sys.executable, "-m", "headrace", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"headrace {headrace.__version__}\n"


def test_without_a_command_the_help_is_printed(capsys):
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("usage: headrace")


COMMANDS = [[sys.executable, "-m", "headrace"], [str(Path(sysconfig.get_path("scripts"), "headrace"))]]


@pytest.mark.parametrize("command", COMMANDS, ids=["python -m headrace", "headrace"])
def test_demo_prints_before_torch_is_imported_and_ends_quietly_when_interrupted_there(command, tmp_path):
    (tmp_path / "torch.py").write_text("import os, signal\nprint('torch')\nos.kill(os.getpid(), signal.SIGINT)\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([*command, "demo"], capture_output=True, text=True, env=environment)
    said = done.stdout.splitlines()
    assert (said[0].split(":")[0], said[1:]) == ("headrace demo", ["torch"])
    assert (done.returncode, done.stderr) == (130, "headrace: interrupted\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["demo", "--latency", "-1"],
        ["demo", "--latency", "nan"],
        ["demo", "--epochs", "0"],
        ["demo", "--batch-size", "0"],
        ["demo", "--workers", "-1"],
        ["demo", "--concurrency", "none"],
        ["demo", "--seed", "-1"],
    ],
)
def test_invalid_arguments_end_with_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: headrace" in capsys.readouterr().err


def test_malformed_store_option_is_not_repeated(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "s3://bucket", "--store-option", "hush"])
    assert "hush" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "package"), [("sklearn", "scikit-learn"), ("PIL", "pillow"), ("aiohttp", "aiohttp"), ("rich", "rich")]
)
def test_missing_package_is_named_with_the_command_that_installs_it(module, package, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)  # makes its import fail
    assert main(["demo"]) == 2
    assert capsys.readouterr().err == f"headrace: this needs {package}: pip install 'headrace[demo]'\n"


def test_demo_without_a_clone_names_the_repository_in_one_sentence(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("headrace.cli.main.__file__", str(tmp_path / "site-packages/headrace/cli/main.py"))
    monkeypatch.chdir(tmp_path)
    assert main(["demo"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "examples/demo" in printed.err
    assert "git clone" in printed.err
    assert printed.err.count("\n") == 1


def test_demo_is_found_in_the_working_directory(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("headrace.cli.main.__file__", str(tmp_path / "site-packages/headrace/cli/main.py"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "examples/demo"
    package.mkdir(parents=True)
    (package / "job.py").touch()
    (package / "__init__.py").write_text("def missing_packages():\n    return ['this one']\n")
    monkeypatch.delitem(sys.modules, "demo", raising=False)
    assert main(["demo"]) == 2
    assert capsys.readouterr().err.startswith("headrace: this needs this one")
    del sys.modules["demo"]


@pytest.mark.parametrize(
    "url", ["s3://me:hush@bucket/prefix?signature=hush", "file:///no/such/folder", "nonsense://hush@bucket"]
)
def test_what_goes_wrong_is_one_line_without_secrets(url, capsys):
    options = [
        "--store-option",
        "endpoint=http://127.0.0.1:9",  # nothing listens there
        "--store-option",
        "client_options.allow_http=true",
        "--store-option",
        "aws_access_key_id=hush",
        "--store-option",
        "aws_secret_access_key=hush-hush",
    ]
    assert main(["bench", url, *(options if url.startswith("s3") else [])]) in (1, 2)
    said = capsys.readouterr()
    assert said.err.startswith("headrace: ")
    assert said.err.count("\n") == 1
    assert "hush" not in said.out + said.err


def test_option_cannot_be_a_value_and_a_group(capsys):
    options = ["--store-option", "client_options=hush", "--store-option", "client_options.allow_http=true"]
    assert main(["bench", "s3://bucket", *options]) == 2
    assert capsys.readouterr().err == (
        "headrace: --store-option client_options.allow_http: client_options has a value already\n"
    )
