"""Worker processes as the pool sees them, and their start: by `multiprocessing`, or by the zygote.

The zygote is started on first use or before, and ended at exit.
"""

from __future__ import annotations

import atexit
import errno
import functools
import multiprocessing.spawn
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from abc import ABC, abstractmethod
from contextlib import ExitStack, suppress
from multiprocessing import connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess

import cloudpickle

from headrace._core.descriptors import check_free, shortage
from headrace._core.pool.worker import ProcessEnvironment, WorkerTask, serve
from headrace._core.pool.zygote import EXIT_STATUS, FORK, FORK_TEMPLATE, FORK_WITH_CONTROL
from headrace._core.transport.channel import Connection
from headrace._core.transport.preload import program_sources


class WorkerProcess(ABC):
    """A worker process. The pool owns the handle, and calls `release` when the process has ended."""

    def __init__(self, sentinel: int, pid: int | None) -> None:
        # a descriptor that becomes readable when the process has started or ended
        self.sentinel = sentinel
        self.pid = pid  # None until it has started
        # a signal's number is negative; None while it runs, or if that is unknown
        self.exit_code: int | None = None
        # why it could not be started; None if it was, or if that is not yet known
        self.refusal: OSError | None = None

    @abstractmethod
    def ended(self) -> bool:
        """Whether the process has ended; does not block."""

    def how_it_ended(self) -> str:
        if self.refusal is not None:
            return f"could not be started ({self.refusal.strerror})"
        if (code := self.exit_code) is None:
            return "is gone"
        return (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"exited with code {code}"
        )

    def signal(self, number: int) -> None:
        if not self.ended() and self.pid is not None:
            with suppress(ProcessLookupError):  # it has ended since the check
                os.kill(self.pid, number)

    @abstractmethod
    def release(self) -> None:
        """Close the descriptors of this handle."""


def launch_worker(
    context: BaseContext | None,
    task: WorkerTask | None,
    worker: int,
    workers: int,
    modules: tuple[str, ...],
) -> tuple[WorkerProcess, Connection]:
    """Start a worker, from any thread; returns its process, and the engine's end of its channel.

    It is started by `context`, of `multiprocessing`, with the task; or forked by the zygote, which
    imports `modules` first, and the first message, a `BootMessage`, has the task.
    """
    if context is None:
        return _forked(FORK, (), modules)
    # a connection, and multiprocessing's pipes, of which it leaks some if others cannot be opened
    check_free(8)
    ours, theirs = Connection.pair()

    def start(task: WorkerTask | bytes | None) -> BaseProcess:
        process: BaseProcess = context.Process(  # type: ignore[attr-defined]
            target=serve,
            args=(theirs, task, worker, workers),
            name=f"headrace-worker-{worker}",
            daemon=True,
        )
        process.start()
        return process

    try:
        try:
            process = start(task)
        except (AttributeError, TypeError, pickle.PicklingError):
            # a lambda, for example: cloudpickle can
            process = start(cloudpickle.dumps(task))
    except BaseException:  # Ctrl-C too: nothing owns the connection yet
        ours.close()
        raise
    finally:
        theirs.close()
    return _ContextProcess(process), ours


class _ContextProcess(WorkerProcess):
    def __init__(self, process: BaseProcess) -> None:
        self._descriptor: int | None = None
        # macOS; it has ended, and was reaped by the program
        with suppress(AttributeError, OSError):
            self._descriptor = os.pidfd_open(process.pid or 0)
        # The pipe of `multiprocessing` is also held open by forks of the worker.
        super().__init__(
            process.sentinel if self._descriptor is None else self._descriptor, process.pid
        )
        self._process = process

    def ended(self) -> bool:
        if self.exit_code is None and connection.wait([self.sentinel], 0):
            # None if the program, or the kernel for it, has reaped the process
            self.exit_code = self._process.exitcode
            return True
        return self.exit_code is not None

    def release(self) -> None:
        if not self.ended():
            self._process.join(1.0)  # s; it has just been killed
        if self._descriptor is not None:
            os.close(self._descriptor)
            self.sentinel, self._descriptor = self._process.sentinel, None
        with suppress(ValueError):  # still running: multiprocessing's own exit hook will join it
            self._process.close()


