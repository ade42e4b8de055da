"""`headrace top` with real jobs: what it says of one that is stuck, and what is left when one of the two is killed."""

import asyncio
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import headrace as hr
from headrace.cli.processes import jobs_of, jobs_of_user
from headrace.cli.top import Feed, _receive, watch_jobs
from headrace.telemetry.live_socket import requests_for
from tests.faults.watching import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")


class Stuck(hr.AsyncDataset):
    """Sample 9 never arrives."""

    def __len__(self):
        return 64

    async def aget(self, index):
        if index == 9:
            await asyncio.Event().wait()
        return index


def wait_in_next(placement, num_workers):
    def program():
        with hr.DataLoader(
            Stuck(), batch_size=4, num_workers=num_workers, concurrency=4, placement=placement
        ) as loader:
            batches = iter(loader)
            for _ in range(2):
                next(batches)
            print("ready", flush=True)
            next(batches)  # waits for sample 9

    return program


def wait_in_step():
    with hr.DataLoader(Stuck(), batch_size=4, concurrency=4, placement="process") as loader:
        for _ in loader:
            print("ready", flush=True)
            wait_in_the_step()


def wait_in_the_step():
    threading.Event().wait()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "headrace"


@pytest.fixture
def start(forks, folder):
    """Start a job, and wait until it is stuck."""
    started = []

    def start_job(program):
        job = forks.start(program, XDG_RUNTIME_DIR=str(folder.parent))
        started.append(job)
        assert job.stdout.readline() == "ready\n"
        return job

    yield start_job
    for job in started:
        job.__exit__()


def snapshots(feed):
    """The loaders of a feed's snapshots, as they arrive."""
    while True:
        feed.snapshot = None
        while feed.snapshot is None:
            _receive([feed], 60)
        yield feed.snapshot["loaders"]


def files(folder):
    return sorted(each.name for each in folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize(("placement", "num_workers"), [("thread", 0), ("process", 0)])
def test_a_job_stuck_in_next_names_batch_stage_and_samples(start, folder, placement, num_workers):
    job = start(wait_in_next(placement, num_workers))
    assert jobs_of(job.pid) == [job.pid]
    feed = Feed(job.pid)
    try:
        (socket_file,) = folder.iterdir()
        assert (folder.stat().st_mode & 0o777, socket_file.stat().st_mode & 0o777) == (0o700, 0o600)
        loader = next(loaders[0] for loaders in snapshots(feed) if "batch_status" in loaders[0])
        assert files(folder) == [], "the name is removed as soon as the job has connected"
    finally:
        feed.close()
    assert (loader["state"], loader["batch"], loader["batches"]) == ("next", 2, 2)
    assert loader["batch_status"] == "batch 2 is in stage fetch, and waits for 1 sample: indices [9]"
    assert loader["line"].startswith(f"{__file__}:")
    assert loader["line"].endswith("program")
    assert (loader["dataset"], loader["placement"], loader["num_workers"]) == ("Stuck", placement, num_workers)
    assert loader["report"]["batches"] == 1


def test_a_job_stuck_in_its_step_names_the_line(start, folder):
    job = start(wait_in_step)
    feed = Feed(job.pid)
    try:
        loader = next(loaders[0] for loaders in snapshots(feed) if "line" in loaders[0])
    finally:
        feed.close()
    assert loader["state"] == "step"
    assert loader["line"].endswith("in wait_in_the_step")
    stream = io.StringIO()
    assert watch_jobs([job.pid], interval=1, once=True, as_json=False, stream=stream) == 0
    text = stream.getvalue()
    assert f"process {job.pid}, headrace " in text
    assert "loader 1: Stuck (process, batch_size=4, num_workers=0, concurrency=4), epoch 0" in text
    assert "in the loop's own code for " in text
    assert "wait_in_the_step: batch 1 is being sent" in text
    stream = io.StringIO()
    assert watch_jobs([job.pid], interval=1, once=True, as_json=True, stream=stream) == 0
    assert json.loads(stream.getvalue())["pid"] == job.pid
    assert job.pid in jobs_of_user()
    assert files(folder) == []


def test_a_killed_job_leaves_nothing_and_ends_top(start, folder, capfd):
    job = start(wait_in_next("thread", 0))
    killed = threading.Event()

    class Killing(io.StringIO):
        def write(self, text):
            if not killed.is_set():
                killed.set()
                os.kill(job.pid, signal.SIGKILL)
            return super().write(text)

    assert watch_jobs([job.pid], interval=3600, once=False, as_json=False, stream=Killing()) == 0
    assert f"headrace: process {job.pid} has ended" in capfd.readouterr().err
    assert files(folder) == []


def sockets_of(pid):
    links = (os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir() if each.exists())
    return sorted(link for link in links if link.startswith("socket:"))


def test_a_killed_top_leaves_neither_socket_nor_connection_in_the_job(start, folder):
    def program():
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a write to a closed socket would end the job
        wait_in_next("thread", 0)()

    job = start(program)
    before = sockets_of(job.pid)
    top = [sys.executable, "-m", "headrace", "top", "--json", str(job.pid)]
    with subprocess.Popen(top, stdout=subprocess.PIPE) as connected:
        assert connected.stdout.readline().startswith(b'{"protocol": 1, ')
        assert len(sockets_of(job.pid)) == len(before) + 1
        connected.kill()
    wait_until(lambda: sockets_of(job.pid) == before)

    os.kill(job.pid, signal.SIGSTOP)
    with subprocess.Popen(top) as waiting:
        wait_until(lambda: files(folder) != [])
        waiting.kill()
    assert len(files(folder)) == 1, "the job could not answer"
    os.kill(job.pid, signal.SIGCONT)
    wait_until(lambda: files(folder) == [])
    assert jobs_of(job.pid) == [job.pid]


def test_ctrl_c_ends_top_quietly_and_leaves_the_job(start, folder):
    job = start(wait_in_next("thread", 0))
    top = [sys.executable, "-m", "headrace", "top", str(job.pid)]
    with subprocess.Popen(top, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        while f"process {job.pid}" not in running.stdout.readline():
            pass
        running.send_signal(signal.SIGINT)
        rest, errors = running.communicate()
        assert (running.returncode, errors) == (0, ""), rest
    assert jobs_of(job.pid) == [job.pid]


def test_a_launcher_stands_for_its_children(start, folder):
    job = start(wait_in_next("thread", 0))
    assert jobs_of(os.getpid()) == [job.pid]


def test_requests_of_other_users_are_ignored(folder):
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "1-2.sock"))
        assert requests_for(1, str(folder)) == [str(folder / "1-2.sock")]
        folder.chmod(0o750)
        assert requests_for(1, str(folder)) == []
