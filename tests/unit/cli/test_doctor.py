"""`headrace doctor`: in a process with few descriptors and one core, and in a container's limits."""

import os
import re
import resource
import subprocess
import sys

from headrace._base.cgroup import CgroupLimits
from headrace.cli import doctor
from headrace.cli.doctor import (
    Finding,
    _check_cores,
    _check_descriptors,
    _check_event_loop,
    _check_memory,
)
from headrace.cli.main import main

FINE = Finding("clock", "tsc")
BAD = Finding(
    "memory",
    "100 MiB available: the kernel may kill a job that fetches ahead",
    "memory_budget=25 << 20",
)


def test_few_descriptors_and_one_core_are_problems_with_remedies():
    limits = "ulimit -Sn 64; export OMP_NUM_THREADS=4; taskset -cp 0 $$ >/dev/null;"
    command = ["sh", "-c", f"{limits} exec $0 -m headrace doctor", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stderr, done.returncode) == ("", 1)
    assert "could not be examined" not in done.stdout
    found = {}
    for line in done.stdout.splitlines()[:-1]:
        text, _, remedy = line[27:].partition(". Remedy: ")
        found[line[9:27].strip()] = Finding("", text, remedy)
    assert re.fullmatch(
        r'64 \(hard limit [\d,]+\): concurrency="auto" uses up to 32 requests of 1,024, and workers may fail to start',
        found["descriptors"].text,
    )
    assert found["descriptors"].remedy == "ulimit -n 2048"
    assert (
        found["cores"].text
        == f"1 of {os.cpu_count()} (CPU affinity): fetching, workers and training share them"
    )
    assert found["threads"].remedy == "export OMP_NUM_THREADS=1"


def test_few_descriptors_are_a_problem_with_a_remedy(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 128))
    (found,) = _check_descriptors()
    assert (
        found.remedy
        == "docker run --ulimit nofile=4096; outside of a container, as root: ulimit -n 4096"
    )
    monkeypatch.setattr(resource, "getrlimit", lambda which: (4096, 4096))
    (found,) = _check_descriptors()
    assert found.remedy is None


def test_a_pipe_gets_one_plain_line_for_each_finding(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "CHECKS", (lambda: iter([FINE, BAD]),))
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out == (
        "ok       clock             tsc\n"
        "problem  memory            100 MiB available: the kernel may kill a job that fetches ahead. "
        "Remedy: memory_budget=25 << 20\n"
        "1 problem\n"
    )
    monkeypatch.setattr(doctor, "CHECKS", (lambda: iter([FINE]),))
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.endswith("no problems\n")

    def _check_everything():
        raise ValueError("another form")
        yield

    monkeypatch.setattr(doctor, "CHECKS", (_check_everything,))
    assert main(["doctor"]) == 1
    assert (
        "everything        could not be examined: ValueError: another form"
        in capsys.readouterr().out
    )


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_limits_of_control_groups_version_2_are_the_tightest_of_all_parents(tmp_path):
    write(tmp_path / "root/job", cpu__max="200000 100000", memory__max="max")
    write(
        tmp_path / "root/job/inner",
        cpu__max="max 100000",
        memory__max=str(1 << 30),
        memory__current=str(1 << 29),
    )
    write(tmp_path, membership="0::/job/inner")
    limits = CgroupLimits.here(tmp_path / "root", tmp_path / "membership")
    assert limits == CgroupLimits(cores=2.0, memory=1 << 30, memory_left=1 << 29)
    write(tmp_path, membership="1:memory:/")  # no control groups of version 2
    assert CgroupLimits.here(tmp_path / "root", tmp_path / "membership") == CgroupLimits()
    assert CgroupLimits.here(tmp_path / "absent", tmp_path / "absent") == CgroupLimits()


def test_limits_of_control_groups_are_problems_and_each_remedy_mends_its_line(
    tmp_path, monkeypatch
):
    root, membership = tmp_path / "root", tmp_path / "membership"
    here = CgroupLimits.here
    monkeypatch.setattr(CgroupLimits, "here", lambda: here(root, membership))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(doctor, "available_memory", lambda: here(root, membership).memory_left)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    write(tmp_path, membership="0::/job")
    write(
        root / "job",
        cpu__max="150000 100000",
        memory__max=str(1 << 30),
        memory__current=str(512 << 20),
    )

    def found():
        return {each.name: each for check in (_check_memory, _check_cores) for each in check()}

    small = found()
    assert small["memory"].text == (
        "0.5 GiB available of the container's 1.0 GiB; batches that are fetched ahead may take 1.0 GiB: the kernel may "
        "kill the job"
    )
    assert small["memory"].remedy == "memory_budget=128 << 20, or more memory for the container"
    assert small["cores"].text.startswith("1.5 of ")
    assert small["cores"].text.endswith(
        "(the container's quota): fetching, workers and training share them"
    )
    assert small["cores"].remedy.startswith("a larger quota, for example docker run --cpus=")
    assert small["threads"].remedy == "export OMP_NUM_THREADS=1"

    write(root / "job", cpu__max="400000 100000", memory__max=str(8 << 30))
    assert [each for each in found().values() if each.remedy is not None] == []
    write(root / "job", cpu__max="250000 100000")
    assert found()["threads"].remedy == "export OMP_NUM_THREADS=2"
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert [each for each in found().values() if each.remedy is not None] == []


def test_the_loop_of_asyncio_is_a_problem_until_the_variable_is_unset(monkeypatch):
    monkeypatch.setenv("HEADRACE_EVENT_LOOP", "asyncio")
    assert next(_check_event_loop()).remedy == "pip install uvloop; unset HEADRACE_EVENT_LOOP"
    monkeypatch.delenv("HEADRACE_EVENT_LOOP")
    assert next(_check_event_loop()) == ("event loop", "uvloop", None)
