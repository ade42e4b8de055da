"""The consumer's half of an epoch: plans sent ahead, batches claimed."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from headrace._core.batches import HostBatch
from headrace._core.consumer.agreement import Agreement
from headrace._core.consumer.batch_wait import BatchWait
from headrace._core.consumer.delivery import opened
from headrace._core.consumer.failures import FailureHandler
from headrace._core.consumer.loader_state import LoaderState
from headrace._core.consumer.planning import Planner
from headrace._core.consumer.prefetch import Prefetcher
from headrace._core.consumer.progress import EpochProgress
from headrace._core.error_policy import ErrorPolicy
from headrace._core.failure import Stage
from headrace._core.look_ahead import LookAheadSize
from headrace._core.open_session import OpenSession
from headrace._core.rankinfo import RankInfo, provide_rank, withdraw_rank
from headrace._core.transport.channel import shortages
from headrace.errors import CoordinationError, EngineDiedError, LoaderClosedError, LostBatchError
from headrace.telemetry.counters import Counters

WAIT = object()


class Epoch:
    """One epoch as its consumer sees it: the sampler on one side, the handoff on the other.

    Everything here runs on the consumer's thread. The two iterators of `iterators` differ only in how they wait.

    Args:
        planner: draws the plans; runs the user's sampler.
        session: where they go; owned from here on.
        look_ahead: how many plans may be outstanding; None to plan one batch at a time.
        together: whether plans are sent in groups only; see `Prefetcher`.
        bounded_engines: how many engines divide the plans, and may let some wait for memory; 0 if none does that.
        policy: the loader's `on_error`.
        stream: whether the dataset decides the order itself.
        as_torch: whether errors from workers are put in torch's words.
        timeout: seconds to wait for a batch; 0 for ever.
        finish: the claim's last step, applied to each batch and its number (pinning, waiting for its copy).
        counters: the loader's.
        progress: of this epoch.
        state: returns the state after the last call of `next()`, or so many calls before.
        rank: the result of `get_rank_info` in user code that is called here.
        agreement: of the ranks, on the number of steps; None if each ends its epoch by itself.
    """

    def __init__(
        self,
        planner: Planner,
        session: OpenSession,
        *,
        look_ahead: LookAheadSize | None,
        together: bool,
        bounded_engines: int,
        policy: ErrorPolicy,
        stream: bool,
        as_torch: bool,
        timeout: float,
        finish: Callable[[Any, int], Any],
        counters: Counters,
        progress: EpochProgress,
        state: Callable[[int], LoaderState],
        rank: RankInfo,
        agreement: Agreement | None,
    ) -> None:
        self._planner = planner
        self._session = session
        self._handoff = session.handoff
        self._failures = FailureHandler(policy, planner.repeat, stream=stream, as_torch=as_torch, counters=counters)
        self._ahead = Prefetcher(planner, session.admit, look_ahead, together=together, more=self._failures.replacement)
        self._finish = finish
        self._counters = counters
        self._progress = progress
        self.state = state
        self._rank = rank
        self._agreement = agreement
        self._next: HostBatch | None = None  # the next step, which the ranks have not agreed on
        self._error: Exception | None = None  # its error
        self._ended = True  # whether this rank has nothing left at the end of the epoch
        self._failures.resume(progress.skipped, progress.batches_before)
        self._iteration = counters.epochs
        self._skipped = counters.skipped_samples  # at the batch before
        self._times = (0.0, 0.0, 0.0)  # of the next step: the call, its batch was taken, plans were sent
        self._called = 0.0  # when the running call of next() began to wait for a batch; 0.0 once it was taken
        self._wait = BatchWait(
            session,
            self._ahead,
            counters,
            agreement,
            timeout=timeout or None,
            bounded_engines=bounded_engines,
        )
        self._over = False
        self.closed = False
        # Also ends the session of an iterator that is dropped in mid-epoch.
        self._finalizer = weakref.finalize(self, _end_iteration, session, counters, counters.open_iteration())
        self._finalizer.atexit = False  # the placement's own hook closes everything at exit, in order
        self._traced = False
        if counters.log.traced:
            self._follow_trace()
        if look_ahead is not None:
            self._ahead.fill()

    @property
    def last_point(self) -> object:
        """The position after the last batch: another object after each."""
        return self._progress.last_point

    def poll(self) -> Any:
        """The next batch, or `WAIT`.

        Raises:
            StopIteration: the epoch is over.
            Exception: the batch's failure; the next call continues after it.
        """
        self._called = self._called or time.perf_counter()
        if self._over:
            raise StopIteration
        if self.closed:
            raise LoaderClosedError
        token = provide_rank(self._rank)
        try:
            agreement = self._agreement
            if agreement is not None and not agreement.granted and not self._agree(agreement):
                return WAIT
            step = self._take_next()
            if step is WAIT:
                return WAIT
            if step is None:
                self._end()
            if agreement is not None:
                agreement.granted -= 1
            self._next = None
            return self._deliver(step)
        finally:
            withdraw_rank(token)

    def _agree(self, agreement: Agreement) -> bool:
        """Whether the ranks have agreed on further steps; False while that takes a wait."""
        if not agreement.pending:
            step = self._take_next()
            if step is WAIT:
                return False
            if step is None:
                self._check_end()
            self._ended = step is None
            agreement.propose(0 if step is None else 1 + self._handoff.certain())
        try:
            if not agreement.settle():
                return False
        except Exception:  # the other ranks cannot be reached any more, so that the epoch is over here too
            if not self.closed:  # otherwise by another thread
                self._over = True
                self.close()
            raise
        if not agreement.granted:
            self._finish_epoch()
        return True

    def _take_next(self) -> Any:
        """The next batch or error of a step; None at the end of this rank's epoch, or `WAIT`."""
        if self._next is not None:
            return self._next
        ahead, called = self._ahead, self._called
        while True:
            if not ahead.under_way:
                ahead.fill()
            host = self._handoff.take()
            if host is None:
                if not ahead.under_way:
                    return None
                if not self._handoff.ended:
                    return WAIT
                host = self._handoff.take()  # it may have been put between our look and the end
                if host is None:
                    raise self._cut_short()
            taken, self._called = time.perf_counter(), 0.0
            ahead.on_batch(host.plan.number, end=self._planner.on_batch(host), times=host.times)
            try:
                delivers = self._failures.delivers(host)
            except Exception as error:  # raised at this batch's turn, when the ranks have agreed on the step
                delivers, self._error = True, error
            # Before plans are drawn and sent, during which Ctrl-C must not lose the batch.
            self._times = called, taken, taken
            if delivers:
                self._next = host
            else:
                self._progress.on_batch(host, self._failures.counts, given=False)
            ahead.refill(self._handoff.ready)  # before the consumer computes, so that fetching goes on meanwhile
            if host.times.load.held_plans:
                self._wait.report_consumed()
            self._times = called, taken, time.perf_counter()
            if delivers:
                return host

    def _deliver(self, host: HostBatch) -> Any:
        """Return a batch, or raise its error; the next call of `next()` continues after it."""
        called, taken, refilled = self._times
        self._called = 0.0
        if self._agreement is not None:  # until now the other ranks were waited for
            taken, refilled = taken + time.perf_counter() - refilled, time.perf_counter()
        try:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            self._counters.delivered(host)
            batch = self._finish(opened(host), host.plan.number)
        except Exception as error:  # raised to the consumer; the next call continues after this batch
            if any(failure.stage is Stage.RESTORE for failure in host.failures):
                self._stop(error)  # the position stays the restored one; later batches would leave out samples
            else:
                self._progress.on_batch(host, self._failures.counts, given=True)
            raise
        self._progress.on_batch(host, self._failures.counts, given=True)
        plan, log = host.plan, self._counters.log
        skipped, self._skipped = self._counters.skipped_samples - self._skipped, self._counters.skipped_samples
        if log.traced is not self._traced:
            self._follow_trace()
        log.add(
            (
                self._iteration,
                plan.number,
                host.size,
                plan.planned,
                host.times,
                called,
                taken,
                refilled,
                time.perf_counter(),
                self._handoff.ready(),
                host.requests,
                time.thread_time(),
                skipped,
                shortages.count,
            ),
            host.fetches,
        )
        return batch

    def _follow_trace(self) -> None:
        """Have single fetches measured while a trace is written."""
        self._traced = self._counters.log.traced
        self._session.trace(self._traced)

    def _end(self) -> NoReturn:
        """End the epoch; this rank has nothing left."""
        if self._agreement is not None:  # it has announced more
            error = CoordinationError("coordinated=True: fewer batches than were announced to the ranks: a bug")
            self._stop(error)
            raise error
        self._finish_epoch()

    def _check_end(self) -> None:
        """Raise the error that ends this rank's epoch, if there is one; the other ranks then raise an error too."""
        try:
            if self._ahead.failure is not None:
                raise self._ahead.failure.exception()
            self._failures.check_epoch(whole=True)
        except Exception as error:  # the other ranks are given it before this one raises it
            self._stop(error)
            raise

    def _finish_epoch(self) -> NoReturn:
        self._over = True
        if not self._ended:
            self._counters.discarded_batches += 1 + self._handoff.ready()
        self.close()
        if self._ahead.failure is not None and self._ended:
            raise self._ahead.failure.exception()
        self._progress.end()
        self._failures.check_epoch(whole=self._ended)
        raise StopIteration

    def _stop(self, error: Exception) -> None:
        """End the epoch with an error, on all ranks."""
        self._over = True
        if self._agreement is not None:
            self._agreement.fail(error)
        self.close()

    def _cut_short(self) -> BaseException:
        if self.closed:  # by another thread, since we looked
            return LoaderClosedError()
        error = self._handoff.error
        planned, outstanding = self._ahead.planned, len(self._ahead.under_way)
        if error is None:
            error = LostBatchError(planned=planned, accounted=planned - outstanding)
        elif not isinstance(error, Exception):
            # A CancelledError, say: raised as it is, it would cancel the consumer.
            cause, error = error, EngineDiedError(why=f"{error!r}, with {outstanding} batches under way")
            error.__cause__ = cause
        self._stop(error)
        return error

    def wait(self) -> None:
        """Block until `poll` has a result."""
        try:
            self._wait.block()
        except BaseException:  # a time-out or Ctrl-C: the next call is another one
            self._called = 0.0
            raise

    async def wait_async(self) -> None:
        """As `wait`, on the caller's event loop."""
        try:
            await self._wait.suspend()
        except BaseException:  # a time-out or a cancellation: the next call is another one
            self._called = 0.0
            raise

    def close(self) -> None:
        """End the session; the iterator raises `LoaderClosedError` from now on."""
        self.closed = True
        self._next = None
        self._finalizer()


def _end_iteration(session: OpenSession, counters: Counters, iteration: object) -> None:
    counters.close_iteration(iteration)
    session.close()
