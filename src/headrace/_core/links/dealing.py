"""Which engine makes which batch: bookkeeping of the plans of several engines."""

from __future__ import annotations

import collections
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from headrace._core.batches import BatchPlan, HostBatch
from headrace._core.failure import Stage

_ANY = 1 << 20  # plans that an engine can be given at once


@dataclass(slots=True)
class _Share:
    # those that it was given and has not made
    plans: dict[int, BatchPlan] = field(default_factory=dict)
    # How many these may be. An engine that has died begins again with one, and doubles them with
    # each batch, so that a batch that ends engines is found.
    room: int = _ANY
    made: bool = False  # whether its process has made a batch
    deaths: int = 0  # of its last processes, which have made none


class Dealer:
    """Deals plans to the engine that has the fewest, and takes back those of an engine that has died.

    Batches are put in order if `in_order`. Where an engine joins the requests of plans that follow
    each other, plans that are sent together go to engines in few parts (`chunked`).
    """

    def __init__(
        self, engines: int, *, first: int = 0, in_order: bool = False, chunked: bool = False
    ) -> None:
        # that wait for an engine, ascending; new ones are appended
        self.waiting: deque[BatchPlan] = deque()
        self.shares = [_Share() for _ in range(engines)]
        self._in_order = in_order
        self._chunked = chunked
        self.next = first  # number of the next batch in order
        self._made: dict[int, HostBatch] = {}  # batches that wait for earlier batches
        self._lost_alone: collections.Counter[int] = collections.Counter()

    def deal(self, engines: Collection[int]) -> dict[int, list[BatchPlan]]:
        """Give waiting plans to those of `engines` that can take plans.

        In order, a batch that may end engines is dealt again when the batches before it have
        arrived. So these are delivered, whatever happens.

        Returns:
            For each engine that gets plans, the plans by ascending numbers.
        """
        size = -(-len(self.waiting) // len(engines)) if self._chunked and self.waiting else 1
        left: deque[BatchPlan] = deque()
        dealt: dict[int, list[BatchPlan]] = {}
        engine = -1
        for position, plan in enumerate(self.waiting):
            free = [
                engine
                for engine in engines
                if len(self.shares[engine].plans) < self.shares[engine].room
            ]
            if not free or (plan.number in self._lost_alone and self._makes_earlier(plan.number)):
                left.append(plan)
                continue
            if not position % size or engine not in free:
                engine = min(free, key=lambda engine: len(self.shares[engine].plans))
            self.shares[engine].plans[plan.number] = plan
            dealt.setdefault(engine, []).append(plan)
        self.waiting = left
        return dealt

    def receive(self, engine: int, host: HostBatch) -> None:
        """Count a batch that an engine has made."""
        share, number = self.shares[engine], host.plan.number
        share.made, share.room = True, min(2 * share.room, _ANY)
        self._lost_alone.pop(number, None)
        # Python handles a signal only at a call. So Ctrl-C finds both, or none.
        self._made[number] = host
        del share.plans[number]

    def take_made(self, messages: deque[Any]) -> None:
        """Move the batches that can be delivered to `messages`. Ctrl-C may repeat a batch."""
        while self._made:
            if not self._in_order:
                self.next = next(iter(self._made))
            if self.next not in self._made:
                return
            messages.append(self._made[self.next])
            del self._made[self.next]
            self.next += 1

    def give_up(self, number: int, error: Exception) -> None:
        """Let a waiting batch, which ends engines, fail."""
        plan = next(plan for plan in self.waiting if plan.number == number)
        self.waiting.remove(plan)
        del self._lost_alone[number]
        self._made[number] = HostBatch.failed(plan, error, Stage.FETCH)

    def engine_of(self, number: int) -> int | None:
        """The engine that has a plan; None if it waits for one, or its batch has been made."""
        return next(
            (engine for engine, share in enumerate(self.shares) if number in share.plans), None
        )

    def _makes_earlier(self, number: int) -> bool:
        """Whether, in order, an engine makes a batch before this one."""
        return self._in_order and any(
            other < number for share in self.shares for other in share.plans
        )

    def take_back(self, engines: Collection[int]) -> tuple[int, int]:
        """Let the plans of engines that have died wait for others.

        Returns the batch with which most engines have died that made nothing else, and their
        number.
        """
        lost = [self.shares[engine] for engine in engines]
        plans = [*self.waiting, *(plan for share in lost for plan in share.plans.values())]
        self.waiting = deque(sorted(plans))
        for engine, share in zip(engines, lost, strict=True):
            if len(share.plans) == 1:
                self._lost_alone.update([*share.plans])
            self.shares[engine] = _Share(room=1, deaths=0 if share.made else share.deaths + 1)
        return next(iter(self._lost_alone.most_common(1)), (0, 0))
