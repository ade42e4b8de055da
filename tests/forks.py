"""Programs that tests run in other processes: functions, in forks of an interpreter that has imported torch.

The import of torch takes longer than most programs do. A fork is otherwise a program of its own: it
has a session, standard streams and a `__main__` of its own, no thread or process was started before
it, and it ends as an interpreter does, with exit hooks and finalization.

A program is any function without arguments. It travels by value (cloudpickle), so that it may be
defined inside its test and use the test's variables.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import cloudpickle

from tests.documents import ROOT
from tests.fork_server import MOST_DESCRIPTORS, run_file, run_source

# Seconds. A program that takes longer hangs, also on a machine that is busy with other work. Less
# than a test may take.
LIMIT = 200.0


class Fork:
    """The process of a program, with part of the interface of `subprocess.Popen`.

    Attributes:
        pid: its process id; it leads a session and a process group of its own.
    """

    def __init__(self, status: socket.socket) -> None:
        self._wire = status
        self.pid = int(status.recv(16))
        self._status: int | None = None

    def wait(self, timeout: float = LIMIT) -> int:
        """Wait for its exit status; the number of a signal that killed it, negative.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        if self._status is None:
            self._wire.settimeout(timeout)
            try:
                self._status = int(self._wire.recv(16))
            except TimeoutError:
                raise subprocess.TimeoutExpired("a fork", timeout) from None
            self._wire.close()
        return self._status

    def send_signal(self, number: int) -> None:
        if self._status is None:
            os.kill(self.pid, number)


class Program(Fork):
    """A fork whose output the test reads; a context manager, whose exit kills the fork.

    Attributes:
        stdout: its standard output, readable while it runs.
    """

    def __init__(self, status: socket.socket, stdout: IO[str], stderr: IO[str]) -> None:
        super().__init__(status)
        self.stdout = stdout
        self._stderr = stderr

    def communicate(self) -> tuple[str, str]:
        """The rest of its standard output, and all of its standard error; it is killed after `LIMIT` seconds."""
        clock = threading.Timer(LIMIT, self._kill)
        clock.start()
        try:
            printed = self.stdout.read()
            self.wait()
        finally:
            clock.cancel()
        self._stderr.seek(0)
        return printed, self._stderr.read()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._status is None:
            self._kill()
            self.wait()
        self.stdout.close()
        self._stderr.close()


class Forks:
    """The interpreter that has imported torch; a context manager.

    Args:
        options: the interpreter's.
        environment: variables that are added to its environment.
    """

    def __init__(self, *options: str, **environment: str) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    *options,
                    "-m",
                    "tests.fork_server",
                    str(theirs.fileno()),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **environment},
                cwd=ROOT,
                start_new_session=True,  # Ctrl-C is for its forks
            )

    def fork(
        self,
        program: Callable[..., object],
        *,
        stdout: int,
        stderr: int,
        descriptors: Sequence[int] = (),
        **environment: str,
    ) -> Fork:
        """Start a program whose output goes to descriptors; its arguments are its own copies of `descriptors`."""
        return Fork(self._request(program, [stdout, stderr, *descriptors], environment))

    def start(self, program: Callable[[], object], **environment: str) -> Program:
        """Start a program whose output can be read while it runs."""
        stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # closed by the program's owner
        read, write = os.pipe()
        try:
            return Program(
                self._request(program, [write, stderr.fileno()], environment),
                open(read),
                stderr,
            )
        finally:
            os.close(write)

    def run(
        self, program: Callable[[], object], **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end, as `subprocess.run` does; it is killed after `LIMIT` seconds."""
        with self.start(program, **environment) as running:
            stdout, stderr = running.communicate()
            return subprocess.CompletedProcess("a fork", running.wait(), stdout, stderr)

    def start_source(self, source: str, **environment: str) -> Program:
        """Start a program that is a text, from a page of the documentation for example."""
        return self.start(functools.partial(run_source, source), **environment)

    def run_source(self, source: str) -> subprocess.CompletedProcess[str]:
        """Run a program that is a text."""
        return self.run(functools.partial(run_source, source))

    def start_file(self, path: Path, **environment: str) -> Program:
        """Start the program in a file."""
        return self.start(functools.partial(run_file, path), **environment)

    def run_file(self, path: Path) -> subprocess.CompletedProcess[str]:
        """Run the program in a file, as ``python path`` does."""
        return self.run(functools.partial(run_file, path))

    def _request(
        self,
        program: Callable[..., object],
        descriptors: list[int],
        environment: dict[str, str],
    ) -> socket.socket:
        assert len(descriptors) + 2 <= MOST_DESCRIPTORS
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, tempfile.TemporaryFile() as file:
            file.write(pickle.dumps(environment) + cloudpickle.dumps(program))
            file.seek(0)
            socket.send_fds(
                self._control, [b"\n"], [theirs.fileno(), file.fileno(), *descriptors]
            )
        return ours

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._control.close()
        self._process.wait()
