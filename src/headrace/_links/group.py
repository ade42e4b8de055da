"""One or several engines behind one link.

The group deals plans to engines, and replaces dead engines. The batches of a dead engine are made
again. A plan has its own number, seed and indices, so every engine makes the same batch.
"""

from __future__ import annotations

import contextlib
import selectors
import time
from collections import deque
from collections.abc import Callable, Iterable

from headrace._base.remote_placement import RemotePlacement
from headrace._base.text import warn_user
from headrace._engine.config import EngineConfig
from headrace._links.dealing import Dealer
from headrace._records.batches import GROWING, FetchLoad, HostBatch, StageTimes
from headrace._records.failure import interrupted
from headrace._records.messages import (
    Answer,
    Consumed,
    EngineRequest,
    Link,
    SessionEnd,
    SessionStarted,
    Status,
    StatusRequest,
)
from headrace._streams.kinds import capabilities
from headrace.errors import EngineDiedError, EngineStartError

DEATHS_ALONE = 2  # deaths of engines with a single batch; then the batch is the reason
# Deaths of an engine without a batch; then the engine is given up.
DEATHS_WITHOUT_BATCH = 3


class EngineGroup(Link):
    """The link to all engines of a session.

    Args:
        config: configuration of the engines.
        connect: opens the link to an engine, and starts the engine if needed. Arguments: the number
            of the engine, and the number of the first batch.
        engines: number of engines.
        first: number of the first batch.
        cluster: the placement of engines on other machines. Such engines may take long to start.
            None for this machine.
    """

    guarded = True

    def __init__(
        self,
        config: EngineConfig,
        connect: Callable[[int, int], Link],
        engines: int,
        *,
        first: int,
        cluster: RemotePlacement | None = None,
    ) -> None:
        self.messages: deque[Answer] = deque()
        self._connect = connect
        self._engines = engines
        self._dealer = Dealer(
            engines,
            first=first,
            in_order=config.in_order,
            chunked=capabilities(config.dataset).ranges,
        )
        self._cluster = cluster
        self._is_stream = config.kind.is_iterable
        # number of running engines before the first plan is dealt
        self._least = 1 if cluster is None else min(cluster.least, engines)
        self._links: dict[int, Link] = {}
        # engines that run, or will run within a moment
        self._running = set(range(engines)) if cluster is None else set[int]()
        self._lost: dict[int, SessionEnd] = {}  # dead engines, and their last messages
        # Ctrl-C, as text: messages may be missing, so all engines must be linked again
        self._interruption: str | None = None
        # times of the last batch of each link, and of each former link
        self._times: dict[Link, StageTimes] = {}
        # the last request to all engines, of each kind
        self._standing: dict[type, EngineRequest] = {}
        self._over = False
        self._selector = selectors.DefaultSelector()
        self.source = self._selector.fileno()
        try:
            for number in range(engines):
                self._add(number)
        except BaseException:  # Ctrl-C too: nothing owns the links yet
            self.leave()
            self.close()
            raise

    def send(self, message: EngineRequest) -> None:
        try:
            self._send(message)
        except BaseException as error:
            self._on_interruption(error)
            raise

    def _on_interruption(self, error: BaseException) -> None:
        """Have all links replaced after Ctrl-C: a message may be missing."""
        if not isinstance(error, Exception):
            # Not the error: the frames of the traceback refer to this object.
            self._interruption = repr(error)

    def _link_again(self, interruption: str) -> None:
        """Replace all links. Engines make missing batches again."""
        if self._is_stream:
            self._end(interrupted(interruption))
            return
        self._lost.clear()
        self._dealer.recall(range(self._engines))
        for number in range(self._engines):  # all again, if Ctrl-C comes here
            self._drop(number)
            self._add(number)
        self._interruption = None

    def _send(self, message: EngineRequest) -> None:
        if isinstance(message, list):
            self._dealer.waiting.extend(message)
            self._deal()
        elif isinstance(message, Consumed):
            next_one = self._dealer.engine_of(message.number + 1)
            for number, link in self._links.items():
                times = self._times.get(link)
                if number == next_one or (times is not None and times.load.held_plans):
                    link.send(message)
        elif isinstance(message, StatusRequest):
            engine = self._dealer.engine_of(message.number)
            if engine in self._links:
                self._links[engine].send(message)
            else:
                why = "others have ended"
                if self._cluster is not None and len(self._running) < self._least:
                    why = self._cluster.shortage
                self.messages.append(
                    Status(f"batch {message.number} waits for an engine: {why}")
                )
        else:
            self._standing[type(message)] = message
            for link in self._links.values():
                link.send(message)

    def receive(self) -> None:
        """Take in the messages of all engines, replace dead engines, and deal waiting plans."""
        try:
            if self._interruption is not None and not self._over:
                self._link_again(self._interruption)
            self._receive()
        except BaseException as error:
            self._on_interruption(error)
            raise

    def _receive(self) -> None:
        # A message from a thread makes the source readable only if the consumer waits.
        ready = [*self._links]
        if self._engines > 1 and self._cluster is None:
            ready = [key.data for key, _ in self._selector.select(0)]
        self._take_in(ready)
        while self._lost and not self._over:
            # Find all dead engines first: no dead engine may get the batches of another.
            self._take_in([*self._links])
            if not self._over:
                self._replace_lost()
        self._deal()

    def must_wait(self) -> bool:
        return not self.messages and all(
            link.must_wait() for link in self._links.values()
        )

    def leave(self) -> None:
        for link in list(self._links.values()):
            link.leave()

    def close(self) -> None:
        for link in list(self._links.values()):
            link.close()
        self._links.clear()
        self._selector.close()

    def _add(self, number: int) -> None:
        link = self._links[number] = self._connect(number, self._dealer.first_missing())
        self._selector.register(link.source, selectors.EVENT_READ, number)
        if self._engines == 1:  # one socket is quicker than one in an epoll
            self.source = link.source
        if self._cluster is None:
            self._running.add(number)
        for message in self._standing.values():
            link.send(message)
        if plans := self._dealer.shares[number].plans:
            link.send(list(plans.values()))

    def _end(self, error: BaseException | None) -> None:
        self._over = True
        self.messages.append(SessionEnd(error))

    def _take_in(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            link = self._links[number]
            link.receive()
            while link.messages and not self._over:
                message = link.messages.popleft()
                if isinstance(message, HostBatch):
                    times = self._times_of_all(link, message.times)
                    if times is not message.times:
                        message = message._replace(times=times)
                    self._dealer.receive(number, message)
                elif isinstance(message, SessionStarted):
                    self._running.add(number)
                elif isinstance(message, Status):
                    self.messages.append(message)
                elif isinstance(message, SessionEnd) and message.death is not None:
                    self._lost[number] = message
                elif isinstance(message, SessionEnd):  # user code: set_epoch, imports
                    self._end(message.error)
        self._dealer.take_made(self.messages)

    def _times_of_all(self, link: Link, times: StageTimes) -> StageTimes:
        """Return the times of a batch, with the load of all engines and mean times."""
        self._times[link] = times
        if len(self._times) == 1:
            return times
        loads = [
            self._times[each].load for each in self._links.values() if each in self._times
        ]
        # An engine without a batch in this session counts like the other engines. Otherwise the
        # engine's earlier seconds would be added later, all at once.
        known = min(len(self._times), self._engines)
        means = {
            name: sum(getattr(e, name) for e in self._times.values()) / known
            for name in GROWING
        }
        steps = sum(each.functions_seconds for each in self._times.values())
        return times._replace(
            load=FetchLoad(*map(sum, zip(*loads, strict=True))),
            functions_seconds=steps,
            **means,
        )

    def _deal(self) -> None:
        if self._over or not self._dealer.waiting:
            return
        if len(self._running) < self._least:
            if (cluster := self._cluster) is None:
                return
            if self.look_by is None:  # the time limit for these engines
                self.look_by = time.monotonic() + cluster.start_timeout
            elif time.monotonic() >= self.look_by:
                error = EngineStartError(
                    running=len(self._running),
                    engines=self._engines,
                    least=self._least,
                    seconds=cluster.start_timeout,
                    shortage=cluster.shortage,
                )
                self._end(error)
            return
        # The epoch has begun: one engine is enough now.
        self._least = 1
        self.look_by = None
        for number, plans in self._dealer.deal(sorted(self._running)).items():
            if number in self._links:  # otherwise `_add` sends the plans
                self._links[number].send(plans)

    def _drop(self, number: int) -> None:
        self._running.discard(number)
        if (link := self._links.get(number)) is not None:
            with contextlib.suppress(KeyError):  # Ctrl-C came before
                self._selector.unregister(link.source)
            link.leave()
            link.close()
            del self._links[number]

    def _replace_lost(self) -> None:
        lost, self._lost = self._lost, {}
        for number in lost:
            self._drop(number)
        if self._is_stream:  # the position in the stream is lost with the engine
            (end,) = lost.values()
            why = f"the only engine that reads the stream has ended: engine 0 {end.death}"
            self._end(end.error or EngineDiedError(why=why))
            return
        batch, deaths = self._dealer.take_back(lost)
        ends = "; ".join(
            f"engine {number} {end.death}" for number, end in sorted(lost.items())
        )
        if deaths >= DEATHS_ALONE:
            what = f"{deaths} engines have ended while they made batch {batch} and nothing else"
            self._dealer.give_up(batch, f"{what}: {ends}")
            self._dealer.take_made(self.messages)
        results = {number: self._restart(number) for number in lost}
        if not self._links:
            whys = "; ".join(f"engine {number}: {why}" for number, why in results.items())
            self._end(EngineDiedError(why=f"{ends}. {whys}"))
            return
        self._deal()
        for number, result in results.items():  # last, since a warning may be an error
            name = (
                "the engine"
                if self._engines == 1
                else f"engine {number} of {self._engines}"
            )
            warning = (
                f"{name} {lost[number].death}: {result}. Its batches are made again."
            )
            warn_user(warning, RuntimeWarning)

    def _restart(self, number: int) -> str:
        """Start an engine in place of a dead engine, and return the result in words."""
        if self._dealer.shares[number].deaths >= DEATHS_WITHOUT_BATCH:
            times = f"{DEATHS_WITHOUT_BATCH} times without a batch"
            return f"it has ended {times}, and is not started again in this epoch"
        try:
            self._add(number)
        except (OSError, EngineDiedError) as error:
            # A shortage of descriptors or of memory.
            return f"it could not be started again ({error})"
        return "it is started again" if self._cluster is None else "another is asked for"
