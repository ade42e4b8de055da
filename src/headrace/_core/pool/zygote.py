"""The zygote: a small process that has torch imported and forks workers on request (the word is Android's).

It is started with a fresh interpreter, so no thread, lock or event loop of the trainer is
inherited, and it runs neither user code nor the main module: docs/design/0004 has the reasons.

Modules that functions need are imported once too, in a *template*: a fork of the zygote that
imports them and then does as the zygote does. If a template cannot be forked, since a module has
started threads, or dies, the process that forked it answers its requests, and workers import
modules themselves.

The zygote belongs to the process that started it, serves every loader there, and ends, with all its
workers, when that process does: its control socket then reads as closed.
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

from headrace._core.descriptors import Reserve
from headrace._core.eventloop.loop_thread import import_event_loop
from headrace._core.pool.worker import serve_boot_message
from headrace._core.transport.channel import Connection
from headrace._core.transport.preload import has_threads, import_modules

# A status pipe's records: first the pid, or a negative errno; then the exit status, as
# os.waitstatus_to_exitcode gives it.
EXIT_STATUS = struct.Struct("<i")

# Requests: one byte each, with descriptors.
FORK = b"f"  # the writing end of the process's status pipe, the two sockets of its connection
FORK_WITH_CONTROL = b"c"  # the same, and then a socket pair: a control socket of the process's own
# the template's control socket; a file with its environment and the names of modules, pickled
FORK_TEMPLATE = b"t"
_DESCRIPTORS = {FORK: 3, FORK_WITH_CONTROL: 5, FORK_TEMPLATE: 2}


def main(control_descriptor: int) -> None:
    """Serve requests until the first control socket closes, then kill the remaining processes and exit."""
    # SIGINT goes to the whole terminal group; the consumer decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a launcher may have blocked SIGCHLD
    # in each engine it takes a third of the CPU time of its start (benchmarks/engines.py)
    import_event_loop()
    import numpy.random  # noqa: F401  # most engines and workers use these, and programs without them do not wait for them
    import obstore  # noqa: F401

    _serve(socket.socket(fileno=control_descriptor))


def _serve(control: socket.socket) -> None:
    zygote = _Zygote(control)
    try:
        zygote.serve()
    finally:
        zygote.kill(of=None)
        zygote.close()


class _Zygote:
    """Forked processes, and the control sockets by which they were requested."""

    def __init__(self, first: socket.socket) -> None:
        self._first = first.fileno()
        self._controls = {first.fileno(): first}
        self._statuses: dict[int, int] = {}  # the pid of a living process → its status pipe
        # the pid of a living process → the control socket that requested it
        self._requester_of: dict[int, int] = {}
        # the pid of a living template → its control socket
        self._templates: dict[int, socket.socket] = {}
        self._reserve = Reserve(1)  # so that the first descriptor, the status pipe, always arrives
        self._wake, self._woken = os.pipe()[::-1]
        for descriptor in (self._wake, self._woken):
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._poller = select.poll()
        self._poller.register(self._woken, select.POLLIN)
        self._poller.register(self._first, select.POLLIN)

    def serve(self) -> None:
        # Imported while nothing is requested: the first request does not wait for what it may not
        # need.
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
                    # The process that requested these, and would end them, has ended.
                    self.kill(of=descriptor)
                    self._poller.unregister(descriptor)
                    self._controls.pop(descriptor).close()

    def _answer(self, control: socket.socket) -> bool:
        """Answer a request; False if the control socket has closed."""
        with self._reserve.given_up():
            request, descriptors, _, _ = socket.recv_fds(control, 1, max(_DESCRIPTORS.values()))
        if not request:
            return False
        reason = errno.EMFILE
        try:
            if len(descriptors) == _DESCRIPTORS[request]:
                answer = self._fork_template if request == FORK_TEMPLATE else self._fork_process
                answer(control, *descriptors)
                return True
        except OSError as error:  # the limit of processes, or no memory
            reason = error.errno or errno.EAGAIN
        # its requests are answered here, without its imports
        if descriptors and request == FORK_TEMPLATE:
            self._listen_to(socket.socket(fileno=descriptors.pop(0)))
        elif descriptors:
            with suppress(BrokenPipeError):  # the requester has ended
                os.write(descriptors[0], EXIT_STATUS.pack(-reason))
        else:
            print(f"headrace: a process cannot be started: {os.strerror(reason)}", file=sys.stderr)
        for descriptor in descriptors:
            os.close(descriptor)
        return True

    def _fork_process(
        self, control: socket.socket, status: int, frames: int, descriptors: int, *own: int
    ) -> None:
        def run() -> None:
            for descriptor in (status, *own[:1]):
                os.close(descriptor)
            connection = Connection(socket.socket(fileno=frames), socket.socket(fileno=descriptors))
            serve_boot_message(connection, socket.socket(fileno=own[1]) if own else None)

        pid = self._fork(run)
        self._statuses[pid], self._requester_of[pid] = status, control.fileno()
        for descriptor in (frames, descriptors, *own[1:]):
            os.close(descriptor)
        if own:
            self._listen_to(socket.socket(fileno=own[0]))
        # The pid goes first on the status pipe; the exit status follows when there is one.
        with suppress(BrokenPipeError):  # the requester has ended; its control socket closes too
            os.write(status, EXIT_STATUS.pack(pid))

    def _fork_template(self, _: socket.socket, own: int, request: int) -> None:
        def run() -> None:
            with open(request, "rb") as file:
                environment, modules = pickle.load(file)
            environment.adopt()
            import_modules(modules)
            gc.freeze()
            _flush_output()  # before each fork copies buffered output of modules
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
            # Collections were off. Here they do not search what was imported, which would copy its
            # pages, and took 8 µs for each sample in an engine with a thousand fetches in flight.
            gc.freeze()
            gc.enable()
            run()
            code = 0
        except BaseException:  # printed as an interpreter does: the process ends here
            traceback.print_exc()
        finally:
            # Never return to the zygote's loop. Exit hooks of user code are not run, as in any
            # forked worker.
            _flush_output()
            os._exit(code)

    def _listen_to(self, control: socket.socket) -> None:
        self._controls[control.fileno()] = control
        self._poller.register(control, select.POLLIN)

    def _reap(self) -> None:
        with suppress(BlockingIOError):  # one reading takes what several signals wrote
            os.read(self._woken, 4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:  # none is left
                return
            if not pid:
                return
            if (pipe := self._statuses.pop(pid, None)) is not None:
                with suppress(BrokenPipeError):  # the requester has ended
                    os.write(pipe, EXIT_STATUS.pack(os.waitstatus_to_exitcode(status)))
                os.close(pipe)
                del self._requester_of[pid]
            if (control := self._templates.pop(pid, None)) is not None:
                self._listen_to(control)  # which reads as closed if that is why the template ended

    def close(self) -> None:
        """Close all descriptors: in this process, where forked ones see it as the end, or in a fork."""
        for control in (*self._controls.values(), *self._templates.values()):
            control.close()
        signal.set_wakeup_fd(-1)
        for descriptor in (self._wake, self._woken, *self._statuses.values()):
            os.close(descriptor)
        self._reserve.close()

    def kill(self, *, of: int | None) -> None:
        """Kill the processes that one control socket requested; all of them, if `of` is None."""
        for pid, requester in self._requester_of.items():
            if of is None or requester == of:
                os.kill(pid, signal.SIGKILL)  # one that has ended is there until `_reap` forgets it


def _flush_output() -> None:
    """Write what user code has printed, which is buffered where the output is a file or a pipe."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the user's stream; or there is none, or its pipe is closed
            stream.flush()


_PR_SET_PDEATHSIG = 1
_prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux has it


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies: a killed zygote cannot end busy workers."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)
