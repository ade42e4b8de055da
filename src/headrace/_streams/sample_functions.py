"""`map` and `filter` functions applied before samples are batched.

In a loader the functions run in the workers, by chunks of samples, and in order. Later operations,
for example `pack` and `batch_by_tokens`, get finished samples. Without a loader the functions run
in place.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headrace._base.text import add_note, function_name
from headrace._eventloop.per_loop import end_all
from headrace._records.failure import as_exception, key_in
from headrace._streams.fetch_functions import fetches, fetching
from headrace._streams.resumable import NOTHING, Mark, ReplayOperation, State, close_all

# Most samples in a request to a worker. A request takes some 150 µs besides the functions, and a
# few ms on a busy machine: there, chunks of 64 take a third of the time of chunks of 16.
CHUNK = 64


class SampleFunction(NamedTuple):
    """A function of `map`, or a predicate of `filter`."""

    function: Callable[[Any], Any]
    is_filter: bool

    @property
    def name(self) -> str:
        return f"{'filter' if self.is_filter else 'map'} function {self.function!r}"


class Raised(NamedTuple):
    """An error in place of a sample."""

    error: Exception


RunFunctions = Callable[[Sequence[Any], int], Awaitable[list[Any]]]
"""Applies functions to samples.

Called with the samples, and the position of the first sample in the stream. Returns the outcome of
each sample.
"""

Compute = Callable[[tuple[SampleFunction, ...]], tuple[RunFunctions, Callable[[], int]]]
"""Makes two functions for work off the session's event loop.

