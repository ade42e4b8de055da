"""Streams: plans filled with the next samples.

Either a fetch stage on the loop or the workers read the stream.
"""

from __future__ import annotations

import asyncio
import inspect
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from headrace._engine.assemble import Catch
from headrace._engine.fetch import Fetch, FetchContext, Fetchers, FetchStage
from headrace._engine.hedging import HedgedRequests
from headrace._engine.memory import FIRST_SAMPLES, RECENT, bytes_in
from headrace._eventloop.per_loop import cancel_once, end_all
from headrace._records.batches import (
    BatchPlan,
    FetchLoad,
    HostBatch,
    RawBatch,
    SessionStart,
)
from headrace._records.error_policy import Tolerance
from headrace._records.failure import Failure, Stage, as_exception
from headrace._streams.epochs import keys_within
from headrace._streams.fetch_functions import fetching
from headrace._streams.resumable import (
    BadRecord,
    ResumableIterator,
    State,
    restore_dataset,
    start_stream,
)
from headrace.errors import StateError

# Rows of a stream that count as a batch for hedging.
ROWS_OF_A_BATCH = 32


@dataclass(slots=True)
class Progress:
    """The progress of a stream in an epoch."""

    position: int = 0  # number of samples and failures so far
    failures_in_a_row: int = 0  # since the last sample
    ended: bool = False
    lost: bool = False  # whether the position could not be restored

    @classmethod
    def at(cls, state: Mapping[str, Any] | None) -> Progress:
        """Return the progress saved in a state; None is the beginning."""
        return cls() if state is None else cls(state["position"], ended="ended" in state)

    def state_dict(self, stream: State) -> State:
        state: State = {"position": self.position, "stream": stream}
        if self.ended:
            state["ended"] = True
        return state


class StreamBatch:
    """A batch being filled from a stream, sync or async.

    If failures are tolerated, reading goes on after a failure. Otherwise the next batch
    begins after the failure, as in torch. All batches of a stream share `progress`.
    """

    def __init__(self, plan: BatchPlan, progress: Progress, tolerance: Tolerance) -> None:
        self._began = time.perf_counter()
        self._plan = plan
        self._progress = progress
        self._tolerance = tolerance
        self._broken = False
        self._samples: list[Any] = []
        self._failures = 0
        self._first = progress.position

    @property
    def room(self) -> int:
        return 0 if self._progress.ended or self._broken else self._missing

    @property
    def _missing(self) -> int:
        return len(self._plan.indices) - len(self._samples) + self._failures

    def add(self, sample: Any) -> None:
        """Add the stream's next sample."""
        self._samples.append(sample)
        self._progress.position += 1
        self._progress.failures_in_a_row = 0

    def fail(self, error: BaseException) -> None:
        """Add an error in place of the next sample.

        The stream ends if the error cannot be skipped: after too many errors in a row, or if the
        error has ended the generator of the stream.
        """
        if isinstance(error, StateError):
            self.fail_restoring(error)
            return
        progress = self._progress
        in_a_row = progress.failures_in_a_row + 1
        unskippable = None
        # An iterator that always raises would otherwise be read for ever.
        if in_a_row >= self._tolerance.max_in_a_row:
            unskippable = f"{in_a_row} failures in a row"
        # Skipping an error that ended the stream would skip all samples after the error.
        if self._tolerance.skips and _ended_a_stream(error):
            unskippable = "the error ended the stream, samples after it are missing"
        failure = Failure.caught(
            error, Stage.FETCH, self._plan.number, index=progress.position
        )
        self._add_failure(replace(failure, unskippable=unskippable))
        progress.failures_in_a_row = in_a_row
        progress.ended |= unskippable is not None

    def fail_restoring(self, error: BaseException) -> None:
        """Add an error of restoring the stream's position.

        The error ends the stream.
        """
        self._progress.ended = self._progress.lost = True
        self._add_failure(Failure.caught(error, Stage.RESTORE, self._plan.number))

    def _add_failure(self, failure: Failure) -> None:
        self.add(failure)
        self._failures += 1
        self._broken = not self._tolerance.skips

    def raw(
        self,
        stream: Callable[[], State] | None,
        *,
        drop_last: bool,
        catch: Catch = BaseException,
    ) -> RawBatch:
        """Return the batch, with the state returned by `stream`.

        If `stream` raises an error in `catch`, the error becomes the batch's failure. With
        `drop_last`, an incomplete batch is reduced to the failures.
        """
        progress, samples = self._progress, self._samples
        places: Sequence[int] = range(self._first, progress.position)
        positions = self._plan.positions[self._first : progress.position]
        # The samples of a broken batch are lost in any case.
        if drop_last and self._missing and not self._broken:
            failed = [
                number
                for number, sample in enumerate(samples)
                if isinstance(sample, Failure)
            ]
            samples, places, positions = (
                [each[number] for number in failed]
                for each in (samples, places, positions)
            )
        plan = self._plan._replace(indices=tuple(places), positions=positions)
        state: State | None = None
        try:
            if stream is not None and not progress.lost:
                state = progress.state_dict(stream())
        except catch as error:
            return without_state(RawBatch(plan, samples, progress.ended), error)
        return RawBatch(
            plan, samples, progress.ended, stream_state=state, began=self._began
        )


