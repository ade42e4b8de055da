"""The base of the operations on streams, which declare what their state consists of.

A class names its `operation`, the `options` that must be the same where a state is loaded, the `fields` that change
while it reads, with their types, and the `streams` that it reads. All of them are attributes of the same name after an
underscore. Saving, restoring and checking are written here, once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterable, Callable
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

from headrace._core.ranks.rankinfo import bound
from headrace._core.streams.resumable import (
    Order,
    Reread,
    ResumableIterator,
    State,
    check_operation,
    close_iterator,
    expect,
    expect_same,
    in_state_of,
    start_stream,
)
from headrace.errors import StateError

T = TypeVar("T")
NOTHING: Any = object()
MAX_ERRORS_IN_A_ROW = 100  # of a stream that are passed over; the next one is raised


class StreamOperation(ResumableIterator[T]):
    """An operation on one stream or several, which it owns and closes.

    Operations are classes, not generators: an error of one sample is raised by `anext`, and the next call continues
    after it. A generator would have ended, and with it the rest of the epoch.

    Args:
        source: the stream, or its iterator; None to start it later.
    """

    operation: ClassVar[str]
    """Its name in states."""

    options: ClassVar[tuple[str, ...]] = ()
    """Values that must be the same where a state is loaded."""

    fields: ClassVar[tuple[tuple[str, object], ...]] = ()
    """Values that change: `int`, `bool` or `Order`; ``[int]`` or ``[bool]`` for a list, of the same length as now."""

    streams: ClassVar[tuple[str, ...]] = ("inner",)
    """The streams that it reads: each is one, None if none is read now, or a list. See `_open`."""

    same_by_lanes: ClassVar[bool] = False
    """Whether it does the same to a part of the shards as to all of them."""

    def __init__(self, source: AsyncIterable[Any] | None) -> None:
        self._inner: Any = None if source is None else start_stream(source)
        self._closed = False

    async def __anext__(self) -> T:
        sample: T = await anext(self._inner)
        return sample

    def _open(self, number: int, state: State) -> ResumableIterator[Any]:
        """Start the stream (`number` of a list) that a state is in the midst of; the fields are restored already."""
        raise StateError("the state is damaged: it is in the midst of a stream that there is not")

    def _restored(self) -> None:
        """Derive other attributes from the restored fields, before streams are restored."""

    def state_dict(self) -> State:
        state: State = {"operation": self.operation}
        for name in (*self.options, *(name for name, _ in self.fields)):
            value = getattr(self, f"_{name}")
            if isinstance(value, Order):
                value = {"seed": value.seed, "epoch": value.epoch, "repetition": value.repetition}
            state[name] = value.copy() if type(value) is list else value
        for name in self.streams:
            streams = getattr(self, f"_{name}")
            if type(streams) is list:
                state[name] = [stream.state_dict() for stream in streams]
            else:
                state[name] = None if streams is None else streams.state_dict()
        return state

    def load_state_dict(self, state: State) -> None:
        check_operation(state, self.operation, repr(self.operation))
        with in_state_of(repr(self.operation)):
            for name in self.options:
                expect_same(state, name, getattr(self, f"_{name}"))
            for name, kind in self.fields:
                setattr(self, f"_{name}", _restored_value(state, name, kind, getattr(self, f"_{name}")))
            self._restored()
            for name in self.streams:
                present = getattr(self, f"_{name}")
                if type(present) is list:
                    for number, saved in enumerate(expect(state, name, list, length=len(present) or None)):
                        with in_state_of(f"part {number}"):
                            inner = expect({name: saved}, name, dict)
                            if number == len(present):
                                present.append(self._open(number, inner))
                            present[number].load_state_dict(inner)
                elif present is not None or state.get(name) is not None:
                    inner = expect(state, name, dict)
                    stream = self._open(0, inner) if present is None else present
                    setattr(self, f"_{name}", stream)
                    stream.load_state_dict(inner)

    async def aclose(self) -> None:
        self._closed = True
        for name in self.streams:
            streams = getattr(self, f"_{name}")
            for stream in streams if type(streams) is list else [streams]:
                await close_iterator(stream)


def _restored_value(state: State, name: str, kind: object, present: Any) -> object:
    if kind is int:
        return expect(state, name, int)
    if kind is bool:
        return expect(state, name, bool)
    if kind is Order:
        saved = expect(state, name, dict)
        expect_same(saved, "seed", present.seed)
        return present._replace(epoch=expect(saved, "epoch", int), repetition=expect(saved, "repetition", int))
    (kind,) = cast("list[object]", kind)
    values = expect(state, name, list, length=len(present) or None)
    return [_restored_value({name: value}, name, kind, None) for value in values]


async def read_again(iterator: ResumableIterator[T], first: int | None) -> list[T]:
    """The first samples of an iterator, or the last one for None.

    Raises:
        Exception: that of the iterator, after `MAX_ERRORS_IN_A_ROW`: one that fails for ever has no end.
    """
    kept: deque[T] = deque(maxlen=first or 1)
    read = errors = 0
    try:
        while read != first:
            try:
                kept.append(await anext(iterator))
            except StopAsyncIteration:
                break
            except Exception:  # it was raised when it was read for the first time
                errors += 1
                if errors > MAX_ERRORS_IN_A_ROW:
                    raise
            else:
                read, errors = read + 1, 0
    finally:
        await close_iterator(iterator)
    return list(kept)


class Mark(NamedTuple):
    """A position that can be saved; with the numbers of samples and errors, and of errors, given before it."""

    given: int
    errors: int
    position: State


class ReplayOperation(StreamOperation[T]):
    """An operation whose samples depend on some that it holds: not every position of it can be saved as such.

    The state is then an earlier position, a mark, and how many samples and errors have been given since. They are read
    again, and dropped.

    Each sample of the stream is passed to `_put`; after the end, `_rest` gives those that are held.
    """

    def __init__(self, source: AsyncIterable[Any]) -> None:
        super().__init__(source)
        self._ended = False
        self._read = 0  # samples and errors of the stream
        self._given = 0  # samples and errors, since the start or the restored position
        self._errors = 0  # of those
        self._mark: Mark | None = None
        self._reread = Reread()
        self._saved: State = {}  # the state while samples are read again

    async def __anext__(self) -> T:
        reread = self._reread
        if self._closed:
            raise StopAsyncIteration
        if self._mark is None:
            self._mark = self._new_mark()
        if reread.left:
            reread.check()
        while True:
            sample: Any
            try:
                if self._ended:
                    sample = await self._rest()
                else:
                    try:
                        sample = await anext(self._inner)
                    except StopAsyncIteration:
                        self._ended = True
                        continue
                    except Exception:  # of user code; in place of a sample
                        self._read += 1
                        raise
                    self._read += 1
                    sample = self._put(sample)
                    if sample is NOTHING:
                        continue
            except StopAsyncIteration:
                if reread.left:
                    reread.fail(self.operation)
                raise
            except Exception as error:  # counted, since it stands in place of a sample
                self._given += 1
                self._errors += 1
                if not reread.left:
                    raise
                reread.error(error)
            else:
                self._given += 1
                if not reread.left:
                    given: T = sample
                    return given
                reread.left -= 1

    def state_dict(self) -> State:
        if self._reread.left:
            return self._saved
        self._mark = self._latest_mark()
        given, errors, position = self._mark
        return {**position, "given": self._given - given, "errors": self._errors - errors}

    def load_state_dict(self, state: State) -> None:
        check_operation(state, self.operation, repr(self.operation))
        self._reread = Reread(expect(state, "given", int), expect(state, "errors", int))
        super().load_state_dict(state)
        self._saved = state
        self._mark = Mark(0, 0, state)

    def _new_mark(self) -> Mark:
        return Mark(self._given, self._errors, self._exact_state())

    def _exact_state(self) -> State:
        """The state at the current position, without what is held."""
        return super().state_dict()

    def _latest_mark(self) -> Mark:
        """The latest position from which what is held now can be read again."""
        return self._new_mark() if self._mark is None or self._is_exact() else self._mark

    def _is_exact(self) -> bool:
        """Whether the current position can be saved as such; true at the start."""
        raise NotImplementedError  # each operation has its own

    def _put(self, sample: Any) -> Any:
        """Take the stream's next sample; returns the one to give, or `NOTHING`."""
        raise NotImplementedError  # not called where `_rest` reads the stream

    async def _rest(self) -> T:
        """The next sample after the end of the stream."""
        raise StopAsyncIteration


class InContext(ResumableIterator[T]):
    """A stream that is started, read and restored within a context, since a generator starts its inner streams late.

    Args:
        context: sets a context variable.
        start: starts the stream.
    """

    def __init__(self, context: bound, start: Callable[[], ResumableIterator[T]]) -> None:
        self._context = context
        with context:
            self._inner = start()

    async def __anext__(self) -> T:
        token = self._context.variable.set(self._context.value)  # for each sample: a third of the time of `with`
        try:
            return await anext(self._inner)
        finally:
            self._context.variable.reset(token)

    def state_dict(self) -> State:
        return self._inner.state_dict()

    def load_state_dict(self, state: State) -> None:
        with self._context:
            self._inner.load_state_dict(state)

    async def aclose(self) -> None:
        await self._inner.aclose()
