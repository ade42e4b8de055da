"""`headrace top`: its lines, and one clear line for each process that it cannot show."""

import os
import pwd
import signal
import subprocess
import sys

import pytest

from headrace.cli import top
from headrace.cli.main import main
from headrace.cli.top_view import overview, view

STAGES = [
    {"name": "plan", "worked": 0.01, "waited": 0.99, "blocked": 0.0, "seconds": 0.0004},
    {"name": "fetch", "worked": 0.97, "waited": 0.0, "blocked": 0.03, "seconds": 0.032},
]
REPORT = {
    "limit": "latency",
    "wait_share": 0.31,
    "batches": 255,
    "samples": 65_280,
    "seconds": 21.4,
    "nbytes": 3_655_680_000,
    "in_flight": 63.6,
    "concurrency": 64,
    "stages": STAGES,
}
LOADER = {
    "loader": 1,
    "dataset": "Photos",
    "batch_size": 256,
    "num_workers": 8,
    "concurrency": 64,
    "placement": "process",
    "rank": 3,
    "world_size": 8,
    "epoch": 2,
    "state": "next",
    "state_seconds": 42.3,
    "batch": 812,
    "batch_status": "batch 812 is in stage fetch, and waits for 1 samples: index 207,923",
    "line": "/home/ada/train.py:88 in main",
    "batches": 812,
    "samples": 207_872,
    "skipped_samples": 3,
    "wait_share": 0.33,
    "elapsed_seconds": 200.0,
    "summary": "31 % of the time your loop waits for data. Fetching is the limit: 64 in flight ÷ 21 ms = 3,050 "
    "samples/s, and the window was full 98 % of the time. Change: concurrency=256. Predicted wait after it: 0 %.",
    "report": REPORT,
}
SNAPSHOT = {"protocol": 1, "headrace": "0.1.0", "pid": 4242, "loaders": [LOADER]}

AT_80 = """\
process 4242, rank 3 of 8, headrace 0.1.0: python train.py
  loader 1: Photos (process, batch_size=256, num_workers=8, concurrency=64),
    epoch 2
    waits in next() for 42 s, at /home/ada/train.py:88 in main: batch 812 is in
      stage fetch, and waits for 1 samples: index 207,923
    812 batches, 207,872 samples, 3 samples skipped, waiting 33 % of 3 min 20 s

    the last 256 batches, 21 s: 3,050 samples/s, 171 MB/s, 64 of 64 fetches in
      flight
    31 % of the time your loop waits for data. Fetching is the limit: 64 in
      flight ÷ 21 ms = 3,050 samples/s, and the window was full 98 % of the
      time. Change: concurrency=256. Predicted wait after it: 0 %.
    stage  works  waits  blocked  time of a batch
    plan     1 %   99 %      0 %           400 µs
    fetch   97 %    0 %      3 %            32 ms
"""


def text_of(lines):
    return "".join(f"{line.text}\n" for line in lines)


def test_lines_are_wrapped_at_the_width_of_a_terminal():
    assert text_of(view(SNAPSHOT, "python train.py", 80)) == AT_80
    assert max(len(line.text) for line in view(SNAPSHOT, "python train.py", 120)) < 120
    assert len(view(SNAPSHOT, "python train.py", None)) == 10


@pytest.mark.parametrize(
    ("changed", "shown"),
    [
        ({"state_seconds": 0.2}, "runs: batch 812 is in stage fetch"),
        ({"state": "over"}, "no iteration runs"),
        ({"state": "step", "batch_status": None}, "in the loop's own code for 42 s, at /home/ada/train.py:88 in main"),
        ({"state": "ranks"}, "waits for the other ranks (coordinated=True) for 42 s"),
        ({"state_seconds": 7300.0}, "waits in next() for 2 h 1 min"),
        ({"error": "ValueError: no"}, "a loader could not be shown: ValueError: no"),
        ({"dataset": "\033[2J\nPhotos"}, "loader 1: ?[2J?Photos ("),
        ({"report": None}, "812 batches"),
    ],
)
def test_states_of_a_loader_are_lines(changed, shown):
    text = text_of(view({**SNAPSHOT, "loaders": [{**LOADER, **changed}]}, "python", None))
    assert shown in text
    assert "\033" not in text


