"""Start of worker processes, and handles of worker processes.

Either `multiprocessing` or the zygote starts a worker. The zygote is started on first use or
earlier, and ended at exit.
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
from typing import NamedTuple

from headrace._base.descriptors import check_free, shortage
from headrace._pool.worker import ProcessEnvironment, WorkerTask, serve
from headrace._pool.zygote import EXIT_STATUS, FORK, FORK_TEMPLATE
from headrace._transport.channel import Connection
from headrace._transport.pickling import dump_message
from headrace._transport.preload import program_sources


class WorkerProcess(ABC):
    """A handle of a worker process.

    The pool owns the handle, and calls `release` when the process has ended.
    """

    def __init__(self, sentinel: int, pid: int | None) -> None:
        # A descriptor, readable once the process has ended. For a fork of the zygote, it is also
        # readable once the process has started.
        self.sentinel = sentinel
        self.pid = pid  # None until the process has started
        # Negative: the number of a signal. None: the process runs, or the exit code is unknown.
        self.exit_code: int | None = None
        # The reason why the process could not be started; None unless the start has failed.
        self.refusal: OSError | None = None
        self._ended = False

    @abstractmethod
    def ended(self) -> bool:
        """Return True if the process has ended, without blocking."""

    def how_it_ended(self) -> str:
        if self.refusal is not None:
            return f"could not be started ({self.refusal.strerror})"
        if (code := self.exit_code) is None:
            return "is gone"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"

    def signal(self, number: int) -> None:
        if not self.ended() and self.pid is not None:
            with suppress(ProcessLookupError):  # the process has ended since the check
                os.kill(self.pid, number)

    @abstractmethod
    def release(self) -> None:
        """Close the descriptors of this handle. Further calls do nothing."""


def launch_worker(
    context: BaseContext, task: WorkerTask | None, worker: int, workers: int
) -> tuple[WorkerProcess, Connection]:
    """Start a worker by `multiprocessing`, which passes the task.

    A fork destroys the thread-local objects of all threads but the caller's, and keeps the locks
    of these threads. So only a thread that may fork this process calls this function.

    Returns:
        The worker process, and the engine's end of the worker's channel.
    """
    # The connection takes 4 descriptors, and the pipes of multiprocessing up to 4. If a pipe cannot
    # be opened, multiprocessing leaks the open pipes.
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
            # Only cloudpickle can pickle a lambda, for example. No buffer is out of band.
            process = start(dump_message(task, smallest=sys.maxsize).pickled)
    except BaseException:  # Ctrl-C too: nothing owns the connection yet
        ours.close()
        raise
    finally:
        theirs.close()
    return _ContextProcess(process), ours


class _ContextProcess(WorkerProcess):
    def __init__(self, process: BaseProcess) -> None:
        self._descriptor: int | None = None
        # AttributeError: macOS. OSError: the process has ended and was reaped.
        with suppress(AttributeError, OSError):
            self._descriptor = os.pidfd_open(process.pid or 0)
        # Prefer the pidfd: forks of the worker hold the sentinel pipe of `multiprocessing` open.
        super().__init__(
            process.sentinel if self._descriptor is None else self._descriptor,
            process.pid,
        )
        self._process = process

    def ended(self) -> bool:
        if not self._ended and connection.wait([self.sentinel], 0):
            # None if the program, or the kernel for the program, has reaped the process
            self.exit_code = self._process.exitcode
            self._ended = True
        return self._ended

    def release(self) -> None:
        if not self.ended():
            self._process.join(1.0)  # seconds; the process has just been killed
            self._ended = True
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        with suppress(ValueError):  # still running; multiprocessing joins it at exit
            self._process.close()


# All modules of headrace needed for unpickling in a worker or in a loader's process. The zygote
# imports them once.
IMPORTED = "headrace, headrace._links.sidecar, headrace._pool.zygote"


def fork_from_zygote(modules: tuple[str, ...]) -> tuple[WorkerProcess, Connection]:
    """Fork a process of the zygote, from any thread.

    The first message to the process is a `BootMessage`. The process has `modules`, and a control
    socket of the zygote to request processes (see `adopt_control`).

    Returns:
        The process, and this end of its channel.
    """
    with ExitStack() as for_the_child, ExitStack() as on_failure:
        ours, theirs = Connection.pair()
        on_failure.callback(ours.close)
        for_the_child.callback(theirs.close)
        status_read, status_write = os.pipe()
        on_failure.callback(os.close, status_read)
        for_the_child.callback(os.close, status_write)
        sockets = [theirs.frames, theirs.descriptors, *socket.socketpair()]
        for each in sockets:
            for_the_child.callback(each.close)
        _request_fork(modules, [status_write, *(each.fileno() for each in sockets)])
        on_failure.pop_all()
    return _ZygoteProcess(status_read), ours


class _ZygoteProcess(WorkerProcess):
    """A handle of a child of the zygote.

    The zygote writes the child's pid, and later the exit status, to the status pipe.
    """

    def __init__(self, status: int) -> None:
        super().__init__(status, None)
        os.set_blocking(status, False)

    def ended(self) -> bool:
        while not self._ended:
            try:
                record = os.read(self.sentinel, EXIT_STATUS.size)
            except BlockingIOError:  # no new record: the child runs
                break
            # The zygote was killed. A worker without supervision must end too.
            if not record:
                self._ended = True
                if self.pid is not None:
                    with suppress(ProcessLookupError):  # the child ended with the zygote
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


class _Template(NamedTuple):
    modules: tuple[str, ...]  # the imported modules
    # The program's sources at the time of the import.
    sources: frozenset[tuple[str, int, int]]
    control: socket.socket


class _ZygoteHandle:
    """This process's end of the zygote: the control socket, and the templates.

    `process` is None in a fork of the zygote.
    """

    def __init__(
        self, control: socket.socket, process: subprocess.Popen[bytes] | None
    ) -> None:
        self.control = control
        self.process = process
        self.used = False
        self._templates: list[_Template] = []

    @classmethod
    def start(cls) -> _ZygoteHandle:
        # If a worker spawns a process, a main module is imported. Without a guard, the main module
        # would start workers again.
        multiprocessing.spawn._check_not_importing_main()  # type: ignore[attr-defined]
        executable = sys.executable
        if getattr(sys, "frozen", False) or not executable:
            executable = os.fsdecode(multiprocessing.spawn.get_executable() or b"")
            if executable == (sys.executable or ""):
                raise OSError(
                    "sys.executable is no Python interpreter: this program is frozen, by "
                    "PyInstaller for example, or embeds Python. Call "
                    "multiprocessing.freeze_support() at the start of the program, and give the "
                    "loader multiprocessing_context='spawn' and placement='thread'; or give "
                    "multiprocessing.set_executable() the path of a Python interpreter that has "
                    "the program's packages"
                )
        control, theirs = socket.socketpair()
        start = (
            f"import gc, sys; gc.disable(); sys.path[:] = {sys.path!r}; "
            f"import {IMPORTED}; headrace._pool.zygote.main({theirs.fileno()})"
        )
        with theirs:
            try:
                process = subprocess.Popen(
                    [executable, "-c", start],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    # Ctrl-C in a terminal signals the whole process group, and would interrupt an
                    # interpreter during the start.
                    process_group=0,
                )
            except BaseException:  # Ctrl-C too: nothing owns the socket yet
                control.close()
                raise
        return cls(control, process)

    def control_for(self, modules: tuple[str, ...]) -> socket.socket:
        """Return the control socket of a template with `modules`.

        If no template has imported the modules, start a template.
        """
        # A fork of the zygote makes no templates: the parent has made the template, if any.
        if self.process is None or not modules:
            return self.control
        sources = program_sources()
        for template in self._templates:
            if set(modules) <= set(template.modules) and template.sources <= sources:
                return template.control
        control, theirs = socket.socketpair()
        try:
            with theirs, tempfile.TemporaryFile() as request:
                pickle.dump((ProcessEnvironment.here(), modules), request)
                request.seek(0)
                socket.send_fds(
                    self.control, [FORK_TEMPLATE], [theirs.fileno(), request.fileno()]
                )
        except BaseException:  # Ctrl-C too: nothing owns the socket yet
            control.close()
            raise
        self._templates.append(_Template(modules, sources, control))
        return control

    def close(self, *, inherited: bool = False) -> None:
        """Close the control sockets.

        A process at the other end exits once all copies of the control socket are closed.

        Args:
            inherited: This process is a fork of the owner, and so cannot wait for the zygote.
        """
        for control in (*(each.control for each in self._templates), self.control):
            control.close()
        if self.process is None:
            return
        if inherited:
            self.process.returncode = 0
            return
        try:  # the zygote exits in milliseconds unless torch is still being imported
            self.process.wait(timeout=0.5 if self.used else 0)  # seconds
        except subprocess.TimeoutExpired:  # the zygote is importing
            self.process.kill()
            self.process.wait()


_lock = threading.RLock()
# The zygote of this process, shared by all loaders. `_end_zygote` ends the zygote at exit.
_zygote: _ZygoteHandle | None = None


def adopt_control(control: socket.socket) -> None:
    """Use the parent zygote of this process, and start no other."""
    global _zygote
    with _lock:
        _zygote = _ZygoteHandle(control, None)


def start_early() -> None:
    """Start the zygote before its first use.

    The zygote imports torch while the program goes on. An error is ignored here: the first use
    starts the zygote again and raises.
    """
    global _zygote
    with _lock, suppress(OSError, RuntimeError):
        if _zygote is None:
            _zygote = _ZygoteHandle.start()


def _request_fork(modules: tuple[str, ...], descriptors: list[int]) -> None:
    global _zygote
    with _lock:
        for _ in range(2):  # a killed zygote is replaced once
            if _zygote is None:
                _zygote = _ZygoteHandle.start()
            try:
                socket.send_fds(_zygote.control_for(modules), [FORK], descriptors)
                _zygote.used = True
                return
            except (BrokenPipeError, ConnectionResetError):
                _end_zygote()
        raise OSError(
            "the process that forks workers ends as soon as it starts; its error is on standard "
            "error. Check that `python -c 'import torch'` works with this interpreter."
        )


def _end_zygote(*, inherited: bool = False) -> None:
    global _zygote, _lock
    if inherited:
        _lock = threading.RLock()  # another thread may have held the lock during the fork
    with _lock:
        zygote, _zygote = _zygote, None
        if zygote is not None:
            zygote.close(inherited=inherited)


# Registered at import, before the exit hooks of loaders, and therefore run after the hooks.
atexit.register(_end_zygote)
os.register_at_fork(after_in_child=functools.partial(_end_zygote, inherited=True))
