"""The consumer's end of a session on several engines: plans are dealt to them, and their batches put in order.

An engine that dies is replaced, and its batches are made by the others: each batch has its own number, seed and
indices, so that it is the same from whichever engine it comes.
"""

from __future__ import annotations

import os
import selectors
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Sequence

import anyio

from headrace._core.batches import BatchPlan, HostBatch
from headrace._core.call_site import users_stacklevel
from headrace._core.engine.config import EngineConfig
from headrace._core.engine.reorder import Reorder
from headrace._core.eventloop.waiting import CloseGuard, wait_readable
from headrace._core.interface.kinds import capabilities
from headrace._core.open_session import check_not_forked
from headrace._core.runtime.dealing import DEATHS_ALONE, Dealer
from headrace._core.runtime.engine_session import EngineSession, Quorum
from headrace._core.runtime.engine_times import EngineTimes
from headrace._core.runtime.lane_dealing import LaneDealer
from headrace.errors import EngineDiedError, EngineStartError, LoaderClosedError

CHECK_EVERY = 5.0  # seconds after which engines elsewhere are looked at, if nothing arrives from them
STARTS_WITHOUT_BATCH = 3  # deaths before the first batch after which an engine is not replaced any more


class GroupSession:
    """The sessions of several engines as one, and its queue.

    Args:
        open_at: starts the session of an engine, by its number; replaces an engine that has died.
        engines: their number.
        first: the number of the first batch.
        in_order: whether batches are delivered in the order of their plans.
        dealer: deals the plans.
        quorum: of engines that have to run before plans are dealt; None where they start at once.
    """

    is_current = False

    def __init__(
        self,
        open_at: Callable[[int], EngineSession],
        engines: int,
        *,
        first: int,
        in_order: bool,
        dealer: Dealer | LaneDealer,
        quorum: Quorum | None = None,
    ) -> None:
        self._open_at = open_at
        self._pid = os.getpid()
        self._engines = engines
        self._sessions: dict[int, EngineSession] = {}
        self._quorum = quorum
        self._least = 0 if quorum is None else quorum.least  # engines without which no plan is dealt
        self._deadline: float | None = None  # for that many
        self._dealer = dealer
        self._reorder = Reorder(first) if in_order else None
        self._ready: deque[HostBatch] = deque()
        self._times = EngineTimes(engines)
        self._starts = dict.fromkeys(range(engines), 1)  # of each engine since its last batch
        self._how_ended: dict[int, str] = {}  # the last process of an engine
        self._status: str | None = None
        self._traced = False
        self._arrived = first - 1  # the highest number of a batch that has
        self._reported: dict[int, int] = {}  # up to which batch each engine knows what was taken
        self.ended = False
        self.error: BaseException | None = None
        self._selector = selectors.DefaultSelector()
        self._guard = CloseGuard(self._wake, self._close_all)
        try:
            for number in range(engines):
                self._add(number)
        except BaseException:  # Ctrl-C too: nothing owns the engines' sessions yet
            self.close()
            raise

    @classmethod
    def of_loader(
        cls,
        config: EngineConfig,
        open_at: Callable[[int], EngineSession],
        engines: int,
        *,
        first: int,
        quorum: Quorum | None = None,
    ) -> GroupSession:
        """The session of a loader: a stream's plans are dealt by lanes, which take turns, others by batches."""
        if config.kind.is_iterable:
            return cls(open_at, engines, first=first, in_order=True, dealer=LaneDealer(engines), quorum=quorum)
        dealer = Dealer(engines, chunked=capabilities(config.dataset).ranges)
        return cls(open_at, engines, first=first, in_order=config.in_order, dealer=dealer, quorum=quorum)

    @property
    def handoff(self) -> GroupSession:
        return self

    def admit(self, plans: Sequence[BatchPlan]) -> None:
        check_not_forked(self._pid)
        with self._guard.acquire() as entered:
            if entered and not self.ended:
                self._deal(plans, among=self._started())
                self._replace_ended()

    def on_consumed(self, number: int) -> None:
        with self._guard.acquire() as entered:
            if not entered:
                return
            next_one = self._dealer.engine_of(number + 1)
            if next_one is None and self._dealer.waits and not self._ready:
                # The next batch waits for an engine that has nothing else, after others have ended with it. So that
                # one gets there, what has arrived and cannot be taken yet does not count.
                for engine in self._sessions:
                    self._report_consumed(engine, self._arrived)
            for engine in self._sessions:
                if engine == next_one or self._times.waits_for_memory(engine):
                    self._report_consumed(engine, number)

    def _report_consumed(self, engine: int, number: int) -> None:
        if number > self._reported.get(engine, -1):
            self._reported[engine] = number
            self._sessions[engine].on_consumed(number)

    def request_status(self, number: int) -> None:
        with self._guard.acquire() as entered:
            if not entered:
                return
            engine = self._dealer.engine_of(number)
            if engine is None:
                self._status = f"batch {number} waits for an engine: {self._why_waiting()}"
            elif engine in self._sessions:
                self._sessions[engine].request_status(number)

    def _why_waiting(self) -> str:
        if self._quorum is None or len(self._started()) >= max(1, self._least):
            return "others have ended"
        return self._quorum.shortage()

    def _started(self) -> list[int]:
        """The engines that get plans."""
        started = [number for number, session in self._sessions.items() if session.started]
        if len(started) >= max(1, self._least):
            self._least, self._deadline = 0, None  # the epoch has begun: one is enough from now on
            return started
        if self._deadline is None and self._quorum is not None:
            self._deadline = time.monotonic() + self._quorum.seconds
        return []

    def _at(self, status: str, engine: int | None) -> str:
        return f"{status}, in engine {engine} of {self._engines}"

    def trace(self, on: bool) -> None:
        self._traced = on
        with self._guard.acquire() as entered:
            for session in self._sessions.values() if entered else ():
                session.trace(on)

    def take_status(self) -> str | None:
        with self._guard.acquire() as entered:
            for number, session in self._sessions.items() if entered else ():
                if (status := session.take_status()) is not None:
                    self._status = self._at(status, number)
                self._receive(number)
        status, self._status = self._status, None
        return status

    def take(self) -> HostBatch | None:
        self._receive_ready()  # also while batches are ready: an engine that has died is replaced at once
        return self._ready.popleft() if self._ready else None

    def ready(self) -> int:
        self._receive_ready()
        return len(self._ready)

    def certain(self) -> int:
        self._receive_ready()
        return sum(not host.empty for host in self._ready)

    def wait(self, timeout: float | None) -> bool:
        """Block until a message of an engine arrives, or one ends; False after `timeout` seconds."""
        with self._guard.acquire() as entered:
            if not entered or self._ready or self.ended or self._status is not None:
                return True
            seconds = self._longest_wait(timeout)
            return wait_readable(self._selector.fileno(), timeout=seconds) or seconds != timeout

    async def wait_async(self, timeout: float | None) -> bool:
        with self._guard.acquire() as entered:
            if not entered or self._ready or self.ended or self._status is not None:
                return True
            seconds = self._longest_wait(timeout)
            with anyio.move_on_after(seconds) as scope:
                await anyio.wait_readable(self._selector.fileno())
            return not scope.cancelled_caught or seconds != timeout

    def _longest_wait(self, timeout: float | None) -> float | None:
        """For how long the consumer may wait for a descriptor."""
        if self._quorum is None:
            return timeout
        left = CHECK_EVERY if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        return left if timeout is None else min(left, timeout)

    def close(self) -> None:
        """End the sessions of all engines; idempotent."""
        if self._pid != os.getpid():
            return  # a fork: the sessions are the parent's
        if not self.ended:
            self._end(LoaderClosedError())
        self._ready.clear()
        for session in list(self._sessions.values()):
            session.abandon()
        self._guard.close()

    def _receive_ready(self) -> None:
        """Take what has arrived, from the engines that have something."""
        with self._guard.acquire() as entered:
            if not entered or self.ended:
                return
            for number, of_process in sorted(key.data for key, _ in self._selector.select(0)):
                if of_process:  # it has started, or ended
                    _ = self._sessions[number].process_ended
                self._receive(number)
            if self._quorum is not None:
                for session in self._sessions.values():
                    _ = session.process_ended  # also if nothing arrives any more
            self._replace_ended()
            if self._dealer.waits and not self.ended:
                self._deal([], among=self._started())
                self._check_deadline()

    def _check_deadline(self) -> None:
        if self._deadline is not None and time.monotonic() >= self._deadline:
            assert self._quorum is not None
            running = sum(session.started for session in self._sessions.values())
            self._end(
                EngineStartError(
                    running=running,
                    engines=self._engines,
                    least=max(1, self._least),
                    seconds=self._quorum.seconds,
                    shortage=self._quorum.shortage(),
                )
            )

    def _receive(self, number: int) -> None:
        session = self._sessions[number]
        while (host := session.take()) is not None:
            self._starts[number] = 0
            self._arrived = max(self._arrived, host.plan.number)
            host = host._replace(times=self._times.of_all(number, host.times))
            for made in self._dealer.receive(number, host):
                self._ready.extend((made,) if self._reorder is None else self._reorder.put(made))

    def _deal(self, plans: Sequence[BatchPlan], *, among: Collection[int]) -> None:
        if self._quorum is not None and among:
            self._dealer.confine(among)  # one that starts may take minutes
        for number, dealt in self._dealer.deal(plans, among=among).items():
            self._sessions[number].admit(dealt)

    def _add(self, number: int) -> None:
        session = self._open_at(number)
        if self._traced:
            session.trace(True)
        for position, source in enumerate(session.sources):
            self._selector.register(source, selectors.EVENT_READ, (number, position > 0))
        self._sessions[number] = session

    def _remove(self, number: int) -> EngineSession:
        self._receive(number)  # the batches that arrived before
        session = self._sessions.pop(number)
        self._times.end(number)
        self._reported.pop(number, None)
        for source in session.sources:
            self._selector.unregister(source)
        session.close()
        return session

    def _replace_ended(self) -> None:
        """Replace engines whose sessions have ended, and give their batches to the others."""
        while not self.ended and any(session.ended for session in self._sessions.values()):
            # All that have ended by now: the batches of one are not given to another that has ended too.
            ended = {n: session for n, session in self._sessions.items() if session.process_ended or session.ended}
            for number, session in ended.items():
                self._remove(number)
                if not session.process_ended:  # user code: set_epoch, imports
                    self._end(session.error)
                    return
                self._how_ended[number] = session.how_process_ended
            self._dealer.take_back(ended)
            if (error := self._reason_to_end()) is not None:
                self._end(error)
                return
            others = self._started()
            results = {number: self._restart(number) for number in ended}
            if not self._sessions:  # none could be started
                self._end(EngineDiedError(why="; ".join(f"engine {number}: {why}" for number, why in results.items())))
                return
            self._deal([], among=others)
            for number, result in results.items():  # last, since a warning may be an error
                warnings.warn(
                    f"engine {number} of {self._engines} {self._how_ended[number]}: {result}. "
                    f"{self._dealer.succession}.",
                    RuntimeWarning,
                    stacklevel=users_stacklevel(),
                )

    def _reason_to_end(self) -> EngineDiedError | None:
        ends = "; ".join(f"engine {number} {how}" for number, how in sorted(self._how_ended.items()))
        if (batch := self._dealer.reason()) is not None:
            return EngineDiedError(
                why=f"{DEATHS_ALONE} of its processes have ended while they made batch {batch} and nothing else: {ends}"
            )
        if not self._sessions and not self._outlives_all():
            return EngineDiedError(why=f"all of its {self._engines} processes have ended: {ends}")
        return None

    def _outlives_all(self) -> bool:
        """Whether the epoch goes on when all engines have ended: those of a cluster are lost with their nodes."""
        return self._quorum is not None and min(self._starts.values()) < STARTS_WITHOUT_BATCH

    def _restart(self, number: int) -> str:
        """Start an engine in place of one that has ended; returns the result, in words."""
        if self._starts[number] == STARTS_WITHOUT_BATCH:
            self._dealer.abandon(number)
            return f"it has ended {STARTS_WITHOUT_BATCH} times without a batch, and is not started again in this epoch"
        self._starts[number] += 1
        try:
            self._add(number)
        except (OSError, EngineDiedError) as error:  # a shortage of descriptors or of memory
            self._dealer.abandon(number)
            return f"it could not be started again ({error})"
        return "it is started again" if self._quorum is None else "another is asked for"

    def _end(self, error: BaseException | None) -> None:
        self.ended = True
        self.error = error

    def _wake(self) -> None:
        for session in list(self._sessions.values()):
            session.wake()

    def _close_all(self) -> None:
        for session in list(self._sessions.values()):
            session.close()
        self._sessions.clear()
        self._selector.close()
