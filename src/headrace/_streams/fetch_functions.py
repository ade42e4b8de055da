"""Coroutine functions of `map` on streams.

In a loader the functions of several rows run at the same time, as tasks on the event loop, and the
samples are given in the order of the rows. Without a loader the functions run row by row.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, Protocol, cast

from headrace._streams.kinds import DatasetKind, walk_datasets
from headrace._streams.read_ahead import Chunk, ReadAhead, raised_by
from headrace._streams.resumable import BadRecord, Reread, State, close_all


class Fetching(Protocol):
    """Runs the coroutine functions of a session, as many as `concurrency` allows."""

    def fetch(
        self, function: Callable[[Any], Awaitable[Any]], row: Any
    ) -> asyncio.Future[list[Any]]:
        """Call a function with a row soon, and return a list of the sample, or of `BadRecord`.

        Cancelling the future cancels the call.
        """

    def most_held(self) -> int:
        """Return the number of rows or samples that an operation may hold."""


fetching: ContextVar[Fetching | None] = ContextVar("headrace_fetching", default=None)
"""`Fetching` of the session that reads; None without a loader."""


def fetches(dataset: object) -> bool:
    """Return whether an operation of a stream applies coroutine functions."""
    return FetchFunctions in _operators(dataset)


def holders(dataset: object) -> int:
    """Return the number of operations of a stream that hold fetched samples."""
    return sum(
        getattr(operator, "reads_ahead", False) for operator in _operators(dataset)
    )


def _operators(dataset: object) -> list[object]:
    return [getattr(part, "_operator", None) for part in walk_datasets(dataset)]


def is_bounded(kind: DatasetKind, dataset: object) -> bool:
    """Return whether the option `memory_budget` limits the samples of a dataset.

    Samples of a stream are not counted, unless coroutine functions fetch the samples.
    """
    return kind is DatasetKind.ASYNC_MAP or (kind.is_async and fetches(dataset))


class FetchFunctions(ReadAhead):
    """A stream with coroutine functions applied to each row.

    In a loader the rows are fetched at the same time. After a restore, the rows given since the
    saved position are read again, and not fetched.
    """

    operation = "map, async"
    saved_samples = 16  # after a restore, at most so many rows are read again

    def __init__(
        self, source: Any, functions: tuple[Callable[[Any], Awaitable[Any]], ...]
    ) -> None:
        while getattr(source, "_operator", None) is FetchFunctions:
            source, functions = (
                source.dataset,
                (*source._options["functions"], *functions),
            )
        session = fetching.get()
        super().__init__(source, in_place=session is None)
        self._functions = functions
        self._session = cast(Fetching, session)  # None only in place

    async def __anext__(self) -> Any:
        if not self._in_place:
            return await super().__anext__()
        await self._reread.read(self._inner, self.operation)
        return await self._apply(await anext(self._inner))

    async def _read_ahead(self) -> None:
        try:
            await self._reread.read(self._inner, self.operation)
        except Exception as error:  # the following rows are unknown
            self._outcomes.append(BadRecord(error))
            self._read_all = True
            self._changed.set()
            return await close_all(self._inner)
        self._read += self._reread.count
        await super()._read_ahead()

    async def _apply(self, row: Any) -> Any:
        sample, function = row, self._functions[0]
        try:
            for function in self._functions:
                sample = await function(sample)
        except BaseException as error:  # user code
            if self._closed:
                raise
            raised = raised_by(error, "map", function, row).error
            raise raised from raised.__cause__
        return sample

    def _most_held(self) -> int:
        return self._session.most_held()

    def _request(self, chunk: Chunk) -> asyncio.Future[list[Any]]:
        return self._session.fetch(self._apply, chunk.samples[0])

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._given, self._errors = state["given"], state["errors"]
        self._reread = Reread(self._given, self._given)