def without_state(raw: RawBatch, error: BaseException) -> RawBatch:
    failure = Failure.caught(error, Stage.SAVE_STATE, raw.plan.number)
    return raw._replace(samples=[failure], whole=False)


def _ended_a_stream(error: BaseException) -> bool:
    """Whether `error` came out of a generator function of the user, or prevented a stream's start.

    The generator has then ended. The first frame outside of headrace decides: a generator in an
    inner frame may have served only a single sample. A part of a stream that cannot start, such as
    shards for too many ranks, would be missing as a whole.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is start_stream.__code__:
            return True
        if str(frame.f_globals.get("__name__")).partition(".")[0] != "headrace":
            return bool(
                frame.f_code.co_flags
                & (inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR)
            )
    return False


class RowFetching:
    """The coroutine functions of a stream: a `Fetching`.

    Args:
        fetchers: The pool that calls the functions.
        nbytes: Maximum bytes held by an operation of the stream; None for no limit.
        hedged: The hedging of slow rows; None for no hedging.
    """

    def __init__(
        self, fetchers: Fetchers, nbytes: int | None, hedged: HedgedRequests | None
    ) -> None:
        self.fetchers = fetchers
        self._hedged = hedged
        self._begun = 0  # number of rows
        self._nbytes = nbytes
        self._sizes: deque[int] = deque(maxlen=RECENT)  # bytes of the last samples

    def fetch(self, function: Fetch, row: Any) -> asyncio.Future[list[Any]]:
        answer: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._begun += 1
        if self._hedged is not None:
            function = self._hedged.wrap(function, self._begun // ROWS_OF_A_BATCH)
        self.fetchers.submit(((None, 0, partial(self._call, function, row), answer),))
        return answer

    async def _call(
        self, function: Fetch, row: Any, answer: asyncio.Future[list[Any]]
    ) -> None:
        if answer.cancelled():
            return
        task = asyncio.ensure_future(function(row))
        answer.add_done_callback(lambda _: cancel_once(task))
        try:
            await asyncio.wait((task,))
        finally:  # the session may end
            await end_all((task,))
        if answer.cancelled():
            return
        if (error := task.exception()) is None:
            self._sizes.append(bytes_in(task.result()))
            answer.set_result([task.result()])
        else:
            self.fetchers.note_failed(error)
            answer.set_result([BadRecord(as_exception(error))])

    def most_held(self) -> int:
        """Return the number of rows or samples that an operation may hold.

        Twice the running fetches: a slow fetch does not hold up the following fetches.
        """
        most = 2 * self.fetchers.size
        if self._nbytes is None:
            return most
        if not self._sizes:
            return min(most, FIRST_SAMPLES)
        return max(1, min(most, self._nbytes // max(1, *self._sizes)))


class StreamFetch(FetchStage):
    """Reads an async iterable by a single coroutine."""

    def __init__(
        self,
        context: FetchContext,
        start: SessionStart,
        dataset: Any,
        drop_last: bool,
        tolerance: Tolerance,
        rows: RowFetching | None,
    ) -> None:
        super().__init__(context)
        self._dataset, self._drop_last, self._tolerance = dataset, drop_last, tolerance
        self._rows = rows
        self._plans: deque[BatchPlan] = deque()
        self._admitted = asyncio.Event()
        self._stream: ResumableIterator[Any] | None = None
        self._state = start.own_state  # the state to restore
        self._progress = Progress.at(self._state)
        context.spawn(self._read)

    def admit(self, plan: BatchPlan) -> None:
        """Queue the plan. After the end of the stream, the batch is empty."""
        self._plans.append(plan)
        self._admitted.set()

    def missing(self, plan: BatchPlan) -> Sequence[object]:
        return (self._progress.position,)

    def load(self) -> FetchLoad:
        return super().load() if self._rows is None else self._rows.fetchers.load()

    async def _read(self) -> None:
        task: Any = asyncio.current_task()
        fetching.set(self._rows)
        try:
            # User code may have swallowed the cancellation, so check for it here. `stopping` is set
            # earlier: a check of `stopping` would end this loop before the cancellation arrives and
            # interrupts `_close`.
            while not task.cancelling():
                while not self._plans:
                    self._admitted.clear()
                    await self._admitted.wait()
                plan = self._plans.popleft()
                progress = self._progress
                if progress.ended and self._state is None:
                    self.deliver(RawBatch(plan._replace(indices=()), (), end=True))
                    continue
                batch = StreamBatch(plan, progress, self._tolerance)
                stream = self._stream = self._stream or self._start(batch)
                while stream is not None and batch.room:
                    await self._read_batch(stream, batch)
                state = None if stream is None else stream.state_dict
                raw = batch.raw(state, drop_last=self._drop_last)
                self.deliver(raw._replace(origin=partial(_origin, stream, self._first)))
                del batch, raw  # otherwise kept while waiting for the next plan
                if self._progress.ended:
                    await self._close()
        finally:
            await self._close()

    def _start(self, batch: StreamBatch) -> ResumableIterator[Any] | None:
        state, self._state = self._state, None
        self._first = self._progress.position
        try:
            if state is not None and self._progress.ended:
                # The next epoch needs the restored dataset.
                restore_dataset(self._dataset, state["stream"])
                return None
            with keys_within(0):
                stream = start_stream(self._dataset)
                if state is not None:
                    stream.load_state_dict(state["stream"])
                return stream
        except BaseException as error:  # user code
            if state is None:
                batch.fail(error)
                self._progress.ended = True
            else:
                batch.fail_restoring(error)
            return None

    async def _read_batch(
        self, stream: ResumableIterator[Any], batch: StreamBatch
    ) -> None:
        try:
            for _ in range(batch.room):
                batch.add(await anext(stream))
        except StopAsyncIteration:
            self._progress.ended = True
        except BaseException as error:  # user code
            if self.context.stopping:
                raise asyncio.CancelledError from None
            batch.fail(error)
            del batch  # breaks a cycle: batch, error, traceback, this frame

    async def _close(self) -> None:
        stream, self._stream = self._stream, None
        try:
            if stream is not None:
                await stream.aclose()
        except BaseException as error:
            # User code; all samples are delivered, or not needed.
            if self.context.stopping and isinstance(error, asyncio.CancelledError):
                raise
            message = f"closing a stream of {type(self._dataset).__name__} failed"
            asyncio.get_running_loop().call_exception_handler(
                {"message": message, "exception": error}
            )


def _origin(stream: ResumableIterator[Any] | None, first: int, index: int) -> str | None:
    """Return the name of the sample at an index of a stream.

    The stream was started at the index `first`.
    """
    return None if stream is None else stream.origin(index - first)


class DispatchToWorkers(FetchStage):
    """Sends plans to numbered workers with copies of a torch dataset.

    Args:
        context: The context of the session.
        start: The beginning of the epoch.
        workers: The number of workers.
        streams: Whether each worker reads a stream. A stream can end.
        in_order: Whether the workers take turns, as in torch. Otherwise a plan goes to the worker
            with the fewest plans, so that a slow worker gets few.
    """

    def __init__(
        self,
        context: FetchContext,
        start: SessionStart,
        workers: int,
        *,
        streams: bool,
        in_order: bool,
    ) -> None:
        super().__init__(context)
        ended = [
            worker
            for worker, state in start.streams.items()
            if state.get("ended") is True
        ]
        turns = ((start.next_worker + turn) % workers for turn in range(workers))
        # The next worker comes first.
        self._active = deque(worker for worker in turns if worker not in ended)
        self._streams = streams
        self._in_order = in_order
        self._loads = [0] * workers

    def admit(self, plan: BatchPlan) -> None:
        """Send the plan to a worker whose stream has not ended."""
        if not self._active:
            self.deliver(RawBatch(plan._replace(indices=()), (), end=True))
            return
        worker = self._active[0]
        if not self._in_order:
            worker = min(self._active, key=self._loads.__getitem__)
        self._active.rotate(-self._active.index(worker) - 1)
        self._loads[worker] += 1
        self.deliver(RawBatch(plan, None, worker=worker))

    def on_assembled(self, raw: RawBatch, host: HostBatch) -> HostBatch:
        """Note that a worker has answered.

        The whole stream ends with the stream of the last worker.
        """
        if raw.worker is None:
            return host
        self._loads[raw.worker] -= 1
        if host.end and self._streams and raw.worker in self._active:
            self._active.remove(raw.worker)
        # The worker of a map-style dataset may have died or failed to start. The next batch may
        # succeed, so there is no end.
        ends = host.end and self._streams and not self._active
        return host._replace(worker=raw.worker, end=ends)
