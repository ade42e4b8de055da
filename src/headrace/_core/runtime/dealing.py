"""Which engine makes which batch: pure bookkeeping of the plans that several engines hold."""

from __future__ import annotations

import collections
from collections import deque
from collections.abc import Collection, Sequence

from headrace._core.batches import BatchPlan, HostBatch

LOSSES = 2  # engines that have ended with a batch, after which an engine makes it alone
DEATHS_ALONE = 2  # engines that have ended while they made nothing but that batch, which is then the reason


class Dealer:
    """Deals plans to the engine that has the fewest, and takes back those of an engine that has ended.

    A batch that several engines have ended with may be the reason, or have been beside it. An engine then makes it
    alone, so that the reason is known.

    Args:
        engines: their number.
        chunked: whether plans that are sent together go to engines in as few parts as possible: an engine joins the
            requests of plans that follow each other.

    Example:
        >>> dealer = Dealer(2)
        >>> dealt = dealer.deal([BatchPlan(number, [number], seed=0) for number in range(3)], among=[0, 1])
        >>> {engine: [plan.number for plan in plans] for engine, plans in dealt.items()}
        {0: [0, 2], 1: [1]}
        >>> dealer.on_batch(0, 0)
        >>> dealer.take_back([0])
        >>> [plan.number for plan in dealer.deal([], among=[1])[1]]
        [2]
    """

    def __init__(self, engines: int, *, chunked: bool = False) -> None:
        self._held: list[dict[int, BatchPlan]] = [{} for _ in range(engines)]
        self._chunked = chunked
        self._waiting: deque[BatchPlan] = deque()  # ascending
        self._suspects: deque[BatchPlan] = deque()  # each for an engine of its own
        self._alone: dict[int, int] = {}  # the suspect that an engine makes
        self._losses: collections.Counter[int] = collections.Counter()
        self._deaths_alone: collections.Counter[int] = collections.Counter()

    succession = "The other engines make its batches"
    """What happens to the plans of an engine that has ended."""

    @property
    def waits(self) -> bool:
        """Whether plans wait for an engine."""
        return bool(self._waiting or self._suspects)

    def deal(self, plans: Sequence[BatchPlan], *, among: Collection[int]) -> dict[int, list[BatchPlan]]:
        """Choose an engine for plans, and for those that wait.

        Args:
            plans: in ascending order.
            among: the engines that can take plans; at least one.

        Returns:
            The plans of each engine that gets any, in ascending order.
        """
        self._waiting.extend(plans)
        dealt: dict[int, list[BatchPlan]] = {}
        for engine in among:
            if self._suspects and not self._held[engine]:
                plan = self._suspects.popleft()
                self._alone[engine] = plan.number
                self._give(engine, plan, dealt)
        free = [engine for engine in among if engine not in self._alone]
        if self._suspects and free:
            free.remove(min(free, key=self._load))  # this one gets the next suspect, when it has nothing else
        size = -(-len(self._waiting) // len(free)) if free and self._chunked else 1
        while free and self._waiting:
            engine = min(free, key=self._load)
            for _ in range(min(size, len(self._waiting))):
                self._give(engine, self._waiting.popleft(), dealt)
        return dealt

    def _load(self, engine: int) -> int:
        return len(self._held[engine])

    def _give(self, engine: int, plan: BatchPlan, dealt: dict[int, list[BatchPlan]]) -> None:
        self._held[engine][plan.number] = plan
        dealt.setdefault(engine, []).append(plan)

    def receive(self, engine: int, host: HostBatch) -> Sequence[HostBatch]:
        """Count a batch that an engine has made; returns those that can be delivered."""
        self.on_batch(engine, host.plan.number)
        return (host,)

    def confine(self, engines: Collection[int]) -> None:
        """Do nothing: no plan waits for one engine only."""

    def abandon(self, engine: int) -> None:
        """Note that an engine is not started again; each plan goes to one that runs, whichever it was."""

    def on_batch(self, engine: int, number: int) -> None:
        """Count a batch that an engine has made."""
        del self._held[engine][number]
        self._alone.pop(engine, None)
        self._losses.pop(number, None)
        self._deaths_alone.pop(number, None)

    def engine_of(self, number: int) -> int | None:
        """The engine that has a plan; None if it waits for one, or its batch has been made."""
        return next((engine for engine, held in enumerate(self._held) if number in held), None)

    def take_back(self, engines: Collection[int]) -> None:
        """Let the plans of engines that have ended wait for others."""
        lost = [plan for engine in engines for plan in self._held[engine].values()]
        for engine in engines:
            self._held[engine].clear()
            if (alone := self._alone.pop(engine, None)) is not None:
                self._deaths_alone[alone] += 1
        self._losses.update(plan.number for plan in lost)
        lost.sort(key=lambda plan: plan.number)
        self._suspects.extend(plan for plan in lost if self._losses[plan.number] >= LOSSES)
        self._waiting.extendleft(plan for plan in reversed(lost) if self._losses[plan.number] < LOSSES)

    def reason(self) -> int | None:
        """The number of a batch that ends the engines; None if there is none."""
        return next((number for number, deaths in self._deaths_alone.items() if deaths >= DEATHS_ALONE), None)
