"""The consumer's side of an epoch: plans go to one engine or several, and their batches come home in order.

An engine that dies beside others is replaced, and its batches are made by them: each batch has its own number, seed and
indices, so that it is the same from whichever engine it comes.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import anyio

from headrace._core.batches import BatchPlan, FetchLoad, HostBatch, StageTimes
from headrace._core.engine.config import EngineConfig
from headrace._core.engine.engine import Reorder
from headrace._core.eventloop.waiting import CloseGuard, wait_readable
from headrace._core.links.dealing import DEATHS_ALONE, Dealer, LaneDealer
from headrace._core.links.inline import WorkOnConsumersThread
from headrace._core.messages import (
    Answer,
    Call,
    Consumed,
    Link,
    Request,
    Started,
    Status,
    StatusRequest,
    check_not_forked,
)
from headrace._core.streams.kinds import capabilities
from headrace._core.streams.resumable import State
from headrace._core.text import users_stacklevel
from headrace.errors import EngineDiedError, EngineStartError, LoaderClosedError

CHECK_EVERY = 5.0  # seconds after which engines elsewhere are looked at, if nothing arrives from them
STARTS_WITHOUT_BATCH = 3  # deaths before the first batch after which an engine is not replaced any more


@dataclass(frozen=True, slots=True)
class Quorum:
    """How many engines an epoch begins with, where they may take long to start, and are lost with their nodes.

    Attributes:
        least: engines that have to run.
        seconds: for which fewer may run, before the epoch ends with an error.
        shortage: says what the others wait for.
    """

    least: int
    seconds: float
    shortage: Callable[[], str]


class Session:
    """An epoch on one engine or several; implements `OpenSession`.

    Args:
        connect: opens the link to an engine, by its number; replaces an engine that has died.
        engines: their number.
        dealer: deals the plans; None for a single engine, which gets them all and is not replaced.
        first: the number of the first batch.
        in_order: whether the batches of several engines are put in the order of their plans.
        quorum: of engines that have to run before plans are dealt; None where they start at once.
        later: engines to which links are opened when another has begun.
        work: what runs on the consumer's thread.
        is_current: whether the caller is on the engine's own thread.
        on_close: called once, after the session is closed.
        inline_state: returns the state of a dataset that is read in the caller's thread, a batch when it is taken.
        mail: the messages of a single engine in this process, which puts them there; `connect` has no descriptors
            then that `send` uses.

    Attributes:
        inline_state: as given; None where an engine reads ahead.
    """

    def __init__(
        self,
        connect: Callable[[int], Link],
        *,
        engines: int = 1,
        dealer: Dealer | LaneDealer | None = None,
        first: int = 0,
        in_order: bool = False,
        quorum: Quorum | None = None,
        later: Sequence[int] = (),
        work: WorkOnConsumersThread | None = None,
        is_current: Callable[[], bool] = lambda: False,
        on_close: Callable[[], None] | None = None,
        inline_state: Callable[[], State | None] | None = None,
        mail: deque[Answer] | None = None,
    ) -> None:
        self._mail = mail
        self.inline_state = inline_state
        self.ended = False
        self.error: BaseException | None = None
        self._pid = os.getpid()
        self._connect = connect
        self._engines = engines
        self._dealer = dealer
        self._reorder = Reorder(first) if in_order else None
        self._quorum = quorum
        self._work = work
        self._is_current = is_current
        self._on_close = on_close
        self._least = 0 if quorum is None else quorum.least  # engines without which no plan is dealt
        self._deadline: float | None = None  # for that many
        self._links: dict[int, Link] = {}
        self._only: Link | None = None  # the link to a single engine that is not replaced
        self._running = set(range(engines)) if quorum is None else set[int]()  # or will run within a moment
        self._later = later
        self._unsent: dict[int, list[BatchPlan]] = {}  # plans of these
        self._lost: dict[int, str] = {}  # engines that have ended, and how
        self._how_ended: dict[int, str] = {}  # the last process of each engine that has ended
        self._starts = dict.fromkeys(range(engines), 1)  # of each engine since its last batch
        self._times = EngineTimes(engines)
        self._standing: dict[type, Request] = {}  # the last request of each kind that is for all engines
        self._arrived = first - 1  # the highest number of a batch that has
        self._reported: dict[int, int] = {}  # up to which batch each engine knows what was taken
        self._messages = 0  # that were taken in
        self._ready: deque[HostBatch] = deque()
        self._calls: deque[Call] = deque()
        self._status: str | None = None
        self._selector: selectors.BaseSelector | None = None
        self._guard = CloseGuard(lambda: None, self._close_links)
        try:
            for number in range(engines):
                if number not in later:
                    self._add(number)
            self._only = self._links[0] if dealer is None else None
        except BaseException:  # Ctrl-C too: nothing owns the links yet
            self.close()
            raise

    @property
    def is_current(self) -> bool:
        check_not_forked(self._pid)
        return self._is_current()

    def send(self, message: Request) -> None:
        check_not_forked(self._pid)
        if self._mail is not None:
            if not self.ended and self._only is not None:
                self._only.send(message)
            return
        with self._guard as entered:
            if not entered or self.ended:
                return
            if self._dealer is None:
                self._links[0].send(message)
            elif isinstance(message, list):
                self._deal(message, among=self._taking_plans())
                self._replace_lost()
            elif isinstance(message, Consumed):
                self._report_consumed(self._dealer, message.number)
            elif isinstance(message, StatusRequest):
                engine = self._dealer.engine_of(message.number)
                if engine is None:
                    self._status = f"batch {message.number} waits for an engine: {self._why_waiting()}"
                elif engine in self._links:
                    self._links[engine].send(message)
            else:
                self._standing[type(message)] = message
                for link in self._links.values():
                    link.send(message)

    def take(self) -> HostBatch | None:
        if not self._ready or self._dealer is not None:  # an engine that has died is replaced at once
            self._receive()
        while self._calls and not self._ready:
            assert self._work is not None
            self._work.call(self._calls[0].function)  # after Ctrl-C it is called again
            with contextlib.suppress(IndexError):  # another thread has closed the session
                self._calls.popleft()
            self._receive()
        try:
            if self._work is None:
                return self._ready.popleft()
            host = self._work.finish(self._ready[0])
        except IndexError:
            return None
        with contextlib.suppress(IndexError):
            self._ready.popleft()
        return host

    def take_status(self) -> str | None:
        self._receive()
        status, self._status = self._status, None
        return status

    def ready(self) -> int:
        if self._mail is None or self._mail:
            self._receive()
        return len(self._ready)

    def certain(self) -> int:
        self._receive()
        if self._work is not None and self._work.skips:
            return 0
        return sum(not host.empty for host in self._ready)

    def wait(self, timeout: float | None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._guard as entered:
            while entered and self._must_wait():
                if deadline is not None and time.monotonic() >= deadline:
                    return False
                wait_readable(self._source(), timeout=self._longest_wait(deadline))
                if self._receive():
                    return True
            return True

    async def wait_async(self, timeout: float | None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._guard as entered:
            while entered and self._must_wait():
                if deadline is not None and time.monotonic() >= deadline:
                    return False
                with anyio.move_on_after(self._longest_wait(deadline)):
                    await anyio.wait_readable(self._source())
                if self._receive():
                    return True
            return True

    def close(self) -> None:
        """End the session without waiting, from any thread; idempotent."""
        if self._pid == os.getpid():  # in a fork, the engines are the parent's, and its locks may be held
            self._end(LoaderClosedError())
            self._ready.clear()
            self._calls.clear()
            for link in list(self._links.values()):
                link.leave()
            self._guard.close()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    def _end(self, error: BaseException | None) -> None:
        if not self.ended:
            self.error = error
            self.ended = True

    def _close_links(self) -> None:
        for link in list(self._links.values()):
            link.close()
        self._links.clear()
        if self._selector is not None:
            self._selector.close()

    def _add(self, number: int) -> None:
        link = self._links[number] = self._connect(number)
        for position, source in enumerate(link.sources):
            if self._selector is None:
                self._selector = selectors.DefaultSelector()
            self._selector.register(source, selectors.EVENT_READ, (number, position > 0))
        if self._quorum is None:
            self._running.add(number)
        for message in self._standing.values():
            link.send(message)
        if plans := self._unsent.pop(number, None):
            link.send(plans)

    def _add_later(self) -> None:
        later, self._later = self._later, ()
        try:
            for number in later:
                self._add(number)
        except (OSError, EngineDiedError) as error:  # a shortage of descriptors or of memory
            self._end(error)

    def _remove(self, number: int) -> None:
        link = self._links.pop(number)
        assert self._selector is not None
        for source in link.sources:
            self._selector.unregister(source)
        self._running.discard(number)
        self._reported.pop(number, None)
        self._times.end(number)
        link.leave()
        link.close()

    def _source(self) -> int:
        assert self._selector is not None  # a link without a descriptor has no wait
        return self._selector.fileno()  # type: ignore[attr-defined,no-any-return]

    def _must_wait(self) -> bool:
        if self._ready or self._calls or self.ended or self._status is not None:
            return False
        return all(link.must_wait() for link in self._links.values())

    def _longest_wait(self, until: float | None) -> float | None:
        """For how many seconds the consumer may wait for a descriptor, by `time.monotonic`."""
        now = time.monotonic()
        if self._quorum is not None:
            ends = [now + CHECK_EVERY, *(each for each in (until, self._deadline) if each is not None)]
            until = min(ends)
        return None if until is None else max(0.0, until - now)

    def _receive(self) -> bool:
        """Take in the messages that have arrived; whether there were any. A log record is none."""
        before = self._messages
        if self._only is not None:  # without the guard, which costs a microsecond for each batch
            if not self.ended:
                self._take_in(0, self._only.receive() if self._mail is None else self._mail)
            return self._messages > before
        with self._guard as entered:
            if not entered or self.ended:
                return False
            assert self._selector is not None
            assert self._dealer is not None
            for number, of_process in sorted(key.data for key, _ in self._selector.select(0)):
                if of_process:  # it has started, or ended
                    self._look_after(number)
                else:
                    self._take_in(number, self._links[number].receive())
            if self._later and self._messages > before and not self.ended:
                self._add_later()
            if self._quorum is not None:
                for number in self._links:
                    self._look_after(number)  # also if nothing arrives any more
            self._replace_lost()
            if self._dealer.waits and not self.ended:
                self._deal([], among=self._taking_plans())
                self._check_deadline()
            return self._messages > before

    def _look_after(self, number: int) -> None:
        """Take in the messages of an engine, the last if its process has ended."""
        link = self._links[number]
        link.must_wait()
        self._take_in(number, link.receive())

    def _take_in(self, number: int, messages: deque[Answer]) -> None:
        while messages and not self.ended:
            message = messages.popleft()
            self._messages += 1
            if isinstance(message, HostBatch):
                if self._dealer is None:
                    self._ready.append(message)
                else:
                    self._on_batch(self._dealer, number, message)
            elif isinstance(message, Status):
                self._status = message.text if self._engines == 1 else f"{message.text}, {self._name(number)}"
            elif isinstance(message, Call):
                self._calls.append(message)
            elif isinstance(message, Started):
                self._running.add(number)
            elif message.death is None or self._dealer is None:  # user code: set_epoch, imports
                self._end(message.error)
            else:
                self._lost[number] = message.death

    def _on_batch(self, dealer: Dealer | LaneDealer, number: int, host: HostBatch) -> None:
        self._starts[number] = 0
        self._arrived = max(self._arrived, host.plan.number)
        host = host._replace(times=self._times.of_all(number, host.times))
        for made in dealer.receive(number, host):
            self._ready.extend((made,) if self._reorder is None else self._reorder.put(made))

    def _report_consumed(self, dealer: Dealer | LaneDealer, number: int) -> None:
        next_one = dealer.engine_of(number + 1)
        # If the next batch waits for an engine that has nothing else, after others have ended with it, what has arrived
        # and cannot be taken yet does not count: so that one gets there.
        stuck = next_one is None and dealer.waits and not self._ready
        for engine, link in self._links.items():
            if stuck or engine == next_one or self._times.waits_for_memory(engine):
                consumed = self._arrived if stuck else number
                if consumed > self._reported.get(engine, -1):
                    self._reported[engine] = consumed
                    link.send(Consumed(consumed))

    def _why_waiting(self) -> str:
        if self._quorum is None or len(self._running) >= max(1, self._least):
            return "others have ended"
        return self._quorum.shortage()

    def _name(self, engine: int) -> str:
        return f"in engine {engine} of {self._engines}"

    def _taking_plans(self) -> list[int]:
        """The engines that get plans."""
        if len(self._running) >= max(1, self._least):
            self._least, self._deadline = 0, None  # the epoch has begun: one is enough from now on
            return sorted(self._running)
        if self._deadline is None and self._quorum is not None:
            self._deadline = time.monotonic() + self._quorum.seconds
        return []

    def _check_deadline(self) -> None:
        if self._deadline is not None and time.monotonic() >= self._deadline:
            assert self._quorum is not None
            self._end(
                EngineStartError(
                    running=len(self._running),
                    engines=self._engines,
                    least=max(1, self._least),
                    seconds=self._quorum.seconds,
                    shortage=self._quorum.shortage(),
                )
            )

    def _deal(self, plans: list[BatchPlan], *, among: Collection[int]) -> None:
        assert self._dealer is not None
        if among:
            self._dealer.confine(self._running)  # one that starts may take minutes, or could not be replaced
        for number, dealt in self._dealer.deal(plans, among=among).items():
            if number in self._links:
                self._links[number].send(dealt)
            else:
                self._unsent.setdefault(number, []).extend(dealt)

    def _replace_lost(self) -> None:
        """Replace engines that have ended, and give their batches to the others."""
        dealer = self._dealer
        while self._lost and dealer is not None:
            for number in self._links:  # all that have ended by now: none gets the batches of another
                self._look_after(number)
            if self.ended:
                return
            lost, self._lost = self._lost, {}
            for number in lost:
                self._remove(number)
            self._how_ended |= lost
            dealer.take_back(lost)
            if (error := self._reason_to_end(dealer)) is not None:
                self._end(error)
                return
            others = self._taking_plans()
            results = {number: self._restart(number) for number in lost}
            if not self._links:  # none could be started
                self._end(EngineDiedError(why="; ".join(f"engine {number}: {why}" for number, why in results.items())))
                return
            self._deal([], among=others)
            for number, result in results.items():  # last, since a warning may be an error
                warnings.warn(
                    f"engine {number} of {self._engines} {lost[number]}: {result}. Its batches are made again.",
                    RuntimeWarning,
                    stacklevel=users_stacklevel(),
                )

    def _reason_to_end(self, dealer: Dealer | LaneDealer) -> EngineDiedError | None:
        ends = "; ".join(f"engine {number} {how}" for number, how in sorted(self._how_ended.items()))
        if (batch := dealer.reason()) is not None:
            return EngineDiedError(
                why=f"{DEATHS_ALONE} of its processes have ended while they made batch {batch} and nothing else: {ends}"
            )
        # Those of a cluster are lost with their nodes, and replaced even if all are.
        outlives = self._quorum is not None and min(self._starts.values()) < STARTS_WITHOUT_BATCH
        if not self._links and not outlives:
            return EngineDiedError(why=f"all of its {self._engines} processes have ended: {ends}")
        return None

    def _restart(self, number: int) -> str:
        """Start an engine in place of one that has ended; returns the result, in words."""
        if self._starts[number] == STARTS_WITHOUT_BATCH:
            return f"it has ended {STARTS_WITHOUT_BATCH} times without a batch, and is not started again in this epoch"
        self._starts[number] += 1
        try:
            self._add(number)
        except (OSError, EngineDiedError) as error:  # a shortage of descriptors or of memory
            return f"it could not be started again ({error})"
        return "it is started again" if self._quorum is None else "another is asked for"


def session_of(
    config: EngineConfig,
    connect: Callable[[int], Link],
    engines: int,
    *,
    first: int,
    quorum: Quorum | None = None,
    later: Sequence[int] = (),
) -> Session:
    """The session of a loader: a stream's plans are dealt by lanes, which take turns, others by batches."""
    if engines == 1 and quorum is None:
        return Session(connect)
    stream = config.kind.is_iterable
    dealer = LaneDealer(engines) if stream else Dealer(engines, chunked=capabilities(config.dataset).ranges)
    in_order = stream or config.in_order
    return Session(connect, engines=engines, dealer=dealer, first=first, in_order=in_order, quorum=quorum, later=later)