def test_an_overview_has_a_line_for_each_loader():
    jobs = [(4242, "python train.py", SNAPSHOT), (17, "python other.py", {"loaders": []}), (5, "python", None)]
    lines = text_of(overview(jobs, None)).splitlines()
    assert lines == [
        " PID  loader  waits  samples/s  limit    state            command",
        "4242  Photos   31 %      3,050  latency  waits for 42 s   python train.py",
        "  17                                     no loader        python other.py",
        "   5                                     does not answer  python",
    ]
    assert max(len(line.text) for line in overview(jobs, 40)) == 39


def complaint(capfd, *arguments):
    assert main(["top", *arguments]) == 1
    output = capfd.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    return line


def test_a_process_that_does_not_exist_is_one_line(capfd):
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert f"there is no process {ended.pid} (one in a container" in complaint(capfd, str(ended.pid))


def test_a_process_that_is_not_python_is_one_line(capfd):
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        assert f"process {other.pid} (cat) is not a Python process" in complaint(capfd, str(other.pid))
        other.communicate()


@pytest.fixture
def python():
    """Start Python on a line that prints when it is ready, and ends with its input."""
    started = []

    def start(line, *arguments, **options):
        command = [sys.executable, "-c", f"{line}\nprint(flush=True)\ninput()", *arguments]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options))
        started[-1].stdout.readline()
        return started[-1].pid

    yield start
    for each in started:
        each.kill()
        each.communicate()


def test_a_python_process_without_a_loader_is_one_line(capfd, python):
    line = complaint(capfd, str(python("pass")))
    assert "runs no loader: it has begun no iteration, has closed its loaders, or has a headrace without" in line


def test_a_helper_process_of_a_loader_names_the_job(capfd, python):
    source = "from headrace._core.pool.title import set_owner, set_title; set_owner(4242); set_title('worker 1')"
    assert "belongs to a loader in process 4242: headrace top 4242" in complaint(capfd, str(python(source, "x" * 99)))


def test_a_job_with_another_protocol_is_one_line(capfd, python):
    job = python("open('/proc/self/comm', 'w').write('headrace-live-9')")
    assert f"the headrace of process {job} speaks protocol 9" in complaint(capfd, str(job))


def test_a_process_of_another_user_is_one_line(capfd, python):
    if os.geteuid():
        line, name = complaint(capfd, "1"), "root"
    else:
        line, name = complaint(capfd, str(python("import os; os.setuid(65534)"))), pwd.getpwuid(65534).pw_name
    assert f"belongs to user {name}: sudo -u {name} headrace top" in line


def test_a_job_that_is_stopped_is_one_line(capfd, python, monkeypatch, tmp_path):
    monkeypatch.setattr(top, "PATIENCE", 0.0)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    job = python("open('/proc/self/comm', 'w').write('headrace-live-1')")
    assert f"process {job} does not answer: a call holds the GIL" in complaint(capfd, str(job))
    os.kill(job, signal.SIGSTOP)
    os.waitid(os.P_PID, job, os.WSTOPPED)  # a signal takes effect later
    assert f"process {job} is stopped: kill -CONT {job}" in complaint(capfd, str(job))
    os.kill(job, signal.SIGCONT)
    assert list((tmp_path / "headrace").iterdir()) == []


def test_a_system_without_unix_sockets_is_one_line(capfd, monkeypatch):
    monkeypatch.setattr(top, "is_supported", lambda: False)
    assert "needs Unix sockets, which this system lacks" in complaint(capfd, "1")


def test_no_job_at_all_is_one_line(capfd, monkeypatch):
    monkeypatch.setattr(top, "jobs_of_user", list)
    assert complaint(capfd) == "headrace: no process of this user runs a loader"
