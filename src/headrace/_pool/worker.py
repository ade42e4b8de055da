"""The main functions of a worker process, run in the child.

A worker runs a *task*: a callable from a request to an answer. A worker has one thread, answers in
order, and ends when the engine closes the channel.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import sys
import types
from collections.abc import Callable
from multiprocessing import current_process
from typing import Any, NamedTuple, Protocol

import torch

from headrace._pool.settings import Settings
from headrace._transport.channel import BlockingChannel, Connection, Disconnected
from headrace._transport.log_records import forward_records
from headrace._transport.pickling import (
    Message,
    dump_message,
    format_error,
    not_picklable,
    picklable_error,
    prefer_references,
)
from headrace._transport.preload import import_modules
from headrace._transport.shared_pickle import SharedPickle
from headrace.collate import collate_into
from headrace.errors import NotPicklableError


class WorkerTask(Protocol):
    def start(self, worker: int, workers: int) -> None:
        """Prepare in the worker, before the first request; called once."""

    def __call__(self, request: Any, /) -> Message:
        """Return the pickled answer to a request. An exception is sent back to the engine."""


ProcessMain = Callable[
    [BlockingChannel, Connection, socket.socket, Callable[[], None]], None
]
"""The main function of a process other than a worker.

Args: a channel on the connection to the requesting process; the connection; a control socket for
requests to the zygote; a function to call before unpickling user code, which may raise."""


class Failed(NamedTuple):
    """An error in place of a task's answer."""

    error: BaseException
    traceback: str | None = None
    """The traceback, formatted by the worker."""
    starting: bool = False
    """Whether the task could not be started."""

    @classmethod
    def caught(cls, error: BaseException, *, starting: bool = False) -> Failed:
        traceback = format_error(error)
        return cls(picklable_error(error), traceback, starting)


class WorkerStarted:
    """The first message of a worker: the task has started."""


class ProcessEnvironment(NamedTuple):
    """The requesting process's environment, for forks of the zygote."""

    path: list[str]
    arguments: list[str]
    directory: str
    environment: dict[str, str]
    # The `__file__` of the main module; `multiprocessing` runs the file in spawned processes.
    script: str | None

    @classmethod
    def here(cls) -> ProcessEnvironment:
        script = getattr(sys.modules["__main__"], "__file__", None)
        return cls(list(sys.path), list(sys.argv), os.getcwd(), dict(os.environ), script)

    def adopt(self) -> None:
        main = sys.modules["__main__"] = sys.modules["__mp_main__"] = types.ModuleType(
            "__main__"
        )
        if self.script is not None:
            main.__file__ = self.script
        sys.path[:] = self.path
        sys.argv[:] = self.arguments
        os.chdir(self.directory)
        os.environ.clear()
        os.environ.update(self.environment)


class BootMessage(NamedTuple):
    """The first message to a process forked by the zygote."""

    environment: ProcessEnvironment
    settings: Settings
    modules: tuple[str, ...]
    task: SharedPickle | ProcessMain
    worker: int | None
    """The worker's number; None for the loader's process."""
    workers: int

    def prepare(self) -> None:
        """Import modules and apply settings, before the task is unpickled."""
        # Imports come first, as in the sending process: imports change settings too.
        import_modules(self.modules)
        forward_records(self.worker)
        self.settings.adopt()

    def load_task(self) -> WorkerTask:
        assert isinstance(self.task, SharedPickle)
        self.prepare()
        task: WorkerTask = self.task.loads()
        return task


class Request(NamedTuple):
    """A request to a worker, sent as a plain tuple.

    Attributes:
        payload: the argument of the task.
        number: the number of the task.
        task: the task, if the worker does not have the task yet.
        in_use: with `task`, the numbers of all tasks still in use. Overlapping epochs use several
            tasks.
    """

    payload: object
    number: int
    task: SharedPickle | None = None
    in_use: frozenset[int] = frozenset()


INHERITED = 0  # the number of an inherited task


