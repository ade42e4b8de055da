"""The child: one numbered worker process, from its first line to its last.

A worker runs a *program*: a callable that takes a request and gives an answer. It is single-threaded, it answers in
order, and it ends when the engine closes the channel.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from headrace.collate import collating_into
from headrace.pool.channel import BlockingChannel, Line
from headrace.pool.packing import pack_error, prefer_references, printed
from headrace.pool.preload import import_modules

__all__ = ["Answer", "Program", "Shipment", "Started", "Surroundings", "Takeover", "serve", "serve_shipment"]


class Program(Protocol):
    """What a worker runs."""

    def start(self, worker: int, workers: int) -> None:
        """Called once, in the worker, before the first request."""

    def __call__(self, request: Any, /) -> Any:
        """Answer one request; what it raises travels back as an error."""


class Takeover(Protocol):
    """What a process runs that is not a worker: it does as it likes with its line."""

    def take_over(self, channel: BlockingChannel, line: Line, control: socket.socket) -> None:
        """Run until the line's other end closes."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A worker's answer to one request: a value, or the error in its place, with the step that failed."""

    value: Any = None
    error: BaseException | None = None
    step: str = "run"
    traceback: str | None = None
    """The error as it would be printed in the worker."""

    @classmethod
    def failed(cls, error: BaseException, step: str = "run") -> Answer:
        """The answer that says so."""
        traceback = printed(error)
        return cls(error=pack_error(error), step=step, traceback=traceback)


@dataclass(frozen=True, slots=True)
class Started:
    """The first thing a worker says: it has lived through the start of its program, and gets to its requests now."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a worker takes over from the process that asked for it, as a forked child would have."""

    path: list[str]
    directory: str
    environment: dict[str, str]

    @classmethod
    def here(cls) -> Surroundings:
        """Those of this process, now."""
        return cls(list(sys.path), os.getcwd(), dict(os.environ))

    def adopt(self) -> None:
        """Make them this process's own."""
        sys.path[:] = self.path
        os.chdir(self.directory)
        os.environ.clear()
        os.environ.update(self.environment)


@dataclass(frozen=True, slots=True)
class Shipment:
    """The first object a worker receives where the program does not come with the fork."""

    surroundings: Surroundings
    modules: tuple[str, ...]
    program: bytes
    worker: int
    workers: int


def serve_shipment(line: Line, control: socket.socket | None) -> None:
    """Receive what to run, then run it: the whole life of a process that the zygote has forked.

    Args:
        line: to whoever asked for the process.
        control: its own way to ask the zygote for processes, if it may.
    """
    channel = BlockingChannel(line)
    try:
        shipment: Shipment = channel.receive()
        shipment.surroundings.adopt()
        import_modules(shipment.modules)
    except EOFError:  # whoever asked for a worker has gone
        return
    if control is None:
        _serve(channel, shipment.program, shipment.worker, shipment.workers)
    else:
        _ignore_interrupts()
        takeover: Takeover = pickle.loads(shipment.program)
        takeover.take_over(channel, line, control)


def serve(line: Line, program: Program | bytes, worker: int, workers: int) -> None:
    """Serve with a program that is already here: inherited by fork, or brought by multiprocessing."""
    prefer_references()
    _serve(BlockingChannel(line), program, worker, workers)


def _serve(channel: BlockingChannel, program: bytes | Program, worker: int, workers: int) -> None:
    _ignore_interrupts()
    torch.set_num_threads(1)
    # What is here already is the parent's, or modules. The collector's look at it would copy every page of it in a
    # forked process: once in the first seconds, 165 ms in which no batch is made (170,000 objects after importing
    # torch; benchmarks/drop_in.py).
    gc.freeze()
    broken: Answer | None = None
    runnable: Program | None = None
    try:
        runnable = pickle.loads(program) if isinstance(program, bytes) else program
        runnable.start(worker, workers)
    except BaseException as error:  # user code: imports of the user's modules, worker_init_fn
        broken = Answer.failed(error, step="start")
    try:
        channel.send(Started())
        while _answer_next(channel, runnable, broken):
            pass
    except (BrokenPipeError, ConnectionResetError):
        return  # the engine has gone while we answered
    finally:
        channel.close()


def _ignore_interrupts() -> None:
    # Ctrl-C goes to the whole process group; the consumer decides, and closes the channel.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _answer_next(channel: BlockingChannel, program: Program | None, broken: Answer | None) -> bool:
    try:
        request = channel.receive()
    except (EOFError, OSError):
        return False  # the engine has gone, or no longer wants us
    except BaseException as error:  # user code: __setstate__ of a sample's class
        answer = Answer.failed(error, step="receive")
    else:
        answer = broken or _run(program, request, channel)
        del request  # its slab goes back with this answer
    _answer(channel, answer)
    return True


def _run(program: Program | None, request: Any, channel: BlockingChannel) -> Answer:
    assert program is not None
    channel.arena.begin()
    try:
        with collating_into(channel.arena):
            return Answer(program(request))
    except BaseException as error:  # user code: SystemExit and KeyboardInterrupt are errors here, see docs/design
        return Answer.failed(error)


def _answer(channel: BlockingChannel, answer: Answer) -> None:
    try:
        channel.send(answer)
    except OSError:
        raise
    except BaseException as error:  # user code: what transform or collate_fn returned cannot be pickled
        channel.send(Answer.failed(error, step="pack"))
