"""A process group of a loader's own, in which its ranks agree on steps; see docs/design/0012."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import socket
import threading
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import anyio
import torch

from headrace._core.eventloop.waiting import CloseGuard, wait_readable
from headrace._core.text import shorten
from headrace._core.torchcompat.private import default_store
from headrace.errors import CoordinationError, LoaderClosedError, LoaderTimeoutError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

GROUP_TIMEOUT = timedelta(minutes=30)  # torch.distributed's default
ROLL_CALL = timedelta(seconds=1)  # after a failed wait: until the other ranks that have waited have said so
_created: Counter[tuple[int, ...]] = Counter()  # groups of this process, by their ranks


class StepGroup:
    """A process group of gloo of a loader's own, over its data-parallel ranks.

    It is not in torch's list of groups, where a name depends on how many groups each process has made.

    Args:
        parent: the group of these ranks.

    Attributes:
        parent: the group of these ranks.
        rank: of this process.
        size: the number of ranks.
        usable: whether it is open, and no collective has failed.
        epochs: number of epochs begun with it.

    Raises:
        CoordinationError: a rank has not made it.
    """

    def __init__(self, parent: ProcessGroup) -> None:
        self.parent = parent
        self.rank, self.size = parent.rank(), parent.size()
        self.epochs = 0
        ranks = tuple(torch.distributed.get_process_group_ranks(parent))
        digest = hashlib.sha1(repr(ranks).encode(), usedforsecurity=False).hexdigest()
        name = f"headrace/{digest}/{_created[ranks]}"
        _created[ranks] += 1
        self._store: Any = torch.distributed.distributed_c10d.PrefixStore(name, default_store())
        self._store.set(f"begun/{self.rank}", "")
        try:
            gloo = torch.distributed.ProcessGroupGloo(self._store, self.rank, self.size, GROUP_TIMEOUT)
        except RuntimeError as error:
            absent = self.absent("begun")
            message = f"coordinated=True: {_named(absent)} have not begun to iterate over their loader"
            raise CoordinationError(f"{message} ({shorten(str(error))})", ranks=absent) from error
        self._gloo: list[Any] = [gloo]
        self._work: Any = None
        self._values = torch.zeros(0)
        self._timeout: float | None = None
        self._sender, self._receiver = socket.socketpair()
        self._sender.setblocking(False)
        self._receiver.setblocking(False)
        self._guard = CloseGuard(self._wake, self._close_sockets)
        self._pid = os.getpid()

    @property
    def usable(self) -> bool:
        return bool(self._gloo)

    @property
    def pending(self) -> bool:
        """Whether a collective was begun whose result was not taken."""
        return self._work is not None

    def begin(self, values: list[int], timeout: float | None) -> None:
        """Begin a collective: the minimum of each value over all ranks.

        Args:
            values: this rank's.
            timeout: seconds to wait for the other ranks; None for 30 minutes.

        Raises:
            LoaderClosedError: another thread has closed the group.
        """
        options: Any = torch.distributed.AllreduceOptions()
        options.reduceOp = torch.distributed.ReduceOp.MIN
        if timeout is not None:
            options.timeout = timedelta(seconds=timeout)
        self._values, self._timeout = torch.tensor(values, dtype=torch.int64), timeout
        try:
            self._work = self._gloo[0].allreduce([self._values], options)
        except IndexError:
            raise LoaderClosedError from None
        self._work.get_future().add_done_callback(self._on_done)

    def result(self) -> list[int] | None:
        """The result of the collective; None while it is under way.

        Raises:
            RuntimeError: a rank has left, or not answered in time.
        """
        future = self._work.get_future()
        if not future.done():
            return None
        self._work = None
        future.value()
        return cast(list[int], self._values.tolist())

    def wait(self) -> None:
        """Block until there is a result, or the group is closed."""
        with self._guard as entered:
            if entered and self._must_wait():
                wait_readable(self._receiver, timeout=None)

    async def wait_async(self) -> None:
        """As `wait`, on the caller's event loop."""
        with self._guard as entered:
            if entered and self._must_wait():
                await anyio.wait_readable(self._receiver)

    def _must_wait(self) -> bool:
        with contextlib.suppress(BlockingIOError):  # bytes of earlier collectives
            self._receiver.recv(4096)
        return self._work is not None and not self._work.get_future().done()

    def _on_done(self, _: object) -> None:  # on a thread of gloo's
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full of bytes, which wake the consumer as well; or closed
            self._sender.send(b"\0")

    def _close_sockets(self) -> None:
        self._sender.close()
        self._receiver.close()

    def leave(self, error: BaseException) -> None:
        """Close the group, and give the other ranks the error that ended this rank's epoch."""
        with contextlib.suppress(RuntimeError):  # the store's process has ended
            self._store.set("failed", f"{self.rank} {shorten(f'{type(error).__name__}: {error}')}")
        self.close()

    def explain(self, error: Exception, step: tuple[int, int]) -> Exception:
        """The error for the consumer in place of one of gloo's, after which the group is closed.

        Args:
            error: from gloo.
            step: number of the epoch and of the step that this rank has waited for.
        """
        timed_out = "Timed out" in str(error)
        self.close()
        key, absent = f"waited/{step[0]}/{step[1]}", cast(tuple[int, ...], ())
        try:
            self._store.set(f"{key}/{self.rank}", "")
            if not self._store.check(["failed"]):
                absent = self.absent(key)
            if self._store.check(["failed"]):
                rank, _, text = self._store.get("failed").decode().partition(" ")
                message = f"coordinated=True: rank {rank} has ended its epoch with an error: {text}"
                return CoordinationError(message, ranks=(int(rank),))
        except RuntimeError:  # the store's process has ended
            return CoordinationError(f"coordinated=True: the process of another rank has ended ({shorten(str(error))})")
        if timed_out and self._timeout is not None:
            return LoaderTimeoutError(
                self._timeout, f"coordinated=True: step {step[1]}, {_named(absent)} do not answer"
            )
        message = (
            f"coordinated=True: {_named(absent)} did not answer at step {step[1]}. Have all ranks iterate over the "
            f"loader to the same step, or to the end of the epoch ({shorten(str(error))})"
        )
        return CoordinationError(message, ranks=absent or None)

    def absent(self, key: str) -> tuple[int, ...]:
        """The ranks that have not set a key of theirs, after a moment for those that are late."""
        keys = [f"{key}/{rank}" for rank in range(self.size)]
        with contextlib.suppress(RuntimeError):  # timed out
            self._store.wait(keys, ROLL_CALL)
        return tuple(rank for rank, each in enumerate(keys) if not self._store.check([each]))

    def close(self) -> None:
        """Close the connections to the other ranks; thread-safe, idempotent."""
        with contextlib.suppress(IndexError):
            _release([self._gloo.pop()], pending=self.pending, pid=self._pid)
        self._guard.close()


def _release(held: list[Any], *, pending: bool, pid: int) -> None:
    """Drop a group. Its destructor waits for a collective that is under way, which may be for other ranks for long."""
    if pid == os.getpid():
        if not pending:
            held.clear()
            return
        with contextlib.suppress(RuntimeError):  # the interpreter is being shut down, and starts no threads
            threading.Thread(target=held.clear, name="headrace-release-group", daemon=True).start()
            return
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held[0]))  # never destroyed; in a fork its threads do not exist


def _named(ranks: tuple[int, ...]) -> str:
    return f"the ranks {list(ranks)}" if ranks else "other ranks"
