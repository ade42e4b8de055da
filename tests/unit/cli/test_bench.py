"""`headrace bench`: what it finds, prints and leaves behind, and one line for whatever is wrong."""

import contextlib
import io
import itertools
import json
import os
import pty
import random
import signal
import subprocess
import sys

import pytest

import headrace as hr
from headrace.cli import bench
from headrace.cli.bench import Trial, choose, sweep
from headrace.cli.main import main
from object_server import Fault, ObjectServer

OBJECTS = {f"train/{number:03}.bin": bytes(20_000) for number in range(300)}
DENIED = "<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


def arguments_for(server, prefix="train"):
    options = {
        "endpoint": server.endpoint,
        "skip_signature": True,
        "virtual_hosted_style_request": False,
        "client_options": {"allow_http": True},
    }
    url = f"{server.url}/{prefix}".rstrip("/")
    return [url, "--store-options", json.dumps(options)]


@pytest.fixture(scope="module")
def server():
    with ObjectServer(OBJECTS, latency=0.01) as server:
        yield server


@pytest.fixture(autouse=True)
def well_behaved(server):
    yield
    server.misbehave()


def run(capsys, *arguments):
    status = main(["bench", *arguments])
    said = capsys.readouterr()
    return status, said.out, said.err


@pytest.fixture(scope="module")
def measured(server, tmp_path_factory):
    """One run on a store of limited bandwidth: JSON and plot."""
    server.misbehave(Fault("bandwidth", rate=8e6))
    plot, out = tmp_path_factory.mktemp("plot") / "store.png", io.StringIO()
    with contextlib.redirect_stdout(out), pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "TRIALS", 2)
        assert main(["bench", *arguments_for(server), "--seconds", "5", "--json", "--plot", str(plot)]) == 0
    return json.loads(out.getvalue()), plot


def test_json_has_the_best_setting_with_its_evidence_and_no_value_of_an_option(measured, server):
    found, plot = measured
    assert server.requests()["PUT"] == server.requests()["DELETE"] == 0
    assert server.endpoint not in json.dumps(found)
    assert (found["objects"], found["mean_bytes"], found["complete"]) == (300, 20_000, True)
    best = found["best"]
    assert best["lowest_rate"] <= best["rate"] <= best["highest_rate"]
    assert best["bandwidth"] == pytest.approx(20_000 * best["rate"])
    assert {each["concurrency"] for each in found["settings"]} == {each["concurrency"] for each in found["trials"]}
    assert f"concurrency={best['concurrency']}" in found["constructor"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_table_and_constructor_of_a_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "TRIALS", 1)
    for number in range(20):
        (tmp_path / f"{number}.bin").write_bytes(bytes(1000))
    status, out, _ = run(capsys, str(tmp_path), "--seconds", "5", "--max-concurrency", "8")
    table, _, constructor = out.rpartition("\n\n")
    assert status == 0
    assert "in flight  objects/s" in table
    assert "  best\n" in table
    names = {"hr": hr}
    exec(constructor, names)
    assert len(names["loader"].dataset) == 20


def swept(rate, most=1024, throttled=lambda setting: 0.0):
    """The settings that a sweep tries on a store of such rates, where a trial takes as long as it measures."""
    left, trials = [45.0], []

    def measure(setting, seconds):
        left[0] -= seconds
        return Trial(setting, rate(setting), throttled=throttled(setting))

    trials += sweep(measure, most, lambda: left[0])
    return choose(trials), [trial.concurrency for trial in trials]


@pytest.mark.parametrize("knee", [3, 100, 700])
def test_the_smallest_of_the_best_settings_is_found_up_to_the_highest(knee):
    best, _ = swept(lambda setting: 50.0 * min(setting, knee))
    assert knee * 0.95 <= best <= knee * 1.2
    best, tried = swept(lambda setting: 50.0 * setting, most=100)
    assert (best >= 97, max(tried)) == (True, 100)


def test_settings_that_are_tried_differ_by_more_than_rounding():
    for seed in range(20):
        random.seed(seed)
        _, tried = swept(lambda setting: min(setting, 700) * random.uniform(0.5, 1.0))
        pairs = itertools.pairwise(sorted({setting for setting in tried if setting >= 16}))
        assert all(more >= 1.15 * less for less, more in pairs)


def test_a_slow_store_is_asked_for_more_while_the_rate_grows(capsys, monkeypatch):
    monkeypatch.setattr(bench, "TRIALS", 1)
    with ObjectServer(OBJECTS, latency=0.2) as slow:
        status, out, _ = run(capsys, *arguments_for(slow), "--seconds", "20", "--max-concurrency", "16", "--json")
    found = json.loads(out)
    assert (status, found["complete"], found["best"]["concurrency"] > 8) == (0, True, True)
    assert "--max-concurrency" in found["limit"]


def test_single_trial_counts_beside_settings_with_several():
    trials = [Trial(10, 100.0), Trial(10, 100.0), Trial(20, 200.0), Trial(11, 108.0)]
    assert [choose(trials), choose(trials[:2] + trials[3:])] == [20, 10]


def test_a_throttled_store_is_not_asked_for_more():
    best, tried = swept(
        lambda setting: 2000.0 if setting > 40 else 50.0 * setting, throttled=lambda setting: (setting > 40) * 0.5
    )
    assert 37 <= best <= 45
    assert max(tried) <= 128


@pytest.mark.parametrize(("method", "words"), [("LIST", "AccessDenied"), ("GET", "AccessDenied"), (None, "listed")])
def test_denied_access_and_an_empty_prefix_are_one_line_and_status_1(method, words, server, capsys):
    if method:
        server.misbehave(Fault("status", method=method, status=403, body=DENIED))
    status, out, err = run(capsys, *arguments_for(server, "train" if method else "few"))
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert words in err


def test_plot_that_cannot_be_written_is_reported_before_the_measurement(server, capsys, monkeypatch):
    for file in ("plot.txt", "/no/such/folder/plot.png"):
        status, _, err = run(capsys, *arguments_for(server), "--plot", file)
        assert (status, err.count("\n")) == (2, 1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    status, _, err = run(capsys, *arguments_for(server), "--plot", "plot.png")
    assert (status, err.count("\n")) == (2, 1)
    assert "headrace[plot]" in err


def test_ctrl_c_prints_the_results_so_far(server):
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
    assert "hr.DataLoader(dataset" in out
    assert said.endswith("headrace: interrupted\r\n")
    assert "Traceback" not in said


def _read(terminal):
    try:
        return os.read(terminal, 1000).decode()
    except OSError:  # closed by the other side
        return ""
