"""Several engines behind one link: plans are dealt, and an engine that dies beside others is replaced.

Its batches are made by the others: each has its own number, seed and indices, so that it is the same from whichever
engine it comes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from headrace._core.batches import GROWING, FetchLoad, HostBatch, StageTimes
from headrace._core.engine.config import EngineConfig
from headrace._core.messages import Answer, Consumed, Link, Request, Started, Status, StatusRequest
from headrace._core.pool.dealing import Dealer, Plan
from headrace._core.pool.group import Lost, ProcessGroup
from headrace._core.ray_placement import RayPlacement
from headrace._core.streams.kinds import capabilities
from headrace._core.text import warn_user
from headrace.errors import EngineDiedError, EngineStartError

CHECK_EVERY = 5.0  # seconds after which engines elsewhere are looked at, if nothing arrives from them
DEATHS_ALONE = 3  # of engines that made nothing but one batch, which is then the reason
DEATHS_WITHOUT_BATCH = 3  # after which an engine is not replaced any more


class EngineGroup(ProcessGroup):
    """The link to several engines, each of which fetches the samples of many plans at once."""

    def __init__(
        self,
        config: EngineConfig,
        connect: Callable[[int], Link],  # opens the link to an engine, by its number; replaces one that has died
        engines: int,
        *,
        first: int,  # number of a batch
        cluster: RayPlacement | None = None,  # where they may take long to start, and are lost with their nodes
        later: Sequence[int] = (),  # engines that are linked when another has begun: the first batch needs a core
    ) -> None:
        chunked = capabilities(config.dataset).ranges
        super().__init__(connect, Dealer(range(engines), first=first, in_order=config.in_order, chunked=chunked))
        self._engines = engines
        self._cluster = cluster
        self.looks_at_all = cluster is not None
        self._is_stream = config.kind.is_iterable
        self._shortage = f"`ray status` shows what is free for {cluster!r}"
        self._least = 1 if cluster is None else min(cluster.least, engines)  # engines without which no plan is dealt
        self._deadline: float | None = None  # for that many
        self._running = set(range(engines)) if cluster is None else set[int]()  # or will run within a moment
        self._later = later
        self._ends: dict[int, str] = {}  # how the last process of each engine has ended
        self._times: dict[Link, StageTimes] = {}  # of the last batch of each link, also of a former one
        self._standing: dict[type, Request] = {}  # the last request of each kind that is for all engines
        self._open(number for number in range(engines) if number not in later)

    def _send_to_all(self, message: Request) -> None:
        if isinstance(message, Consumed):
            next_one = self._dealer.process_of(message.number + 1)
            for number, link in self._links.items():
                times = self._times.get(link)
                if number == next_one or (times is not None and times.load.held_plans):
                    link.send(message)
            return
        self._standing[type(message)] = message
        for link in self._links.values():
            link.send(message)

    def _request_status(self, message: StatusRequest) -> None:
        engine = self._dealer.process_of(message.number)
        if engine in self._links:
            self._links[engine].send(message)
        else:
            why = self._shortage if self._cluster and len(self._running) < self._least else "others have ended"
            self.messages.append(Status(f"batch {message.number} waits for an engine: {why}"))

    @property
    def look_by(self) -> float | None:  # type: ignore[override]
        if self._cluster is None:
            return None
        soon = time.monotonic() + CHECK_EVERY
        return soon if self._deadline is None else min(soon, self._deadline)

    def _add(self, number: int) -> None:
        super()._add(number)
        if self._cluster is None:
            self._running.add(number)
        for message in self._standing.values():
            self._links[number].send(message)

    def _send_plans(self, link: Link, plans: list[Plan]) -> None:
        link.send(plans)

    def _on_message(self, number: int, link: Link, message: Answer) -> None:
        if self._later:
            later, self._later = self._later, ()
            try:
                for other in later:
                    self._add(other)
            except (OSError, EngineDiedError) as error:  # a shortage of descriptors or of memory
                self._end(error)
        if isinstance(message, HostBatch):
            host = message._replace(times=self._times_of_all(link, message.times))
            self.messages.extend(self._dealer.receive(number, host))
        elif isinstance(message, Started):
            self._running.add(number)
        elif isinstance(message, Status) and self._engines > 1:
            self.messages.append(Status(f"{message.text}, in engine {number} of {self._engines}"))
        else:
            self.messages.append(message)

    def _times_of_all(self, link: Link, times: StageTimes) -> StageTimes:
        """The times of an engine's batch, with the sum of the engines' loads and the means of their times."""
        self._times[link] = times
        loads = [self._times[each].load for each in self._links.values() if each in self._times]
        # Those that have made no batch of this session yet count as the others: their sums of earlier ones would come
        # at once later.
        known = min(len(self._times), self._engines)
        means = {name: sum(getattr(e, name) for e in self._times.values()) / known for name in GROWING}
        steps = sum(each.steps_seconds for each in self._times.values())
        return times._replace(load=FetchLoad(*map(sum, zip(*loads, strict=True))), steps_seconds=steps, **means)

    def _ready_for_plans(self) -> list[int]:
        return sorted(self._running)

    def _deal(self) -> None:
        if self._over or not self._dealer.waiting:
            return
        if len(self._running) < self._least:
            self._wait_for_engines()
            return
        self._least, self._deadline = 1, None  # the epoch has begun: one is enough from now on
        super()._deal()

    def _wait_for_engines(self) -> None:
        if (cluster := self._cluster) is None:
            return
        if self._deadline is None:
            self._deadline = time.monotonic() + cluster.start_timeout
        elif time.monotonic() >= self._deadline:
            error = EngineStartError(
                running=len(self._running),
                engines=self._engines,
                least=self._least,
                seconds=cluster.start_timeout,
                shortage=self._shortage,
            )
            self._end(error)

    def _replace(self, lost: dict[int, Lost]) -> None:
        deaths = batch = 0
        for number, (_, end) in lost.items():
            self._ends[number] = end.death or ""
            self._running.discard(number)
            plans = self._dealer.shares[number].plans
            if len(plans) == 1:
                batch = next(iter(plans))
                deaths = max(deaths, self._dealer.note_death(batch))
            self._dealer.take_back(number, room=1)
        # Engines of a cluster are lost with their nodes, and replaced even if all are. The position that an engine had
        # in a stream is lost with the engine.
        none_left = not self._links and (self._cluster is None or self._is_stream)
        if none_left or deaths >= DEATHS_ALONE:
            why = f"all of its {self._engines} processes have ended"
            if self._is_stream:
                why = "the only engine that reads the stream has ended"
            if deaths > 1:
                why = f"{deaths} of its processes have ended while they made batch {batch} and nothing else"
            ends = "; ".join(f"engine {number} {how}" for number, how in sorted(self._ends.items()))
            only = next(iter(lost.values())).end.error
            self._end(only if self._engines == 1 else EngineDiedError(why=f"{why}: {ends}"))
            return
        results = {number: self._restart(number) for number in lost}
        if not self._links:  # none could be started
            self._end(EngineDiedError(why="; ".join(f"engine {number}: {why}" for number, why in results.items())))
            return
        self._deal()
        for number, result in results.items():  # last, since a warning may be an error
            warning = (
                f"engine {number} of {self._engines} {lost[number].end.death}: {result}. Its batches are made again."
            )
            warn_user(warning, RuntimeWarning)

    def _restart(self, number: int) -> str:
        """Start an engine in place of one that has died; returns the result, in words."""
        if self._dealer.shares[number].deaths >= DEATHS_WITHOUT_BATCH:
            return f"it has ended {DEATHS_WITHOUT_BATCH} times without a batch, and is not started again in this epoch"
        try:
            self._add(number)
        except (OSError, EngineDiedError) as error:  # a shortage of descriptors or of memory
            return f"it could not be started again ({error})"
        return "it is started again" if self._cluster is None else "another is asked for"
