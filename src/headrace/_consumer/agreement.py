"""Agreement of the ranks on the steps of an epoch.

The reasons are in docs/design/0012.
"""

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

from headrace._base.text import shorten
from headrace._eventloop.waiting import CloseGuard, Readable, Waker
from headrace._ranks.rankinfo import RankInfo, has_process_group
from headrace._torchcompat.private import default_store
from headrace.errors import CoordinationError, LoaderClosedError, LoaderTimeoutError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

GROUP_TIMEOUT = timedelta(minutes=30)  # torch.distributed's default
# After a failed wait: time for other waiting ranks to report in the store.
ROLL_CALL = timedelta(seconds=1)
# Proposals of a rank: the rank has ended, or all samples of the next batch were lost. A larger
# proposal is `SKIP` plus a number of steps.
END, SKIP = (0, 1)
_created: Counter[tuple[int, ...]] = Counter()  # groups of this process, by their ranks


def begin_agreement(
    previous: StepGroup | None,
    rank: RankInfo,
    given: ProcessGroup | None,
    timeout: float | None,
) -> StepGroup:
    """Return the agreement for a new epoch.

    Args:
        previous: The group of the epoch before, if any. A group that cannot be used again is
            closed.
        rank: The rank of this process.
        given: The process group of the ranks; None for all ranks.
        timeout: Seconds to wait for other ranks; None for the timeout of the group.
    """
    if not has_process_group():
        raise CoordinationError(
            f"coordinated=True: {rank.source} names {rank.world_size} ranks, but "
            "torch.distributed is not initialized: call "
            "torch.distributed.init_process_group() before iterating over the loader"
        )
    parent: Any = given or torch.distributed.group.WORLD
    # Do not reuse a group with a pending answer: other ranks are at another step, or have left an
    # answer pending too.
    group = previous
    if group is None or not group.gloo or group.pending or group.parent is not parent:
        if group is not None:
            group.close()
        group = StepGroup(parent)  # waits for all ranks
    group.epoch += 1
    group.before += group.made - group.granted
    group.made = group.granted = 0
    group.timeout = timeout
    return group


