"""The iterators of a loader.

An iterator sends plans ahead, waits for batches, and returns batches. Everything runs on the
consumer's thread. `for` and `async for` differ only in the way of waiting.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, NoReturn, TypeVar

from headrace._base.text import shorten_list
from headrace._consumer.agreement import END, SKIP, StepGroup
from headrace._consumer.deliver import FailureHandler, Finish, opened
from headrace._consumer.position import Position
from headrace._consumer.prefetch import Prefetcher
from headrace._device.stage import DeviceStage
from headrace._engine.look_ahead import LookAheadSize
from headrace._eventloop.waiting import Readable, wait_readable
from headrace._links.session import Session
from headrace._order.progress import EpochProgress
from headrace._order.samplers import BlockSampler
from headrace._order.spec import TorchLoader, drawn_freely
from headrace._order.state import states_to_dict
from headrace._ranks.rankinfo import temporary_rank
from headrace._records.batches import BatchPlan, HostBatch
from headrace._records.failure import Stage
from headrace._records.messages import Consumed, StatusRequest, TraceRequest
from headrace._streams.fetch_functions import is_bounded
from headrace._streams.kinds import DatasetKind, joined_part
from headrace._streams.resumable import State
from headrace._torchcompat.private import profiler
from headrace._transport.pickling import PickledPayload
from headrace.errors import (
    CoordinationError,
    DeadlockError,
    EngineDiedError,
    LoaderClosedError,
    LoaderTimeoutError,
    LostBatchError,
)
from headrace.telemetry.counters import BatchRecord, Counters

T_co = TypeVar("T_co", covariant=True)

WAIT = object()
_NO_RECORD = nullcontext()
# Seconds for the engine to report a batch's status, after a time-out.
ANSWER_TIMEOUT = 0.2
# Seconds between readings of the thread's CPU clock. A reading takes 0.4 µs; a call takes 6 µs.
CPU_READING = 0.005


class _Step(NamedTuple):
    """A batch or the batch's error, with the times of a `BatchRecord`."""

    host: HostBatch
    error: Exception | None
    called: float
    taken: float
    refilled: float
    ready: int

    @property
    def is_lost(self) -> bool:
        """Whether all samples of the batch were lost."""
        return self.host.empty and self.error is None


