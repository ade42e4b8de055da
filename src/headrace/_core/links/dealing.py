"""Which engine makes which batch, or reads which lane of a stream: pure bookkeeping of the plans of several engines."""

from __future__ import annotations

import collections
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from headrace._core.batches import BatchPlan, HostBatch, StreamState

_ANY = 1 << 20  # plans that an engine can be given at once


@dataclass(slots=True)
class _Share:
    plans: dict[int, BatchPlan] = field(default_factory=dict)  # those that it was given and has not made
    # How many these may be. An engine that has died begins again with one, and doubles them with each batch, so that a
    # batch that ends engines is found.
    room: int = _ANY
    made: bool = False  # whether its process has made a batch
    deaths: int = 0  # of its last processes, which have made none


@dataclass(slots=True)
class _Lane:
    engine: int  # which reads it
    made: dict[int, BatchPlan] = field(default_factory=dict)  # plans whose batches wait for those of other lanes
    state: StreamState | None = None  # after the last batch that was delivered; None until there is one
    moved: bool = False  # whether the next plan goes to an engine that has not read the lane up to it


class Dealer:
    """Deals plans to the engine that has the fewest, and takes back those of an engine that has died.

    A lane of a stream stays with its engine. The process that replaces an engine, or if there is none another engine,
    reads the lane on from the state after the last batch that was delivered.

    The batches of a stream, whose plans are of lanes, are put in order, and others if `in_order`. Where an engine joins
    the requests of plans that follow each other, plans that are sent together go to engines in few parts (`chunked`).
    """

    def __init__(
        self, engines: int, *, first: int = 0, in_order: bool = False, stream: bool = False, chunked: bool = False
    ) -> None:
        self.waiting: deque[BatchPlan] = deque()  # that wait for an engine, ascending; new ones are appended
        self._shares = [_Share() for _ in range(engines)]
        self._lanes: dict[int | None, _Lane] | None = {} if stream else None
        self._in_order = in_order or stream
        self._chunked = chunked
        self._next = first
        self._early: dict[int, HostBatch] = {}  # batches that wait for earlier ones
        self._lost_alone: collections.Counter[int] = collections.Counter()

    def deal(self, engines: Collection[int]) -> dict[int, list[BatchPlan]]:
        """Give the waiting plans to some of `engines`, those that can take plans; returns what each gets, ascending."""
        waiting, self.waiting = self.waiting, deque()
        size = -(-len(waiting) // len(engines)) if self._chunked and waiting else 1
        dealt: dict[int, list[BatchPlan]] = {}
        for position, plan in enumerate(waiting):
            free = [engine for engine in engines if len(self._shares[engine].plans) < self._shares[engine].room]
            if self._lanes is not None:
                engine = self._lane_of(plan, engines).engine
            elif free and (not position % size or engine not in free):
                engine = min(free, key=lambda engine: len(self._shares[engine].plans))
            if not free or engine not in free:
                self.waiting.append(plan)
                continue
            self._shares[engine].plans[plan.number] = plan
            dealt.setdefault(engine, []).append(self._resumed(plan))
        return dealt

    def _lane_of(self, plan: BatchPlan, engines: Collection[int]) -> _Lane:
        assert self._lanes is not None
        if (lane := self._lanes.get(plan.lane)) is None:
            lane = self._lanes[plan.lane] = _Lane((plan.lane or 0) % len(self._shares))
        if lane.engine not in engines:
            lanes = collections.Counter(each.engine for each in self._lanes.values())
            lane.engine = min(sorted(engines), key=lambda engine: lanes[engine])
        return lane

    def _resumed(self, plan: BatchPlan) -> BatchPlan:
        if self._lanes is None or not (lane := self._lanes[plan.lane]).moved:
            return plan
        lane.moved = False
        return plan if lane.state is None else plan._replace(resume=lane.state)

    def receive(self, engine: int, host: HostBatch) -> list[HostBatch]:
        """Count a batch that an engine has made; returns those that can be delivered."""
        share, number = self._shares[engine], host.plan.number
        plan = share.plans.pop(number)
        share.made, share.room = True, min(2 * share.room, _ANY)
        self._lost_alone.pop(number, None)
        if not self._in_order:
            return [host]
        if self._lanes is not None:
            self._lanes[plan.lane].made[number] = plan
        self._early[number] = host
        ready = []
        while (next_one := self._early.pop(self._next, None)) is not None:
            if self._lanes is not None:
                lane = self._lanes[next_one.plan.lane]
                del lane.made[self._next]
                lane.state = lane.state if next_one.stream_state is None else next_one.stream_state
            self._next += 1
            ready.append(next_one)
        return ready

    def engine_of(self, number: int) -> int | None:
        """The engine that has a plan; None if it waits for one, or its batch has been made."""
        return next((engine for engine, share in enumerate(self._shares) if number in share.plans), None)

    def plans_of(self, engine: int) -> list[BatchPlan]:
        return list(self._shares[engine].plans.values())

    def deaths_of(self, engine: int) -> int:
        return self._shares[engine].deaths

    def take_back(self, engines: Collection[int]) -> tuple[int, int]:
        """Let the plans of engines that have died wait for others.

        Returns the batch with which most engines have died that made nothing else, and their number.
        """
        plans = [*self.waiting]
        for engine in engines:
            share = self._shares[engine]
            if len(share.plans) == 1:
                self._lost_alone.update([*share.plans])
            plans += share.plans.values()
            self._shares[engine] = _Share(room=1, deaths=0 if share.made else share.deaths + 1)
        for lane in (self._lanes or {}).values():
            if lane.engine in engines:  # it is read on from before the batches that wait, which are made again
                lane.moved = True
                plans += lane.made.values()
                for number in lane.made:
                    del self._early[number]
                lane.made.clear()
        self.waiting = deque(sorted(plans))
        return next(iter(self._lost_alone.most_common(1)), (0, 0))
