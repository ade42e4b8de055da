"""Agreement of the ranks on the number of steps of an epoch; docs/design/0012 has the reasons."""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed

from headrace._core.eventloop.waiting import CloseGuard, Readable, Waker
from headrace._core.ranks.rankinfo import RankInfo
from headrace._core.text import shorten
from headrace._core.torchcompat.private import default_store
from headrace.errors import CoordinationError, LoaderClosedError, LoaderTimeoutError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

GROUP_TIMEOUT = timedelta(minutes=30)  # torch.distributed's default
# after a failed wait: until the other ranks that have waited have said so
ROLL_CALL = timedelta(seconds=1)
# proposals of a rank that has ended, or whose next batch lost all its samples; more are steps
END, SKIP = (0, 1)
_created: Counter[tuple[int, ...]] = Counter()  # groups of this process, by their ranks


def begin_agreement(
    groups: list[StepGroup], rank: RankInfo, given: ProcessGroup | None, timeout: float | None
) -> StepGroup:
    """The agreement of an epoch that begins: by the group of the epoch before, in `groups`, or by a new one there.

    A `given` group of None is that of all ranks. `timeout` is in seconds; None for the group's own.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise CoordinationError(
            f"coordinated=True: {rank.source} names {rank.world_size} ranks, but torch.distributed is not "
            f"initialized: call torch.distributed.init_process_group() before iterating over the loader"
        )
    parent: Any = given or torch.distributed.group.WORLD
    # One whose answer was not waited for is not used again: the other ranks are at another step, or
    # did the same.
    if not groups or not groups[0].gloo or groups[0].pending or groups[0].parent is not parent:
        close_all(groups)
        groups.append(StepGroup(parent))  # waits for all ranks
    (group,) = groups
    group.epoch += 1
    group.before += group.made - group.granted
    group.made = group.granted = 0
    group.timeout = timeout
    return group


def close_all(groups: list[StepGroup]) -> None:
    """Close a loader's group, if it has one; the next epoch makes another one."""
    while groups:
        groups.pop().close()