class Epoch:
    """One epoch: plans from the sampler to the session, batches from the session."""

    def __init__(
        self,
        # kept alive by the iterator: the engine ends with the loader
        loader: TorchLoader,
        position: Position,
        counters: Counters,
        progress: EpochProgress,
        session: Session | DeviceStage,  # the receiver of plans; owned from here on
        *,
        # None: plan single batches, in the caller's thread.
        look_ahead: LookAheadSize | None,
        finish: Finish | None,
        # Changes the number of workers; returns when to call this again.
        tune: Callable[[], float],
        # Agrees with other ranks on the number of steps; None without coordination.
        agreement: StepGroup | None,
    ) -> None:
        arguments = position.spec
        self._loader, self._position = loader, position
        # As in torch's iterators: libraries read these attributes. With `seed=` no seed is drawn.
        self._dataset, self._index_sampler = loader.dataset, loader._index_sampler
        self._num_workers, self._base_seed = loader.num_workers, progress.begun.base_seed
        self._session = session
        self._failures = FailureHandler(
            arguments, progress, counters, coordinated=agreement is not None
        )
        sampler: Any = loader.sampler
        group = (
            0.5 if arguments.kind.is_iterable else joined_part(arguments.source, sampler)
        )
        group_of = None
        # A look-ahead given by the user may be too small for whole groups of blocks.
        if (
            group
            and isinstance(sampler, BlockSampler)
            and vars(loader)["prefetch_factor"] is None
        ):
            group_of = sampler.groups_in(progress.begun.epoch)
        self._ahead = Prefetcher(
            progress,
            session.send,
            look_ahead,
            group=group,
            group_of=group_of,
            free=drawn_freely(loader) - progress.begun.batches,
            by_size=arguments.reads_in_persistent_workers(loader),
            in_workers=arguments.kind is DatasetKind.MAP,
        )
        self._timeout = loader.timeout or None  # seconds to wait for a batch
        self._finish = finish
        self._counters = counters
        self._progress = progress
        self._rank = progress.rank  # the result of `get_rank_info` in user code, here
        # Number of engines where plans may wait for memory; 0 without a memory budget.
        bounded = (
            is_bounded(arguments.kind, arguments.source)
            and arguments.options["memory_budget"] is not None
        )
        self._bounded_engines = arguments.engines if bounded else 0
        self._agreement = agreement
        self._agreed_epoch = 0 if agreement is None else agreement.epoch
        # the next step, before the ranks have agreed or the step is returned
        self._next: Any = None
        # number of the last batch taken from the session
        self._taken: int | None = None
        # the step of the running call of `next()`, once counted and not yet returned
        self._counted: _Step | None = None
        self._ended = True  # whether this rank has nothing left at the end of the epoch
        self._iteration = counters.stats.epochs
        self._tune = tune
        self._tune_at = 0.0  # by `time.perf_counter`
        # start of the wait in the running call of next(); 0.0 after the batch was taken
        self._called = 0.0
        # CPU seconds of the thread, and the time of this reading.
        self._cpu = self._cpu_read = 0.0
        self._over = False
        self.closed = False
        self._turn = threading.RLock()
        # Also ends the session of an iterator dropped in mid-epoch. As in torch, persistent workers
        # read all drawn plans, including plans that were not sent yet.
        unsent = self._ahead.held if self._ahead.by_size else []
        self._finalizer = weakref.finalize(self, _end_iteration, session, unsent)
        # the placement's own hook closes everything at exit, in order
        self._finalizer.atexit = False
        self._traced = False
        if counters.traced:
            self._follow_trace()
        if look_ahead is not None:
            self._fill()

    def state_dict(self, lag: int = 0) -> State:
        """Return the state of this iteration, for `DataLoader.load_state_dict`."""
        return states_to_dict(
            (self._position.state_of(self._progress, self._loader, lag),)
        )

    @property
    def _num_yielded(self) -> int:
        """The number of returned batches of the epoch, including batches before a restore."""
        return self._progress.state(int(self._progress.over)).steps

    def __getstate__(self) -> NoReturn:
        # Libraries catch this error of torch's iterators.
        raise NotImplementedError(
            f"{type(self).__name__} cannot be pickled: save its state_dict()"
        )

    # `next()`. During the call the CPU caches hold the trainer's data, so each object costs.

    def _poll(self) -> Any:
        """Return the next batch, or `WAIT`.

        The next call goes on after the batch, also if the batch's error is raised.
        """
        if not self._called:
            self._called = time.perf_counter()
        if self.closed:
            raise StopIteration if self._over else LoaderClosedError
        if self._called > self._tune_at:  # before a batch is taken: Ctrl-C may come
            self._tune_at = self._tune()
        agreement = self._agreement
        if agreement is not None and not self._agree(agreement):
            return WAIT
        step = self._next or self._take_next()
        if step is WAIT:
            return WAIT
        if step is None:
            if agreement is not None:  # this rank has announced more steps
                raise self._cut_short()
            self._finish_epoch()
        # kept until the return: Ctrl-C in user code must not lose the batch
        self._next, self._called = (step, 0.0)
        host, taken, refilled = step.host, step.taken, step.refilled
        if agreement is not None:
            now = time.perf_counter()  # until now the other ranks were waited for
            taken, refilled = taken + now - refilled, now
        counters, returned = self._counters, refilled
        batch = host.data
        try:
            if step.error is not None:
                raise step.error
            if type(batch) is PickledPayload or self._finish is not None:
                batch = opened(host)
                if self._finish is not None:
                    batch = self._finish(batch, host.plan.number)
                returned = time.perf_counter()
        except Exception as raised:
            if any(failure.stage is Stage.RESTORE for failure in host.failures):
                # The restored position stays. Later batches would leave out samples.
                self._stop(raised)
            else:
                self._count(host)
                self._counted = None
            del step, host  # the traceback holds this frame; avoid a cycle
            raise
        if counters.traced is not self._traced:
            self._follow_trace()
        if returned - self._cpu_read > CPU_READING:
            self._cpu, self._cpu_read = time.thread_time(), returned
        counters.delivered(
            BatchRecord(
                iteration=self._iteration,
                number=host.plan.number,
                size=host.size,
                planned=host.plan.planned,
                times=host.times,
                called=step.called,
                taken=taken,
                refilled=refilled,
                returned=returned,
                ready=step.ready,
                requests=host.requests,
                cpu=self._cpu,
                fetches=host.fetches,
            )
        )
        self._count(host)
        return batch

    def _count(self, host: HostBatch) -> None:
        """Count a batch, or the batch's error, in the position."""
        self._progress.on_batch(host, self._failures.losses, given=True)
        if self._agreement is not None:
            self._agreement.granted -= 1
        self._counted, self._next = self._next, None

    def _keep_counted(self) -> None:
        """Return the batch of an interrupted call of `next()` at the next call."""
        if self._counted is not None:
            if self._agreement is not None:
                self._agreement.granted += 1
            self._next, self._counted = self._counted, None

    def _agree(self, agreement: StepGroup) -> bool:
        """Return whether the ranks have agreed on further steps; False: wait first."""
        if agreement.epoch != self._agreed_epoch:
            raise CoordinationError(
                "coordinated=True: a later epoch of this loader has begun; "
                "a coordinated loader has one iterator"
            )
        while not agreement.granted:
            if not agreement.pending:
                step = self._next or self._take_next()
                if step is WAIT:
                    return False
                if step is None:
                    self._check_end()
                self._ended = step is None
                self._next = step
                if step is None:
                    agreement.propose(END)
                elif step.is_lost:
                    agreement.propose(SKIP)
                else:
                    agreement.propose(SKIP + 1 + self._session.certain())
            try:
                settled = agreement.settle()
            except Exception:
                # Other ranks cannot be reached any more. So the epoch is over here too.
                if not self.closed:  # otherwise by another thread
                    self._over = True
                    self.close()
                raise
            if settled is None:
                return False
            if settled == END:
                self._finish_epoch()
            if settled == SKIP:
                # A rank lost all samples of a batch: all ranks leave out the step.
                step, self._next = self._next, None
                self._counters.stats.discarded_batches += not step.is_lost
                self._pass_over(step.host, lost=True)
        return True

    def _pass_over(self, host: HostBatch, *, lost: bool) -> None:
        """Record a batch which the consumer does not get. `lost`: whether the batch was a step."""
        if lost:
            self._failures.skip_step(host.plan.number)
        self._progress.on_batch(host, self._failures.losses, given=False)

    def _take_next(self) -> Any:
        """The next `_Step`; None at this rank's end, or `WAIT`."""
        progress, ahead, session, failures = (
            self._progress,
            self._ahead,
            self._session,
            self._failures,
        )
        while True:
            if not ahead.under_way:
                self._fill()
            host = session.take()
            if host is None:
                if not ahead.under_way:
                    return None
                if not session.ended:
                    return WAIT
                host = session.take()  # the batch may have come before the end
                if host is None:
                    raise self._cut_short()
            number = host.plan.number
            if number == self._taken or number not in ahead.under_way:
                ahead.under_way.pop(number, None)  # Ctrl-C came before
                session.release()
                continue
            called, taken, self._called = self._called, time.perf_counter(), 0.0
            error, times = None, host.times
            if failures.skips or host.failures or host.empty:
                with temporary_rank(self._rank):
                    # The error is raised at this batch's turn, when the ranks have agreed on the
                    # step.
                    error = failures.judge(host)
            if times.worker_deaths:
                self._counters.stats.worker_deaths += times.worker_deaths
            if host.requests is not None:
                self._counters.stats.requests += host.requests
            ready = session.ready()
            step = _Step(host, error, called, taken, taken, ready)
            delivers = error is not None or not host.empty
            if failures.lost and self._agreement is not None:
                delivers = True  # other ranks skip the step too
            if not delivers:
                self._pass_over(host, lost=failures.lost)
            # Python handles a signal only at a call. So Ctrl-C finds all three, or none.
            self._next = step if delivers else None
            self._taken = number
            progress.taken += 1
            due = ahead.on_batch(host, ready)
            session.release()
            if due:
                self._fill()  # before the consumer computes: fetching goes on meanwhile
                step = step._replace(refilled=time.perf_counter())
            if times.load.held_plans:
                self._report_consumed()
            if delivers:
                return step

    def _fill(self) -> None:
        with temporary_rank(self._rank):  # for the user's sampler
            self._ahead.fill()

    def _follow_trace(self) -> None:
        """Have single fetches measured while a trace is written."""
        self._traced = self._counters.traced
        self._session.send(TraceRequest(self._traced))

    # The end.

    def _check_end(self) -> None:
        """Raise the error at the end of this rank's epoch, if any.

        Other ranks then raise an error too.
        """
        try:
            if self._ahead.failure is not None:
                raise self._ahead.failure.exception()
            self._failures.check_epoch(whole=True)
        except Exception as error:  # other ranks get the error before it is raised here
            self._stop(error)
            raise

    def _finish_epoch(self) -> NoReturn:
        self._over = True
        if not self._ended:
            self._counters.stats.discarded_batches += (
                not self._next.is_lost
            ) + self._session.certain()
        self.close()
        if self._ahead.failure is not None and self._ended:
            raise self._ahead.failure.exception()
        self._progress.over = True
        self._failures.check_epoch(whole=self._ended)
        raise StopIteration

    def _stop(self, error: Exception) -> None:
        """End the epoch with an error, on all ranks."""
        self._over = True
        if self._agreement is not None:
            self._agreement.leave(error)
        self.close()

    def _cut_short(self) -> BaseException:
        if self.closed:  # by another thread, since we looked
            return LoaderClosedError()
        error = self._session.error
        planned, outstanding = self._ahead.planned, self._ahead.outstanding
        if error is None:
            error = LostBatchError(planned=planned, accounted=planned - outstanding)
        elif not isinstance(error, Exception):
            # For example a CancelledError, which would cancel the consumer.
            cause, error = (
                error,
                EngineDiedError(why=f"{error!r}, with {outstanding} batches under way"),
            )
            error.__cause__ = cause
        self._stop(error)
        return error

    def close(self) -> None:
        """Stop fetching for this epoch; the loader stays usable."""
        self.closed = True
        self._next = self._counted = None
        self._finalizer()

    # The wait for a batch, or for the other ranks.

    def _waits(self) -> Iterator[tuple[Readable, float | None]]:
        """The waits until `_poll` has a result, as of `Session.waits`."""
        session = self._session
        try:
            if self._agreement is not None and self._agreement.pending:
                yield from self._agreement.waits()
                return
            if session.is_current:  # in a fork, raises an error
                raise DeadlockError(what="next() of a loader")
            session.take_status()  # a late answer, after a time-out
            self._ahead.on_stall(time.perf_counter())
            if self._bounded_engines:
                last = next(reversed(self._ahead.under_way.values()), None)
                # A single engine knows the taken batches from the last plan.
                if (
                    self._bounded_engines > 1
                    or last is None
                    or last.taken != self._progress.taken
                ):
                    self._report_consumed()
            yield from session.waits(self._timeout)
            if session.must_wait():
                session.send(StatusRequest(self._ahead.oldest.number))
                yield from session.waits(ANSWER_TIMEOUT)
                self._time_out()
        except BaseException:
            # A time-out, a cancellation or Ctrl-C: the next call begins anew.
            self._called = 0.0
            raise

    def _report_consumed(self) -> None:
        """Report taken batches to the engine: plans may wait for the memory."""
        if self._ahead.under_way:
            self._session.send(Consumed(self._ahead.oldest.number - 1))

    def _time_out(self) -> None:
        status = self._session.take_status()
        if self._session.ready() or self._session.ended:
            return  # the batch arrived meanwhile
        oldest = self._ahead.oldest
        if status is None:
            status = (
                f"batch {oldest.number}, indices "
                f"{shorten_list(oldest.indices, len(oldest.indices))}; the loader's event loop "
                f"does not answer: code in aget or __aiter__ blocks it"
            )
        assert self._timeout is not None
        raise LoaderTimeoutError(
            seconds=self._timeout,
            waiting_for=f"{status}; {len(self._ahead.under_way)} batches are under way",
            batch=oldest.number,
        )


