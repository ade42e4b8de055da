"""Agreement of the ranks on the number of steps of an epoch; docs/design/0012 has the reasons."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch.distributed

from headrace._core.consumer.step_group import StepGroup
from headrace._core.ranks.rankinfo import RankInfo
from headrace.errors import CoordinationError

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

        Args:
            rank: of this process.
            group: whose ranks agree; None for all.
            timeout: seconds to wait for the other ranks; 0 for the group's own time-out.

        Raises:
            CoordinationError: there is no process group, or a rank does not begin.
        """
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            raise CoordinationError(
                f"coordinated=True: {rank.source} names {rank.world_size} ranks, but torch.distributed is not "
                f"initialized: call torch.distributed.init_process_group() before iterating over the loader"
            )
        parent: Any = group or torch.distributed.group.WORLD
        agreement = self._begin(parent, timeout or None)
        try:
            yield agreement
        except Exception as error:  # which the other ranks would wait for
            agreement.fail(error)
            raise

    def _begin(self, parent: ProcessGroup, timeout: float | None) -> Agreement:
        """Begin the agreement of an epoch; waits for all ranks where there is no group yet.

        Raises:
            CoordinationError: a rank does not begin.
        """
        group = self._group[0] if self._group else None
        # One whose answer was not waited for is not used again: the other ranks are at another step, or did the same.
        if group is None or not group.usable or group.pending or group.parent is not parent:
            self.close()
            self._group.append(StepGroup(parent))
        group = self._group[0]
        group.epochs += 1
        return Agreement(group, group.epochs, timeout)

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
        epoch: number of the epoch among those begun with the group.
        timeout: seconds to wait for the other ranks; None for 30 minutes.

    Attributes:
        granted: number of steps that all ranks make before they agree again.
    """

    def __init__(self, group: StepGroup, epoch: int, timeout: float | None) -> None:
        self._group = group
        self._epoch = epoch
        self._timeout = timeout
        self._made = 0  # steps
        self.granted = 0

    @property
    def pending(self) -> bool:
        """Whether this rank waits for the others."""
        return self._group.pending

    def propose(self, steps: int) -> None:
        """Propose that all ranks make so many steps; 0 ends the epoch."""
        if self._group.epochs != self._epoch:
            raise CoordinationError(
                "coordinated=True: a later epoch of this loader has begun; a coordinated loader has one iterator"
            )
        self._group.begin([steps, self._epoch, -self._epoch, self._made, -self._made], self._timeout)

    def settle(self) -> bool:
        """Take the answer, if it has arrived; `granted` is 0 if the epoch has ended.

        Raises:
            CoordinationError: a rank has failed or left, or is at another step.
            LoaderTimeoutError: a rank did not answer within the loader's `timeout`.
        """
        try:
            result = self._group.result()
        except RuntimeError as error:
            raise self._group.explain(error, (self._epoch, self._made)) from error
        if result is None:
            return False
        steps, *position = result
        if position != [self._epoch, -self._epoch, self._made, -self._made]:
            self._group.close()
            least, most = (position[0], position[2]), (-position[1], -position[3])
            raise CoordinationError(
                f"coordinated=True: the ranks are not at the same step: this one is in iteration {self._epoch} of its "
                f"loader after {self._made} steps, others are in iterations {least[0]} to {most[0]}, after {least[1]} "
                f"to {most[1]} steps. Let all ranks leave an epoch at the same step."
            )
        self.granted = steps
        self._made += steps
        return True

    def wait(self) -> None:
        """Block until `settle` has an answer."""
        self._group.wait()

    async def wait_async(self) -> None:
        """As `wait`, on the caller's event loop."""
        await self._group.wait_async()

    def fail(self, error: BaseException) -> None:
        """End the epoch of all ranks, which raise `CoordinationError`."""
        self._group.leave(error)
