"""The thread that answers `headrace top`: when it runs, and what it does where the other end is slow or gone."""

import json
import os
import socket
import threading

import pytest

import headrace as hr
from headrace._core.eventloop import watchdog
from headrace.telemetry import live
from headrace.telemetry.live_socket import connect, listen, remove_stale, requests_for, runtime_folder


class Numbers(hr.AsyncDataset):
    def __len__(self):
        return 32

    async def aget(self, index):
        return index


class Source:
    def snapshot(self):
        return {"loader": 1}


def live_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("headrace-live")]


@pytest.fixture
def server():
    server = live.LiveServer()
    yield server
    server.forget(None)


@pytest.mark.parametrize("dataset", [Numbers(), list(range(32))], ids=["async", "torch"])
def test_the_thread_runs_from_the_first_iteration_to_the_close_of_the_last_loader(dataset):
    loaders = [hr.DataLoader(dataset, batch_size=8, placement="thread") for _ in range(2)]
    assert live_threads() == []
    for loader in loaders:
        next(iter(loader))
        assert live_threads() == ["headrace-live-1"]
    loaders.pop().close()
    assert live_threads() == ["headrace-live-1"]
    del loaders[0], loader
    assert live_threads() == []


def test_a_loader_that_is_closed_is_shown_again_when_it_is_iterated_again():
    loader = hr.DataLoader(Numbers(), batch_size=8, placement="thread")
    for _ in range(2):
        next(iter(loader))
        assert live_threads() == ["headrace-live-1"]
        loader.close()
        assert live_threads() == []


def start_with_collection(monkeypatch, collect):
    """Let the garbage collector run in each new thread before its `start` returns."""
    real = threading.Thread

    class Collecting(real):
        def start(self):
            collector = real(target=collect)
            collector.start()
            collector.join()
            super().start()

    monkeypatch.setattr(threading, "Thread", Collecting)


def test_a_loader_may_be_dropped_while_the_thread_starts(server, monkeypatch):
    start_with_collection(monkeypatch, lambda: server.forget(dropped))
    dropped, shown = Source(), Source()
    server.show(dropped)
    assert server._sources == []
    server.show(shown)
    assert server._sources == [shown]
    assert live_threads() == ["headrace-live-1"]


def test_a_watch_may_be_dropped_while_the_watchdog_starts(monkeypatch):
    dropped = watchdog.LoopWatch("Numbers")
    watching = watchdog.Watchdog()
    start_with_collection(monkeypatch, lambda: watching.remove(dropped))
    watching.add(dropped)
    assert watching._watches == []


def test_a_job_that_may_start_no_thread_runs_on(server, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        server.show(Source())
    server.show(Source())
    assert live_threads() == ["headrace-live-1"]


def test_a_fork_has_no_thread_and_shows_its_own_loaders():
    loader = hr.DataLoader(Numbers(), batch_size=8, placement="thread")
    next(iter(loader))
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        live.show(Source())
        found = live_threads(), len(live._server._sources)
        os.write(write, json.dumps(found).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert json.loads(os.read(read, 4096)) == [["headrace-live-1"], 1]
    os.close(read)
    os.close(write)
    loader.close()


def test_a_reader_that_is_stopped_does_not_block_the_thread():
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    client = live._Client(ours)
    line = json.dumps("x" * (1 << 20)).encode() + b"\n"
    for _ in range(3):
        assert client.offer(line)  # the buffer is full: the others are dropped, and no line is cut
    received = b""
    while len(received) < len(line):
        received += theirs.recv(1 << 20)
        assert client.offer(line)
    assert received[: len(line)] == line
    theirs.close()
    assert not client.offer(line)
    assert ours.fileno() == -1


def test_a_loader_that_cannot_be_shown_does_not_hide_the_others(server):
    class Failing:
        def snapshot(self):
            raise ValueError("no")

    class Gone:
        def snapshot(self):
            return None

    server._sources = [Failing(), Gone(), Source()]
    assert server._snapshot()["loaders"] == [{"error": "ValueError: no"}, {"loader": 1}]
    server._sources = []


def test_a_socket_that_refuses_is_removed(tmp_path):
    folder = tmp_path / "headrace"
    listening, path = listen(str(folder), 7)
    assert requests_for(7, str(folder)) == [path]
    assert requests_for(71, str(folder)) == []
    connection = connect(path)
    connection.close()
    remove_stale(str(folder))
    assert os.path.exists(path), "it listens"
    listening.close()
    assert connect(path) is None
    assert os.listdir(folder) == []
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "8-1.sock"))
    (folder / "8-2.sock").touch()
    remove_stale(str(folder))
    assert os.listdir(folder) == ["8-2.sock"], "what is not a socket is not ours"


def test_a_folder_that_others_may_enter_is_refused_and_ignored(tmp_path):
    folder = tmp_path / "headrace"
    listening, _ = listen(str(folder), 7)
    folder.chmod(0o750)
    with pytest.raises(PermissionError, match="is not a folder that only this user may enter"):
        listen(str(folder), 7)
    assert requests_for(7, str(folder)) == []
    listening.close()
    link = tmp_path / "link"
    folder.chmod(0o700)
    link.symlink_to(folder)
    with pytest.raises(PermissionError):
        listen(str(link), 7)
    assert requests_for(7, str(link)) == []


def test_folders_with_long_names_are_no_problem(tmp_path):
    folder = tmp_path / ("long" * 30)
    listening, path = listen(str(folder), 7)
    connection = connect(path)
    assert connection is not None
    connection.close()
    listening.close()


def test_the_folder_is_in_the_users_runtime_folder_else_in_the_temporary_one(tmp_path):
    mine = f"headrace-{os.geteuid()}"
    assert runtime_folder({"XDG_RUNTIME_DIR": str(tmp_path)}) == f"{tmp_path}/headrace"
    assert runtime_folder({"XDG_RUNTIME_DIR": f"{tmp_path}/absent"}) == f"/tmp/{mine}"
    assert runtime_folder({"XDG_RUNTIME_DIR": "relative", "TMPDIR": str(tmp_path)}) == f"{tmp_path}/{mine}"
    assert runtime_folder({"TMPDIR": f"{tmp_path}/absent"}) == f"/tmp/{mine}"


@pytest.mark.parametrize("placement", ["thread", "process"])
def test_a_request_for_the_status_does_not_wake_the_consumer(placement):
    with hr.DataLoader(Numbers(), batch_size=8, placement=placement) as loader:
        batches = iter(loader)
        next(batches)
        assert "batch" in batches._epoch.describe(2, 30.0)
        assert batches._epoch._handoff.take_status() is None
        assert batches._epoch.activity().doing == "step"
