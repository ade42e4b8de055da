"""Several processes behind one link: plans are dealt, and a process that dies is replaced."""

from __future__ import annotations

import copy
import logging
import selectors
import signal
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from headrace._core.batches import BatchPlan, HostBatch
from headrace._core.descriptors import explained
from headrace._core.failure import Failure, Stage, describe_samples
from headrace._core.messages import (
    Answer,
    Link,
    Request,
    SessionEnd,
    Started,
    Status,
    StatusRequest,
    StepsAnswer,
    Unread,
)
from headrace._core.pool.children import Job, ProcessLink
from headrace._core.pool.dealing import Dealer, Plan
from headrace._core.pool.launch import WorkerProcess
from headrace._core.text import shorten_list
from headrace.errors import WorkerDiedError

ATTEMPTS = 2  # a batch whose process died is tried once more: another process may be the cause (memory)
DEATHS_AT_START = 3  # deaths without an answer, after which a process is given up
_log = logging.getLogger("headrace")


class _Ready(NamedTuple):
    """What is registered with the selector: a process's socket, or the descriptor that says when it has ended."""

    process: int
    ended: bool


class Lost(NamedTuple):
    """A process that has died: the link to it, which is closed, and how its session has ended."""

    link: Link
    end: SessionEnd


class ProcessGroup(Link):
    """The link to several processes, among which plans are dealt."""

    guarded = True
    looks_at_all = False  # whether a link may have messages while its descriptor is not readable

    def __init__(self, connect: Callable[[int], Link], dealer: Dealer) -> None:
        self.messages: deque[Answer] = deque()
        self._connect = connect  # opens the link to a process, by its number; replaces a process that has died
        self._dealer = dealer
        self._links: dict[int, Link] = {}
        self._lost: dict[int, SessionEnd] = {}  # processes that have died
        self._over = False
        self._selector = selectors.DefaultSelector()
        self.source = self._selector.fileno()

    def _open(self, numbers: Iterable[int]) -> None:
        try:
            for number in numbers:
                self._add(number)
        except BaseException:  # Ctrl-C too: nothing owns the links yet
            self.leave()
            self.close()
            raise

    def send(self, message: Request) -> None:
        if isinstance(message, list):
            self._dealer.waiting.extend(message)
            self._deal()
        elif isinstance(message, StatusRequest):
            self._request_status(message)
        else:
            self._send_to_all(message)

    def receive(self) -> None:
        """Take in the messages of all processes, replace those that have died, and deal the plans that wait."""
        ready = [key.data for key, _ in self._selector.select(0)]
        if self.looks_at_all:
            ready = [_Ready(number, ended=False) for number in self._links]
        self._take_in(ready)
        while self._lost and not self._over:
            # All that have died by now: none gets the batches of another.
            self._take_in([_Ready(number, ended=False) for number in self._links])
            if not self._over:
                ends, self._lost = self._lost, {}
                self._replace({number: Lost(self._remove(number), end) for number, end in ends.items()})
        self._deal()

    def must_wait(self) -> bool:
        return not self.messages and all(link.must_wait() for link in self._links.values())

    def leave(self) -> None:
        for link in list(self._links.values()):
            link.leave()

    def close(self) -> None:
        for link in list(self._links.values()):
            link.close()
        self._links.clear()
        self._selector.close()

    def _add(self, number: int) -> None:
        link = self._links[number] = self._connect(number)
        self._selector.register(link.source, selectors.EVENT_READ, _Ready(number, ended=False))
        if isinstance(link, ProcessLink):
            # The end of the connection does not tell if another process has a copy of it.
            self._selector.register(link.child.process.sentinel, selectors.EVENT_READ, _Ready(number, ended=True))
        if plans := self._dealer.shares[number].plans:
            self._send_plans(link, list(plans.values()))

    def _remove(self, number: int) -> Link:
        link = self._links.pop(number)
        self._selector.unregister(link.source)
        if isinstance(link, ProcessLink):
            self._selector.unregister(link.child.process.sentinel)
        link.leave()
        link.close()
        return link

    def _take_in(self, ready: Iterable[_Ready]) -> None:
        for number, ended in ready:
            link = self._links.get(number)
            if link is None or (ended and not self._has_ended(link)):
                continue
            link.receive()
            if ended and isinstance(link, ProcessLink):
                link.lose()
            while link.messages and not self._over:
                message = link.messages.popleft()
                if isinstance(message, SessionEnd):
                    if message.death is None:
                        self._end(message.error)  # of user code: set_epoch, imports
                    else:
                        self._lost[number] = message
                else:
                    self._on_message(number, link, message)

    def _has_ended(self, link: Link) -> bool:
        return isinstance(link, ProcessLink) and link.child.process.ended()

    def _end(self, error: BaseException | None) -> None:
        self._over = True
        self.messages.append(SessionEnd(error))

    def _deal(self) -> None:
        if self._over or not self._dealer.waiting:
            return
        for number, plans in self._dealer.deal(self._ready_for_plans()).items():
            if number in self._links:  # otherwise they are sent when it is started
                self._send_plans(self._links[number], plans)

    def _send_to_all(self, message: Request) -> None:
        pass  # processes that make one batch after the other know no other requests

    @abstractmethod
    def _ready_for_plans(self) -> list[int]:
        """The processes that plans may be dealt to, one at least."""

    @abstractmethod
    def _send_plans(self, link: Link, plans: list[Plan]) -> None: ...

    @abstractmethod
    def _request_status(self, message: StatusRequest) -> None:
        """Have the progress of a batch answered."""

    @abstractmethod
    def _on_message(self, number: int, link: Link, message: Answer) -> None: ...

    @abstractmethod
    def _replace(self, lost: dict[int, Lost]) -> None:
        """Start other processes in place of those that have died, and have their plans made."""


