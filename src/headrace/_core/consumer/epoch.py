"""The consumer's half of an epoch: plans sent ahead, batches claimed, for `for` and for `async for`."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sized
from typing import Any, TypeVar

import anyio.lowlevel
from torch.autograd.profiler import record_function

from headrace._core.batches import HostBatch
from headrace._core.consumer.failures import FailureHandler
from headrace._core.consumer.loader_state import LoaderState
from headrace._core.consumer.planning import Planner
from headrace._core.consumer.prefetch import Prefetcher
from headrace._core.consumer.progress import EpochProgress
from headrace._core.error_policy import ErrorPolicy
from headrace._core.failure import Failure, Stage
from headrace._core.interface.stream_state import State
from headrace._core.open_session import OpenSession
from headrace._core.pool.log_records import handle_records
from headrace._core.text import shorten_list
from headrace._core.torchcompat.private import profiler_enabled
from headrace._core.transport.pickling import PickledPayload
from headrace.errors import (
    DeadlockError,
    EngineDiedError,
    LoaderClosedError,
    LoaderTimeoutError,
    LostBatchError,
    NotPicklableError,
)
from headrace.telemetry.counters import Counters

T_co = TypeVar("T_co", covariant=True)

_WAIT = object()
ANSWER_TIMEOUT = 0.2  # seconds that the engine has, after the time-out, to report a batch's status


class Epoch:
    """One epoch as its consumer sees it: the sampler on one side, the handoff on the other.

    Everything here runs on the consumer's thread. The two iterators below differ only in how they wait.

    Args:
        planner: draws the plans; runs the user's sampler.
        session: where they go; owned from here on.
        look_ahead: how many plans may be outstanding; 0 to plan one batch at a time.
        together: whether plans are sent in groups only; see `Prefetcher`.
        policy: the loader's `on_error`.
        stream: whether the dataset decides the order itself.
        as_torch: whether errors from workers are put in torch's words.
        timeout: seconds to wait for a batch; 0 for ever.
        finish: the claim's last step, applied to each batch and its number (pinning, waiting for its copy).
        counters: the loader's.
        progress: of this epoch.
        state: returns the state after the last call of `next()`, or so many calls before.
    """

    def __init__(
        self,
        planner: Planner,
        session: OpenSession,
        *,
        look_ahead: int,
        together: bool,
        policy: ErrorPolicy,
        stream: bool,
        as_torch: bool,
        timeout: float,
        finish: Callable[[Any, int], Any],
        counters: Counters,
        progress: EpochProgress,
        state: Callable[[int], LoaderState],
    ) -> None:
        self._session = session
        self._handoff = session.handoff
        self._failures = FailureHandler(policy, planner.repeat, stream=stream, as_torch=as_torch, counters=counters)
        self._ahead = Prefetcher(planner, session.admit, look_ahead, together=together, more=self._failures.replacement)
        self._timeout = timeout or None
        self._finish = finish
        self._counters = counters
        self._progress = progress
        self.state = state
        self._failures.resume(progress.skipped)
        self._iteration = counters.epochs
        self._called = 0.0  # when the running call of `next()` began; 0.0 if none runs
        self._over = False
        self.closed = False
        # Also ends the session of an iterator that is dropped in mid-epoch.
        self._finalizer = weakref.finalize(self, session.close)
        self._finalizer.atexit = False  # the placement's own hook closes everything at exit, in order
        if look_ahead:
            self._ahead.fill()

    def poll(self) -> Any:
        """The next batch, or `_WAIT`.

        Raises:
            StopIteration: the epoch is over.
            Exception: the batch's failure; the next call continues after it.
        """
        handle_records()
        called = self._called = self._called or time.perf_counter()
        if self._over:
            raise StopIteration
        if self.closed:
            raise LoaderClosedError
        ahead = self._ahead
        while True:
            if not ahead.under_way:
                ahead.fill()
            host = self._handoff.take()
            if host is None:
                if not ahead.under_way:
                    break
                if not self._handoff.ended:
                    return _WAIT
                host = self._handoff.take()  # it may have been put between our look and the end
                if host is None:
                    raise self._cut_short()
            taken, self._called = time.perf_counter(), 0.0
            ahead.on_batch(host.plan.number, end=host.end)
            ahead.refill(self._handoff.ready)  # before the consumer computes, so that fetching goes on meanwhile
            refilled = time.perf_counter()
            try:
                delivers = self._failures.delivers(host)
                batch = self._finish(opened(host), host.plan.number) if delivers else None
            except Exception:  # raised to the consumer; the next call continues after this batch
                if any(failure.stage is Stage.RESTORE for failure in host.failures):
                    self._over = True  # the position stays the restored one; later batches would leave out samples
                    self.close()
                else:
                    self._progress.on_batch(host, self._failures.counts, given=True)
                raise
            self._progress.on_batch(host, self._failures.counts, given=delivers)
            if delivers:
                plan = host.plan
                self._counters.log.add(
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
                    )
                )
                return batch
        self._over = True
        self.close()
        if ahead.failure is not None:
            raise ahead.failure.exception()
        self._progress.end()
        self._failures.check_epoch()
        raise StopIteration

    def _cut_short(self) -> BaseException:
        if self.closed:  # by another thread, since we looked
            return LoaderClosedError()
        self._over = True
        error = self._handoff.error
        self.close()
        planned, outstanding = self._ahead.planned, len(self._ahead.under_way)
        if error is None:
            return LostBatchError(planned=planned, accounted=planned - outstanding)
        if isinstance(error, Exception):
            return error
        # A CancelledError, say: raised as it is, it would cancel the consumer.
        died = EngineDiedError(why=f"{error!r}, with {outstanding} batches under way")
        died.__cause__ = error
        return died

    def wait(self) -> None:
        """Block until `poll` has a result."""
        self._begin_wait()
        with self._counters.waiting(), self._ends_call():
            if not self._handoff.wait(self._timeout):
                self._session.request_status(self._ahead.oldest.number)
                self._handoff.wait(ANSWER_TIMEOUT)
                self._time_out()

    async def wait_async(self) -> None:
        """As `wait`, on the caller's event loop."""
        self._begin_wait()
        with self._counters.waiting(), self._ends_call():
            if not await self._handoff.wait_async(self._timeout):
                self._session.request_status(self._ahead.oldest.number)
                await self._handoff.wait_async(ANSWER_TIMEOUT)
                self._time_out()

    @contextlib.contextmanager
    def _ends_call(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # a time-out, Ctrl-C or a cancellation: the next call is another one
            self._called = 0.0
            raise

    def _begin_wait(self) -> None:
        if self._session.is_current:
            raise DeadlockError(what="next() of a loader")
        self._handoff.take_status()  # an answer that arrived after its time-out
        self._ahead.on_stall()

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

    def close(self) -> None:
        """End the session; the iterator raises `LoaderClosedError` from now on."""
        self.closed = True
        self._finalizer()


class BatchIterator(Iterator[T_co]):
    """The iterator of `for`: blocks in `next()` until a batch is ready.

    Args:
        epoch: the epoch it iterates over; owned from here on.
        loader: kept alive as long as the iterator: dropping a loader ends its engine.
    """

    def __init__(self, epoch: Epoch, loader: Sized) -> None:
        self._epoch = epoch
        self._loader = loader
        self._turn = threading.RLock()

    def __next__(self) -> T_co:
        record = _begin_record(self) if profiler_enabled() else None
        try:
            with self._turn:  # threads that share an iterator take turns
                while (batch := self._epoch.poll()) is _WAIT:
                    self._epoch.wait()
                return batch  # type: ignore[no-any-return]
        finally:
            if record is not None:
                record.__exit__(None, None, None)

    def __len__(self) -> int:
        return len(self._loader)

    def state_dict(self, lag: int = 0) -> State:
        """The state of this iteration, for the `load_state_dict` of a loader; see `DataLoader.state_dict`."""
        return self._epoch.state(lag).to_dict()

    def close(self) -> None:
        """Stop fetching for this epoch; the loader stays usable."""
        self._epoch.close()


class AsyncBatchIterator(AsyncIterator[T_co]):
    """The iterator of `async for`: waits in `anext()` on the caller's event loop (asyncio, uvloop, trio).

    Args:
        epoch: the epoch it iterates over; owned from here on.
        loader: kept alive as long as the iterator: dropping a loader ends its engine.
    """

    def __init__(self, epoch: Epoch, loader: Sized) -> None:
        self._epoch = epoch
        self._loader = loader

    async def __anext__(self) -> T_co:
        # Other tasks of the caller's loop get their turn even while batches are always ready.
        await anyio.lowlevel.checkpoint()
        record = _begin_record(self) if profiler_enabled() else None
        try:
            while (batch := self._epoch.poll()) is _WAIT:
                await self._epoch.wait_async()
        except StopIteration:
            raise StopAsyncIteration from None
        finally:
            if record is not None:
                record.__exit__(None, None, None)
        return batch  # type: ignore[no-any-return]

    def state_dict(self, lag: int = 0) -> State:
        """The state of this iteration, for the `load_state_dict` of a loader; see `DataLoader.state_dict`."""
        return self._epoch.state(lag).to_dict()

    async def aclose(self) -> None:
        """Stop fetching for this epoch; the loader stays usable."""
        self._epoch.close()


def _begin_record(iterator: object) -> record_function:
    """Begin the profiler's record of a call of `next()`, named as torch's is; tools look for both ends of the name.

    In `async for` it lasts until the batch is there: what other tasks of the loop do meanwhile is shown inside it.
    """
    record = record_function(f"enumerate(DataLoader)#{type(iterator).__name__}.__next__")
    record.__enter__()  # type: ignore[no-untyped-call]
    return record


def opened(host: HostBatch) -> Any:
    """The batch's data, on the consumer's thread: its classes are the consumer's."""
    if not isinstance(host.data, PickledPayload):
        return host.data
    try:
        return host.data.loads()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        remedy = "Its classes have to be importable, or picklable by value, in this process too."
        unpicklable = NotPicklableError(what="the return value of collate_fn", reason=reason, remedy=remedy)
        raise Failure.caught(unpicklable, stage=Stage.CLAIM, batch=host.plan.number).exception() from error
