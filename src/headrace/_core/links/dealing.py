"""Which engine makes which batch, or reads which lane of a stream: pure bookkeeping of the plans of several engines."""

from __future__ import annotations

import collections
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from headrace._core.batches import BatchPlan, HostBatch

LOSSES = 2  # engines that have ended with a batch, after which an engine makes it alone
DEATHS_ALONE = 2  # engines that have ended while they made nothing but that batch, which is then the reason


class _Losses:
    """How many engines have ended with each batch that has not arrived.

    A batch that several engines have ended with may be the reason, or have been beside it. An engine then makes it
    alone, so that the reason is known.
    """

    def __init__(self) -> None:
        self._losses: collections.Counter[int] = collections.Counter()

    def reason(self) -> int | None:
        """The number of a batch that ends the engines; None if there is none."""
        return next((number for number, losses in self._losses.items() if losses >= LOSSES + DEATHS_ALONE), None)

    def _alone(self, plans: Iterable[BatchPlan]) -> list[BatchPlan]:
        """Those of some plans that an engine makes, or has to make, alone."""
        return [plan for plan in plans if self._losses[plan.number] >= LOSSES] if self._losses else []


class Dealer(_Losses):
    """Deals plans to the engine that has the fewest, and takes back those of an engine that has ended.

    Args:
        engines: their number.
        chunked: whether plans that are sent together go to engines in as few parts as possible: an engine joins the
            requests of plans that follow each other.

    Example:
        >>> dealer = Dealer(2)
        >>> dealt = dealer.deal([BatchPlan(number, [number], seed=0) for number in range(3)], among=[0, 1])
        >>> {engine: [plan.number for plan in plans] for engine, plans in dealt.items()}
        {0: [0, 2], 1: [1]}
        >>> dealer.take_back([0])
        >>> [plan.number for plan in dealer.deal([], among=[1])[1]]
        [0, 2]
    """

    def __init__(self, engines: int, *, chunked: bool = False) -> None:
        super().__init__()
        self._held: list[dict[int, BatchPlan]] = [{} for _ in range(engines)]
        self._chunked = chunked
        self._waiting: deque[BatchPlan] = deque()  # ascending

    @property
    def waits(self) -> bool:
        """Whether plans wait for an engine."""
        return bool(self._waiting)

    def deal(self, plans: Sequence[BatchPlan], *, among: Collection[int]) -> dict[int, list[BatchPlan]]:
        """Choose an engine for plans, and for those that wait.

        Args:
            plans: in ascending order.
            among: the engines that can take plans.

        Returns:
            The plans of each engine that gets any, in ascending order.
        """
        self._waiting.extend(plans)
        dealt: dict[int, list[BatchPlan]] = {}

        def load(engine: int) -> int:
            return len(self._held[engine])

        def give(engine: int, plan: BatchPlan) -> None:
            self._held[engine][plan.number] = plan
            dealt.setdefault(engine, []).append(plan)

        suspects = self._alone(self._waiting)
        for engine in among:
            if suspects and not self._held[engine]:
                self._waiting.remove(suspects[0])
                give(engine, suspects.pop(0))
        free = [engine for engine in among if not self._alone(self._held[engine].values())]
        if suspects and free:
            free.remove(min(free, key=load))  # this one gets the next suspect, when it has nothing else
        others = deque(plan for plan in self._waiting if plan not in suspects) if suspects else self._waiting
        size = -(-len(others) // len(free)) if free and self._chunked else 1
        while free and others:
            engine = min(free, key=load)
            for _ in range(min(size, len(others))):
                give(engine, others.popleft())
        if suspects:
            self._waiting = deque(sorted((*suspects, *others)))
        return dealt

    def receive(self, engine: int, host: HostBatch) -> Sequence[HostBatch]:
        """Count a batch that an engine has made; returns those that can be delivered."""
        del self._held[engine][host.plan.number]
        self._losses.pop(host.plan.number, None)
        return (host,)

    def engine_of(self, number: int) -> int | None:
        """The engine that has a plan; None if it waits for one, or its batch has been made."""
        return next((engine for engine, held in enumerate(self._held) if number in held), None)

    def take_back(self, engines: Collection[int]) -> None:
        """Let the plans of engines that have ended wait for others."""
        lost = sorted(plan for engine in engines for plan in self._held[engine].values())
        for engine in engines:
            self._held[engine].clear()
        self._losses.update(plan.number for plan in lost)
        self._waiting.extendleft(reversed(lost))

    def confine(self, engines: Collection[int]) -> None:
        """Do nothing: no plan waits for one engine only."""


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
    state: Mapping[str, object] | bytes | None = None
    moved: bool = False


class LaneDealer(_Losses):
    """Deals the plans of a stream to the engines that read their lanes.

    A lane stays with its engine. The process that replaces an engine, or if there is none another engine, reads the
    lane on from the state after the last batch that arrived.

    Args:
        engines: their number.

    Example:
        >>> dealer = LaneDealer(2)
        >>> plans = [BatchPlan(number, [None], seed=0, lane=number % 3) for number in range(3)]
        >>> dealt = dealer.deal(plans, among=[0, 1])
        >>> {engine: [plan.lane for plan in plans] for engine, plans in dealt.items()}
        {0: [0, 2], 1: [1]}
    """

    def __init__(self, engines: int) -> None:
        super().__init__()
        self._engines = set(range(engines))
        self._count = engines
        self._lanes: dict[int | None, _Lane] = {}

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
            if plan.lane not in self._lanes:
                engine = (plan.lane or 0) % self._count
                self._lanes[plan.lane] = _Lane(engine if engine in self._engines else self._least())
            self._lanes[plan.lane].waiting.append(plan)
        return {engine: given for engine in among if (given := sorted(self._plans_for(engine)))}

    def _least(self) -> int:
        of_engine = collections.Counter(lane.engine for lane in self._lanes.values())
        return min(sorted(self._engines), key=lambda engine: of_engine[engine])

    def _plans_for(self, engine: int) -> Iterator[BatchPlan]:
        lanes = [lane for lane in self._lanes.values() if lane.engine == engine]
        if self._alone(lane.sent[0] for lane in lanes if lane.sent):
            return
        suspects = self._alone(lane.waiting[0] for lane in lanes if lane.waiting)
        if not suspects:
            for lane in lanes:
                while lane.waiting:
                    yield self._send(lane)
        elif not any(lane.sent for lane in lanes):
            yield self._send(self._lanes[suspects[0].lane])

    def _send(self, lane: _Lane) -> BatchPlan:
        plan = lane.waiting.popleft()
        lane.sent.append(plan)
        moved, lane.moved = lane.moved, False
        return plan._replace(resume=lane.state) if moved and lane.state is not None else plan

    def receive(self, engine: int, host: HostBatch) -> list[HostBatch]:
        """Note a batch that an engine has made; returns those of its lane that have none missing before them."""
        lane = self._lanes[host.plan.lane]
        lane.arrived[host.plan.number] = host
        ready = []
        while lane.sent and (next_one := lane.arrived.pop(lane.sent[0].number, None)) is not None:
            self._losses.pop(lane.sent.popleft().number, None)
            if next_one.stream_state is not None:
                lane.state = next_one.stream_state
            ready.append(next_one)
        return ready

    def engine_of(self, number: int) -> int | None:
        """The engine that has a plan; None if it waits for one, or its batch has been made."""
        sent = (lane.engine for lane in self._lanes.values() for plan in lane.sent if plan.number == number)
        return next(sent, None)

    def take_back(self, engines: Collection[int]) -> None:
        """Let the plans of engines that have ended wait for those that replace them."""
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
        if self._engines != set(engines):
            self._engines = set(engines)
            for lane in self._lanes.values():
                if lane.engine not in self._engines:
                    lane.engine = self._least()
