"""A small process that has torch imported and forks workers on request.

Importing torch takes a second or more of CPU; forking a process that has done so takes milliseconds, and shares its
memory. The zygote is started with a fresh interpreter, so no thread, lock or event loop of the trainer is inherited,
and it never runs user code: what it forks is as clean as a spawned process. It runs no main module either, so a
script that uses headrace needs no ``if __name__ == "__main__"`` guard.

It belongs to the process that started it, serves every loader there, and ends, with all its workers, when that
process does: its control socket then reads as closed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct

from headrace.pool.channel import Line
from headrace.pool.worker import serve_shipment

__all__ = ["EXIT_STATUS", "main"]

EXIT_STATUS = struct.Struct("<i")  # what a worker's status pipe carries when it ends: as os.waitstatus_to_exitcode
_REQUEST_DESCRIPTORS = 3  # the two sockets of the worker's line, the writing end of its status pipe


def main(control_descriptor: int) -> None:
    """Serve requests from the control socket until its other end closes, then kill what is left and exit."""
    control = socket.socket(fileno=control_descriptor)
    # SIGINT goes to the whole terminal group; the consumer decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wake_read, wake_write = os.pipe()
    for descriptor in (wake_read, wake_write):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    statuses: dict[int, int] = {}  # pid of a living worker → its status pipe
    poller = select.poll()
    poller.register(control, select.POLLIN)
    poller.register(wake_read, select.POLLIN)
    try:
        while True:
            ready = {descriptor for descriptor, _ in poller.poll()}
            if wake_read in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake_read, 4096)
                _reap(statuses)
            if control.fileno() in ready:
                request, descriptors, _, _ = socket.recv_fds(control, 1, _REQUEST_DESCRIPTORS)
                if not request:
                    return
                *line, status = descriptors
                pid = _fork(line, close=(control.fileno(), wake_read, wake_write, status, *statuses.values()))
                for descriptor in line:
                    os.close(descriptor)
                statuses[pid] = status
                # The pid goes first on the status pipe; the exit status follows when there is one.
                with contextlib.suppress(BrokenPipeError):
                    os.write(status, EXIT_STATUS.pack(pid))
    finally:
        for pid in statuses:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _fork(line: list[int], close: tuple[int, ...]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in close:
            os.close(descriptor)
        serve_shipment(Line(*(socket.socket(fileno=descriptor) for descriptor in line)))
        code = 0
    finally:
        # Never back into the zygote's loop; what user code registered with atexit is not run, as in any forked worker.
        os._exit(code)


def _reap(statuses: dict[int, int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        if (pipe := statuses.pop(pid, None)) is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(pipe, EXIT_STATUS.pack(os.waitstatus_to_exitcode(status)))
            os.close(pipe)
