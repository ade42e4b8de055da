"""Which engine reads which lane of a stream, and where another one goes on: pure bookkeeping."""

from __future__ import annotations

import collections
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from headrace._core.batches import BatchPlan, HostBatch
from headrace._core.runtime.dealing import DEATHS_ALONE, LOSSES


@dataclass(slots=True)
class _Lane:
    """One lane.

    Attributes:
        engine: the engine that reads it.
        waiting: plans to be sent, ascending.
        sent: plans that the engine has, ascending.
        arrived: batches that arrived before an earlier one of the lane.
        state: the lane's state after the last batch without a gap; None until there is one.
        moved: whether the next plan goes to an engine that has not read the lane up to it.
    """

    engine: int
    waiting: deque[BatchPlan] = field(default_factory=deque)
    sent: deque[BatchPlan] = field(default_factory=deque)
    arrived: dict[int, HostBatch] = field(default_factory=dict)
    state: Mapping[str, object] | None = None
    moved: bool = False


class LaneDealer:
    """Deals the plans of a stream to the engines that read their lanes.

    A lane stays with its engine. The process that replaces an engine, or if there is none another engine, reads the
    lane on from the state after the last batch that arrived. Of an engine that has ended twice with the next batch of a
    lane, the one that follows makes this batch and nothing else, so that the reason is known.

    Args:
        engines: their number.

    Example:
        >>> dealer = LaneDealer(2)
        >>> plans = [BatchPlan(number, [None], seed=0, lane=number % 3) for number in range(3)]
        >>> dealt = dealer.deal(plans, among=[0, 1])
        >>> {engine: [plan.lane for plan in plans] for engine, plans in dealt.items()}
        {0: [0, 2], 1: [1]}
    """

    succession = "Its lanes are read on after the last batch that arrived"
    """What happens to the plans of an engine that has ended."""

    def __init__(self, engines: int) -> None:
        self._engines = set(range(engines))
        self._count = engines
        self._lanes: dict[int | None, _Lane] = {}
        self._alone: dict[int, int] = {}  # the batch that an engine makes, and nothing else
        self._losses: collections.Counter[int] = collections.Counter()
        self._deaths_alone: collections.Counter[int] = collections.Counter()

    @property
    def waits(self) -> bool:
        """Whether plans wait for an engine."""
        return any(lane.waiting for lane in self._lanes.values())

    def deal(self, plans: Sequence[BatchPlan], *, among: Collection[int]) -> dict[int, list[BatchPlan]]:
        """Choose the engine for plans, and for those that wait.

        Args:
            plans: in ascending order.
            among: the engines that can take plans. The plans of others wait.

        Returns:
            The plans of each engine that gets any, in ascending order.
        """
        for plan in plans:
            self._lane(plan).waiting.append(plan)
        dealt: dict[int, list[BatchPlan]] = {}
        for engine in among:
            if engine not in self._alone and (given := list(self._plans_for(engine))):
                dealt[engine] = sorted(given, key=lambda plan: plan.number)
        return dealt

    def _lane(self, plan: BatchPlan) -> _Lane:
        if (lane := self._lanes.get(plan.lane)) is None:
            engine = (plan.lane or 0) % self._count
            lane = self._lanes[plan.lane] = _Lane(engine if engine in self._engines else self._least())
        return lane

    def _least(self) -> int:
        of_engine = collections.Counter(lane.engine for lane in self._lanes.values())
        return min(sorted(self._engines), key=lambda engine: of_engine[engine])

    def _plans_for(self, engine: int) -> Iterator[BatchPlan]:
        lanes = [lane for lane in self._lanes.values() if lane.engine == engine]
        suspects = [lane for lane in lanes if lane.waiting and self._losses[lane.waiting[0].number] >= LOSSES]
        if not suspects:
            for lane in lanes:
                while lane.waiting:
                    yield self._send(lane)
        elif not any(lane.sent for lane in lanes):
            self._alone[engine] = suspects[0].waiting[0].number
            yield self._send(suspects[0])

    def _send(self, lane: _Lane) -> BatchPlan:
        plan = lane.waiting.popleft()
        lane.sent.append(plan)
        moved, lane.moved = lane.moved, False
        return plan._replace(resume=lane.state) if moved and lane.state is not None else plan

    def receive(self, engine: int, host: HostBatch) -> list[HostBatch]:
        """Note a batch that an engine has made; returns those of its lane that have none missing before them."""
        lane = self._lanes[host.plan.lane]
        lane.arrived[host.plan.number] = host
        if self._alone.get(engine) == host.plan.number:
            del self._alone[engine]
        ready = []
        while lane.sent and (next_one := lane.arrived.pop(lane.sent[0].number, None)) is not None:
            number = lane.sent.popleft().number
            self._losses.pop(number, None)
            self._deaths_alone.pop(number, None)
            lane.state = next_one.stream_state or lane.state
            ready.append(next_one)
        return ready

    def engine_of(self, number: int) -> int | None:
        """The engine that has a plan; None if it waits for one, or its batch has been made."""
        for lane in self._lanes.values():
            if any(plan.number == number for plan in lane.sent):
                return lane.engine
        return None

    def take_back(self, engines: Collection[int]) -> None:
        """Let the plans of engines that have ended wait for those that replace them."""
        for engine in engines:
            if (alone := self._alone.pop(engine, None)) is not None:
                self._deaths_alone[alone] += 1
        for lane in self._lanes.values():
            if lane.engine in engines:
                lane.moved = True
                lane.arrived.clear()  # made again: the lane is read on from before them
                if lane.sent:
                    self._losses[lane.sent[0].number] += 1
                lane.waiting.extendleft(reversed(lane.sent))
                lane.sent.clear()

    def confine(self, engines: Collection[int]) -> None:
        """Give the lanes of all other engines to these."""
        self._engines = set(engines)
        for lane in self._lanes.values():
            if lane.engine not in self._engines:
                lane.engine = self._least()

    def abandon(self, engine: int) -> None:
        """Give the lanes of an engine that has ended, and is not started again, to the others."""
        self._engines.discard(engine)
        for lane in self._lanes.values():
            if lane.engine == engine and self._engines:
                lane.engine = self._least()

    def reason(self) -> int | None:
        """The number of a batch that ends the engines; None if there is none."""
        return next((number for number, deaths in self._deaths_alone.items() if deaths >= DEATHS_ALONE), None)
