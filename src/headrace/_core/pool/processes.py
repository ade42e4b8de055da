"""Worker processes as the pool sees them, and their launcher by `multiprocessing`."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Protocol

import cloudpickle

from headrace._core.descriptors import check_free
from headrace._core.pool.settings import setups
from headrace._core.pool.worker import WorkerTask, serve
from headrace._core.transport.channel import Connection


class WorkerProcess(Protocol):
    """A worker process. The pool owns the handle, and calls `release` when the process has ended."""

    sentinel: int
    """A descriptor that becomes readable when the process has started or ended."""

    pid: int | None
    """Its process id; None until it has started."""

    exit_code: int | None
    """Its exit status, or a signal's number, negative; None while it runs, or if that is unknown."""

    refusal: OSError | None
    """Why it could not be started; None if it was, or if that is not yet known."""

    def ended(self) -> bool:
        """Whether the process has ended; does not block."""

    def signal(self, number: int) -> None:
        """Send it a signal, if it runs."""

    def release(self) -> None:
        """Close the descriptors of this handle."""


def how_it_ended(process: WorkerProcess) -> str:
    """How a process ended, in words."""
    code = process.exit_code
    if process.refusal is not None:
        return f"could not be started ({process.refusal.strerror})"
    if code is None:
        return "is gone"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


class Launcher(Protocol):
    """Starts workers; may be called from any thread."""

    ships_task: bool
    """Whether the pool must send a `BootMessage` first."""

    def launch(
        self, task: WorkerTask | None, worker: int, workers: int, modules: tuple[str, ...]
    ) -> tuple[WorkerProcess, Connection]:
        """Start worker number `worker` of `workers`; returns its handle and the engine's end of its channel."""


class ContextLauncher:
    """Workers from a `multiprocessing` context: fork, spawn or forkserver."""

    ships_task = False

    def __init__(self, context: BaseContext) -> None:
        self._context = context

    def launch(
        self, task: WorkerTask | None, worker: int, workers: int, modules: tuple[str, ...]
    ) -> tuple[WorkerProcess, Connection]:
        check_free(8)  # a connection, and multiprocessing's pipes, of which it leaks some if others cannot be opened
        ours, theirs = Connection.pair()
        try:
            try:
                process = self._process(theirs, task, worker, workers)
            except (AttributeError, TypeError, pickle.PicklingError):  # a lambda, for example: cloudpickle can
                process = self._process(theirs, cloudpickle.dumps(task), worker, workers)
        except BaseException:  # Ctrl-C too: nothing owns the connection yet
            ours.close()
            raise
        finally:
            theirs.close()
        return _ContextProcess(process), ours

    def _process(
        self, connection: Connection, task: WorkerTask | bytes | None, worker: int, workers: int
    ) -> BaseProcess:
        process: BaseProcess = self._context.Process(  # type: ignore[attr-defined]
            target=serve,
            args=(connection, task, worker, workers, self._setups()),
            name=f"headrace-worker-{worker}",
            daemon=True,
        )
        process.start()
        return process

    def _setups(self) -> bytes | None:
        return None if self._context.get_start_method() == "fork" else cloudpickle.dumps(setups())


class _ContextProcess:
    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self.sentinel = process.sentinel
        self.pid = process.pid
        self.exit_code: int | None = None
        self.refusal: OSError | None = None

    def ended(self) -> bool:
        if self.exit_code is None:
            self.exit_code = self._process.exitcode
        return self.exit_code is not None

    def signal(self, number: int) -> None:
        if not self.ended() and self.pid is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since the check
                os.kill(self.pid, number)

    def release(self) -> None:
        if not self.ended():
            self._process.join(1.0)  # s; it has just been killed
        with contextlib.suppress(ValueError):  # still running: multiprocessing's own exit hook will join it
            self._process.close()
