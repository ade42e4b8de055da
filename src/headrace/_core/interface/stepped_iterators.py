"""Iterators that apply functions and predicates before samples are batched: in place, or in a loader's workers."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from headrace._core.failure import as_exception
from headrace._core.interface.block_reader import end_all
from headrace._core.interface.iterators import OperationIterator
from headrace._core.interface.replay_iterator import ReplayIterator
from headrace._core.interface.reread import Reread
from headrace._core.interface.steps import Raised, RunSteps, Step, apply_steps, compute
from headrace._core.interface.stream_state import (
    ResumableIterator,
    State,
    close_iterator,
    expect_int,
    expect_state,
    snapshot,
)

# Most samples in one request to a worker. A request takes some 150 µs besides the functions, and a few ms on a busy
# machine, where 64 take a third of the time of 16.
CHUNK = 64

STEPS = "map, filter"


def apply_to_stream(inner: ResumableIterator[object], steps: tuple[Step, ...]) -> ResumableIterator[Any]:
    """The samples of an iterator with steps applied: in the workers of the loader that reads it, or in place."""
    current = compute.get()
    if current is None:
        return _SteppedIterator(inner, steps)
    return ParallelStepsIterator(inner, current.prepare(steps), current.parallel + 1)


class _SteppedIterator(ReplayIterator[object]):
    """Applies steps to one sample after the other; states of `ParallelStepsIterator` fit, and the other way round."""

    operation = STEPS

    def __init__(self, inner: ResumableIterator[object], steps: tuple[Step, ...]) -> None:
        super().__init__()
        self._inner = inner
        self._steps = steps
        self._read = 0  # samples and errors

    async def _next(self) -> object:
        while True:
            try:
                sample = await anext(self._inner)
            except StopAsyncIteration:
                raise
            except Exception:  # of user code; the error takes the place of a sample
                self._read += 1
                raise
            self._read += 1
            for outcome in apply_steps(self._steps, [sample], None):
                return _value(outcome)

    def _is_exact(self) -> bool:
        return True

    def _snapshot(self) -> Callable[[], State]:
        read, inner = self._read, snapshot(self._inner)
        return lambda: {"position": read, "inner": inner()}

    def _restore_exact(self, state: State) -> None:
        self._read = expect_int(state, "position")
        self._inner.load_state_dict(expect_state(state, "inner"))

    async def aclose(self) -> None:
        await close_iterator(self._inner)


class _Mark(NamedTuple):
    """A position of the inner iterator.

    Attributes:
        read: samples and errors read before it.
        state: the state there.
    """

    read: int
    state: Callable[[], State]


class _Chunk(NamedTuple):
    """Samples in one request; `mark` if it is the first after a mark."""

    outcomes: asyncio.Future[list[object]]
    size: int
    mark: _Mark | None


class ParallelStepsIterator(OperationIterator[object]):
    """Reads ahead in one task, and sends chunks of the samples that arrived while earlier chunks were in progress.

    Its state is the last position of the inner iterator that was noted, one for each `CHUNK` samples, and the number of
    outcomes given since. After a restore those are computed again, with the same seeds, and dropped.

    Args:
        inner: the iterator; owned by this one.
        run: applies the steps to a chunk.
        limit: most chunks in flight.
    """

    operation = STEPS

    def __init__(self, inner: ResumableIterator[object], run: RunSteps, limit: int) -> None:
        self._inner = inner
        self._run = run
        self._limit = limit
        self._max_held = CHUNK * limit
        self._held = 0  # samples read and not yet returned
        self._read = 0  # samples and errors
        self._sent = 0  # of those
        self._buffer: deque[object] = deque()
        self._marks: deque[_Mark] = deque()  # of samples that are not sent yet
        self._chunks: deque[_Chunk] = deque()  # in order
        self._in_flight: set[asyncio.Future[list[object]]] = set()
        self._outcomes: deque[object] = deque()
        self._mark: _Mark | None = None  # before the oldest chunk of which not all is returned
        self._given = 0  # outcomes returned since
        self._errors = 0  # of those
        self._reread = Reread()
        self._reader: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._has_room = asyncio.Event()
        self._ended = False
        self._closing = False

    async def __anext__(self) -> object:
        if self._closing:
            raise StopAsyncIteration
        if self._reader is None:
            self._mark = self._mark or _Mark(self._read, snapshot(self._inner))
            self._reader = asyncio.get_running_loop().create_task(self._read_ahead())
        if self._reread.left:
            await self._reread.drop(self._next, self.operation)
        if not self._outcomes and not await self._receive():
            raise StopAsyncIteration
        self._given += 1
        outcome = self._outcomes.popleft()
        if type(outcome) is Raised:
            self._errors += 1
            raise outcome.error
        return outcome

    async def _next(self) -> object:
        if not self._outcomes and not await self._receive():
            raise StopAsyncIteration
        return _value(self._outcomes.popleft())

    async def _receive(self) -> bool:
        """Wait for outcomes; returns whether there are any."""
        while not self._outcomes:
            if self._chunks:
                chunk = self._chunks[0]
                await asyncio.wait((chunk.outcomes,))  # loses nothing when it is cancelled
                if self._closing:
                    return False
                self._chunks.popleft()
                if chunk.mark is not None and not self._reread.left:
                    self._mark, self._given, self._errors = chunk.mark, 0, 0
                self._outcomes.extend(chunk.outcomes.result())
                self._held -= chunk.size
                self._has_room.set()
            elif self._closing or (self._ended and not self._buffer):
                return False
            else:
                self._changed.clear()
                await self._changed.wait()
        return True

    async def _read_ahead(self) -> None:
        try:
            marked = self._read
            while True:
                while self._held >= self._max_held:
                    self._has_room.clear()
                    await self._has_room.wait()
                if self._read >= marked + CHUNK:
                    self._marks.append(_Mark(self._read, snapshot(self._inner)))
                    marked = self._read
                try:
                    sample = await anext(self._inner)
                except StopAsyncIteration:
                    break
                except BaseException as error:  # user code
                    if self._closing:
                        raise
                    sample = Raised(as_exception(error))
                    marked = -CHUNK  # an error may not be raised when it is read again: the next position is noted
                self._held += 1
                self._read += 1
                self._buffer.append(sample)
                self._send()
        finally:
            self._ended = True
            self._changed.set()
            await close_iterator(self._inner)

    def _send(self) -> None:
        loop = asyncio.get_running_loop()
        while self._buffer and len(self._in_flight) < self._limit and not self._closing:
            mark = self._marks.popleft() if self._marks and self._marks[0].read == self._sent else None
            most = min(CHUNK, self._marks[0].read - self._sent) if self._marks else CHUNK
            chunk = list(itertools.islice(itertools.takewhile(_is_sample, self._buffer), most))
            if chunk:
                future: asyncio.Future[list[object]] = loop.create_task(self._outcomes_of(chunk, self._sent))
                self._in_flight.add(future)
                future.add_done_callback(self._on_done)
            else:  # an error of the stream itself
                chunk = [self._buffer[0]]
                future = loop.create_future()
                future.set_result(chunk)
            self._chunks.append(_Chunk(future, len(chunk), mark))
            self._sent += len(chunk)
            for _ in chunk:
                self._buffer.popleft()
            self._changed.set()

    async def _outcomes_of(self, chunk: Sequence[object], position: int) -> list[object]:
        try:
            return await self._run(chunk, position)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # the worker died, or the request cannot be pickled
            if len(chunk) == 1:
                return [Raised(as_exception(error))]
            # One by one, so that no other sample is lost.
            alone = [await self._outcomes_of([sample], position + offset) for offset, sample in enumerate(chunk)]
            return list(itertools.chain.from_iterable(alone))

    def _on_done(self, future: asyncio.Future[list[object]]) -> None:
        self._in_flight.discard(future)
        self._send()

    def _position(self) -> State:
        mark, given, errors = self._mark, self._given, self._errors
        if mark is None:
            mark = _Mark(self._read, snapshot(self._inner))
        elif not self._outcomes and self._chunks and self._chunks[0].mark is not None and not self._reread.left:
            mark, given, errors = self._chunks[0].mark, 0, 0
        return {"position": mark.read, "given": given, "errors": errors, "inner": mark.state()}

    def _restore(self, state: State) -> None:
        self._read = self._sent = expect_int(state, "position")
        self._given, self._errors = expect_int(state, "given"), expect_int(state, "errors")
        self._reread = Reread(self._given, self._errors)
        inner = expect_state(state, "inner")
        self._mark = _Mark(self._read, lambda: inner)
        self._inner.load_state_dict(inner)

    async def aclose(self) -> None:
        """Cancel pending requests, and close the inner iterator."""
        self._closing = True
        self._changed.set()
        if self._reader is None:
            await close_iterator(self._inner)
            return
        await end_all([self._reader, *self._in_flight])  # type: ignore[list-item]  # all of them are tasks
        if not self._reader.cancelled() and (error := self._reader.exception()) is not None:
            raise error


def _is_sample(entry: object) -> bool:
    return type(entry) is not Raised


def _value(outcome: object) -> object:
    """The sample; raises the error in place of one."""
    if type(outcome) is Raised:
        raise outcome.error
    return outcome
