"""The process that forks workers is started with the loader: what programs may do before the first iteration."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import select
import signal
import subprocess
import sys

import pytest

import headrace as hr
from headrace._pool import launch, supervisor
from tests.faults.watching import Numbers

pytestmark = pytest.mark.skipif("sys.platform != 'linux'", reason="reads /proc")


def loader(**options):
    return hr.DataLoader(Numbers(4), 2, **{"num_workers": 1, **options})


def helper():
    """The pid of the helper process, if there is one."""
    return launch._zygote and launch._zygote.process.pid


@pytest.fixture
def run(forks):
    return functools.partial(forks.run, OWN_ZYGOTE="1")


def printed(done):
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_the_first_iteration_uses_the_process_that_was_started_with_the_loader(run):
    """Engines and workers import nothing of headrace, and get variables that were set after the loader was made."""
    listed = f"import {launch.IMPORTED}; [getattr(headrace, name) for name in headrace.__all__]"
    listed += "; import sys; print(*sys.modules)"
    command = [sys.executable, "-c", listed]
    in_helper = set(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    )

    def headraces():
        return {name for name in list(sys.modules) if name.startswith("headrace")}

    class Imported(Numbers):
        async def aget(self, index):
            return headraces(), os.environ["A_VARIABLE"]

    def program():
        options = {"num_workers": 1, "collate_fn": list}
        made = hr.DataLoader(
            Imported(4),
            4,
            transform=lambda engine: (*engine, headraces(), os.environ["A_VARIABLE"]),
            **options,
        )
        started = helper()
        assert started is not None
        os.environ["A_VARIABLE"] = "7"
        engine, engines_variable, worker, workers_variable = next(iter(made))[0]
        assert (engines_variable, workers_variable) == ("7", "7")
        print(engine | worker <= in_helper, helper() == started)
        os.environ["A_VARIABLE"] = "1"  # from the first use on the process is kept
        assert [batch.tolist() for batch in loader()] == [[0, 1], [2, 3]]
        print(helper() == started)

    assert printed(run(program)) == ["True"] * 3


def test_a_daemon_that_was_forked_after_the_loader_was_made_has_a_process_of_its_own(run):
    def program():
        made, (read, write) = loader(), os.pipe()
        if os.fork():
            os.close(write)
            started = helper()
            with open(read) as result:  # until the daemon has ended
                print(result.read(), started)
            sys.stdout.flush()
            # As who starts a daemon does: no exit hook ends the helper process.
            os._exit(0)
        os.setsid()
        assert helper() is None
        os.write(
            write, str([batch.tolist() for batch in made] == [[0, 1], [2, 3]]).encode()
        )

    right, pid = printed(run(program))
    assert right == "True"
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        descriptor = os.pidfd_open(int(pid))
        try:
            assert select.select([descriptor], [], [], 60)[0]
        finally:
            os.close(descriptor)


@pytest.mark.parametrize("how", ["blocks", "ignores"])
def test_signals_that_a_launcher_blocks_or_ignores_do_not_delay_the_end_of_workers(
    how, run
):
    def program():
        supervisor.WORK_DEADLINE = 1000.0  # the loader gives up before, with a warning
        if how == "blocks":
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        else:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        for options in (
            {"placement": "thread"},
            {"placement": "process"},
            {"multiprocessing_context": "fork"},
        ):
            with loader(**options, transform=float) as numbers:
                print(len(list(numbers)))

    assert printed(run(program)) == ["2"] * 3


@pytest.mark.parametrize(
    ("attributes", "error"),
    [
        ({"executable": None}, None),
        (
            {"executable": "/bin/false", "frozen": True},
            r"frozen.*freeze_support.*multiprocessing_context='spawn'",
        ),
    ],
)
def test_program_without_a_path_of_an_interpreter_is_an_error_or_uses_that_of_multiprocessing(
    attributes, error, run
):
    def program():
        executable = sys.executable
        vars(sys).update(attributes)
        multiprocessing.set_executable(sys.executable or "")
        with loader() as numbers, pytest.raises(OSError, match=error):
            next(iter(numbers))
        multiprocessing.set_executable(executable)
        with loader() as numbers:
            print(len(list(numbers)))

    assert printed(run(program)) == ["2"]
