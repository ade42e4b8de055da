"""The timeout of each test: a test that hangs ends with a traceback, wherever it hangs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

IN_PYTHON = """
import threading

def test_hangs():
    threading.Event().wait()
"""

IN_C = """
import ctypes, signal

def test_hangs():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    ctypes.CDLL(None).pause()
"""


def run_pytest(folder, source, **environment):
    (folder / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (folder / "test_hanging.py").write_text(source)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", folder, "-c", os.devnull, folder],
        env={**os.environ, "HEADRACE_TEST_TIMEOUT": "0.3", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_test_that_waits_in_python_fails_with_hang_error(tmp_path):
    ended = run_pytest(tmp_path, IN_PYTHON)
    assert ended.returncode == 1
    assert "HangError: the test has not ended within 0.3 s" in ended.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="pause() is a call of Unix")
def test_test_that_hangs_in_c_code_ends_its_process_with_a_traceback(tmp_path):
    ended = run_pytest(tmp_path, IN_C, HEADRACE_TEST_KILL_DELAY="0.3")
    assert ended.returncode == 1
    assert "in test_hangs" in ended.stderr
