"""Functions of `map` and predicates of `filter` that are applied before samples are batched.

With a loader they run in its workers, by chunks of samples, and in order; so `pipe` and `batch_by_tokens` after them
get finished samples. Without one they run in place.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

from headrace._core.eventloop.per_loop import end_all
from headrace._core.failure import as_exception
from headrace._core.streams.operation import NOTHING, Mark, ReplayOperation
from headrace._core.streams.resumable import State, close_iterator
from headrace._core.text import add_note

# Most samples in one request to a worker. A request takes some 150 µs besides the functions, and a few ms on a busy
# machine, where 64 take a third of the time of 16.
CHUNK = 64


class Step(NamedTuple):
    """A function of `map`, or a predicate of `filter`."""

    function: Callable[[Any], Any]
    is_filter: bool


class Raised(NamedTuple):
    """An error in place of a sample."""

    error: Exception


RunSteps = Callable[[Sequence[Any], int], Awaitable[list[Any]]]
"""Applies steps to samples, of which the first is at a position of the stream; returns those kept, and errors."""


Compute = tuple[Callable[[tuple[Step, ...]], RunSteps], int]
"""Makes a function that applies steps off the session's event loop, and the number of requests that keep it busy."""

compute: ContextVar[Compute | None] = ContextVar("headrace_compute", default=None)
"""That of the session that reads; None without a loader."""


def apply_steps(
    steps: Sequence[Step], sample: Any, catch: type[BaseException] | tuple[type[BaseException], ...] = BaseException
) -> Any:
    """The sample after all steps; `NOTHING` if it is not kept, `Raised` if a function raised one of `catch`.

    Example:
        >>> apply_steps([Step(abs, is_filter=False), Step(lambda x: x > 1, is_filter=True)], -2)
        2
    """
    step = steps[0]
    try:
        for step in steps:
            result = step.function(sample)
            if not step.is_filter:
                sample = result
            elif not result:
                return NOTHING
    except catch as error:  # user code
        raised = as_exception(error)
        name = getattr(step.function, "__qualname__", type(step.function).__name__)
        add_note(raised, f"headrace: in {'filter' if step.is_filter else 'map'}({name}), before batching")
        return Raised(raised)
    return sample


class _Chunk(NamedTuple):
    """Samples in one request; `position` before them, if it was noted."""

    outcomes: asyncio.Future[list[object]]
    size: int
    position: Callable[[], State] | None


class Steps(ReplayOperation[Any]):
    """A stream with steps applied.

    In a loader one task reads ahead, and sends chunks of the samples that arrived while earlier chunks were in
    progress. The position that is saved is one of those noted for each `CHUNK` samples; the outcomes given since are
    computed again after a restore, with the same seeds, and dropped.
    """

    operation = "map, filter"
    fields = (("read", int),)

    def __init__(self, source: AsyncIterable[object], steps: tuple[Step, ...]) -> None:
        super().__init__(source)
        self._steps = steps
        self._read = 0  # samples and errors
        prepare, parallel = compute.get() or (None, 0)
        self._run = None if prepare is None else prepare(steps)
        self._limit = parallel + 1  # chunks in flight
        self._sent = 0  # of those read
        self._held = 0  # samples read whose outcomes are not received
        self._buffer: deque[object] = deque()  # samples that are not sent yet
        self._noted: deque[tuple[int, Callable[[], State]]] = deque()  # positions in it, by the number read before
        self._chunks: deque[_Chunk] = deque()  # in order
        self._in_flight: set[asyncio.Future[list[object]]] = set()
        self._outcomes: deque[object] = deque()
        self._reader: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._has_room = asyncio.Event()
        self._read_all = False
        self._ended = self._run is not None  # a task reads the stream

    def _put(self, sample: object) -> object:
        self._read += 1
        outcome = apply_steps(self._steps, sample)
        if type(outcome) is Raised:
            raise outcome.error
        return outcome

    def _skip(self) -> None:
        self._read += 1

    async def _rest(self) -> object:
        if self._run is not None and self._reader is None:
            self._reader = asyncio.get_running_loop().create_task(self._read_ahead())
        if not (self._outcomes or (self._reader is not None and await self._receive())):
            raise StopAsyncIteration
        outcome = self._outcomes.popleft()
        if type(outcome) is Raised:
            raise outcome.error
        return outcome

    async def _receive(self) -> bool:
        """Wait for outcomes; returns whether there are any."""
        while not self._outcomes:
            if self._chunks:
                chunk = self._chunks[0]
                await asyncio.wait((chunk.outcomes,))  # loses nothing when it is cancelled
                if self._closed:
                    return False
                self._mark = self._latest_mark()
                self._chunks.popleft()
                self._outcomes.extend(chunk.outcomes.result())
                self._held -= chunk.size
                self._has_room.set()
            elif self._closed or (self._read_all and not self._buffer):
                return False
            else:
                self._changed.clear()
                await self._changed.wait()
        return True

    async def _read_ahead(self) -> None:
        noted = self._read
        try:
            while True:
                while self._held >= CHUNK * self._limit:
                    self._has_room.clear()
                    await self._has_room.wait()
                if self._read >= noted + CHUNK:
                    noted = self._read
                    self._noted.append((noted, self._new_mark().position))
                sample: object
                try:
                    sample = await anext(self._inner)
                except StopAsyncIteration:
                    break
                except BaseException as error:  # user code
                    if self._closed:
                        raise
                    sample = Raised(as_exception(error))
                    noted = -CHUNK  # an error may not be raised when it is read again: the next position is noted
                self._held += 1
                self._read += 1
                self._buffer.append(sample)
                self._send()
        finally:
            self._read_all = True
            self._changed.set()
            await close_iterator(self._inner)

    def _send(self, *_done: object) -> None:
        loop = asyncio.get_running_loop()
        while self._buffer and len(self._in_flight) < self._limit and not self._closed:
            position = self._noted.popleft()[1] if self._noted and self._noted[0][0] == self._sent else None
            most = min(CHUNK, self._noted[0][0] - self._sent) if self._noted else CHUNK
            chunk: list[object] = list(itertools.islice(itertools.takewhile(_is_sample, self._buffer), most))
            if chunk:
                future: asyncio.Future[list[object]] = loop.create_task(self._outcomes_of(chunk, self._sent))
                self._in_flight.add(future)
                future.add_done_callback(self._in_flight.discard)
                future.add_done_callback(self._send)
            else:  # an error of the stream itself
                chunk = [self._buffer[0]]
                future = loop.create_future()
                future.set_result(chunk)
            self._chunks.append(_Chunk(future, len(chunk), position))
            self._sent += len(chunk)
            for _ in chunk:
                self._buffer.popleft()
            self._changed.set()

    async def _outcomes_of(self, chunk: Sequence[object], position: int) -> list[object]:
        assert self._run is not None
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

    def _latest_mark(self) -> Mark:
        if self._run is None or self._mark is None:
            return self._new_mark()
        if not self._outcomes and self._chunks and self._chunks[0].position is not None:
            return Mark(self._given, self._errors, self._chunks[0].position)
        return self._mark

    def _restored(self) -> None:
        self._sent = self._read

    async def aclose(self) -> None:
        """Cancel pending requests, and close the stream."""
        self._closed = True
        self._changed.set()
        if self._reader is None:
            await super().aclose()
            return
        await end_all([self._reader, *self._in_flight])  # type: ignore[list-item]  # all of them are tasks
        if not self._reader.cancelled() and (error := self._reader.exception()) is not None:
            raise error


def _is_sample(entry: object) -> bool:
    return type(entry) is not Raised
