"""Fixtures that run programs in child processes, watched from inside and from outside.

From inside: descriptors, threads, child processes and named shared memory are counted before and
after (`watching`). From outside: the exit status, a clock, and the phrases of leaks on standard
error.

`script` runs a program in a child of its own. `case` runs it in a child that serves all tests, with
its zygote and whatever else is made once: that takes longer than most programs do."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator

import cloudpickle
import pytest

from tests.faults import child
from tests.faults.watching import session_of
from tests.forks import LIMIT, Fork, Forks

OPTIONS = ("-X", "dev", "-W", "error::ResourceWarning")
IMPORTS = "tests.faults.programs.caches tests.faults.programs.epochs headrace.datasets.tar headrace.datasets.lines"

LEAK_PHRASES = (
    "never retrieved",
    "Task was destroyed",
    "Event loop is closed",
    "never awaited",
    "ResourceWarning",
    "Exception ignored",
    "Fatal Python error",
    "Traceback",
)


Script = Callable[..., subprocess.CompletedProcess[str]]
Case = Callable[..., str]


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """The parent of all children; each leads a session, by which its descendants are found."""
    with Forks(*OPTIONS, FORK_SERVER_IMPORTS=IMPORTS) as parent:
        yield parent


@pytest.fixture
def script(forks: Forks) -> Script:
    """Run a program in a child of its own.

    It must exit with `status` and, unless `quiet` is false, print none of the phrases of leaks to
    standard error."""

    def run(
        program: Callable[[], object],
        *,
        status: int = 0,
        quiet: bool = True,
        engine_loop: str = "uvloop",
    ) -> subprocess.CompletedProcess[str]:
        run_alone = functools.partial(child.run_alone, program)
        done = forks.run(run_alone, HEADRACE_EVENT_LOOP=engine_loop)
        assert done.returncode == status, (
            f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        if quiet:
            _assert_no_leak_phrase(done.stderr)
        return done

    return run


def _assert_no_leak_phrase(stderr: str) -> None:
    found = [phrase for phrase in LEAK_PHRASES if phrase in stderr]
    assert not found, f"standard error contains {found}:\n{stderr[-20_000:]}"


class Resident:
    """The child that runs programs; replaced after one has killed it or hangs in it."""

    def __init__(self, forks: Forks) -> None:
        self._forks = forks
        self._process: Fork | None = None
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`

    def run(self, program: Callable[[], object], within: float) -> str | None:
        """Run one program; returns the traceback of its failure."""
        if self._process is None:
            self._start()
        try:
            pickle.dump((cloudpickle.dumps(program), within), self._stream)
            self._stream.flush()
            failure: str | None = pickle.load(self._stream)
        except EOFError:
            return f"the child died with status {self._end(clock=2)}\n{self.stderr()}"
        except BaseException as error:  # the time-out of the socket, or of the test
            assert self._process is not None
            self._process.send_signal(signal.SIGUSR1)
            self._end(clock=1)
            error.add_note(self.stderr())
            raise
        return failure

    def stderr(self) -> str:
        """What was printed to standard error since the last call."""
        return self._stderr.read().decode(errors="replace")

    def close(self) -> None:
        """Let the child exit; all its descendants must end with it."""
        status = self._end(clock=LIMIT) if self._process is not None else 0
        stderr = self.stderr()
        self._stderr.close()
        assert status == 0, f"exit status {status}\n{stderr}"

    def _start(self) -> None:
        self._wire, theirs = socket.socketpair()
        self._wire.settimeout(LIMIT)
        self._stream = self._wire.makefile("rwb")
        with theirs, open(f"/proc/self/fd/{self._stderr.fileno()}", "ab") as stderr:
            self._process = self._forks.fork(
                child.serve,
                stdout=1,
                stderr=stderr.fileno(),
                descriptors=[theirs.fileno()],
            )

    def _end(self, clock: float) -> int:
        assert self._process is not None
        process, self._process = self._process, None
        with contextlib.suppress(OSError):  # a request that the child did not read
            self._stream.close()
        self._wire.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(clock)
        left = [pid for pid in session_of(process.pid) if pid != process.pid]
        for pid in session_of(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        status = process.wait()
        assert status != 0 or not left, f"processes {left} have outlived the child"
        return status


@pytest.fixture(scope="session")
def resident(forks: Forks) -> Iterator[Resident]:
    """The child that runs the programs of all modules."""
    child = Resident(forks)
    yield child
    child.close()


@pytest.fixture
def case(resident: Resident) -> Case:
    """Run a program in the one child: it must not fail, leave anything behind, or print the phrases of leaks.

    `within`: seconds until nothing may be left, for programs that kill processes. Returns standard
    error."""

    def run(program: Callable[[], object], *, within: float = 0.0) -> str:
        failure = resident.run(program, within)
        stderr = resident.stderr()
        assert failure is None, f"{failure}\n{stderr[-20_000:]}"
        _assert_no_leak_phrase(stderr)
        return stderr

    return run


@pytest.fixture
def folder(tmp_path):
    """The folder of a cache, which is not there yet."""
    return tmp_path / "cache"


@pytest.fixture
def server(started):
    """The module's server, whose objects no test changes; its requests are those of the test."""
    started.misbehave()
    return started
