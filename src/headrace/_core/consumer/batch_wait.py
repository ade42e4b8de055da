"""The consumer's wait for a batch: blocking or on an event loop, with its time-out."""

from __future__ import annotations

import os
import time

from headrace._core.consumer.agreement import Agreement
from headrace._core.consumer.prefetch import Prefetcher
from headrace._core.open_session import OpenSession, check_not_forked
from headrace._core.text import shorten_list
from headrace.errors import DeadlockError, LoaderTimeoutError
from headrace.telemetry.counters import Counters

ANSWER_TIMEOUT = 0.2  # seconds that the engine has, after the time-out, to report a batch's status


class BatchWait:
    """Waits until a session has a batch, or the ranks have agreed.

    Args:
        session: of the epoch.
        ahead: its plans.
        counters: the loader's.
        agreement: of the ranks, on the number of steps; None if each ends its epoch by itself.
        timeout: seconds to wait for a batch; None for ever.
        bounded_engines: how many engines divide the plans, and may let some wait for memory; 0 if none does that.
    """

    def __init__(
        self,
        session: OpenSession,
        ahead: Prefetcher,
        counters: Counters,
        agreement: Agreement | None,
        *,
        timeout: float | None,
        bounded_engines: int,
    ) -> None:
        self._session = session
        self._handoff = session.handoff
        self._ahead = ahead
        self._counters = counters
        self._agreement = agreement
        self._timeout = timeout
        self._bounded_engines = bounded_engines
        self._pid = os.getpid()

    def block(self) -> None:
        """Block the thread.

        Raises:
            LoaderTimeoutError: no batch came in time.
            DeadlockError: this is the thread that makes the batch.
            ForkedError: this is a fork of the process that iterates, which has the engine.
        """
        if self._agreement is not None and self._agreement.pending:
            with self._counters.waiting():
                self._agreement.wait()
            return
        self._begin()
        with self._counters.waiting():
            if not self._handoff.wait(self._timeout):
                self._session.request_status(self._ahead.oldest.number)
                self._handoff.wait(ANSWER_TIMEOUT)
                self._time_out()

    async def suspend(self) -> None:
        """As `block`, on the caller's event loop."""
        if self._agreement is not None and self._agreement.pending:
            with self._counters.waiting():
                await self._agreement.wait_async()
            return
        self._begin()
        with self._counters.waiting():
            if not await self._handoff.wait_async(self._timeout):
                self._session.request_status(self._ahead.oldest.number)
                await self._handoff.wait_async(ANSWER_TIMEOUT)
                self._time_out()

    def report_consumed(self) -> None:
        """Tell the engine which batches were taken: plans may wait for their memory."""
        if self._ahead.under_way:
            self._session.on_consumed(self._ahead.oldest.number - 1)

    def _begin(self) -> None:
        check_not_forked(self._pid)  # a wait here would also take the bytes that wake the other process
        if self._session.is_current:
            raise DeadlockError(what="next() of a loader")
        self._handoff.take_status()  # an answer that arrived after its time-out
        self._ahead.on_stall(time.perf_counter())
        # A single engine knows it from the last plan.
        if self._bounded_engines > 1 or (self._bounded_engines and not self._ahead.shows_taken):
            self.report_consumed()

    def _time_out(self) -> None:
        status = self._handoff.take_status()
        if self._handoff.ready() or self._handoff.ended:
            return  # the batch arrived meanwhile
        oldest = self._ahead.oldest
        if status is None:
            status = (
                f"batch {oldest.number}, indices {shorten_list(oldest.indices, len(oldest.indices))}; the loader's "
                f"event loop does not answer: code in aget or __aiter__ blocks it"
            )
        assert self._timeout is not None
        raise LoaderTimeoutError(
            self._timeout, f"{status}; {len(self._ahead.under_way)} batches are under way", batch=oldest.number
        )
