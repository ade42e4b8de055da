"""Other processes of a test: each runs a function of `tests.faults.programs.caches` with a pipe to the test."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any


class Peer:
    """A process; a context manager, whose exit kills it.

    Args:
        program: the function it runs, with a pipe as its first argument.
        *arguments: its other arguments.

    Attributes:
        process: the process.
    """

    def __init__(self, program: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.faults.programs.caches"])  # imports torch once
        self._wire, theirs = context.Pipe()
        self.process = context.Process(target=program, args=(theirs, *arguments))
        self.process.start()
        theirs.close()

    def receive(self) -> Any:
        """The next object that it sends."""
        return self._wire.recv()

    def start(self) -> None:
        """Let it continue after it has sent "ready"."""
        self._wire.send("go")

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def join(self) -> None:
        """Wait until it ends, which must be without an error."""
        self.process.join()
        assert self.process.exitcode == 0

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()
        self._wire.close()
        self.process.close()


@contextlib.contextmanager
def started_together(program: Callable[..., None], count: int, *arguments: Any) -> Iterator[list[Peer]]:
    """Several processes that are all ready before each continues."""
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(Peer(program, *arguments)) for _ in range(count)]
        for peer in peers:
            assert peer.receive() == "ready"
        yield peers


def results(peers: list[Peer]) -> list[Any]:
    """Let peers continue; returns what each sends, after all have ended."""
    for peer in peers:
        peer.start()
    received = [peer.receive() for peer in peers]
    for peer in peers:
        peer.join()
    return received
