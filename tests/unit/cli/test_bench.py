"""`headrace bench`: what it prints and leaves behind, and one line for whatever is wrong."""

import contextlib
import gc
import io
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
from array import array
from pathlib import Path

import pytest

from headrace.cli.bench.reads import _ranges
from headrace.cli.bench.results import hide_secrets
from headrace.cli.main import main
from headrace.testing import Fault, ObjectServer
from tests.faults.watching import make_signal_pair, wait_until

OBJECTS = {f"train/{number:03}.bin": bytes(20_000) for number in range(300)}
DENIED = "<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


def arguments_for(server, prefix="train"):
    options = {
        "endpoint": server.endpoint,
        "skip_signature": "true",
        "virtual_hosted_style_request": "false",
        "client_options.allow_http": "true",
    }
    url = f"{server.url}/{prefix}".rstrip("/")
    return [url, *(word for name, value in options.items() for word in ("--store-option", f"{name}={value}"))]


@pytest.fixture(scope="module")
def server():
    with ObjectServer(OBJECTS, latency=0.01) as server:
        yield server


@pytest.fixture(autouse=True)
def well_behaved(server):
    yield
    server.misbehave()


def descriptors():
    """What the descriptors of this process refer to, without matplotlib's fonts, which it keeps open."""
    gc.collect()
    found = set()
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            found.add(os.readlink(f"/proc/self/fd/{each}"))
    return {each for each in found if not each.endswith(".ttf")}


