"""Other processes of a test: each runs a function of `tests.faults.programs.caches` with a pipe to the test."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from tests.forks import Forks


def _run(
    program: Callable[..., None], arguments: tuple[Any, ...], descriptor: int
) -> None:
    with Connection(descriptor) as wire:
        program(wire, *arguments)


class Peer:
    """A process; a context manager, whose exit kills it.

    Args:
        forks: its parent.
        program: the function it runs, with a pipe as its first argument.
        *arguments: its other arguments.
    """

    def __init__(
        self, forks: Forks, program: Callable[..., None], *arguments: Any
    ) -> None:
        self._wire, theirs = multiprocessing.Pipe()
        with theirs:
            run = functools.partial(_run, program, arguments)
            self._process = forks.fork(
                run, stdout=1, stderr=2, descriptors=[theirs.fileno()], OWN_ZYGOTE="1"
            )
        self.receive = self._wire.recv
        self.wait = self._process.wait

    def kill(self) -> None:
        """Kill the process by SIGKILL."""
        self._process.send_signal(signal.SIGKILL)

    def start(self) -> None:
        """Let it continue after it has sent "ready"."""
        self._wire.send("go")

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.kill()
        self.wait()
        self._wire.close()


@contextlib.contextmanager
def started_together(
    forks: Forks, program: Callable[..., None], count: int, *arguments: Any
) -> Iterator[list[Peer]]:
    """Several processes that are all ready before each continues."""
    with contextlib.ExitStack() as stack:
        peers = [
            stack.enter_context(Peer(forks, program, *arguments)) for _ in range(count)
        ]
        for peer in peers:
            assert peer.receive() == "ready"
        yield peers


def results(peers: list[Peer]) -> list[Any]:
    """Let peers continue; returns what each sends, after all have ended without an error."""
    for peer in peers:
        peer.start()
    received = [peer.receive() for peer in peers]
    assert not any(peer.wait() for peer in peers)
    return received