class WorkerGroup(ProcessGroup):
    """The link to workers, each of which makes one batch after the other, in the order of its plans.

    So the first plan of a worker that dies is the suspect. It is tried once more. A worker that dies repeatedly before
    it has answered anything breaks the group: all plans are answered with the error. The position in a stream, or the
    state of a stateful dataset, is lost with a worker: there one death breaks the group.
    """

    def __init__(
        self,
        connect: Callable[[int], ProcessLink],
        dealer: Dealer,
        *,
        reads: bool = False,  # whether workers read a torch dataset
        streams: bool = False,  # whether each worker reads a stream
        stateful: bool = False,  # whether a worker has a state that cannot be made again
        sample_key: Callable[[object], str | None] = lambda index: None,  # of the dataset that they read
    ) -> None:
        super().__init__(connect, dealer)
        self.deaths = 0  # of processes that had started, since the reader of this set it to 0
        self.broken: WorkerDiedError | None = None
        self._reads = reads
        self._streams = streams
        self._stateful = stateful
        self._sample_key = sample_key
        self._attempts: dict[int, int] = {}  # of plans that were given to more than one worker
        self._leaving: set[int] = set()  # they have no link any more when they have answered their plans
        self._open(dealer.shares)

    @property
    def numbers(self) -> list[int]:
        """The workers that plans are dealt to."""
        return self._dealer.active

    def resize(self, numbers: Iterable[int]) -> None:
        """Have workers with these numbers, one at least; others leave when they have answered their plans."""
        wanted = list(numbers)
        for number in [number for number in self.numbers if number not in wanted]:
            self._dealer.retire(number)
            self._leaving.add(number)
            self._let_leave(number)
        for number in wanted:
            if number not in self.numbers and not self.broken:
                try:
                    with explained(f"start worker {number}"):
                        self._dealer.add(number)
                        if number not in self._leaving:
                            self._add(number)
                        self._leaving.discard(number)
                except OSError as error:  # the others go on
                    self._dealer.retire(number)
                    _log.warning("%s", error)
        self._deal()

    def _let_leave(self, number: int) -> None:
        if number in self._leaving and number in self._links and not self._dealer.shares[number].plans:
            self._leaving.discard(number)
            self._remove(number)

    def worker_of(self, number: int) -> int | None:
        """The worker that has a plan; None if the plan waits for a worker, or is answered."""
        return self._dealer.process_of(number)

    def _ready_for_plans(self) -> list[int]:
        return self.numbers

    def _send_plans(self, link: Link, plans: list[Plan]) -> None:
        for plan in plans:  # each by itself, so that it is known which one a worker cannot unpickle
            link.send([plan])

    def _deal(self) -> None:
        waiting = self._dealer.waiting
        while waiting and not self._over and (self.broken or not self.numbers):
            plan = waiting.popleft()
            if self.broken:
                self._fail(plan, copy.copy(self.broken))
            else:
                assert isinstance(plan, BatchPlan)
                self._deliver(HostBatch.nothing(plan._replace(indices=()), end=True))
        super()._deal()

    def _request_status(self, message: StatusRequest) -> None:
        number = message.number
        worker = self._dealer.process_of(number)
        plans = self._dealer.waiting if worker is None else self._dealer.shares[worker].plans.values()
        plan = next((plan for plan in plans if plan.number == number), None)
        where = "waits for a worker" if worker is None else f"is in stage fetch, in a worker, worker {worker}"
        if isinstance(plan, BatchPlan):
            where = f"{where}, {describe_samples(plan.indices, self._sample_key)}"
        self.messages.append(Status(f"batch {number} {where}"))

    def _on_message(self, number: int, link: Link, message: Answer) -> None:
        if isinstance(message, HostBatch):
            self._on_batch(number, message)
        elif isinstance(message, StepsAnswer):
            self._count(number, message.number)
            self.messages.append(message)
        elif isinstance(message, Unread):
            assert message.number is not None
            plan = self._dealer.shares[number].plans[message.number]
            self._count(number, message.number)
            if isinstance(plan, Job):
                self.messages.append(message)
            else:
                self._fail(plan, message.error)
        elif not isinstance(message, Started):
            self.messages.append(message)

    def _on_batch(self, number: int, host: HostBatch) -> None:
        attempt = self._attempts.pop(host.plan.number, 1)
        self._count(number, host.plan.number)
        if host.failures:
            failures = (replace(failure, worker=number, attempt=attempt) for failure in host.failures)
            host = host._replace(failures=tuple(failures))
        if self._streams and host.end:
            self._dealer.retire(number)
        if self._reads:
            now, planned = time.perf_counter(), host.plan.planned
            deaths, self.deaths = self.deaths, 0
            host = host.located(self._sample_key)
            times = host.times._replace(
                admitted=planned, began=planned, fetched=planned, assembled=now, worker_deaths=deaths
            )
            host = host._replace(times=times)
            # Of a map-style dataset, the worker could not start; its next batch may succeed.
            host = host._replace(worker=number, end=host.end and self._streams and not self.numbers)
        self._deliver(host)

    def _count(self, worker: int, number: int) -> None:
        self._dealer.count(worker, number)
        self._let_leave(worker)

    def _deliver(self, host: HostBatch) -> None:
        self.messages.extend(self._dealer.ordered(host))

    def _fail(self, plan: Plan, error: Exception | BaseException) -> None:
        """Answer a plan with an error."""
        if isinstance(plan, Job) and plan.plan is None:
            self.messages.append(StepsAnswer(plan.number, None, error))
            return
        batch = plan.plan if isinstance(plan, Job) else plan
        assert batch is not None
        failure = Failure.caught(error, Stage.ASSEMBLE, batch.number)
        host = HostBatch.nothing(batch, (failure,), end=self._streams)
        self._deliver(host.located(self._sample_key) if self._reads else host)

    def _replace(self, lost: dict[int, Lost]) -> None:
        for number, (link, _) in lost.items():
            assert isinstance(link, ProcessLink)
            self._replace_worker(number, link)

    def _replace_worker(self, number: int, link: ProcessLink) -> None:
        process, dealer, share = link.child.process, self._dealer, self._dealer.shares[number]
        self.deaths += process.refusal is None
        first = next(iter(share.plans.values()), None)
        suspect = first if link.begun else None  # before, it had not read its plans
        attempt = 0 if link.child.answered else share.deaths + 1
        if suspect is not None:
            attempt = dealer.note_death(suspect.number)
            self._attempts[suspect.number] = attempt + 1
            share.made = True  # the attempts of the batch are the bound here
        died = _death(number, process, suspect, attempt)
        reported = suspect is not None and attempt >= (1 if self._stateful else ATTEMPTS)
        if reported and suspect is not None:
            dealer.count(number, suspect.number)
            self._attempts.pop(suspect.number, None)
            self._fail(suspect, died)
        dealer.take_back(number)
        if number in self._leaving:
            self._leaving.discard(number)
            return
        if self.broken or process.refusal is not None:
            self._break(number, self.broken or _death(number, process, None, 0, process.refusal))
        elif self._stateful or dealer.shares[number].deaths >= DEATHS_AT_START:
            self._break(number, died)
        else:
            try:
                with explained(f"replace worker {number}"):
                    self._add(number)
            except Exception as error:
                self._break(number, _death(number, process, None, 0, error))
                return
            if not reported:  # else the error reports it
                _log.warning("%s Another process has taken its place.", died)

    def _break(self, number: int, died: WorkerDiedError) -> None:
        """Answer all plans that no worker has with an error, from now on."""
        self.broken = died
        plans = self._dealer.shares[number].plans
        self._dealer.waiting.extendleft(reversed(plans.values()))
        plans.clear()


