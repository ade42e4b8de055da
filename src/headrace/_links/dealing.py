"""Bookkeeping of plans and engines: which engine makes which batch."""

from __future__ import annotations

import collections
import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from headrace._base.text import shorten_list
from headrace._records.batches import BatchPlan, HostBatch
from headrace._records.failure import Stage
from headrace.errors import WorkerDiedError

_ANY = 1 << 20  # number of plans for an engine without a limit


@dataclass(slots=True)
class _Share:
    """The plans of an engine.

    Attributes:
        plans: plans given to the engine, without an arrived batch.
        room: the most plans that the engine may have. After a death the limit is one, and doubles
            with each batch. So a batch that ends engines is found.
        made: whether the process of the engine has made a batch.
        deaths: number of the engine's last processes that ended without a batch.
    """

    plans: dict[int, BatchPlan] = field(default_factory=dict)
    room: int = _ANY
    made: bool = False
    deaths: int = 0

    @property
    def has_room(self) -> bool:
        return len(self.plans) < self.room


class Dealer:
    """Deals plans to the engine with the fewest plans, and puts batches in order.

    Args:
        engines: number of engines.
        first: number of the first batch.
        in_order: whether batches are delivered in order.
        chunked: whether plans that arrive together are dealt in few parts. An engine then joins the
            requests of neighbouring plans.

    Attributes:
        waiting: plans without an engine, ascending. New plans are appended.
        shares: the plans of each engine.
        next: number of the next batch to deliver.
    """

    def __init__(
        self,
        engines: int,
        *,
        first: int = 0,
        in_order: bool = False,
        chunked: bool = False,
    ) -> None:
        self.waiting: deque[BatchPlan] = deque()
        self.shares = [_Share() for _ in range(engines)]
        self._in_order = in_order
        self._chunked = chunked
        self.next = first
        self._made: dict[int, HostBatch] = {}  # batches that wait for earlier batches
        self._lost_alone: collections.Counter[int] = collections.Counter()

    def deal(self, engines: Collection[int]) -> dict[int, list[BatchPlan]]:
        """Give waiting plans to `engines` with room.

        A batch may have ended an engine. In order, such a batch is dealt again only after the
        earlier batches have arrived. So the earlier batches are delivered, whatever happens.

        Returns:
            For each engine that gets plans, the plans by ascending numbers.
        """
        size = 1  # plans for an engine before the turn of the next engine
        if self._chunked:
            size = max(1, math.ceil(len(self.waiting) / len(engines)))
        left: deque[BatchPlan] = deque()
        dealt: dict[int, list[BatchPlan]] = {}
        engine = -1
        for position, plan in enumerate(self.waiting):
            free = [engine for engine in engines if self.shares[engine].has_room]
            suspect = plan.number in self._lost_alone and self._makes_earlier(plan.number)
            if suspect or not free:
                left.append(plan)
                continue
            if position % size == 0 or engine not in free:
                engine = min(free, key=lambda engine: len(self.shares[engine].plans))
            self.shares[engine].plans[plan.number] = plan
            dealt.setdefault(engine, []).append(plan)
        self.waiting = left
        return dealt

    def receive(self, engine: int, host: HostBatch) -> None:
        """Record a batch from an engine."""
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

    def first_missing(self) -> int:
        """Return the number of the first batch that an engine in order has still to make."""
        number = self.next
        while number in self._made:  # after Ctrl-C, arrived batches may wait here
            number += 1
        return number

    def give_up(self, number: int, why: str) -> None:
        """Let a waiting batch fail, because the batch ends engines."""
        plan = next(plan for plan in self.waiting if plan.number == number)
        indices = tuple(plan.indices)
        what = f"{why}. It has the indices {shorten_list(indices, len(indices))}"
        remedy = "fetch these with placement='thread' and num_workers=0 to see the crash"
        error = WorkerDiedError(f"{what}: {remedy}", batch=number, indices=indices)
        self.waiting.remove(plan)
        del self._lost_alone[number]
        self._made[number] = HostBatch.failed(plan, error, Stage.FETCH)

    def engine_of(self, number: int) -> int | None:
        """Return the engine with the plan of a batch; None if no engine has the plan."""
        return next(
            (engine for engine, share in enumerate(self.shares) if number in share.plans),
            None,
        )

    def _makes_earlier(self, number: int) -> bool:
        """Return whether batches are in order and an engine makes an earlier batch."""
        return self._in_order and any(
            other < number for share in self.shares for other in share.plans
        )

    def recall(self, engines: Collection[int]) -> None:
        """Let all plans of some engines wait again."""
        held = [plan for engine in engines for plan in self.shares[engine].plans.values()]
        plans = {plan.number: plan for plan in (*self.waiting, *held)}
        self.waiting = deque(sorted(plans.values()))
        for engine in engines:
            self.shares[engine].plans.clear()

    def take_back(self, engines: Collection[int]) -> tuple[int, int]:
        """Let the plans of dead engines wait again.

        Returns:
            The batch with the most deaths of engines that held no other batch, and the number of
            these deaths.
        """
        for engine in engines:
            plans = self.shares[engine].plans
            if len(plans) == 1:
                self._lost_alone.update([*plans])
        self.recall(engines)
        for engine in engines:
            share = self.shares[engine]
            self.shares[engine] = _Share(
                room=1, deaths=0 if share.made else share.deaths + 1
            )
        return next(iter(self._lost_alone.most_common(1)), (0, 0))
