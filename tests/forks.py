"""Programs for tests that start many: forks of an interpreter that has imported torch, which takes longer than they do.

A fork is a program of its own to its very end: it has a session, standard streams and a `__main__` of its own, nothing
was started before it, and there is no way out of it but the interpreter's, with its exit hooks and its finalization.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO

MOST = 1 << 17  # bytes of a program, which is one datagram; a socket's buffer takes 200 KiB
DESCRIPTORS = 8

# Imports only: of what a process makes once, a thread or a descriptor say, the forks must each make their own.
# Between it and each fork stands a process that waits for the fork's end, so that there can be several at a time.
PARENT = f"""
import gc, json, os, signal, socket, sys
import obstore.store, torch, uvloop
import headrace
gc.freeze()  # the collector of a fork need not go through torch, which takes 0.3 s at its end alone
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how those end that wait
control = socket.socket(fileno=int(sys.argv.pop()))
while True:
    request, descriptors, _, _ = socket.recv_fds(control, {MOST}, {DESCRIPTORS})
    if not request:
        control.close()
        sys.exit()
    if os.fork() == 0:
        control.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        status, *descriptors = descriptors
        if (pid := os.fork()) == 0:
            break
        for descriptor in descriptors:
            os.close(descriptor)
        os.write(status, b"%d" % pid)
        os.write(status, b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os._exit(0)
    for descriptor in descriptors:
        os.close(descriptor)
os.close(status)
os.setsid()
for number in (1, 2):
    os.dup2(descriptors[number - 1], number)
    os.close(descriptors[number - 1])
descriptors = descriptors[2:]
request = json.loads(request)
os.environ.update(request["environment"])
program = compile(request["program"], "<string>", "exec")
del control, number, pid, request, status
exec(program)
"""

FILE = """
import sys
__file__ = {path!r}
sys.argv[:] = [__file__]
sys.path[0] = {folder!r}
with open(__file__) as file:
    program = compile(file.read(), __file__, "exec")
del file
exec(program)
"""


class Fork:
    """The process of a program, as `subprocess.Popen` has it.

    Attributes:
        pid: the process, which leads a session and a process group of its own.
    """

    def __init__(self, status: socket.socket) -> None:
        self._wire = status
        self.pid = int(status.recv(16))
        self._status: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, or the number of the signal that killed it, negative.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        if self._status is None:
            self._wire.settimeout(timeout)
            try:
                self._status = int(self._wire.recv(16))
            except TimeoutError:
                raise subprocess.TimeoutExpired("a fork", timeout or 0.0) from None
            self._wire.close()
        return self._status

    def send_signal(self, number: int) -> None:
        if self._status is None:
            os.kill(self.pid, number)


class Program(Fork):
    """A fork whose output goes to whom started it; a context manager, which the fork does not outlive.

    Attributes:
        stdout: what it prints, as it comes.
    """

    def __init__(self, status: socket.socket, stdout: IO[str], stderr: IO[str]) -> None:
        super().__init__(status)
        self.stdout = stdout
        self._stderr = stderr

    def communicate(self, timeout: float) -> tuple[str, str]:
        """All that it still prints, and all that it says on standard error; it is killed after `timeout` seconds."""
        clock = threading.Timer(timeout, self._kill)
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
        environment: what is added to its environment.
    """

    def __init__(self, *options: str, **environment: str) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *options, "-c", PARENT, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **environment},
                start_new_session=True,  # Ctrl-C is for what it forks
            )

    def fork(
        self, program: str, *, stdout: int, stderr: int, descriptors: Sequence[int] = (), **environment: str
    ) -> Fork:
        """Start a program whose output goes to descriptors; it finds its own copies of `descriptors` by that name."""
        return Fork(self._request(program, [stdout, stderr, *descriptors], environment))

    def start(self, program: str, **environment: str) -> Program:
        """Start a program that can be listened to."""
        stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # closed by the program's owner
        read, write = os.pipe()
        try:
            return Program(self._request(program, [write, stderr.fileno()], environment), open(read), stderr)
        finally:
            os.close(write)

    def run(self, program: str, *, timeout: float, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a program to its end, as `subprocess.run` does; it is killed after `timeout` seconds."""
        with self.start(program, **environment) as running:
            stdout, stderr = running.communicate(timeout)
            return subprocess.CompletedProcess("a fork", running.wait(), stdout, stderr)

    def run_file(self, path: Path, *, timeout: float) -> subprocess.CompletedProcess[str]:
        """Run the program in a file, as `python path` does."""
        return self.run(FILE.format(path=str(path), folder=str(path.parent)), timeout=timeout)

    def _request(self, program: str, descriptors: list[int], environment: dict[str, str]) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = json.dumps({"program": program, "environment": environment}).encode()
        assert len(request) < MOST
        assert len(descriptors) < DESCRIPTORS
        with theirs:
            socket.send_fds(self._control, [request], [theirs.fileno(), *descriptors])
        return ours

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._control.close()
        self._process.wait()