_GROWING = ("engine_cpu", "engine_queued", "blocked", "blocked_before")  # of `StageTimes`: sums since an engine's start


class EngineTimes:
    """What `StageTimes` says of one engine, for all of them: the sum of their loads, the means of their times.

    Args:
        engines: their number.
    """

    def __init__(self, engines: int) -> None:
        self._engines = engines
        self._last: dict[int, StageTimes] = {}  # of the last batch of each engine
        self._of_ended = dict.fromkeys(_GROWING, 0.0)

    def of_all(self, engine: int, times: StageTimes) -> StageTimes:
        """The times of an engine's batch, with the load and the means of all, those that have ended included."""
        self._last[engine] = times
        last = self._last.values()
        means = {
            name: (ended + sum(getattr(each, name) for each in last)) / self._engines
            for name, ended in self._of_ended.items()
        }
        return times._replace(load=FetchLoad(*map(sum, zip(*(each.load for each in last), strict=True))), **means)

    def waits_for_memory(self, engine: int) -> bool:
        """Whether plans of an engine waited for memory at its last batch."""
        last = self._last.get(engine)
        return last is not None and last.load.held_plans > 0

    def end(self, engine: int) -> None:
        """Note that an engine has ended: its load is gone, and its sums are kept."""
        if (last := self._last.pop(engine, None)) is not None:
            for name in _GROWING:
                self._of_ended[name] += getattr(last, name)
