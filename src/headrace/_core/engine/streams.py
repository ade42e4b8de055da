"""Streams, whose plans are filled with the next samples: by a fetch stage on the loop, or inside the workers."""

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

from headrace._core.batches import BatchPlan, HostBatch, RawBatch, SessionStart
from headrace._core.engine.assemble import Catch
from headrace._core.engine.fetch import FetchContext, FetchStage
from headrace._core.error_policy import Tolerance
from headrace._core.failure import Failure, Stage
from headrace._core.pool.supervisor import PINNED_AHEAD
from headrace._core.streams.epochs import keys_within
from headrace._core.streams.resumable import ResumableIterator, State, start_stream
from headrace.errors import StateError


@dataclass(slots=True)
class Progress:
    position: int = 0  # samples and failures so far
    failures_in_a_row: int = 0  # since the last sample
    ended: bool = False
    lost: bool = False  # the position could not be restored

    @classmethod
    def at(cls, state: Mapping[str, Any] | None) -> Progress:
        """The progress that a state was saved at; None for the beginning."""
        return cls() if state is None else cls(state["position"], ended="ended" in state)

    def state_dict(self, stream: State) -> State:
        state: State = {"position": self.position, "stream": stream}
        if self.ended:
            state["ended"] = True
        return state


class StreamBatch:
    """A batch that is filled from a stream, sync or async; also after a failure, if that is tolerated.

    Otherwise the next batch begins there, as in torch. The stream's progress is shared by its
    batches.
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
        """Add an error in place of the next sample; the stream ends if it only raises errors."""
        if isinstance(error, StateError):
            self.fail_restoring(error)
            return
        progress = self._progress
        in_a_row = progress.failures_in_a_row + 1
        unskippable = None
        # an iterator that always raises would be read for ever
        if in_a_row >= self._tolerance.max_in_a_row:
            unskippable = f"{in_a_row} failures in a row"
        if self._tolerance.skips and _ended_a_generator(
            error
        ):  # skipping it would skip all samples after it
            unskippable = "the error ended the stream, samples after it are missing"
        failure = Failure.caught(error, Stage.FETCH, self._plan.number, index=progress.position)
        self._add_failure(replace(failure, unskippable=unskippable))
        progress.failures_in_a_row = in_a_row
        progress.ended |= unskippable is not None

    def fail_restoring(self, error: BaseException) -> None:
        """Add an error of restoring the stream's position, which ends it."""
        self._progress.ended = self._progress.lost = True
        self._add_failure(Failure.caught(error, Stage.RESTORE, self._plan.number))

    def _add_failure(self, failure: Failure) -> None:
        self.add(failure)
        self._failures += 1
        self._broken = not self._tolerance.skips

    def raw(
        self, stream: Callable[[], State] | None, *, drop_last: bool, catch: Catch = BaseException
    ) -> RawBatch:
        """The batch, with the state that `stream` returns; with `drop_last`, only the failures of an incomplete one.

        What is caught from `stream` is the batch's failure.
        """
        progress, samples = self._progress, self._samples
        places: Sequence[int] = range(self._first, progress.position)
        positions = self._plan.positions[self._first : progress.position]
        # its samples are lost with a broken one
        if drop_last and self._missing and not self._broken:
            failed = [
                number for number, sample in enumerate(samples) if isinstance(sample, Failure)
            ]
            samples, places, positions = (
                [each[number] for number in failed] for each in (samples, places, positions)
            )
        plan = self._plan._replace(indices=tuple(places), positions=positions)
        state: State | None = None
        try:
            if stream is not None and not progress.lost:
                state = progress.state_dict(stream())
        except catch as error:
            return without_state(RawBatch(plan, samples, progress.ended), error)
        return RawBatch(plan, samples, progress.ended, stream_state=state, began=self._began)


def without_state(raw: RawBatch, error: BaseException) -> RawBatch:
    failure = Failure.caught(error, Stage.SAVE_STATE, raw.plan.number)
    return raw._replace(samples=[failure], whole=False)


