"""Which engine makes which batch, or reads which lane of a stream: pure bookkeeping of the plans of several engines."""

from __future__ import annotations

import collections
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from headrace._core.batches import BatchPlan, HostBatch

LOSSES = 2  # engines that have ended with a batch, after which an engine makes it alone
DEATHS_ALONE = 2  # engines that have ended while they made nothing but that batch, which is then the reason


class _Suspects:
    """Batches that engines have ended with.

    A batch that several engines have ended with may be the reason, or have been beside it. An engine then makes it
    alone, so that the reason is known.
    """

    def __init__(self) -> None:
        self._alone: dict[int, int] = {}  # the suspect that an engine makes, and nothing else
        self._losses: collections.Counter[int] = collections.Counter()
        self._deaths_alone: collections.Counter[int] = collections.Counter()

    def reason(self) -> int | None:
        """The number of a batch that ends the engines; None if there is none."""
        return next((number for number, deaths in self._deaths_alone.items() if deaths >= DEATHS_ALONE), None)

    def _acquit(self, number: int) -> None:
        self._losses.pop(number, None)
        self._deaths_alone.pop(number, None)

    def _note_deaths_alone(self, engines: Collection[int]) -> None:
        for engine in engines:
            if (alone := self._alone.pop(engine, None)) is not None:
                self._deaths_alone[alone] += 1


class Dealer(_Suspects):
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

    succession = "The other engines make its batches"
    """What happens to the plans of an engine that has ended."""

    def __init__(self, engines: int, *, chunked: bool = False) -> None:
        super().__init__()
        self._held: list[dict[int, BatchPlan]] = [{} for _ in range(engines)]
        self._chunked = chunked
        self._waiting: deque[BatchPlan] = deque()  # ascending
        self._suspects: deque[BatchPlan] = deque()  # each for an engine of its own

    @property
    def waits(self) -> bool:
        """Whether plans wait for an engine."""
        return bool(self._waiting or self._suspects)

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

        for engine in among:
            if self._suspects and not self._held[engine]:
                plan = self._suspects.popleft()
                self._alone[engine] = plan.number
                give(engine, plan)
        free = [engine for engine in among if engine not in self._alone]
        if self._suspects and free:
            free.remove(min(free, key=load))  # this one gets the next suspect, when it has nothing else
        size = -(-len(self._waiting) // len(free)) if free and self._chunked else 1
        while free and self._waiting:
            engine = min(free, key=load)
            for _ in range(min(size, len(self._waiting))):
                give(engine, self._waiting.popleft())
        return dealt

    def receive(self, engine: int, host: HostBatch) -> Sequence[HostBatch]:
        """Count a batch that an engine has made; returns those that can be delivered."""
        del self._held[engine][host.plan.number]
        self._alone.pop(engine, None)
        self._acquit(host.plan.number)
        return (host,)

    def engine_of(self, number: int) -> int | None:
        """The engine that has a plan; None if it waits for one, or its batch has been made."""
        return next((engine for engine, held in enumerate(self._held) if number in held), None)

    def take_back(self, engines: Collection[int]) -> None:
        """Let the plans of engines that have ended wait for others."""
        lost = sorted(plan for engine in engines for plan in self._held[engine].values())
        for engine in engines:
            self._held[engine].clear()
        self._note_deaths_alone(engines)
        self._losses.update(plan.number for plan in lost)
        self._suspects.extend(plan for plan in lost if self._losses[plan.number] >= LOSSES)
        self._waiting.extendleft(plan for plan in reversed(lost) if self._losses[plan.number] < LOSSES)

    def confine(self, engines: Collection[int]) -> None:
        """Do nothing: no plan waits for one engine only."""

    def abandon(self, engine: int) -> None:
        """Do nothing: each plan goes to an engine that runs, whichever it was."""


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


class LaneDealer(_Suspects):
    """Deals the plans of a stream to the engines that read their lanes.

    A lane stays with its engine. The process that replaces an engine, or if there is none another engine, reads the
    lane on from the state after the last batch that arrived. Of an engine that has ended twice with the next batch of a
    lane, the one that follows makes this batch and nothing else.

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
        dealt: dict[int, list[BatchPlan]] = {}
        for engine in among:
            if engine not in self._alone and (given := sorted(self._plans_for(engine))):
                dealt[engine] = given
        return dealt

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
            self._acquit(lane.sent.popleft().number)
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
        self._note_deaths_alone(engines)
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
        if self._engines - {engine}:
            self.confine(self._engines - {engine})
