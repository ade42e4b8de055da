"""The process from which `tests.forks.Forks` forks programs: ``python -m tests.fork_server DESCRIPTOR``.

It only imports. What a process makes once, a thread or a descriptor for example, each fork makes
for itself."""

from __future__ import annotations

import asyncio.coroutines
import contextlib
import faulthandler
import gc
import importlib
import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import types
import warnings
from pathlib import Path

import cloudpickle
import obstore.store  # noqa: F401
import pytest  # noqa: F401
import torch  # noqa: F401
import uvloop  # noqa: F401

import tests
from headrace._links import sidecar  # noqa: F401
from headrace._pool import launch, zygote

MOST_DESCRIPTORS = 16


def main() -> None:
    for name in os.environ.pop("FORK_SERVER_IMPORTS", "").split():
        importlib.import_module(name)
    # Of -X dev: a callback that took 0.1 s says nothing, on a machine that is busy with other
    # tests. Records of other processes arrive formatted.
    logging.getLogger("asyncio").addFilter(
        lambda record: not record.getMessage().startswith("Executing <")
    )
    # Else each fork's collector goes through torch's objects, 0.3 s at its end alone.
    gc.freeze()
    # the processes that wait for forks are not waited for
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv.pop())) as control:
        program, descriptors = serve(control)
    os.setsid()
    for number, descriptor in zip((1, 2), descriptors, strict=False):
        os.dup2(descriptor, number)
        os.close(descriptor)
    # A `__main__` of its own, as in an interpreter that was started with `-c`.
    sys.modules["__main__"] = types.ModuleType("__main__")
    with open(program, "rb") as file:
        os.environ.update(pickle.load(file))
        if not os.environ.pop("OWN_ZYGOTE", ""):
            fork_zygote()
        run = pickle.load(file)
    # Programs send what `tests` defines to their workers by value, as a notebook does: these import
    # nothing of it.
    cloudpickle.register_pickle_by_value(tests)
    run(*descriptors[2:])


def serve(control: socket.socket) -> tuple[int, list[int]]:
    """Fork for each request; returns in the forks, with the descriptors that came with it, the program's first.

    Between this process and each fork is one that waits for the fork, so that there can be several
    at a time."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, 1, MOST_DESCRIPTORS)
        if not request:
            sys.exit()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            status, program, *others = descriptors
            if (pid := os.fork()) == 0:
                os.close(status)
                return program, others
            control.close()
            for descriptor in (program, *others):
                os.close(descriptor)
            os.write(status, b"%d" % pid)
            os.write(status, b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


class _Child:
    """A fork, with the part of the interface of `subprocess.Popen` that headrace uses of its zygote."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> None:
        if self.returncode is not None:
            return
        with open(os.pidfd_open(self.pid)) as ended:
            if not select.select([ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a zygote", timeout or 0.0)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def fork_zygote() -> None:
    """Give this process a zygote that is a fork of it.

    headrace starts one with an interpreter of its own, which has to import torch: a program of a
    test would take three times as long. This process has imported the same, and has started nothing
    yet."""
    control, theirs = socket.socketpair()
    if (pid := os.fork()) == 0:
        os.setpgid(0, 0)
        # -X dev is for the program, and not for its engines and workers.
        warnings.simplefilter("ignore", ResourceWarning)
        asyncio.coroutines._is_debug_mode = bool  # type: ignore[attr-defined]
        faulthandler.disable()
        os.closerange(3, theirs.fileno())
        os.closerange(theirs.fileno() + 1, 1024)
        zygote.main(theirs.detach())
        os._exit(0)
    theirs.close()
    launch._zygote = launch._ZygoteHandle(control, _Child(pid))  # type: ignore[arg-type]


def run_source(source: str) -> None:
    """Run a program's text, as ``python -c`` does."""
    exec(compile(source, "<string>", "exec"), vars(sys.modules["__main__"]))


def run_file(path: Path) -> None:
    """Run the program in a file, as ``python path`` does."""
    sys.argv[:] = [str(path)]
    sys.path[0] = str(path.parent)
    vars(sys.modules["__main__"])["__file__"] = str(path)
    exec(compile(path.read_bytes(), path, "exec"), vars(sys.modules["__main__"]))


if __name__ == "__main__":
    main()
