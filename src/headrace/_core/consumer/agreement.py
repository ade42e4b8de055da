"""Agreement of the ranks on the number of steps of an epoch; docs/design/0012 has the reasons."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import socket
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import anyio
import torch
import torch.distributed

from headrace._core.eventloop.waiting import CloseGuard, wait_readable
from headrace._core.ranks.rankinfo import RankInfo
from headrace._core.text import shorten
from headrace._core.torchcompat.private import default_store
from headrace.errors import CoordinationError, LoaderClosedError, LoaderTimeoutError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Coordinator:
    """Begins the agreements of one loader, and owns its process group."""

    def __init__(self) -> None:
        self._group: list[StepGroup] = []
        weakref.finalize(self, _close_all, self._group)

    @contextlib.contextmanager
    def agreement(self, rank: RankInfo, group: ProcessGroup | None, timeout: float) -> Iterator[Agreement]:
        """The agreement of an epoch that begins inside the block, of which the other ranks are given the error.

        A `group` of None is that of all ranks, a `timeout` of 0 the group's own.

        Raises:
            CoordinationError: there is no process group, or a rank does not begin.
        """
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            raise CoordinationError(
                f"coordinated=True: {rank.source} names {rank.world_size} ranks, but torch.distributed is not "
                f"initialized: call torch.distributed.init_process_group() before iterating over the loader"
            )
        parent: Any = group or torch.distributed.group.WORLD
        steps = self._group[0] if self._group else None
        # One whose answer was not waited for is not used again: the other ranks are at another step, or did the same.
        if steps is None or not steps.gloo or steps.pending or steps.parent is not parent:
            self.close()
            steps = StepGroup(parent)  # waits for all ranks
            self._group.append(steps)
        steps.epochs += 1
        try:
            yield Agreement(steps, timeout or None)
        except Exception as error:  # which the other ranks would wait for
            steps.leave(error)
            raise

    def close(self) -> None:
        """Close the group; the next epoch makes another one."""
        _close_all(self._group)


def _close_all(groups: list[StepGroup]) -> None:
    while groups:
        groups.pop().close()


class Agreement:
    """The agreement of all ranks on the steps of one epoch.

    A step is a call of `next()` that returns a batch or raises its error. Each rank proposes how many it can make
    without waiting; all make the smallest number of these, and then agree again. The first that can make none ends the
    epoch of all. Collectives are begun on the consumer's thread only.

    Args:
        group: the ranks; owned by the `Coordinator`.
        timeout: seconds to wait for the other ranks; None for 30 minutes.

    Attributes:
        granted: number of steps that all ranks make before they agree again.
    """

    def __init__(self, group: StepGroup, timeout: float | None) -> None:
        self.group = group
        self._epoch = group.epochs
        self._timeout = timeout
        self._made = 0  # steps
        self.granted = 0

    def propose(self, steps: int) -> None:
        """Propose that all ranks make so many steps; 0 ends the epoch."""
        if self.group.epochs != self._epoch:
            raise CoordinationError(
                "coordinated=True: a later epoch of this loader has begun; a coordinated loader has one iterator"
            )
        self.group.begin([steps, self._epoch, -self._epoch, self._made, -self._made], self._timeout)

    def settle(self) -> bool:
        """Take the answer, if it has arrived; `granted` is 0 if the epoch has ended.

        Raises:
            CoordinationError: a rank has failed or left, or is at another step.
            LoaderTimeoutError: a rank did not answer within the loader's `timeout`.
        """
        try:
            result = self.group.result()
        except RuntimeError as error:
            raise self.group.explain(error, (self._epoch, self._made)) from error
        if result is None:
            return False
        steps, *position = result
        if position != [self._epoch, -self._epoch, self._made, -self._made]:
            self.group.close()
            least, most = (position[0], position[2]), (-position[1], -position[3])
            raise CoordinationError(
                f"coordinated=True: the ranks are not at the same step: this one is in iteration {self._epoch} of its "
                f"loader after {self._made} steps, others are in iterations {least[0]} to {most[0]}, after {least[1]} "
                f"to {most[1]} steps. Let all ranks leave an epoch at the same step."
            )
        self.granted = steps
        self._made += steps
        return True


GROUP_TIMEOUT = timedelta(minutes=30)  # torch.distributed's default
ROLL_CALL = timedelta(seconds=1)  # after a failed wait: until the other ranks that have waited have said so
_created: Counter[tuple[int, ...]] = Counter()  # groups of this process, by their ranks


class StepGroup:
    """A process group of gloo of a loader's own, over its data-parallel ranks.

    It is not in torch's list of groups, where a name depends on how many groups each process has made.

    Attributes:
        parent: the group of these ranks.
        rank: of this process.
        size: the number of ranks.
        gloo: it, while it is open, and no collective has failed.
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
        self.gloo: list[Any] = [gloo]
        self._work: Any = None
        self._values = torch.zeros(0)
        self._timeout: float | None = None
        self._sender, self._receiver = socket.socketpair()
        self._sender.setblocking(False)
        self._receiver.setblocking(False)
        self._guard = CloseGuard(self._wake, self._close_sockets)
        self._pid = os.getpid()

    @property
    def pending(self) -> bool:
        """Whether a collective was begun whose result was not taken."""
        return self._work is not None

    def begin(self, values: list[int], timeout: float | None) -> None:
        """Begin a collective: the minimum of each value over all ranks.

        Raises:
            LoaderClosedError: another thread has closed the group.
        """
        options: Any = torch.distributed.AllreduceOptions()
        options.reduceOp = torch.distributed.ReduceOp.MIN
        if timeout is not None:
            options.timeout = timedelta(seconds=timeout)
        self._values, self._timeout = torch.tensor(values, dtype=torch.int64), timeout
        try:
            self._work = self.gloo[0].allreduce([self._values], options)
        except IndexError:
            raise LoaderClosedError from None
        self._work.get_future().add_done_callback(lambda _: self._wake())  # on a thread of gloo's

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
        """Block until there is a result, or another thread has closed the group."""
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
        """The error for the consumer in place of one of gloo's, at a `step` of an epoch; the group is closed then."""
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
                seconds=self._timeout, waiting_for=f"coordinated=True: step {step[1]}, {_named(absent)} do not answer"
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
            _release([self.gloo.pop()], pending=self.pending, pid=self._pid)
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