The first function applies sample functions. The second function returns the number of requests
that keep the workers busy.
"""

compute: ContextVar[Compute | None] = ContextVar("headrace_compute", default=None)
"""`Compute` of the session that reads; None without a loader."""


def apply_functions(
    functions: Sequence[SampleFunction],
    sample: Any,
    catch: type[BaseException] | tuple[type[BaseException], ...] = BaseException,
) -> Any:
    """Return a sample after all functions.

    Returns `NOTHING` if a filter drops the sample, and `Raised` if a function raises one of
    `catch`.
    """
    part, read = functions[0], sample
    try:
        for part in functions:
            result = part.function(sample)
            if not part.is_filter:
                sample = result
            elif not result:
                return NOTHING
    except catch as error:  # user code
        raised = as_exception(error)
        key = key_in(read)
        where = f", key {key!r}" if key else ""
        kind = "filter" if part.is_filter else "map"
        add_note(
            raised, f"headrace: in {kind}({function_name(part.function)}), before batching{where}"
        )
        return Raised(raised)
    return sample


@dataclass
class _Chunk:
    """Samples of a request. Only the last can be an error of the stream."""

    first: int  # number of the first sample
    position: State | None  # position before the first sample, if known
    samples: list[object] = field(default_factory=list)
    task: Any = None  # the request for the outcomes


class SampleFunctions(ReplayOperation[Any]):
    """A stream with functions applied.

    In a loader a task reads ahead. The task sends samples in chunks: samples that arrive during
    earlier requests form the next chunk. The saved position is the position before a chunk. After a
    restore, outcomes already given from the chunk are computed again with the same seeds, and
    dropped.
    """

    operation = "map, filter"
    reads_ahead = True
    fields = ("read",)
    ranks_differ = True  # because of filters

    def __init__(self, source: Any, functions: tuple[SampleFunction, ...]) -> None:
        # Adjacent functions are applied in the same request.
        while getattr(source, "_operator", None) is SampleFunctions:
            source, functions = source.dataset, (*source._options["functions"], *functions)
        super().__init__(source)
        self._functions = functions
        prepare = compute.get()
        self._run: RunFunctions | None
        self._parallel: Callable[[], int]
        # `_parallel` returns the number of chunks that keep the workers busy.
        self._run, self._parallel = (None, int) if prepare is None else prepare(functions)
        self._held = 0  # samples read, without a received outcome
        # Fetched samples are large: the memory budget limits the number of samples read ahead.
        self._fetching = fetching.get() if fetches(source) else None
        self._unsent: _Chunk | None = None
        self._sent: deque[_Chunk] = deque()  # in order
        self._in_flight: set[asyncio.Task[list[object]]] = set()
        self._outcomes: deque[object] = deque()
        self._reader: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._read_all = False
        self._ended = self._run is not None  # True: a task reads the stream, not `__anext__`

    def _put(self, sample: object) -> object:
        outcome = apply_functions(self._functions, sample)
        if outcome is NOTHING:
            self._drop(1)
        return _raised_or(outcome)

    async def _rest(self) -> object:
        if self._run is not None and self._reader is None:
            self._first = self._read
            self._reader = asyncio.get_running_loop().create_task(self._read_ahead())
        while not self._outcomes:
            if (
                self._closed
                or self._reader is None
                or (self._read_all and not (self._sent or self._unsent))
            ):
                raise StopAsyncIteration
            if self._sent:
                await asyncio.wait((self._sent[0].task,))  # cancelling the wait loses nothing
                if not self._closed:
                    self._mark = self._latest_mark()
                    chunk = self._sent.popleft()
                    outcomes = chunk.task.result()
                    kept = [
                        place for place, outcome in enumerate(outcomes) if outcome is not NOTHING
                    ]
                    self._note_origin(chunk.first - self._first, kept)
                    self._outcomes.extend(outcomes[place] for place in kept)
                    self._held -= len(chunk.samples)
                    self._changed.set()
                    if not kept:
                        self._drop(len(outcomes))
            else:
                await self._change()
        return _raised_or(self._outcomes.popleft())

    def _note_origin(self, first: int, kept: list[int]) -> None:
        self._origins.append((self._given, lambda number: self._inner.origin(first + kept[number])))

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _read_ahead(self) -> None:
        try:
            while True:
                while self._held >= self._most_held() or self._is_full(self._unsent):
                    await self._change()
                position: State | None = None
                sample: object
                try:
                    position = None if self._unsent else self._exact_state()
                    sample = await anext(self._inner)
                except StopAsyncIteration:
                    break
                except BaseException as error:  # user code
                    if self._closed:
                        raise
                    sample = Raised(as_exception(error))
                self._unsent = self._unsent or _Chunk(self._read, position)
                self._unsent.samples.append(sample)
                self._held += 1
                self._read += 1
                self._send()
        finally:
            self._read_all = True
            self._changed.set()
            await close_all(self._inner)

    def _most_held(self) -> int:
        most = CHUNK * (self._parallel() + 1)
        return most if self._fetching is None else min(most, self._fetching.most_held())

    def _is_full(self, chunk: _Chunk | None) -> bool:
        """Return whether the next sample must start a new chunk.

        The position is saved before a new chunk.
        """
        if chunk is None:
            return False
        return (
            len(chunk.samples) >= CHUNK
            or chunk.position is None
            or type(chunk.samples[-1]) is Raised
        )

    def _send(self, *_done: object) -> None:
        """Send the unsent samples, unless enough requests are in flight."""
        chunk = self._unsent
        if chunk is None or len(self._in_flight) > self._parallel() or self._closed:
            return
        task = asyncio.get_running_loop().create_task(self._outcomes_of(chunk.samples, chunk.first))
        chunk.task = task
        self._in_flight.add(task)
        task.add_done_callback(self._in_flight.discard)
        task.add_done_callback(self._send)
        self._sent.append(chunk)
        self._unsent = None
        self._changed.set()

    async def _outcomes_of(self, samples: list[object], first: int) -> list[object]:
        assert self._run is not None
        if type(samples[-1]) is Raised:  # an error of the stream itself
            return [
                *(await self._outcomes_of(samples[:-1], first) if samples[1:] else ()),
                samples[-1],
            ]
        try:
            return await self._run(samples, first)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # the worker died, or the request cannot be pickled
            if len(samples) == 1:
                return [Raised(as_exception(error))]
            # Send each sample alone, so no other sample is lost.
            return [
                each
                for at, one in enumerate(samples, first)
                for each in await self._outcomes_of([one], at)
            ]

    def _latest_mark(self) -> Mark:
        if self._run is None or self._mark is None:
            return self._new_mark()
        if not self._outcomes and self._sent and self._sent[0].position is not None:
            return Mark(self._given, self._errors, self._sent[0].position)
        return self._mark

    async def aclose(self) -> None:
        self._closed = True
        self._changed.set()
        if self._reader is None:
            await super().aclose()
            return
        await end_all([self._reader, *self._in_flight])
        if not self._reader.cancelled() and (error := self._reader.exception()) is not None:
            raise error


def _raised_or(outcome: object) -> object:
    if type(outcome) is Raised:
        raise outcome.error
    return outcome
