"""Iterators over streams that wrap another iterator, which they own and close.

They are classes, not generators: an error of one sample is raised by `anext`, and the next call continues after it. A
generator would have ended, and with it the rest of the epoch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterable, Mapping
from typing import Any, ClassVar, TypeVar

from headrace._core.interface.distributed import undivided
from headrace._core.interface.stream_state import (
    ResumableIterator,
    State,
    close_iterator,
    expect_int,
    expect_same,
    expect_state,
    in_state_of,
    start_stream,
)
from headrace.errors import StateError

T = TypeVar("T")
NOTHING: Any = object()


def check_times(times: int) -> None:
    """Raise for a number of repetitions that is not an int (`TypeError`) or negative (`ValueError`)."""
    if isinstance(times, bool) or not isinstance(times, int):
        raise TypeError(f"times must be an int, but got {times!r}")
    if times < 0:
        raise ValueError(f"times={times} must not be negative")


class OperationIterator(ResumableIterator[T]):
    """An iterator of one of our operations; its state has the operation's name."""

    operation: ClassVar[str]

    def state_dict(self) -> State:
        return {"operation": self.operation, **self._position()}

    def load_state_dict(self, state: State) -> None:
        found = state.get("operation") if isinstance(state, Mapping) else None
        if found != self.operation:
            saved = "a stream without operations" if found is None else repr(found)
            raise StateError(
                f"the state was saved of {saved}, but the stream is {self.operation!r} now: restore it with the same "
                f"operations in the same order"
            )
        with in_state_of(repr(self.operation)):
            self._restore(state)

    @abstractmethod
    def _position(self) -> State:
        """The state without the operation's name."""

    @abstractmethod
    def _restore(self, state: State) -> None:
        """Continue from a state of this operation."""


class StreamIterator(OperationIterator[T]):
    """An iterator that wraps another."""

    def __init__(self, inner: ResumableIterator[T]) -> None:
        self._inner = inner

    async def __anext__(self) -> T:
        return await anext(self._inner)

    def _position(self) -> State:
        return {"inner": self._inner.state_dict()}

    def _restore(self, state: State) -> None:
        self._inner.load_state_dict(expect_state(state, "inner"))

    async def aclose(self) -> None:
        await close_iterator(self._inner)


class UndividedIterator(ResumableIterator[T]):
    """All samples of a stream, even of one that splits itself by rank."""

    def __init__(self, dataset: AsyncIterable[T]) -> None:
        token = undivided.set(True)
        try:
            self._inner = start_stream(dataset)
        finally:
            undivided.reset(token)

    async def __anext__(self) -> T:
        token = undivided.set(True)  # a generator starts its inner streams here
        try:
            return await anext(self._inner)
        finally:
            undivided.reset(token)

    def state_dict(self) -> State:
        return self._inner.state_dict()

    def load_state_dict(self, state: State) -> None:
        token = undivided.set(True)
        try:
            self._inner.load_state_dict(state)
        finally:
            undivided.reset(token)

    async def aclose(self) -> None:
        await self._inner.aclose()


class Take(StreamIterator[T]):
    """The first samples."""

    operation = "take"

    def __init__(self, inner: ResumableIterator[T], count: int) -> None:
        super().__init__(inner)
        self._count = count
        self._left = count

    async def __anext__(self) -> T:
        if self._left <= 0:
            await self.aclose()  # stops its read-ahead
            raise StopAsyncIteration
        sample = await anext(self._inner)
        self._left -= 1
        return sample

    def _position(self) -> State:
        return {"count": self._count, "left": self._left, **super()._position()}

    def _restore(self, state: State) -> None:
        expect_same(state, "count", self._count)
        self._left = expect_int(state, "left")
        super()._restore(state)
