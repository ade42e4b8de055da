"""The demo as its user runs it."""

import subprocess
import sys

from demo.job import verdict
from tests.documents import ROOT
from tests.faults.watching import session_of


def test_the_demo_trains_compares_and_leaves_no_process():
    command = [
        sys.executable,
        "examples/demo",
        "--latency",
        "1",
        "--epochs",
        "3",
        "--copies",
        "2",
    ]
    demo = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    # Returns when all processes have closed the pipes.
    output, errors = demo.communicate()
    assert demo.returncode == 0, errors
    assert errors == ""
    for promise in (
        "360 held out",
        "3/3",
        "torch, 2 workers",
        "torch, 16 workers",
        "headrace, 2 workers",
        "2,874 objects",
        "Done in",
    ):
        assert promise in output
    assert session_of(demo.pid) == []


def test_a_model_that_learned_too_little_is_not_called_done():
    assert "Only 94.9%" in verdict(0.949, epochs=1, seconds=9.0)
    assert verdict(0.95, epochs=6, seconds=29.4).startswith("Done in 29 s")