def _end_iteration(session: Session | DeviceStage, unsent: list[BatchPlan]) -> None:
    try:
        if unsent:
            session.send(unsent)
    finally:
        session.close()


class BatchIterator(Epoch, Iterator[T_co]):
    """The iterator of `for`; `next()` blocks."""

    def __next__(self) -> T_co:
        try:
            with self._turn, _recorded(self):  # threads with the same iterator take turns
                while (batch := self._poll()) is WAIT:
                    for source, seconds in self._waits():
                        wait_readable(source, timeout=seconds)
            self._counted = None
            return batch  # type: ignore[no-any-return]
        except BaseException:  # Ctrl-C
            self._keep_counted()
            raise

    def __len__(self) -> int:
        return len(self._loader)


class AsyncBatchIterator(Epoch, AsyncIterator[T_co]):
    """The iterator of `async for`.

    `anext()` waits on the caller's event loop: asyncio, uvloop or trio.
    """

    async def __anext__(self) -> T_co:
        import anyio.lowlevel  # 3 ms; not needed without an event loop

        # Other tasks of the caller's loop get a turn even if batches are always ready.
        await anyio.lowlevel.checkpoint()
        try:
            with _recorded(self):
                while (batch := self._poll()) is WAIT:
                    for source, seconds in self._waits():
                        with anyio.move_on_after(seconds):
                            await anyio.wait_readable(source)
            self._counted = None
            return batch  # type: ignore[no-any-return]
        except StopIteration:
            raise StopAsyncIteration from None
        except BaseException:  # Ctrl-C
            self._keep_counted()
            raise

    async def aclose(self) -> None:
        """Stop fetching for this epoch; the loader stays usable."""
        self.close()


class LateIterator(AsyncIterator[T_co]):
    """An async iterator whose epoch begins at the first `anext`.

    `tqdm.auto` calls `aiter` also for a loader that `for` will read. This must not begin an epoch.
    """

    def __init__(self, begin: Callable[[], AsyncBatchIterator[T_co]]) -> None:
        self._begin = begin
        self._batches: AsyncBatchIterator[T_co] | None = None

    async def __anext__(self) -> T_co:
        if self._batches is None:
            self._batches = self._begin()
        return await anext(self._batches)

    async def aclose(self) -> None:
        """Stop fetching for this epoch; the loader stays usable."""
        if self._batches is not None:
            await self._batches.aclose()


def _recorded(iterator: object) -> AbstractContextManager[object]:
    """Return the profiler's record of a call of `next()`, with torch's name.

    Tools look for both ends of the name. In `async for` the record ends when the batch has arrived:
    the record includes other tasks of the loop.
    """
    if not profiler._is_profiler_enabled:
        return _NO_RECORD
    return profiler.record_function(
        f"enumerate(DataLoader)#{type(iterator).__name__}.__next__"
    )
