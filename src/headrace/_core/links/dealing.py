"""Which engine makes which batch: bookkeeping of the plans of several engines."""

from __future__ import annotations

import collections
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from headrace._core.batches import BatchPlan, HostBatch

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
        self._next = first
        self._early: dict[int, HostBatch] = {}  # batches that wait for earlier ones
        self._lost_alone: collections.Counter[int] = collections.Counter()

    def deal(self, engines: Collection[int]) -> dict[int, list[BatchPlan]]:
        """Give the waiting plans to some of `engines`, those that can take plans; returns what each gets, ascending.

        In order, a batch that may end engines is dealt again when the batches before it have
        arrived, which are then delivered, whatever happens.
        """
        waiting, self.waiting = self.waiting, deque()
        size = -(-len(waiting) // len(engines)) if self._chunked and waiting else 1
        dealt: dict[int, list[BatchPlan]] = {}
        engine = -1
        for position, plan in enumerate(waiting):
            free = [
                engine
                for engine in engines
                if len(self.shares[engine].plans) < self.shares[engine].room
            ]
            if not free or (plan.number in self._lost_alone and self._makes_earlier(plan.number)):
                self.waiting.append(plan)
                continue
            if not position % size or engine not in free:
                engine = min(free, key=lambda engine: len(self.shares[engine].plans))
            self.shares[engine].plans[plan.number] = plan
            dealt.setdefault(engine, []).append(plan)
        return dealt

    def receive(self, engine: int, host: HostBatch) -> list[HostBatch]:
        """Count a batch that an engine has made; returns those that can be delivered."""
        share, number = self.shares[engine], host.plan.number
        del share.plans[number]
        share.made, share.room = True, min(2 * share.room, _ANY)
        self._lost_alone.pop(number, None)
        if not self._in_order:
            return [host]
        self._early[number] = host
        ready = []
        while (next_one := self._early.pop(self._next, None)) is not None:
            self._next += 1
            ready.append(next_one)
        return ready

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
        plans = [*self.waiting]
        for engine in engines:
            share = self.shares[engine]
            if len(share.plans) == 1:
                self._lost_alone.update([*share.plans])
            plans += share.plans.values()
            self.shares[engine] = _Share(room=1, deaths=0 if share.made else share.deaths + 1)
        self.waiting = deque(sorted(plans))
        return next(iter(self._lost_alone.most_common(1)), (0, 0))