def unpicklable_sample(reason: BaseException) -> NotPicklableError:
    """Return the error for a request that cannot be pickled or unpickled."""
    remedy = (
        "The result of aget is sent to a worker process: return bytes or arrays, or use "
        "num_workers=0."
    )
    return not_picklable("a fetched sample", reason, remedy)


def serve_boot_message(connection: Connection, control: socket.socket) -> None:
    """Run a process forked by the zygote, as the first message says."""
    channel = BlockingChannel(connection)
    try:
        message: BootMessage = channel.receive()
        message.environment.adopt()
    except Disconnected:  # the process that requested this worker has ended
        return
    if isinstance(message.task, SharedPickle):
        assert message.worker is not None
        control.close()
        worker = Worker(channel, message.worker, message.workers)
        worker.begin(message.task.number, message.load_task)
        del message  # then only the loaded objects keep the shared memory alive
        worker.serve()
    else:
        _begin_process("headrace-loader")
        message.task(channel, connection, control, message.prepare)


def serve(
    connection: Connection, task: WorkerTask | bytes, number: int, workers: int
) -> None:
    """Run a worker started by `multiprocessing`.

    `task` is inherited, or pickled.
    """
    prefer_references()
    worker = Worker(BlockingChannel(connection), number, workers)
    worker.begin(
        INHERITED, lambda: pickle.loads(task) if isinstance(task, bytes) else task
    )
    worker.serve()


def _begin_process(name: str) -> None:
    current_process().name = name
    # As in torch: the processes and their threads share the cores.
    torch.set_num_threads(1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a launcher may have blocked SIGTERM
    # Ctrl-C goes to the whole process group. The consumer decides, and closes the channel.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class Worker:
    """The worker of this process, with tasks by number."""

    def __init__(self, channel: BlockingChannel, number: int, workers: int) -> None:
        self._channel = channel
        self._position = number, workers
        collate_into(channel.arena.empty)
        self._tasks: dict[int, WorkerTask | Failed] = {}

    def begin(self, number: int, make: Callable[[], WorkerTask]) -> None:
        """Set up this process as a worker, and add the first task."""
        _begin_process(f"headrace-worker-{self._position[0]}")
        # Existing objects are modules, or come from the parent. In a forked process, a collection
        # would copy each page of the objects. The first collection took 165 ms, without a batch in
        # this time (170,000 objects after importing torch; benchmarks/drop_in.py).
        gc.freeze()
        self.add(number, make)

    def add(self, number: int, make: Callable[[], WorkerTask]) -> None:
        """Make and start a task.

        If this fails, each request for the task gets the error as answer.
        """
        try:
            task = make()
            task.start(*self._position)
        except BaseException as error:
            # User code: imports of the user's modules, worker_init_fn.
            self._tasks[number] = Failed.caught(error, starting=True)
        else:
            self._tasks[number] = task

    def serve(self) -> None:
        try:
            self._channel.send(WorkerStarted())
            while self.answer_next():
                pass
        except (BrokenPipeError, ConnectionResetError):
            return  # the engine has ended
        finally:
            self._channel.close()

    def answer_next(self) -> bool:
        """Wait for a request and answer.

        Return False at the end of the channel.
        """
        try:
            request = Request(*self._channel.receive())
        except Disconnected:
            return False
        except BaseException as error:  # user code: __setstate__ of a sample's class
            self._channel.send(Failed.caught(unpicklable_sample(error)))
            return True
        answer = self._answer(request)
        del request  # so that the slab of the request is returned with this answer
        self._channel.send_message(answer)
        return True

    def _answer(self, request: Request) -> Message:
        number, shipped = request.number, request.task
        if shipped is not None:
            self._tasks = {
                each: task for each, task in self._tasks.items() if each in request.in_use
            }
            if number not in self._tasks:
                self.add(number, shipped.loads)
        task = self._tasks[number]
        if isinstance(task, Failed):
            return dump_message(task)
        self._channel.arena.begin()
        try:
            return task(request.payload)
        except BaseException as error:
            # user code: SystemExit and KeyboardInterrupt are errors here, see docs/design
            return dump_message(Failed.caught(error))