def held():
    """Threads and child processes of this process, and files of the working directory."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return sorted(thread.name for thread in threading.enumerate()), children, sorted(os.listdir())


def run(capsys, *arguments):
    status = main(["bench", *arguments])
    said = capsys.readouterr()
    return status, said.out, said.err


@pytest.fixture(scope="module")
def measured(server, tmp_path_factory):
    """One run on a store of limited bandwidth: status, JSON, plot, and what is held before and after.

    That all descriptors are closed, and bodies of abandoned requests read, is waited for. The working directory is one
    of its own: other tests that run meanwhile write to the clone's.
    """
    server.misbehave(Fault("bandwidth", rate=8e6))
    plot = tmp_path_factory.mktemp("plot") / "store.png"
    out = io.StringIO()
    with contextlib.chdir(tmp_path_factory.mktemp("working")):
        main(["bench", *arguments_for(server, "nothing")])  # starts the background loop, which the process keeps
        make_signal_pair()
        before, opened = held(), descriptors()
        with contextlib.redirect_stdout(out):
            status = main(["bench", *arguments_for(server), "--seconds", "5", "--json", "--plot", str(plot)])
        wait_until(lambda: descriptors() <= opened)  # the client closes its connections a little later
        for thread in threading.enumerate():
            if thread.name == "headrace-bodies":
                thread.join()
        after = held()
    return status, json.loads(out.getvalue()), plot, before, after


def test_json_has_the_best_setting_with_its_evidence(measured):
    status, found, *_ = measured
    assert status == 0
    assert found["listing"]["objects"] == 300
    best = found["best"]
    assert best["lowest_rate"] <= best["rate"] <= best["highest_rate"]
    assert best["bytes_per_second"] == pytest.approx(20_000 * best["rate"])
    assert {each["concurrency"] for each in found["settings"]} == {each["concurrency"] for each in found["trials"]}
    assert f"concurrency={best['concurrency']}" in found["constructor"]
    assert [each["concurrency"] for each in found["latency"]] == [4, best["concurrency"]]
    assert all(each["first_seconds"]["p50"] <= each["whole_seconds"]["p50"] for each in found["latency"])


def test_settings_far_above_the_bandwidth_are_not_chosen(measured):
    _, found, *_ = measured
    # 400 objects/s at 10 ms are 4 in flight.
    assert found["best"]["concurrency"] <= 64


def test_plot_is_an_image(measured):
    assert measured[2].read_bytes().startswith(b"\x89PNG")


def test_nothing_is_left_behind(measured):
    *_, before, after = measured
    assert before == after


def test_nothing_is_written_to_the_store(measured, server):
    assert server.requests()["PUT"] == server.requests()["DELETE"] == 0


def test_constructor_runs(measured):
    import headrace as hr

    names = {"hr": hr}
    exec(measured[1]["constructor"], names)
    with names["loader"] as loader:
        assert len(loader.dataset) == 300


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nonsense://bucket", "unknown scheme"),
        ("s3://", "no bucket"),
        ("http:///data", "no host"),
        ("s3:/bucket", "two slashes"),
        ("memory://", "memory of one process"),
        ("/no/such/folder", "no such directory"),
        ("", "empty"),
    ],
)
def test_wrong_url_is_one_line_and_status_2(url, words, capsys):
    status, out, err = run(capsys, url)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert words in err


def test_refused_connection_is_one_line_and_status_1(capsys):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--store-option", "skip_signature=true", "--store-option", "client_options.allow_http=true"]
    status, out, err = run(capsys, "s3://bucket/a", "--store-option", f"endpoint=http://127.0.0.1:{port}", *options)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "Connection refused" in err


def test_host_that_does_not_resolve_is_one_line_and_status_1(capsys):
    status, out, err = run(capsys, "https://no-such-host.invalid/a")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "does not resolve" in err


@pytest.mark.parametrize("method", ["LIST", "GET"])
def test_denied_access_is_one_line_and_status_1(method, server, capsys):
    server.misbehave(Fault("status", method=method, status=403, body=DENIED))
    status, out, err = run(capsys, *arguments_for(server))
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "AccessDenied" in err


@pytest.mark.parametrize(
    ("objects", "words"),
    [
        ({}, "the listing is empty"),
        ({"train/a": b"", "train/b": b""}, "all 2 objects listed are empty"),
        ({"train/a": b""}, "the only object listed is empty"),
        ({"train/a": b"abc"}, "only one object"),
    ],
)
def test_prefix_with_nothing_to_measure_is_one_line_and_status_1(objects, words, server, capsys):
    for key, data in objects.items():
        server.put(key.replace("train", "few"), data)
    try:
        status, out, err = run(capsys, *arguments_for(server, "few"))
    finally:
        for key in objects:
            server.delete(key.replace("train", "few"))
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert words in err


def test_server_that_cannot_list_is_one_line_and_status_1(server, capsys):
    status, out, err = run(capsys, f"{server.http_url}/train")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "cannot list" in err


def test_plot_that_cannot_be_written_is_reported_before_the_measurement(server, capsys):
    for file in ("plot.txt", "/no/such/folder/plot.png"):
        status, _, err = run(capsys, *arguments_for(server), "--plot", file)
        assert (status, err.count("\n")) == (2, 1)


def test_missing_matplotlib_is_reported_before_the_measurement(server, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    status, _, err = run(capsys, *arguments_for(server), "--plot", "plot.png")
    assert (status, err.count("\n")) == (2, 1)
    assert "headrace[plot]" in err


@pytest.mark.parametrize("argument", ["--seconds=1", "--objects=0", "--gpus=0", "--samples-per-gpu=0"])
def test_invalid_arguments_end_with_status_2(argument, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "s3://bucket", argument])
    assert ended.value.code == 2


def test_large_objects_are_read_in_ranges():
    ranges = [*_ranges(array("q", [1000, 20 << 20, 64 << 20]))]
    assert ranges[0] == (0, 0, 1000)
    assert {(position, stop - start) for position, start, stop in ranges[1:]} == {(1, 8 << 20), (2, 8 << 20)}
    assert len(ranges) == 1 + 2 + 8


def test_secrets_are_not_in_the_constructor():
    options = {"region": "eu", "secret_access_key": "hush", "client_options": {"default_headers": {"cookie": "hush"}}}
    assert "hush" not in str(hide_secrets(options))
    assert hide_secrets(options)["region"] == "eu"


def test_ctrl_c_prints_the_results_so_far_and_leaves_no_process(server):
    terminal, inner = pty.openpty()
    command = [sys.executable, "-m", "headrace", "bench", *arguments_for(server)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=inner, text=True) as process:
        os.close(inner)
        said = ""
        while "objects/s" not in said:  # the progress shows a trial's result
            said += os.read(terminal, 1000).decode()
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
        while chunk := _read(terminal):
            said += chunk
        os.close(terminal)
    assert process.returncode == 130
    assert "Interrupted: these are the results so far." in out
    assert "hr.DataLoader(dataset" in out
    assert said.endswith("headrace: interrupted\r\n")
    assert "Traceback" not in said


def _read(terminal):
    try:
        return os.read(terminal, 1000).decode()
    except OSError:  # closed by the other side
        return ""
