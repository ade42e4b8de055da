"""The zygote: a small process with torch imported, which forks workers.

The name is Android's. The zygote starts with a fresh interpreter, and so inherits no thread, lock
or event loop of the trainer. It runs neither user code nor the main module. The reasons are in
docs/design/0004.

Modules for user functions are imported once too, in a *template*. A template is a fork of the
zygote: it imports the modules and then serves requests like the zygote. If a module has
started threads, or if the template dies, the parent answers the template's requests, and workers
import modules themselves.

The process that starts the zygote owns the zygote. All loaders of the owner use the same zygote.
When the owner ends, the control socket reads as closed, and the zygote ends with all workers.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import pickle
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from headrace._base.descriptors import Reserve
from headrace._eventloop.loop_thread import import_event_loop
from headrace._pool.worker import serve_boot_message
from headrace._transport.channel import Connection
from headrace._transport.preload import has_threads, import_modules

# A record of a status pipe. The first record is the pid, or a negative errno. The second record is
# the exit status, as returned by os.waitstatus_to_exitcode.
EXIT_STATUS = struct.Struct("<i")

# Requests: one byte each, sent with descriptors.
# The writing end of the status pipe, the two sockets of the connection, and a socket pair for the
# control socket of the new process.
FORK = b"f"
# The template's control socket, and a file with the pickled environment and names of modules.
FORK_TEMPLATE = b"t"
_DESCRIPTORS = {FORK: 5, FORK_TEMPLATE: 2}


def main(control_descriptor: int) -> None:
    """Serve requests until the first control socket closes.

    Then kill the remaining processes and exit.
    """
    # SIGINT goes to the whole process group of the terminal. The consumer decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a launcher may have blocked SIGCHLD
    # Per engine, the import takes a third of the CPU time of the start (benchmarks/engines.py).
    import_event_loop()
    # Most engines and workers use these modules. Other programs do not wait for the import.
    import numpy.random  # noqa: F401
    import obstore  # noqa: F401

    _serve(socket.socket(fileno=control_descriptor))


def _serve(control: socket.socket) -> None:
    zygote = _Zygote(control)
    try:
        zygote.serve()
    finally:
        zygote.kill(of=None)
        zygote.close()


class _Child(NamedTuple):
    status: int  # descriptor of the status pipe
    requester: int  # descriptor of the requesting control socket


class _Zygote:
    """Forked processes, and the control sockets of the requesting processes."""

    def __init__(self, first: socket.socket) -> None:
        self._first = first.fileno()
        self._controls = {first.fileno(): first}
        self._children: dict[int, _Child] = {}  # living processes by pid
        # pid of a living template → control socket
        self._templates: dict[int, socket.socket] = {}
        # A free descriptor, so that the first sent descriptor (the status pipe) always arrives.
        self._reserve = Reserve(1)
        self._wake, self._woken = os.pipe()[::-1]
        for descriptor in (self._wake, self._woken):
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._poller = select.poll()
        self._poller.register(self._woken, select.POLLIN)
        self._poller.register(self._first, select.POLLIN)

    def serve(self) -> None:
        # Import the remaining names of headrace between requests. The first request then does not
        # wait for unneeded modules.
        unused = list((headrace := sys.modules["headrace"]).__all__)
        while True:
            if not (requests := self._poller.poll(0 if unused else None)):
                getattr(headrace, unused.pop())
            for descriptor, _ in requests:
                if descriptor == self._woken:
                    self._reap()
                elif not self._answer(self._controls[descriptor]):
                    if descriptor == self._first:
                        return
                    # The requesting process has ended, and can no longer end its processes.
                    self.kill(of=descriptor)
                    self._poller.unregister(descriptor)
                    self._controls.pop(descriptor).close()

    def _answer(self, control: socket.socket) -> bool:
        """Answer a request. Return False if the control socket has closed."""
        with self._reserve.given_up():
            request, descriptors, _, _ = socket.recv_fds(
                control, 1, max(_DESCRIPTORS.values())
            )
        if not request:
            return False
        reason = errno.EMFILE
        try:
            if len(descriptors) == _DESCRIPTORS[request]:
                answer = (
                    self._fork_template
                    if request == FORK_TEMPLATE
                    else self._fork_process
                )
                answer(control, *descriptors)
                return True
        except OSError as error:  # no memory, or the limit of processes is reached
            reason = error.errno or errno.EAGAIN
        # Without a template, answer the template's requests here, without imported modules.
        if descriptors and request == FORK_TEMPLATE:
            self._listen_to(socket.socket(fileno=descriptors.pop(0)))
        elif descriptors:
            with suppress(BrokenPipeError):  # the requester has ended
                os.write(descriptors[0], EXIT_STATUS.pack(-reason))
        for descriptor in descriptors:
            os.close(descriptor)
        return True

    def _fork_process(
        self,
        control: socket.socket,
        status: int,
        frames: int,
        descriptors: int,
        own: int,
        childs: int,
    ) -> None:
        def run() -> None:
            os.close(status)
            os.close(own)
            connection = Connection(
                socket.socket(fileno=frames), socket.socket(fileno=descriptors)
            )
            serve_boot_message(connection, socket.socket(fileno=childs))

        pid = self._fork(run)
        self._children[pid] = _Child(status, control.fileno())
        for descriptor in (frames, descriptors, childs):
            os.close(descriptor)
        self._listen_to(socket.socket(fileno=own))
        # The pid goes first on the status pipe. The exit status follows when the process ends.
        # The requester has ended, and so its control socket closes.
        with suppress(BrokenPipeError):
            os.write(status, EXIT_STATUS.pack(pid))

    def _fork_template(self, _: socket.socket, own: int, request: int) -> None:
        def run() -> None:
            with open(request, "rb") as file:
                environment, modules = pickle.load(file)
            environment.adopt()
            import_modules(modules)
            gc.freeze()
            # Otherwise each fork would copy the buffered output of modules.
            _flush_output()
            if not has_threads():
                _serve(socket.socket(fileno=own))

        self._templates[self._fork(run)] = socket.socket(fileno=own)
        os.close(request)

    def _fork(self, run: Callable[[], None]) -> int:
        zygote = os.getpid()
        if pid := os.fork():
            return pid
        code = 1
        try:
            _die_with(zygote)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.close()
            # Garbage collection was off. Collections in this process shall not visit the imported
            # objects: a visit copies memory pages, and cost 8 µs for each sample in an engine with
            # a thousand fetches in flight.
            gc.freeze()
            gc.enable()
            run()
            code = 0
        except BaseException:
            # Print the error as an interpreter does: the process ends here.
            traceback.print_exc()
        finally:
            # Never return to the zygote's loop. Exit hooks of user code do not run, as in any
            # forked worker.
            _flush_output()
            os._exit(code)

    def _listen_to(self, control: socket.socket) -> None:
        self._controls[control.fileno()] = control
        self._poller.register(control, select.POLLIN)

    def _reap(self) -> None:
        # A single read takes the bytes of several signals.
        with suppress(BlockingIOError):
            os.read(self._woken, 4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:  # no child is left
                return
            if not pid:
                return
            if (child := self._children.pop(pid, None)) is not None:
                with suppress(BrokenPipeError):  # the requester has ended
                    os.write(
                        child.status, EXIT_STATUS.pack(os.waitstatus_to_exitcode(status))
                    )
                os.close(child.status)
            if (control := self._templates.pop(pid, None)) is not None:
                # If the requester has ended, the socket reads as closed, and `serve` drops it.
                self._listen_to(control)

    def close(self) -> None:
        """Close all descriptors, in the zygote or in a fork.

        When the zygote closes the control sockets, forked processes read an end of file.
        """
        for control in (*self._controls.values(), *self._templates.values()):
            control.close()
        signal.set_wakeup_fd(-1)
        pipes = [child.status for child in self._children.values()]
        for descriptor in (self._wake, self._woken, *pipes):
            os.close(descriptor)
        self._reserve.close()

    def kill(self, *, of: int | None) -> None:
        """Kill the processes requested by the control socket `of`.

        None: kill all processes.
        """
        for pid, child in self._children.items():
            if of is None or child.requester == of:
                # Safe: until `_reap`, the pid cannot be reused.
                os.kill(pid, signal.SIGKILL)


def _flush_output() -> None:
    """Flush the output of user code.

    Python buffers the output if standard output is a file or a pipe.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the stream is the user's, or absent, or a closed pipe
            stream.flush()


_PR_SET_PDEATHSIG = 1
_prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux has it


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when the parent dies.

    A killed zygote cannot end busy workers.
    """
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call
        os._exit(1)
