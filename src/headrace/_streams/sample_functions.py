"""`map` and `filter` functions applied before samples are batched.

In a loader the functions run in the workers, by chunks of samples, and in order. Later operations,
for example `pack` and `batch_by_tokens`, get finished samples. Without a loader the functions run
in place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

from headrace._records.failure import as_exception
from headrace._streams.fetch_functions import fetches, fetching
from headrace._streams.read_ahead import CHUNK, Chunk, ReadAhead, raised_by
from headrace._streams.resumable import NOTHING, BadRecord, raised_or


class SampleFunction(NamedTuple):
    """A function of `map`, or a predicate of `filter`."""

    function: Callable[[Any], Any]
    is_filter: bool

    @property
    def operation(self) -> str:
        return "filter" if self.is_filter else "map"

    @property
    def name(self) -> str:
        return f"{self.operation} function {self.function!r}"


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


def outcome_of(
    functions: Sequence[SampleFunction],
    sample: Any,
    catch: type[BaseException] | tuple[type[BaseException], ...] = BaseException,
) -> Any:
    """Return a sample after all functions.

    Returns `NOTHING` if a filter drops the sample, and `BadRecord` if a function raises one of
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
        return raised_by(error, part.operation, part.function, read)
    return sample


class SampleFunctions(ReadAhead):
    """A stream with functions applied.

    In a loader, samples that arrive during earlier requests form the next chunk. After a restore,
    outcomes already given from the chunk are computed again with the same seeds, and dropped.
    """

    operation = "map, filter"
    ranks_differ = True  # because of filters

    def __init__(self, source: Any, functions: tuple[SampleFunction, ...]) -> None:
        # Adjacent functions are applied in the same request.
        while getattr(source, "_operator", None) is SampleFunctions:
            source, functions = (
                source.dataset,
                (*source._options["functions"], *functions),
            )
        prepare = compute.get()
        super().__init__(source, in_place=prepare is None)
        self._functions = functions
        self._run: RunFunctions
        self._parallel: Callable[[], int]  # returns how many chunks keep the workers busy
        if prepare is not None:
            self._run, self._parallel = prepare(functions)
        # Fetched samples are large: the memory budget limits the number of samples read ahead.
        self._fetching = fetching.get() if fetches(source) else None
        self._in_flight: set[asyncio.Task[list[object]]] = set()

    def _put(self, sample: object) -> object:
        outcome = outcome_of(self._functions, sample)
        if outcome is NOTHING:
            self._drop(1)
        return raised_or(outcome)

    def _most_held(self) -> int:
        most = CHUNK * (self._parallel() + 1)
        return most if self._fetching is None else min(most, self._fetching.most_held())

    def _request(self, chunk: Chunk) -> asyncio.Task[list[object]] | None:
        if len(self._in_flight) > self._parallel():
            return None
        task = asyncio.get_running_loop().create_task(
            self._apply(chunk.samples, chunk.first)
        )
        self._in_flight.add(task)
        task.add_done_callback(self._in_flight.discard)
        task.add_done_callback(self._send)
        return task

    async def _apply(self, samples: list[object], first: int) -> list[object]:
        try:
            return await self._run(samples, first)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            # The worker died, or the request cannot be pickled.
            if len(samples) == 1:
                return [BadRecord(as_exception(error))]
            # Send each sample alone, so no other sample is lost.
            outcomes = []
            for number, sample in enumerate(samples, first):
                outcomes += await self._apply([sample], number)
            return outcomes
