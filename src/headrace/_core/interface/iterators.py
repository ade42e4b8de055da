"""Iterators over streams that wrap another iterator, which they own and close.

They are classes, not generators: an error of one sample is raised by `anext`, and the next call continues after it. A
generator would have ended, and with it the rest of the epoch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterable, Callable, Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar

from headrace._core.interface.distributed import Remainder, ShardOptions, undivided
from headrace._core.interface.reread import Reread
from headrace._core.interface.stream_seeds import child_seeds, spawn_key
from headrace._core.interface.stream_state import (
    ResumableIterator,
    State,
    close_iterator,
    expect_bool,
    expect_int,
    expect_same,
    expect_state,
    in_state_of,
    snapshot,
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


class Mark(NamedTuple):
    """A position that can be saved; with the numbers of samples and errors, and of errors, given before it."""

    given: int
    errors: int
    position: Callable[[], State]


class ReplayIterator(OperationIterator[T]):
    """An operation whose samples depend on some that it holds: not every position of it can be saved as such.

    The state is then an earlier position, and how many samples and errors have been given since. They are read again,
    and dropped.
    """

    def __init__(self) -> None:
        self._mark: Mark | None = None
        self._given = 0  # samples and errors
        self._errors = 0  # of those
        self._reread = Reread()

    async def __anext__(self) -> T:
        if self._mark is None:
            self._mark = self._new_mark()
        if self._reread.left:
            await self._reread.drop(self._next, self.operation)
        try:
            sample = await self._next()
        except StopAsyncIteration:
            raise
        except Exception:
            self._given += 1
            self._errors += 1
            raise
        self._given += 1
        return sample

    def _position(self) -> State:
        if self._mark is None or not self._reread.left:
            self._mark = self._latest_mark()
        given, errors, position = self._mark
        return {**position(), "given": self._given - given, "errors": self._errors - errors}

    def _latest_mark(self) -> Mark:
        """The latest position from which what is held now can be read again."""
        return self._new_mark() if self._mark is None or self._is_exact() else self._mark

    def _new_mark(self) -> Mark:
        return Mark(self._given, self._errors, self._snapshot())

    def _restore(self, state: State) -> None:
        self._given, self._errors = expect_int(state, "given"), expect_int(state, "errors")
        self._reread = Reread(self._given, self._errors)
        self._restore_exact(state)
        position = {name: value for name, value in state.items() if name not in ("operation", "given", "errors")}
        self._mark = Mark(0, 0, lambda: position)

    @abstractmethod
    async def _next(self) -> T:
        """The next sample."""

    @abstractmethod
    def _is_exact(self) -> bool:
        """Whether the current position can be saved as such; true at the start."""

    @abstractmethod
    def _snapshot(self) -> Callable[[], State]:
        """The current position, if it can be saved as such."""

    @abstractmethod
    def _restore_exact(self, state: State) -> None:
        """Continue from such a position."""


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


class ShardIterator(ReplayIterator[T]):
    """Every n-th sample of an iterator that is the same in all shards; every shard gets the same number.

    A group is one sample for each shard. Samples are returned when their group is complete, so that no shard is ahead
    of another by more than the time to read a group. Its states between groups are the same for all shards, and can be
    restored with another number of shards.

    Args:
        start: returns the iterator; called again at the end for ``"repeat"`` if it was restored.
        shard: the shard to return.
        remainder: policy for an incomplete last group. ``"pad"`` completes it with its last sample, ``"repeat"`` with
            the first samples of all.
    """

    operation = "split"

    def __init__(self, start: Callable[[], ResumableIterator[T]], shard: ShardOptions, remainder: Remainder) -> None:
        super().__init__()
        self._key = spawn_key()
        self._start = start
        self._inner = self._started()
        self._shard = shard
        self._remainder = remainder
        self._first: list[T] = []  # the first group, for "repeat"
        self._restored = False  # the first group was read before the state was saved
        self._group: list[T] = []
        self._ended = False

    def _started(self) -> ResumableIterator[T]:
        with child_seeds(self._key, 0):
            return self._start()

    async def _next(self) -> T:
        count, index = self._shard.count, self._shard.index
        while not self._ended:
            try:
                self._group.append(await anext(self._inner))
            except StopAsyncIteration:
                return await self._from_last_group()
            if len(self._group) == count:
                sample = self._group[index]
                if self._remainder == "repeat" and not (self._first or self._restored):
                    self._first = self._group
                self._group = []
                return sample
        raise StopAsyncIteration

    async def _from_last_group(self) -> T:
        last, index = self._group, self._shard.index
        if not last or self._remainder == "drop" or (self._remainder == "keep" and index >= len(last)):
            self._end()
            raise StopAsyncIteration
        if index >= len(last) and self._remainder == "repeat":
            if self._restored:
                await self._read_first_group()
            first = self._first or last  # fewer samples in all than shards
            last = [*last, *(first[number % len(first)] for number in range(index + 1 - len(last)))]
        self._end()
        return last[min(index, len(last) - 1)]

    def _end(self) -> None:
        self._ended = True
        self._group = []

    async def _read_first_group(self) -> None:
        first: list[T] = []
        inner = self._started()
        try:
            while len(first) < self._shard.count:
                try:
                    first.append(await anext(inner))
                except StopAsyncIteration:
                    break
                except Exception:  # it was raised when it was read for the first time
                    continue
        finally:
            await close_iterator(inner)
        self._first, self._restored = first, False

    def _is_exact(self) -> bool:
        return not self._group

    def _snapshot(self) -> Callable[[], State]:
        inner, ended = snapshot(self._inner), self._ended
        return lambda: {"world_size": self._shard.count, "inner": inner(), "ended": ended}

    def _restore_exact(self, state: State) -> None:
        if self._reread.left:
            expect_same(state, "world_size", self._shard.count)
        self._inner.load_state_dict(expect_state(state, "inner"))
        self._ended = expect_bool(state, "ended")
        self._restored = True

    async def aclose(self) -> None:
        await close_iterator(self._inner)