class StepGroup:
    """The agreement of all ranks on the steps of an epoch.

    The loader has a separate process group of gloo. A step is a call of `next()` with a batch or an
    error of a batch. Each rank proposes `SKIP` plus the number of steps it can make without
    waiting. The least proposal decides for all ranks, and afterwards the ranks agree again. The
    first proposal of `END` ends the epoch on all ranks. If a rank has lost all samples of a batch,
    all ranks skip the step, so the positions of the ranks stay equal. Collectives begin on the
    consumer's thread only.

    The group is not in torch's list of groups: a name there depends on the number of groups made by
    each process.

    Attributes:
        parent: The process group of the ranks.
        gloo: A list with the loader's process group. Empty after `close` or a failed collective.
        epoch: Number of epochs begun with this group.
        before: Number of steps of this rank in earlier epochs of this group.
        made: Number of steps in this epoch, including granted steps.
        granted: Number of steps for all ranks before the next agreement.
        timeout: Seconds to wait for other ranks; None for 30 minutes.
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
        self._store: Any = torch.distributed.distributed_c10d.PrefixStore(
            name, default_store()
        )
        self._store.set(f"begun/{self._rank}", "")
        try:
            gloo = torch.distributed.ProcessGroupGloo(
                self._store, self._rank, self._size, GROUP_TIMEOUT
            )
        except RuntimeError as error:
            absent = self._absent("begun")
            message = f"coordinated=True: {_named(absent)} have not called iter() of their loader"
            raise CoordinationError(
                f"{message} ({shorten(str(error))})", ranks=absent
            ) from error
        self.gloo: list[Any] = [gloo]
        self._work: Any = None
        self._values = torch.zeros(0, device="cpu")
        self._waker = Waker()
        self._guard = CloseGuard(self._waker.wake, self._waker.close)
        self._pid = os.getpid()

    @property
    def pending(self) -> bool:
        """Whether the result of a collective has not been taken yet."""
        return self._work is not None

    @property
    def _position(self) -> list[int]:
        steps = self.before + self.made
        return [self.epoch, -self.epoch, steps, -steps]

    def propose(self, proposal: int) -> None:
        """Begin the search for the least proposal of all ranks.

        Propose `END`, `SKIP`, or `SKIP` plus a number of steps.
        """
        options: Any = torch.distributed.AllreduceOptions()
        options.reduceOp = torch.distributed.ReduceOp.MIN
        if self.timeout is not None:
            options.timeout = timedelta(seconds=self.timeout)
        self._values = torch.tensor(
            [proposal, *self._position], dtype=torch.int64, device="cpu"
        )
        try:
            self._work = self.gloo[0].allreduce([self._values], options)
        except IndexError:
            raise LoaderClosedError from None
        # The callback runs on a thread of gloo.
        self._work.get_future().add_done_callback(lambda _: self._waker.wake())

    def settle(self) -> int | None:
        """Take the answer (the least proposal), and set `granted`.

        Return None while there is no answer.
        """
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
                "coordinated=True: the ranks are not at the same step: this one is in iteration "
                f"{self.epoch} of its loader after {self.before + self.made} steps in all, others "
                f"are in iterations {least[0]} to {-least[1]}, after {least[2]} to {-least[3]} "
                "steps. Let all ranks leave an epoch at the same step."
            )
        self.granted = max(0, settled - SKIP)
        self.made += self.granted
        return int(settled)

    def waits(self) -> Iterator[tuple[Readable, None]]:
        """Yield objects to wait for, like `Session.waits`.

        The wait ends with the answer, or when another thread has closed the group.
        """
        with self._guard as entered:
            if entered:
                self._waker.drain()
                if self._work is not None and not self._work.get_future().done():
                    yield self._waker.source, None

    def leave(self, error: BaseException) -> None:
        """Close the group after an error.

        The other ranks receive the error.
        """
        with suppress(RuntimeError):  # the store's process has ended
            self._store.set(
                "failed", f"{self._rank} {shorten(f'{type(error).__name__}: {error}')}"
            )
        self.close()

    def _explained(self, error: Exception) -> Exception:
        """Return the consumer's error for an error of gloo.

        The group is closed.
        """
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
            waiting_for = (
                f"coordinated=True: step {self.made}, {_named(absent)} do not answer"
            )
            return LoaderTimeoutError(seconds=self.timeout, waiting_for=waiting_for)
        message = (
            f"coordinated=True: {_named(absent)} did not answer at step {self.made}. Have all "
            "ranks iterate over the loader to the same step, or to the end of the epoch "
            f"({shorten(str(error))})"
        )
        return CoordinationError(message, ranks=absent or None)

    def _absent(self, key: str) -> tuple[int, ...]:
        """Return the ranks without a key in the store.

        Late ranks have a short time to set the key.
        """
        keys = [f"{key}/{rank}" for rank in range(self._size)]
        with suppress(RuntimeError):  # timed out
            self._store.wait(keys, ROLL_CALL)
        return tuple(
            rank for rank, each in enumerate(keys) if not self._store.check([each])
        )

    def close(self) -> None:
        """Close the connections to the other ranks.

        Thread-safe. Further calls do nothing. The destructor of gloo's group waits for a running
        collective, and other ranks may hold it up for long. In this case another thread runs the
        destructor.
        """
        with suppress(IndexError):
            held = [self.gloo.pop()]
            if self._pid != os.getpid():
                # Never destroy the group in a fork: the threads of the group do not exist here.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(held[0]))
            elif self.pending:
                try:
                    threading.Thread(
                        target=held.clear, name="headrace-release-group", daemon=True
                    ).start()
                except RuntimeError:  # the interpreter shuts down, and starts no threads
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held[0]))
        self._guard.close()


def _named(ranks: tuple[int, ...]) -> str:
    return f"the ranks {list(ranks)}" if ranks else "other ranks"
