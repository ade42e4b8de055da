"""`headrace doctor`: in a process with few descriptors and one core, in a container's limits, on a terminal."""

import fcntl
import json
import os
import pty
import resource
import shutil
import struct
import subprocess
import sys
import termios

import pytest

from headrace.cli import checks
from headrace.cli.cgroups import CgroupLimits
from headrace.cli.checks import Finding, check_cores, check_environment, check_memory, check_processes, within
from headrace.cli.doctor import examine
from headrace.cli.main import main

FINE = Finding("clock", "tsc")
BAD = Finding("memory", "100 MiB available: the kernel may kill a job that fetches ahead", "memory_budget=25 << 20")


def run_limited(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command with 64 descriptors and one core."""

    def limit():
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128))
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    command = [sys.executable, "-m", "headrace", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, preexec_fn=limit)


def test_few_descriptors_and_one_core_are_problems_with_remedies():
    done = run_limited("--json")
    assert (done.returncode, done.stderr) == (1, "")
    report = json.loads(done.stdout)
    found = {each["name"]: each for each in report["findings"]}
    assert report["ok"] is False
    assert found["descriptors"] == {
        "name": "descriptors",
        "ok": False,
        "text": '64 (hard limit 128): concurrency="auto" uses up to 32 of 1,024 requests, '
        "and workers may fail to start",
        "remedy": "ulimit -n 128",
    }
    assert found["cores"]["text"].startswith("1 of ")
    assert "taskset" in found["cores"]["remedy"]
    unexamined = [each for each in report["findings"] if "could not be examined" in each["text"]]
    assert unexamined == []
    assert found["torch"]["ok"]


def test_a_pipe_gets_one_plain_line_for_each_finding(monkeypatch, capsys):
    monkeypatch.setattr(checks, "CHECKS", (lambda: iter([FINE, BAD]),))
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out == (
        "ok       clock             tsc\n"
        "problem  memory            100 MiB available: the kernel may kill a job that fetches ahead. "
        "Remedy: memory_budget=25 << 20\n"
        "1 problem\n"
    )


def test_exit_status_is_0_where_all_is_well(monkeypatch, capsys):
    monkeypatch.setattr(checks, "CHECKS", (lambda: iter([FINE]),))
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.endswith("no problems\n")
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True


def test_a_check_that_fails_is_a_finding(monkeypatch, capsys):
    def check_everything():
        raise ValueError("another form")
        yield

    monkeypatch.setattr(checks, "CHECKS", (check_everything,))
    assert main(["doctor"]) == 1
    assert "everything        could not be examined: ValueError: another form" in capsys.readouterr().out


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("no_color", ["", "1"])
def test_a_terminal_gets_wrapped_lines_and_colors(columns, no_color, monkeypatch):
    monkeypatch.setattr(checks, "CHECKS", (lambda: iter([FINE, BAD]),))
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.delenv("COLUMNS", raising=False)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with open(theirs, "w") as terminal, open(ours) as reader:
        assert examine(as_json=False, stream=terminal) == 1
        terminal.flush()
        lines = [reader.readline().rstrip()]
        while lines[-1] != "1 problem":
            lines.append(reader.readline().rstrip())
    assert ("\033[33mproblem\033[0m" in "".join(lines)) == (not no_color)
    plain = [line.replace("\033[32m", "").replace("\033[33m", "").replace("\033[0m", "") for line in lines]
    assert max(map(len, plain)) < columns
    assert plain[0] == "ok       clock             tsc"
    assert "Remedy: memory_budget=25 << 20" in " ".join(line.strip() for line in plain)


TINY_SHM = """
mount -t tmpfs -o size=1m tmpfs /dev/shm || exit 77
exec "$0" -c '
from headrace.cli.checks import check_shared_memory
print([(each.name, each.remedy) for each in check_shared_memory()])
'
"""


def test_a_tiny_shared_memory_is_a_problem():
    if shutil.which("unshare") is None or os.geteuid():
        pytest.skip("needs root and unshare, for a mount namespace")
    command = ["unshare", "-m", "--propagation", "private", "sh", "-c", TINY_SHM, sys.executable]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("a mount namespace is not permitted here")
    assert done.stdout == (
        "[('memfd', None), ('/dev/shm', 'mount -o remount,size=2G /dev/shm, or docker run --shm-size=2g')]\n"
    ), done.stderr


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_limits_of_control_groups_version_2_are_the_tightest_of_all_parents(tmp_path):
    write(tmp_path / "root/job", cpu__max="200000 100000", memory__max="max", pids__max="100", pids__current="90")
    write(tmp_path / "root/job/inner", cpu__max="max 100000", memory__max=str(1 << 30), memory__current=str(1 << 29))
    write(tmp_path, membership="0::/job/inner")
    limits = CgroupLimits.here(tmp_path / "root", tmp_path / "membership")
    assert limits == CgroupLimits(cores=2.0, memory=1 << 30, memory_left=1 << 29, pids=100, pids_left=10)


def test_limits_of_control_groups_version_1_are_read(tmp_path):
    write(tmp_path / "root/cpu,cpuacct/job", cpu__cfs_quota_us="150000", cpu__cfs_period_us="100000")
    write(tmp_path / "root/memory", memory__limit_in_bytes=str(1 << 30), memory__usage_in_bytes="0")
    write(tmp_path / "root/pids/job", pids__max="max", pids__current="3")
    write(tmp_path, membership="3:cpu,cpuacct:/job\n2:memory:/of/the/host\n1:pids:/job")
    limits = CgroupLimits.here(tmp_path / "root", tmp_path / "membership")
    assert limits == CgroupLimits(cores=1.5, memory=1 << 30, memory_left=1 << 30)


def test_no_control_groups_are_no_limits(tmp_path):
    write(tmp_path / "root/memory", memory__limit_in_bytes=str((1 << 63) - 4096), memory__usage_in_bytes="0")
    write(tmp_path, membership="1:memory:/")
    assert CgroupLimits.here(tmp_path / "root", tmp_path / "membership") == CgroupLimits()
    assert CgroupLimits.here(tmp_path / "absent", tmp_path / "absent") == CgroupLimits()


def test_limits_of_a_container_are_problems_with_remedies(monkeypatch):
    small = CgroupLimits(cores=1.5, memory=1 << 30, memory_left=512 << 20, pids=64, pids_left=20)
    monkeypatch.setattr(CgroupLimits, "here", classmethod(lambda cls: small))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = {each.name: each for check in (check_memory, check_cores, check_processes) for each in check()}
    assert found["memory"].text.startswith("512 MiB available of the container's 1.0 GiB")
    assert found["memory"].remedy == "memory_budget=128 << 20, or more memory for the container"
    assert found["threads"].remedy == "export OMP_NUM_THREADS=1"
    assert found["container PIDs"].remedy == "docker run --pids-limit=4096"
    assert not found["cores"].ok


def test_values_of_variables_are_not_printed():
    (found,) = check_environment({"AWS_ACCESS_KEY_ID": "hush", "https_proxy": "http://user:hush@proxy"})
    assert found.text.startswith("set: HTTPS_PROXY, AWS_ACCESS_KEY_ID, without AWS_SECRET_ACCESS_KEY")
    assert "hush" not in f"{found}"
    (found,) = check_environment({})
    assert found.ok


@pytest.mark.parametrize(
    ("version", "wanted", "holds"),
    [
        ("2.13.0+cpu", ">=2.6,<3", True),
        ("2.5.1", ">=2.6,<3", False),
        ("3.0.0", ">=2.6,<3", False),
        ("0.12.0rc1", ">=0.11,<0.13", True),
        ("4.0", "", True),
    ],
)
def test_versions_are_compared_with_the_declared_range(version, wanted, holds):
    assert within(version, wanted) is holds