def log_idle_death(number: int, process: WorkerProcess) -> None:
    """Log the end of a worker that had no session, and is replaced."""
    _log.warning("%s Another process has taken its place.", _death(number, process, None, 0))


def _death(
    number: int, process: WorkerProcess, plan: Plan | None, attempt: int, obstacle: Exception | None = None
) -> WorkerDiedError:
    """The error that reports the end of a worker, whose first plan was `plan`, or why none could take its place."""
    pid, how, code = process.pid, process.how_it_ended(), process.exit_code
    batch = plan.plan if isinstance(plan, Job) else plan
    if batch is not None:
        doing = f"on batch {batch.number}, indices {shorten_list(batch.indices, len(batch.indices))}"
        remedy = "Run the transform and collate_fn over these indices with num_workers=0 to see the crash"
    elif plan is not None:
        doing = "on samples that are not yet in a batch"
        remedy = "Call the function that map or filter was given in this process to see the crash"
    elif attempt:
        doing = "while starting"
        remedy = "Call worker_init_fn, and import what the transform needs, in this process to see the crash"
    else:
        doing, remedy = "while idle", "None of your code was running in it"
    torchs = f"DataLoader worker (pid(s) {pid}) exited unexpectedly"  # which people and tools look for
    if code is not None and code < 0:
        torchs = f"DataLoader worker (pid {pid}) is killed by signal: {signal.strsignal(-code)}"
    message = (
        f"worker {number} (pid {pid}) {how} {doing}{f', attempt {attempt}' if attempt else ''}. {remedy}; "
        f"if it was killed, look for the out-of-memory killer in the kernel's log. In torch's words: {torchs}."
    )
    if obstacle is not None:
        ended = "" if pid is None else f" (pid {pid}) {how}, and"
        reason = getattr(obstacle, "strerror", None) or f"{type(obstacle).__name__}: {obstacle}"
        message = f"worker {number}{ended} cannot be started: {reason}"
    indices = () if batch is None else tuple(batch.indices)
    return WorkerDiedError(message, worker=number, exit_code=code, batch=batch and batch.number, indices=indices)
