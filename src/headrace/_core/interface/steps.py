"""Functions and predicates on samples of a stream before they are batched, run in a loader's workers."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from headrace._core.batches import as_exception
from headrace._core.interface.block_reader import end_all
from headrace._core.interface.iterators import StreamIterator
from headrace._core.interface.stream_state import close_iterator
from headrace._core.notes import add_note

# Most samples in one request to a worker. A request takes some 150 µs besides the functions, and a few ms on a busy
# machine, where 64 take a third of the time of 16.
CHUNK = 64


@dataclass(frozen=True, slots=True)
class Step:
    """A function of `map`, or a predicate of `filter`."""

    function: Callable[[Any], Any]
    is_filter: bool


@dataclass(frozen=True, slots=True)
class Raised:
    """An error in place of a sample."""

    error: Exception


RunSteps = Callable[[Sequence[Any], int], Awaitable[list[Any]]]
"""Applies steps to samples, of which the first is at a position of the stream; as `apply_steps`."""


class Compute(Protocol):
    """Applies steps for a loader's session, off its event loop."""

    @property
    def parallel(self) -> int:
        """Number of requests that keep it busy."""

    def prepare(self, steps: tuple[Step, ...]) -> RunSteps:
        """A function that applies these steps."""


compute: ContextVar[Compute | None] = ContextVar("headrace_compute", default=None)
"""The `Compute` of the session that reads; None without a loader."""


def apply_steps(
    steps: Sequence[Step],
    samples: Sequence[Any],
    prepare: Callable[[int], object] | None,
    catch: type[BaseException] | tuple[type[BaseException], ...] = BaseException,
) -> list[Any]:
    """Apply steps to samples.

    Args:
        steps: applied in order.
        samples: the samples.
        prepare: called before each sample with its position among these.
        catch: exceptions of user code that are caught.

    Returns:
        The samples that were kept, in their order; `Raised` where a function raised.

    Example:
        >>> apply_steps([Step(abs, is_filter=False), Step(lambda x: x > 1, is_filter=True)], [-1, -2, 3], None)
        [2, 3]
    """
    outcomes: list[Any] = []
    for position, sample in enumerate(samples):
        step = steps[0]
        try:
            if prepare is not None:
                prepare(position)
            for step in steps:
                result = step.function(sample)
                if not step.is_filter:
                    sample = result
                elif not result:
                    break
            else:
                outcomes.append(sample)
        except catch as error:  # user code
            outcomes.append(Raised(_with_note(as_exception(error), step)))
    return outcomes


def _with_note(error: Exception, step: Step) -> Exception:
    name = getattr(step.function, "__qualname__", type(step.function).__name__)
    add_note(error, f"headrace: in {'filter' if step.is_filter else 'map'}({name}), before batching")
    return error


def apply_to_stream(inner: AsyncIterator[Any], steps: tuple[Step, ...]) -> AsyncIterator[Any]:
    """The samples of an iterator with steps applied: in the workers of the loader that reads it, or in place."""
    current = compute.get()
    if current is None:
        return _SteppedIterator(inner, steps)
    return _ParallelStepsIterator(inner, current.prepare(steps), current.parallel + 1)


class _SteppedIterator(StreamIterator):
    def __init__(self, inner: AsyncIterator[Any], steps: tuple[Step, ...]) -> None:
        super().__init__(inner)
        self._steps = steps

    async def __anext__(self) -> Any:
        while not (outcomes := apply_steps(self._steps, [await anext(self._inner)], None)):
            pass
        return _value(outcomes[0])


class _ParallelStepsIterator(AsyncIterator[Any]):
    """Reads ahead in one task, and sends chunks of the samples that arrived while earlier chunks were in progress.

    Args:
        inner: the iterator; owned by this one.
        run: applies the steps to a chunk.
        limit: most chunks in flight.
    """

    def __init__(self, inner: AsyncIterator[Any], run: RunSteps, limit: int) -> None:
        self._inner = inner
        self._run = run
        self._limit = limit
        self._max_held = CHUNK * limit
        self._held = 0  # samples read and not yet returned
        self._position = 0
        self._buffer: deque[Any] = deque()
        self._chunks: deque[tuple[asyncio.Future[list[Any]], int]] = deque()  # in order, each with its size
        self._in_flight: set[asyncio.Future[list[Any]]] = set()
        self._outcomes: deque[Any] = deque()
        self._reader: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._has_room = asyncio.Event()
        self._ended = False
        self._closing = False

    async def __anext__(self) -> Any:
        if self._reader is None and not self._closing:
            self._reader = asyncio.get_running_loop().create_task(self._read())
        while not self._outcomes:
            if self._chunks:
                future, count = self._chunks[0]
                await asyncio.wait((future,))  # loses nothing when it is cancelled
                if self._closing:
                    raise StopAsyncIteration
                self._chunks.popleft()
                self._outcomes.extend(future.result())
                self._held -= count
                self._has_room.set()
            elif self._closing or (self._ended and not self._buffer):
                raise StopAsyncIteration
            else:
                self._changed.clear()
                await self._changed.wait()
        return _value(self._outcomes.popleft())

    async def _read(self) -> None:
        try:
            while True:
                while self._held >= self._max_held:
                    self._has_room.clear()
                    await self._has_room.wait()
                try:
                    sample = await anext(self._inner)
                except StopAsyncIteration:
                    break
                except BaseException as error:  # user code
                    if self._closing:
                        raise
                    sample = Raised(as_exception(error))
                self._held += 1
                self._buffer.append(sample)
                self._send()
        finally:
            self._ended = True
            self._changed.set()
            await close_iterator(self._inner)

    def _send(self) -> None:
        loop = asyncio.get_running_loop()
        while self._buffer and len(self._in_flight) < self._limit and not self._closing:
            chunk = list(itertools.islice(itertools.takewhile(_is_sample, self._buffer), CHUNK))
            if chunk:
                future: asyncio.Future[list[Any]] = loop.create_task(self._outcomes_of(chunk, self._position))
                self._in_flight.add(future)
                future.add_done_callback(self._on_done)
            else:  # an error of the stream itself
                chunk = [self._buffer[0]]
                future = loop.create_future()
                future.set_result(chunk)
            self._chunks.append((future, len(chunk)))
            self._position += len(chunk)
            for _ in chunk:
                self._buffer.popleft()
            self._changed.set()

    async def _outcomes_of(self, chunk: list[Any], position: int) -> list[Any]:
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

    def _on_done(self, future: asyncio.Future[list[Any]]) -> None:
        self._in_flight.discard(future)
        self._send()

    async def aclose(self) -> None:
        """Cancel pending requests, and close the inner iterator."""
        self._closing = True
        self._changed.set()
        if self._reader is None:
            await close_iterator(self._inner)
            return
        await end_all([self._reader, *self._in_flight])  # type: ignore[list-item]  # all of them are tasks
        self._outcomes.clear()
        self._chunks.clear()
        if not self._reader.cancelled() and (error := self._reader.exception()) is not None:
            raise error


def _is_sample(entry: Any) -> bool:
    return type(entry) is not Raised


def _value(outcome: Any) -> Any:
    if type(outcome) is Raised:
        raise outcome.error
    return outcome
