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
    """Samples in one request, and the position before them, if it is known."""

    outcomes: asyncio.Task[list[object]]
    size: int
    position: State | None


class Steps(ReplayOperation[Any]):
    """A stream with steps applied.

    In a loader one task reads ahead, and sends chunks of the samples that arrived while earlier chunks were in
    progress. The position that is saved is that before a chunk; the outcomes given of it are computed again after a
    restore, with the same seeds, and dropped.
    """

    operation = "map, filter"
    fields = (("read", int),)

    def __init__(self, source: AsyncIterable[object], steps: tuple[Step, ...]) -> None:
        super().__init__(source)
        self._steps = steps
        prepare, parallel = compute.get() or (None, 0)
        self._run = None if prepare is None else prepare(steps)
        self._limit = parallel + 1  # chunks in flight
        self._held = 0  # samples read whose outcomes are not received
        self._chunk: list[object] = []  # samples that are not sent yet; an error is the last
        self._first = 0  # number of its first sample
        self._position: State | None = None  # before it; None if it is not known
        self._chunks: deque[_Chunk] = deque()  # in order
        self._in_flight: set[asyncio.Task[list[object]]] = set()
        self._outcomes: deque[object] = deque()
        self._reader: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._has_room = asyncio.Event()
        self._read_all = False
        self._ended = self._run is not None  # a task reads the stream

    def _put(self, sample: object) -> object:
        outcome = apply_steps(self._steps, sample)
        if type(outcome) is Raised:
            raise outcome.error
        return outcome

    async def _rest(self) -> object:
        if self._run is not None and self._reader is None:
            self._reader = asyncio.get_running_loop().create_task(self._read_ahead())
        while not self._outcomes:
            if self._closed or self._reader is None or (self._read_all and not (self._chunks or self._chunk)):
                raise StopAsyncIteration
            if self._chunks:
                await asyncio.wait((self._chunks[0].outcomes,))  # loses nothing when it is cancelled
                if not self._closed:
                    self._mark = self._latest_mark()
                    chunk = self._chunks.popleft()
                    self._outcomes.extend(chunk.outcomes.result())
                    self._held -= chunk.size
                    self._has_room.set()
            else:
                self._changed.clear()
                await self._changed.wait()
        outcome = self._outcomes.popleft()
        if type(outcome) is Raised:
            raise outcome.error
        return outcome

    async def _read_ahead(self) -> None:
        try:
            while True:
                while self._held >= CHUNK * self._limit or self._is_full():
                    self._has_room.clear()
                    await self._has_room.wait()
                position: State | None = None
                sample: object
                try:
                    position = None if self._chunk else self._exact_state()
                    sample = await anext(self._inner)
                except StopAsyncIteration:
                    break
                except BaseException as error:  # user code
                    if self._closed:
                        raise
                    sample = Raised(as_exception(error))
                if not self._chunk:
                    self._first, self._position = self._read, position
                self._held += 1
                self._read += 1
                self._chunk.append(sample)
                self._send()
        finally:
            self._read_all = True
            self._changed.set()
            await close_iterator(self._inner)

    def _is_full(self) -> bool:
        """Whether the next sample belongs to another chunk, before which the position is saved."""
        chunk = self._chunk
        return len(chunk) >= CHUNK or (bool(chunk) and (self._position is None or type(chunk[-1]) is Raised))

    def _send(self, *_done: object) -> None:
        """Send the samples that have arrived, unless there are enough requests."""
        if not self._chunk or len(self._in_flight) >= self._limit or self._closed:
            return
        task = asyncio.get_running_loop().create_task(self._outcomes_of(self._chunk, self._first))
        self._in_flight.add(task)
        task.add_done_callback(self._in_flight.discard)
        task.add_done_callback(self._send)
        self._chunks.append(_Chunk(task, len(self._chunk), self._position))
        self._chunk = []
        self._changed.set()
        self._has_room.set()

    async def _outcomes_of(self, chunk: list[object], position: int) -> list[object]:
        assert self._run is not None
        if type(chunk[-1]) is Raised:  # an error of the stream itself
            return [*(await self._outcomes_of(chunk[:-1], position) if chunk[1:] else ()), chunk[-1]]
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

    async def aclose(self) -> None:
        """Cancel pending requests, and close the stream."""
        self._closed = True
        self._changed.set()
        if self._reader is None:
            await super().aclose()
            return
        await end_all([self._reader, *self._in_flight])
        if not self._reader.cancelled() and (error := self._reader.exception()) is not None:
            raise error
