"""Which process makes which batch: bookkeeping of the plans of several processes."""

from __future__ import annotations

import collections
import operator
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from headrace._core.batches import BatchPlan, HostBatch
from headrace._core.pool.children import Job

ANY = 1 << 20  # plans that a process can be given at once

Plan = BatchPlan | Job


@dataclass(slots=True)
class Share:
    """The plans of one process.

    Attributes:
        plans: those that it was given and has not made, by their numbers.
        room: how many these may be.
        made: whether the process has made a batch.
        deaths: how many of the last processes of this number have died and made nothing.
    """

    plans: dict[int, Plan] = field(default_factory=dict)
    room: int = ANY
    made: bool = False
    deaths: int = 0


class Dealer:
    """Deals plans to processes, and takes back those of a process that has died.

    A plan goes to the process that has the fewest plans, or to the next in turn (`in_turn`). Batches are put in order
    if `in_order`. Where a process joins the requests of plans that follow each other, plans that are sent together go
    to processes in few parts (`chunked`).
    """

    def __init__(
        self,
        numbers: Iterable[int],
        *,
        first: int = 0,  # number of a batch
        in_order: bool = False,
        in_turn: bool = False,
        chunked: bool = False,
        room: int = ANY,  # plans that a process can be given at once
    ) -> None:
        self.waiting: deque[Plan] = deque()  # that wait for a process, ascending; new ones are appended
        self.shares = {number: Share(room=room) for number in numbers}
        self.room = room
        self.in_turn = in_turn
        self._turns = deque(self.shares)  # the next one first
        self._in_order = in_order
        self._chunked = chunked
        self._next = first
        self._early: dict[int, HostBatch] = {}  # batches that wait for earlier ones
        self._deaths: collections.Counter[int] = collections.Counter()  # of processes that made this batch, by number

    def deal(self, numbers: Collection[int]) -> dict[int, list[Plan]]:
        """Give waiting plans to some of the processes `numbers`; returns what each gets, ascending."""
        waiting, self.waiting = self.waiting, deque()
        size = -(-len(waiting) // len(numbers)) if self._chunked and waiting else 1
        dealt: dict[int, list[Plan]] = {}
        chosen = -1
        for position, plan in enumerate(waiting):
            free = [number for number in numbers if len(self.shares[number].plans) < self.shares[number].room]
            if not free:
                self.waiting.append(plan)
                continue
            if self.in_turn:
                chosen = next(number for number in self._turns if number in free)
                self._turns.rotate(-self._turns.index(chosen) - 1)
            elif not position % size or chosen not in free:
                chosen = min(free, key=lambda number: len(self.shares[number].plans))
            self.shares[chosen].plans[plan.number] = plan
            dealt.setdefault(chosen, []).append(plan)
        return dealt

    def receive(self, process: int, host: HostBatch) -> list[HostBatch]:
        """Count a batch that a process has made; returns those that can be delivered."""
        number = host.plan.number
        self.count(process, number)
        return self.ordered(host)

    def count(self, process: int, number: int) -> None:
        """Count a plan that a process has answered."""
        share = self.shares[process]
        del share.plans[number]
        share.made, share.room = True, min(2 * share.room, self.room)
        self._deaths.pop(number, None)

    def ordered(self, host: HostBatch) -> list[HostBatch]:
        """The batches that can be delivered, now that there is one more."""
        if not self._in_order:
            return [host]
        self._early[host.plan.number] = host
        ready = []
        while (next_one := self._early.pop(self._next, None)) is not None:
            self._next += 1
            ready.append(next_one)
        return ready

    def process_of(self, number: int) -> int | None:
        """The process that has a plan; None if the plan waits for a process, or its batch has been made."""
        return next((process for process, share in self.shares.items() if number in share.plans), None)

    def note_death(self, number: int) -> int:
        """Note that a process has died in which this plan was the suspect; returns how many have."""
        self._deaths[number] += 1
        return self._deaths[number]

    def take_back(self, process: int, *, room: int | None = None) -> None:
        """Let the plans of a process that has died wait for others, its next process with so much room.

        In turn, the plans are kept for the next process of the same number.
        """
        share = self.shares[process]
        deaths = 0 if share.made else share.deaths + 1
        self.shares[process] = successor = Share(room=self.room if room is None else room, deaths=deaths)
        if self.in_turn:
            successor.plans = share.plans
        else:
            self.waiting = deque(sorted((*self.waiting, *share.plans.values()), key=operator.attrgetter("number")))

    def retire(self, process: int) -> None:
        """Deal nothing more to a process."""
        if process in self._turns:
            self._turns.remove(process)

    @property
    def active(self) -> list[int]:
        """The processes that plans are dealt to."""
        return list(self._turns)

    def add(self, process: int) -> None:
        """Deal plans to one more process, or to one again."""
        self.shares.setdefault(process, Share(room=self.room))
        self._turns.append(process)
