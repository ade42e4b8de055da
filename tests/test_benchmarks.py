"""The benchmarks: some of them in their quick mode, which checks every byte; how all are run.

Speed is not tested. `make bench-quick` runs the quick mode of every benchmark.
"""

import importlib
import json
import os
import re
import subprocess
import sys

import pytest

from tests.documents import ROOT
from tests.forks import LIMIT

BENCHMARKS = ROOT / "benchmarks"
# The engine, an object store, the disk cache and a recorded epoch, in a few seconds of CPU.
IN_CI = ("cache", "engine_overhead", "telemetry")

BENCHMARK = """
import argparse
from harness import claim, interleave, parse_arguments

arguments = parse_arguments(argparse.ArgumentParser(), value=0.0)
values = iter([9.0, 2.0, 3.0, 4.0])
rounds = interleave({"ours": lambda: next(values), "limit": lambda: 4.0}, rounds=3, unit="objects/s")
rounds.show(against="limit")
claim("reading", rounds.share("ours", "limit", at_least=0.5), rounds.figure("ours", at_least=3.5))
"""


@pytest.fixture
def module(monkeypatch):
    """Imports a module of `benchmarks`, as its neighbours do."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_quick_benchmarks_run_and_claim_nothing(tmp_path):
    command = [
        sys.executable,
        BENCHMARKS / "run_all.py",
        "--quick",
        "--results",
        tmp_path,
        "--only",
        *IN_CI,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.iterdir()
    results = json.loads(file.read_text())
    ran = {f"{name}.py": "ran" for name in IN_CI}
    assert {name: ended["status"] for name, ended in results["benchmarks"].items()} == ran
    assert results["quick"]
    assert results["complete"]
    tables = [record for record in results["records"] if "table" in record]
    assert {record["file"] for record in tables} == set(ran)
    assert not [record for record in results["records"] if "claim" in record]


def test_quick_benchmark_fails_when_a_byte_is_wrong(module):
    contents = module("contents")
    data = bytearray(contents.content_of(7, 800))
    assert contents.numbers_of([data], 800) == [7]
    data[413] ^= 1
    with pytest.raises(RuntimeError, match="not one of those that were stored"):
        contents.numbers_of([data], 800)


def test_every_benchmark_has_a_quick_mode(module):
    run = module("run_all").benchmarks()
    assert {file.stem for file in run} >= {"fetch_rate", "gpu_copy", *IN_CI}
    assert {file.name for file in run} >= set(module("run_all").SHORTER)
    assert not [
        file.name
        for file in run
        if not re.search(r"= parse_arguments\(", file.read_text())
    ]


@pytest.fixture
def folder(tmp_path, monkeypatch, module):
    """A folder in place of `benchmarks`."""
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    monkeypatch.setattr(module("run_all"), "HERE", folder)
    monkeypatch.setenv("PYTHONPATH", f"{BENCHMARKS}{os.pathsep}{ROOT / 'src'}")
    return folder


def test_failing_benchmark_is_reported_and_the_others_run(
    folder, tmp_path, module, capfd
):
    (folder / "a_fails.py").write_text("raise RuntimeError('wrong bytes')")
    (folder / "b_runs.py").write_text(BENCHMARK)
    (folder / "c_ends.py").write_text(
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    )
    (folder / "gpu_d.py").write_text("")
    with pytest.raises(SystemExit, match=r"these failed: a_fails\.py, c_ends\.py"):
        module("run_all").main(["--results", str(tmp_path)])
    shown = capfd.readouterr().out
    assert (
        "| reading | ≥ 0.5 of limit; ≥ 3.5 objects/s | 0.75 of limit (0.5 to 1); 3 objects/s (2 to 4) | **missed**"
        in shown
    )
    (file,) = tmp_path.glob("*.json")
    results = json.loads(file.read_text())
    assert {
        name: (ended["status"], ended["reason"])
        for name, ended in results["benchmarks"].items()
    } == {
        "a_fails.py": ("failed", "exit status 1"),
        "b_runs.py": ("ran", ""),
        "c_ends.py": ("failed", "ended by SIGKILL"),
        "gpu_d.py": ("not run", "it needs a CUDA device"),
    }
    table, claimed = results["records"]
    assert table["values"] == {"ours": [2.0, 3.0, 4.0], "limit": [4.0] * 3}
    share, rate = claimed["figures"]
    assert (share["values"], share["at_least"], share["met"]) == (
        [0.5, 0.75, 1.0],
        0.5,
        True,
    )
    assert (rate["value"], rate["met"], claimed["met"]) == (3.0, False, False)
    assert {"commit", "changed", "machine"} <= set(results)
    assert {"cpu", "cores", "memory_bytes", "kernel", "python", "versions"} <= set(
        results["machine"]
    )
    assert len(results["benchmarks"]["b_runs.py"]["load_before"]) == 3


def test_benchmark_that_hangs_is_ended_with_its_processes(folder, tmp_path, module):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    (folder / "hangs.py").write_text(
        "import os, subprocess, threading\n"
        f"writer = os.open({str(fifo)!r}, os.O_WRONLY)\n"
        "subprocess.Popen(['sleep', '1000'], pass_fds=[writer])\n"
        "os.write(writer, b'started')\n"
        "threading.Event().wait()\n"
    )
    ended = module("run_all").run(
        folder / "hangs.py", tmp_path / "records", [], limit=5.0
    )
    assert (ended["status"], ended["reason"]) == ("failed", "took more than 5 s")
    os.set_blocking(reader, True)
    assert os.read(reader, 100) == b"started"
    assert os.read(reader, 100) == b""  # once no process has the other end
    os.close(reader)