# All of headrace that unpickling in a worker or in a loader's process needs: it is imported once,
# in the zygote.
IMPORTED = "headrace, headrace._core.links.sidecar, headrace._core.pool.zygote"


def launch_with_control(modules: tuple[str, ...]) -> tuple[WorkerProcess, Connection]:
    """Fork a process, `modules` imported, that can itself request processes of the zygote (see `adopt_control`)."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        return _forked(FORK_WITH_CONTROL, (ours.fileno(), theirs.fileno()), modules)


def _forked(
    request: bytes, extra: tuple[int, ...], modules: tuple[str, ...]
) -> tuple[WorkerProcess, Connection]:
    with ExitStack() as for_the_child, ExitStack() as on_failure:
        ours, theirs = Connection.pair()
        on_failure.callback(ours.close)
        for_the_child.callback(theirs.close)
        status_read, status_write = os.pipe()
        on_failure.callback(os.close, status_read)
        for_the_child.callback(os.close, status_write)
        sockets = theirs.frames.fileno(), theirs.descriptors.fileno()
        _request_fork(modules, request, [status_write, *sockets, *extra])
        on_failure.pop_all()
    return _ZygoteProcess(status_read), ours


class _ZygoteProcess(WorkerProcess):
    """A child of the zygote, which writes the pid, and later the exit status, to the status pipe."""

    def __init__(self, status: int) -> None:
        super().__init__(status, None)
        os.set_blocking(status, False)
        self._ended = False

    def ended(self) -> bool:
        while not self._ended:
            try:
                record = os.read(self.sentinel, EXIT_STATUS.size)
            except BlockingIOError:  # nothing new: it runs
                break
            # the zygote was killed: this worker is no longer watched, so it must end too
            if not record:
                self._ended = True
                if self.pid is not None:
                    with suppress(ProcessLookupError):  # it ended with the zygote
                        os.kill(self.pid, signal.SIGKILL)
            elif self.pid is None:
                (number,) = EXIT_STATUS.unpack(record)
                if number > 0:
                    self.pid = number
                else:
                    text = f"a process could not be started: {os.strerror(-number)}"
                    self.refusal = (
                        shortage("start a process")
                        if -number == errno.EMFILE
                        else OSError(-number, text)
                    )
                    self._ended = True
            else:
                (self.exit_code,) = EXIT_STATUS.unpack(record)
                self._ended = True
        return self._ended

    def release(self) -> None:
        if self.sentinel >= 0:
            os.close(self.sentinel)
            self.sentinel = -1
            self._ended = True


class _Zygote:
    """The zygote: its control socket and, in the process that started it, its process."""

    def __init__(self, control: socket.socket, process: subprocess.Popen[bytes] | None) -> None:
        self.control = control
        self.process = process
        self.used = False
        # Of each template the modules that it has imported, the program's sources then, and its
        # control socket.
        self._templates: list[
            tuple[tuple[str, ...], frozenset[tuple[str, int, int]], socket.socket]
        ] = []

    @classmethod
    def start(cls) -> _Zygote:
        # A worker may spawn a process, which imports a main module without a guard: it would start
        # workers again.
        multiprocessing.spawn._check_not_importing_main()  # type: ignore[attr-defined]
        frozen = getattr(sys, "frozen", False)  # by PyInstaller, for example
        configured = os.fsdecode(multiprocessing.spawn.get_executable() or b"")
        if frozen and configured == sys.executable:
            raise OSError(
                "this program is frozen (sys.frozen), so that sys.executable would start the program again in place of "
                "a worker. Call multiprocessing.freeze_support() at the start of the program, and give the loader "
                "multiprocessing_context='spawn' and placement='thread'; or give multiprocessing.set_executable() the "
                "path of a Python interpreter that has the program's packages"
            )
        executable = configured if frozen or not sys.executable else sys.executable
        control, theirs = socket.socketpair()
        start = (
            f"import gc, sys; gc.disable(); sys.path[:] = {sys.path!r}; "
            f"import {IMPORTED}; headrace._core.pool.zygote.main({theirs.fileno()})"
        )
        with theirs:
            try:
                process = subprocess.Popen(
                    [executable, "-c", start],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    # Ctrl-C in a terminal goes to a whole group, and would hit an interpreter still
                    # starting.
                    process_group=0,
                )
            except BaseException:  # Ctrl-C too: nothing owns the socket yet
                control.close()
                raise
        return cls(control, process)

    def control_for(self, modules: tuple[str, ...]) -> socket.socket:
        """The control socket of a template that has imported `modules`; starts the template if there is none."""
        # the process that forked this one has made a template, if any
        if self.process is None or not modules:
            return self.control
        sources = program_sources()
        for imported, unchanged, template in self._templates:
            if set(modules) <= set(imported) and unchanged <= sources:
                return template
        control, theirs = socket.socketpair()
        try:
            with theirs, tempfile.TemporaryFile() as request:
                pickle.dump((ProcessEnvironment.here(), modules), request)
                request.seek(0)
                socket.send_fds(self.control, [FORK_TEMPLATE], [theirs.fileno(), request.fileno()])
        except BaseException:  # Ctrl-C too: nothing owns the socket yet
            control.close()
            raise
        self._templates.append((modules, sources, control))
        return control

    def close(self, *, inherited: bool = False) -> None:
        """Close the control sockets; the processes at the other ends exit when all copies are closed.

        With `inherited`, this is a fork of the process that started it, and has nothing to wait
        for.
        """
        for control in (*(template for _, _, template in self._templates), self.control):
            control.close()
        if self.process is None:
            return
        if inherited:
            self.process.returncode = 0
            return
        try:  # it exits in milliseconds unless it is still importing torch
            self.process.wait(timeout=0.5 if self.used else 0)  # seconds
        except subprocess.TimeoutExpired:  # it imports
            self.process.kill()
            self.process.wait()


_lock = threading.RLock()
# one for a process, shared by its loaders; ended by `_end_zygote` at exit
_zygote: _Zygote | None = None


def adopt_control(control: socket.socket) -> None:
    """Use the zygote that forked this process, instead of starting one."""
    global _zygote
    with _lock:
        _zygote = _Zygote(control, None)


def start_early() -> None:
    """Start the zygote, if there is none, so that it imports torch while the program goes on.

    Why it cannot be started is for the first use to say.
    """
    global _zygote
    with _lock, suppress(OSError, RuntimeError):  # it is tried again at the first use, which raises
        if _zygote is None:
            _zygote = _Zygote.start()


def _request_fork(modules: tuple[str, ...], request: bytes, descriptors: list[int]) -> None:
    global _zygote
    with _lock:
        for _ in range(2):  # a zygote that was killed is replaced once
            if _zygote is None:
                _zygote = _Zygote.start()
            try:
                socket.send_fds(_zygote.control_for(modules), [request], descriptors)
                _zygote.used = True
                return
            except (BrokenPipeError, ConnectionResetError):
                _end_zygote()
        raise OSError(
            "the process that forks workers ends as soon as it starts; its error is on standard error. "
            "Check that `python -c 'import torch'` works with this interpreter."
        )


def _end_zygote(*, inherited: bool = False) -> None:
    global _zygote, _lock
    if inherited:
        _lock = threading.RLock()  # which another thread may have held
    with _lock:
        zygote, _zygote = _zygote, None
        if zygote is not None:
            zygote.close(inherited=inherited)


# Registered when this module is imported, and so before any loader's own hook: it runs after them.
atexit.register(_end_zygote)
os.register_at_fork(after_in_child=functools.partial(_end_zygote, inherited=True))
