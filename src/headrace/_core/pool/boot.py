"""The start of a child process: what it is sent first, and its main functions.

A child is forked by the zygote, or started by `multiprocessing`. Either way it runs a `ProcessMain` until the process
that requested it closes their connection.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable
from multiprocessing import current_process
from typing import NamedTuple, Protocol

import torch

from headrace._core.pool.settings import Settings
from headrace._core.transport.channel import BlockingChannel, Connection, Disconnected
from headrace._core.transport.log_records import forward_records
from headrace._core.transport.pickling import SentModule, prefer_references
from headrace._core.transport.preload import import_modules


class ProcessMain(Protocol):
    """The main function of a child process, with the name of the process."""

    @property
    def name(self) -> str:
        """The name of the process."""

    @property
    def worker(self) -> int | None:
        """Its number in log records; None of a process that fetches."""

    def __call__(self, connection: Connection, control: socket.socket | None, prepare: Callable[[], None], /) -> None:
        """Serve the sessions that are opened over `connection`, until its other end is closed.

        `control` is a socket for requesting processes from the zygote. `prepare` is called before user code is
        unpickled, and may raise.
        """


class ProcessEnvironment(NamedTuple):
    """What a forked child would inherit of the process that requests it."""

    path: list[str]
    arguments: list[str]
    directory: str
    environment: dict[str, str]
    script: dict[str, object]  # of the main module its file, which `multiprocessing` runs in processes that it spawns

    @classmethod
    def here(cls) -> ProcessEnvironment:
        script = {name: value for name, value in vars(sys.modules["__main__"]).items() if name == "__file__"}
        return cls(list(sys.path), list(sys.argv), os.getcwd(), dict(os.environ), script)

    def adopt(self) -> None:
        main = sys.modules["__main__"] = sys.modules["__mp_main__"] = SentModule("__main__")
        vars(main).update(self.script)
        sys.path[:] = self.path
        sys.argv[:] = self.arguments
        os.chdir(self.directory)
        os.environ.clear()
        os.environ.update(self.environment)


class BootMessage(NamedTuple):
    """The first message to a process that the zygote has forked."""

    environment: ProcessEnvironment
    settings: Settings
    modules: tuple[str, ...]
    main: ProcessMain

    def prepare(self) -> None:
        """Import modules and apply settings, before user code is unpickled; errors of user code are raised."""
        import_modules(self.modules)  # first, as in the process that has sent this: imports change settings too
        forward_records(self.main.worker)
        self.settings.adopt()


def serve_boot_message(connection: Connection, control: socket.socket | None) -> None:
    """The main function of a process that the zygote has forked: receive what to run, and run it."""
    try:
        message: BootMessage = BlockingChannel(connection).receive()
        message.environment.adopt()
    except Disconnected:  # the process that requested this one has ended
        return
    _run(message.main, connection, control, message.prepare)


def serve(connection: Connection, main: ProcessMain | bytes) -> None:
    """The main function of a process started by `multiprocessing`; its own is inherited or pickled."""
    prefer_references()
    _run(pickle.loads(main) if isinstance(main, bytes) else main, connection, None, lambda: None)


def _run(main: ProcessMain, connection: Connection, control: socket.socket | None, prepare: Callable[[], None]) -> None:
    current_process().name = main.name
    torch.set_num_threads(1)  # as in torch's workers: processes and their threads have the cores
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a launcher may have blocked SIGTERM
    # Ctrl-C goes to the whole process group; the consumer decides, and closes the connection.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Existing objects are the parent's, or modules. In a forked process a collection would copy each of their pages:
    # once in the first seconds, 165 ms in which no batch is made (170,000 objects after importing torch;
    # benchmarks/drop_in.py).
    gc.freeze()
    try:
        main(connection, control, prepare)
    finally:
        connection.close()
