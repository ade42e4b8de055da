"""Coroutine functions of `map` on streams.

In a loader the functions of several rows run at the same time, as tasks on the event loop, and the
samples are given in the order of the rows. Without a loader the functions run row by row.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

from headrace._base.text import add_note, function_name
from headrace._eventloop.per_loop import end_all
from headrace._records.failure import as_exception, key_in
from headrace._streams.kinds import DatasetKind, walk_datasets
from headrace._streams.resumable import Reread, State, StreamOperation, close_all

# Rows between two saved positions. After a restore, at most so many rows are read again.
_SAVED_ROWS = 16


class Fetching(Protocol):
    """Runs the coroutine functions of a session, as many as `concurrency` allows."""

    def fetch(self, function: Callable[[Any], Awaitable[Any]], row: Any) -> asyncio.Future[Any]:
        """Call a function with a row soon, and return its result.

        Cancelling the result cancels the call.
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
    return sum(getattr(operator, "reads_ahead", False) for operator in _operators(dataset))


def _operators(dataset: object) -> list[object]:
    return [getattr(part, "_operator", None) for part in walk_datasets(dataset)]


def is_bounded(kind: DatasetKind, dataset: object) -> bool:
    """Return whether the option `memory_budget` limits the samples of a dataset.

    Samples of a stream are not counted, unless coroutine functions fetch the samples.
    """
    return kind is DatasetKind.ASYNC_MAP or (kind.is_async and fetches(dataset))


class _HeldRow(NamedTuple):
    """A row that was read, and not given yet."""

    position: State | None  # position of the stream before the row, if saved
    sample: asyncio.Future[Any]


class FetchFunctions(StreamOperation[Any]):
    """A stream with coroutine functions applied to each row.

    In a loader a task reads rows ahead, and the rows are fetched at the same time. The saved
    position is the position before a row, and the number of rows given since. After a restore these
    rows are read again, and not fetched.
    """

    operation = "map, async"
    reads_ahead = True
    fields = ("given",)

    def __init__(self, source: Any, functions: tuple[Callable[[Any], Awaitable[Any]], ...]) -> None:
        while getattr(source, "_operator", None) is FetchFunctions:
            source, functions = source.dataset, (*source._options["functions"], *functions)
        super().__init__(source)
        self._functions = functions
        self._fetching = fetching.get()
        self._position: State | None = None  # the saved position; None for the current position
        self._given = 0  # rows given since the saved position
        self._reread = Reread()
        self._rows: deque[_HeldRow] = deque()
        self._reader: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._read_all = False

    async def __anext__(self) -> Any:
        if self._fetching is None:
            await self._reread.read(self._inner, self.operation)
            self._given = 0
            return await self._apply(await anext(self._inner))
        if self._reader is None and not self._closed:
            self._position = self._inner_state()
            self._reader = asyncio.get_running_loop().create_task(self._read_ahead(self._fetching))
        while not self._rows:
            if self._closed or self._read_all:
                raise StopAsyncIteration
            await self._change()
        row = self._rows[0]
        await asyncio.wait((row.sample,))  # cancelling the wait loses nothing
        if self._closed:
            raise StopAsyncIteration
        self._rows.popleft()
        self._changed.set()
        if row.position is not None:
            self._position, self._given = row.position, 0
        self._given += 1
        return row.sample.result()

    async def _read_ahead(self, session: Fetching) -> None:
        number = 0
        try:
            await self._reread.read(self._inner, self.operation)
            while True:
                while len(self._rows) >= session.most_held():
                    await self._change()
                position = None if number % _SAVED_ROWS else self._inner.state_dict()
                number += 1
                try:
                    sample = session.fetch(self._apply, await anext(self._inner))
                except StopAsyncIteration:
                    break
                except BaseException as error:  # user code, in place of a row
                    if self._closed:
                        raise
                    sample = _failed(error)
                self._rows.append(_HeldRow(position, sample))
                self._changed.set()
        except Exception as error:  # the position could not be restored or saved
            self._rows.append(_HeldRow(None, _failed(error)))
        finally:
            self._read_all = True
            self._changed.set()
            await close_all(self._inner)

    async def _apply(self, row: Any) -> Any:
        sample, function = row, self._functions[0]
        try:
            for function in self._functions:
                sample = await function(sample)
        except BaseException as error:  # user code
            if self._closed:
                raise
            raised, key = as_exception(error), key_in(row)
            where = f", key {key!r}" if key else ""
            add_note(raised, f"headrace: in map({function_name(function)}), before batching{where}")
            raise raised from raised.__cause__
        return sample

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _inner_state(self) -> Any:
        return super()._inner_state() if self._position is None else self._position

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self._reread = Reread(self._given, self._given)

    def origin(self, number: int) -> Any:
        return self._inner.origin(number + self._reread.count)

    async def aclose(self) -> None:
        self._closed = True
        self._changed.set()
        for row in self._rows:
            row.sample.cancel()
        if self._reader is None:
            await super().aclose()
        else:
            await end_all([self._reader])


def _failed(error: BaseException) -> asyncio.Future[Any]:
    """Return a result with an error."""
    failed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    failed.set_exception(as_exception(error))
    failed.exception()  # the error may never be given: no warning of the event loop
    return failed