def _ended_a_generator(error: BaseException) -> bool:
    """Whether `error` came out of a generator function of the user's, which gives nothing more then.

    It is found by the first frame outside of headrace that the error passed through. A generator
    further inside may have served a single sample.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__")).partition(".")[0] != "headrace":
            return bool(frame.f_code.co_flags & (inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR))
    return False


class StreamFetch(FetchStage):
    """Reads an async iterable, by one coroutine."""

    def __init__(
        self,
        context: FetchContext,
        start: SessionStart,
        dataset: Any,
        drop_last: bool,
        tolerance: Tolerance,
    ) -> None:
        super().__init__(context)
        self._dataset, self._drop_last, self._tolerance = dataset, drop_last, tolerance
        self._plans: deque[BatchPlan] = deque()
        self._admitted = asyncio.Event()
        self._stream: ResumableIterator[Any] | None = None
        self._state = start.own_state  # to be restored
        self._progress = Progress.at(self._state)
        context.spawn(self._read)

    def admit(self, plan: BatchPlan) -> None:
        """Queue the plan; after the stream's end its batch is empty."""
        self._plans.append(plan)
        self._admitted.set()

    def missing(self, plan: BatchPlan) -> Sequence[object]:
        return (self._progress.position,)

    async def _read(self) -> None:
        task: Any = asyncio.current_task()
        try:
            # User code may have caught the cancellation. `stopping` is set before it, and it would
            # interrupt `_close`.
            while not task.cancelling():
                while not self._plans:
                    self._admitted.clear()
                    await self._admitted.wait()
                plan = self._plans.popleft()
                progress = self._progress
                if progress.ended:
                    self.context.deliver(RawBatch(plan._replace(indices=()), (), end=True))
                    continue
                batch = StreamBatch(plan, progress, self._tolerance)
                stream = self._stream = self._stream or self._start(batch)
                while stream is not None and batch.room:
                    await self._read_batch(stream, batch)
                state = None if stream is None else stream.state_dict
                raw = batch.raw(state, drop_last=self._drop_last)
                self.context.deliver(raw._replace(origin=partial(_origin, stream, self._first)))
                del batch, raw  # which a wait for the next plan would hold
                if self._progress.ended:
                    await self._close()
        finally:
            await self._close()

    def _start(self, batch: StreamBatch) -> ResumableIterator[Any] | None:
        state, self._state = self._state, None
        self._first = self._progress.position
        try:
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

    async def _read_batch(self, stream: ResumableIterator[Any], batch: StreamBatch) -> None:
        try:
            for _ in range(batch.room):
                batch.add(await anext(stream))
        except StopAsyncIteration:
            self._progress.ended = True
        except BaseException as error:  # user code
            if self.context.stopping:
                raise asyncio.CancelledError from None
            batch.fail(error)
            del batch  # it holds the error, whose traceback holds this frame

    async def _close(self) -> None:
        stream, self._stream = self._stream, None
        try:
            if stream is not None:
                await stream.aclose()
        except BaseException as error:  # user code; its samples are delivered, or no longer needed
            if self.context.stopping and isinstance(error, asyncio.CancelledError):
                raise
            message = f"closing a stream of {type(self._dataset).__name__} failed"
            asyncio.get_running_loop().call_exception_handler(
                {"message": message, "exception": error}
            )


def _origin(stream: ResumableIterator[Any] | None, first: int, index: int) -> str | None:
    """The name of the sample at an index of a stream, which was started at the index `first`."""
    return None if stream is None else stream.origin(index - first)


class DispatchToWorkers(FetchStage):
    """Sends plans to the numbered workers, which have copies of a torch dataset.

    With `in_order` the workers take turns, as in torch. Otherwise a plan goes to the next worker
    that has room, so that a slow worker delays only its own plans. With `streams` each worker reads
    a stream, which can end.
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
        ended = [worker for worker, state in start.streams.items() if state.get("ended") is True]
        turns = ((start.next_worker + turn) % workers for turn in range(workers))
        # the next one first
        self._active = deque(worker for worker in turns if worker not in ended)
        self._streams = streams
        self._in_order = in_order
        self._loads = [0] * workers
        self._waiting: deque[BatchPlan] = deque()

    def admit(self, plan: BatchPlan) -> None:
        """Send the plan to a worker whose stream has not ended."""
        self._waiting.append(plan)
        self._dispatch()

    def _dispatch(self) -> None:
        while self._waiting and self._active:
            free = (
                each for each in self._active if self._in_order or self._loads[each] < PINNED_AHEAD
            )
            if (worker := next(free, None)) is None:
                return
            self._active.rotate(-self._active.index(worker) - 1)
            self._loads[worker] += 1
            self.context.deliver(RawBatch(self._waiting.popleft(), None, worker=worker))
        while self._waiting:
            self.context.deliver(
                RawBatch(self._waiting.popleft()._replace(indices=()), (), end=True)
            )

    def on_assembled(self, raw: RawBatch, host: HostBatch) -> HostBatch:
        """Free the worker's slot; the whole stream ends with the last worker's."""
        if raw.worker is None:
            return host
        self._loads[raw.worker] -= 1
        if host.end and self._streams and raw.worker in self._active:
            self._active.remove(raw.worker)
        # Of a map-style dataset, the worker could not start, or died; its next batch may succeed.
        host = host._replace(worker=raw.worker, end=host.end and self._streams and not self._active)
        self._dispatch()
        return host