class StepGroup:
    """The agreement of all ranks on the steps of an epoch, by a process group of gloo of the loader's own.

    A step is a call of `next()` that returns a batch or raises its error. Each rank proposes how
    many steps it can make without waiting, plus `SKIP`; the least proposal decides for all ranks,
    which then agree again. The first rank that proposes `END` ends the epoch of all ranks. If a
    rank lost all samples of a batch, all ranks skip that step, so that their positions stay equal.
    Collectives are begun on the consumer's thread only.

    The group is not in torch's list, where a name depends on how many groups each process has made.

    Attributes:
        parent: the group of these ranks.
        gloo: it, while it is open, and no collective has failed.
        epoch: the number of epochs begun with it.
        before: steps that this rank has made in earlier ones.
        made: steps of this epoch, `granted` ones among them.
        granted: steps that all ranks make before they agree again.
        timeout: seconds to wait for the other ranks; None for 30 minutes.
    """

    def __init__(self, parent: ProcessGroup) -> None:
        self.parent = parent
        self._rank, self._size = parent.rank(), parent.size()
        self.epoch = self.before = self.made = self.granted = 0
        self.timeout: float | None = None
        ranks = tuple(torch.distributed.get_process_group_ranks(parent))
        digest = hashlib.sha1(repr(ranks).encode(), usedforsecurity=False).hexdigest()
        name = f"headrace/{digest}/{_created[ranks]}"
        _created[ranks] += 1
        self._store: Any = torch.distributed.distributed_c10d.PrefixStore(name, default_store())
        self._store.set(f"begun/{self._rank}", "")
        try:
            gloo = torch.distributed.ProcessGroupGloo(
                self._store, self._rank, self._size, GROUP_TIMEOUT
            )
        except RuntimeError as error:
            absent = self._absent("begun")
            message = (
                f"coordinated=True: {_named(absent)} have not begun to iterate over their loader"
            )
            raise CoordinationError(f"{message} ({shorten(str(error))})", ranks=absent) from error
        self.gloo: list[Any] = [gloo]
        self._work: Any = None
        self._values = torch.zeros(0, device="cpu")
        self._waker = Waker()
        self._guard = CloseGuard(self._waker.wake, self._waker.close)
        self._pid = os.getpid()

    @property
    def pending(self) -> bool:
        """Whether a collective was begun whose result was not taken."""
        return self._work is not None

    @property
    def _position(self) -> list[int]:
        steps = self.before + self.made
        return [self.epoch, -self.epoch, steps, -steps]

    def propose(self, proposal: int) -> None:
        """Propose `END`, `SKIP`, or `SKIP` and a number of steps: begin to find the least value of all ranks."""
        options: Any = torch.distributed.AllreduceOptions()
        options.reduceOp = torch.distributed.ReduceOp.MIN
        if self.timeout is not None:
            options.timeout = timedelta(seconds=self.timeout)
        self._values = torch.tensor([proposal, *self._position], dtype=torch.int64, device="cpu")
        try:
            self._work = self.gloo[0].allreduce([self._values], options)
        except IndexError:
            raise LoaderClosedError from None
        self._work.get_future().add_done_callback(
            lambda _: self._waker.wake()
        )  # on a thread of gloo's

    def settle(self) -> int | None:
        """Take the answer, the least proposal, and set `granted`; None while there is no answer."""
        future = self._work.get_future()
        if not future.done():
            return None
        self._work = None
        try:
            future.value()
        except RuntimeError as error:
            raise self._explained(error) from error
        settled, *least = self._values.tolist()
        if least != self._position:
            self.close()
            raise CoordinationError(
                f"coordinated=True: the ranks are not at the same step: this one is in iteration {self.epoch} of its "
                f"loader after {self.before + self.made} steps in all, others are in iterations {least[0]} to "
                f"{-least[1]}, after {least[2]} to {-least[3]} steps. Let all ranks leave an epoch at the same step."
            )
        self.granted = max(0, settled - SKIP)
        self.made += self.granted
        return int(settled)

    def waits(self) -> Iterator[tuple[Readable, None]]:
        """As `Session.waits`, until there is an answer, or another thread has closed the group."""
        with self._guard as entered:
            if entered:
                self._waker.drain()
                if self._work is not None and not self._work.get_future().done():
                    yield self._waker.source, None

    def leave(self, error: BaseException) -> None:
        """Close the group, and give the other ranks the error that ended this rank's epoch."""
        with suppress(RuntimeError):  # the store's process has ended
            self._store.set("failed", f"{self._rank} {shorten(f'{type(error).__name__}: {error}')}")
        self.close()

    def _explained(self, error: Exception) -> Exception:
        """The error for the consumer in place of one of gloo's; the group is closed then."""
        self.close()
        key, absent = f"waited/{self.epoch}/{self.made}", cast(tuple[int, ...], ())
        try:
            self._store.set(f"{key}/{self._rank}", "")
            if not self._store.check(["failed"]):
                absent = self._absent(key)
            if self._store.check(["failed"]):
                rank, _, text = self._store.get("failed").decode().partition(" ")
                message = f"coordinated=True: rank {rank} has ended its epoch with an error: {text}"
                return CoordinationError(message, ranks=(int(rank),))
        except RuntimeError:  # the store's process has ended
            return CoordinationError(
                f"coordinated=True: the process of another rank has ended ({shorten(str(error))})"
            )
        if "Timed out" in str(error) and self.timeout is not None:
            waiting_for = f"coordinated=True: step {self.made}, {_named(absent)} do not answer"
            return LoaderTimeoutError(seconds=self.timeout, waiting_for=waiting_for)
        message = (
            f"coordinated=True: {_named(absent)} did not answer at step {self.made}. Have all ranks iterate over the "
            f"loader to the same step, or to the end of the epoch ({shorten(str(error))})"
        )
        return CoordinationError(message, ranks=absent or None)

    def _absent(self, key: str) -> tuple[int, ...]:
        """The ranks that have not set a key of theirs, after a moment for those that are late."""
        keys = [f"{key}/{rank}" for rank in range(self._size)]
        with suppress(RuntimeError):  # timed out
            self._store.wait(keys, ROLL_CALL)
        return tuple(rank for rank, each in enumerate(keys) if not self._store.check([each]))

    def close(self) -> None:
        """Close the connections to the other ranks; thread-safe, idempotent.

        The destructor of gloo's group waits for a collective that is under way, which may be for
        other ranks for long.
        """
        with suppress(IndexError):
            held = [self.gloo.pop()]
            if self._pid != os.getpid():
                # never destroyed: its threads do not exist here
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(held[0]))
            elif self.pending:
                try:
                    threading.Thread(
                        target=held.clear, name="headrace-release-group", daemon=True
                    ).start()
                except RuntimeError:  # the interpreter is being shut down, and starts no threads
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held[0]))
        self._guard.close()


def _named(ranks: tuple[int, ...]) -> str:
    return f"the ranks {list(ranks)}" if ranks else "other ranks"
