"""The process from which `tests.forks.Forks` forks programs: ``python -m tests.fork_server DESCRIPTOR``.

It only imports. What a process makes once, a thread or a descriptor for example, each fork makes for itself.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import signal
import socket
import sys
import types
from pathlib import Path

import cloudpickle
import obstore.store  # noqa: F401
import pytest  # noqa: F401
import torch  # noqa: F401
import uvloop  # noqa: F401

import headrace  # noqa: F401
import tests

MOST_DESCRIPTORS = 16


def main() -> None:
    for name in os.environ.pop("FORK_SERVER_IMPORTS", "").split():
        importlib.import_module(name)
    gc.freeze()  # else each fork's collector goes through torch's objects, 0.3 s at its end alone
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the processes that wait for forks are not waited for
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
        run = pickle.load(file)
    # Programs send what `tests` defines to their workers by value, as a notebook does: these import nothing of it.
    cloudpickle.register_pickle_by_value(tests)
    run(*descriptors[2:])


def serve(control: socket.socket) -> tuple[int, list[int]]:
    """Fork for each request; returns in the forks, with the descriptors that came with it, the program's first.

    Between this process and each fork is one that waits for the fork, so that there can be several at a time.
    """
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
