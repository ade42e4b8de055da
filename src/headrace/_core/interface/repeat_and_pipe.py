"""Iterators that repeat a stream, or pass it through an async generator function."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from headrace._core.interface.epochs import repeated, repetition
from headrace._core.interface.iterators import NOTHING, OperationIterator
from headrace._core.interface.replay_iterator import ReplayIterator
from headrace._core.interface.reprs import function_name
from headrace._core.interface.stream_seeds import child_seeds, spawn_key
from headrace._core.interface.stream_state import (
    ResumableIterator,
    State,
    close_iterator,
    expect_bool,
    expect_int,
    expect_same,
    expect_state,
    is_stateful,
    snapshot,
    start_stream,
)
from headrace._core.seeding import batch_seed
from headrace.errors import StateError

T = TypeVar("T")
MAX_ERRORS_IN_A_ROW = 100  # errors of a stream that bypass a function; the next one ends the function


class RepeatIterator(OperationIterator[Any]):
    """A stream several times; with ``times=None`` until a repetition without a sample."""

    operation = "repeat"

    def __init__(self, dataset: Any, times: int | None) -> None:
        self._dataset = dataset
        self._times = times
        self._started = 0  # repetitions
        self._key = spawn_key()
        self._repetition = repetition()  # of this iterator itself, if it is repeated
        self._gave = True  # whether the current repetition has given a sample
        self._inner: ResumableIterator[object] | None = None
        self._inner_repetition = 0
        self._closed = False

    async def __anext__(self) -> object:
        while not self._closed:
            if self._inner is None:
                if self._started == self._times or (self._times is None and not self._gave):
                    break
                self._gave = False
                self._started += 1
                self._inner = self._start()
            try:
                with repeated(self._inner_repetition):  # a generator starts its inner streams here
                    sample = await anext(self._inner)
            except StopAsyncIteration:
                inner, self._inner = self._inner, None
                await close_iterator(inner)
                continue
            self._gave = True
            return sample
        raise StopAsyncIteration

    def _start(self) -> ResumableIterator[object]:
        again = self._started > 1
        self._inner_repetition = batch_seed(self._repetition, 0, self._started) if again else self._repetition
        with repeated(self._inner_repetition), child_seeds(self._key, self._started):
            return start_stream(self._dataset)

    def _position(self) -> State:
        inner = None if self._inner is None else self._inner.state_dict()
        return {"times": self._times, "started": self._started, "gave": self._gave, "inner": inner}

    def _restore(self, state: State) -> None:
        expect_same(state, "times", self._times)
        self._started = expect_int(state, "started", most=self._times)
        self._gave = expect_bool(state, "gave")
        if state.get("inner") is not None:
            expect_int(state, "started", least=1)
            inner = expect_state(state, "inner")
            self._inner = self._start()
            with repeated(self._inner_repetition):
                self._inner.load_state_dict(inner)

    async def aclose(self) -> None:
        self._closed = True
        if self._inner is not None:
            await close_iterator(self._inner)


class PipeIterator(ReplayIterator[T]):
    """The samples that an async generator function yields for those of an iterator.

    An error of the inner iterator bypasses the function, which would end with it, and is raised by `anext` here. After
    an error of the function itself, the function is called again with the samples that follow.

    What a generator holds cannot be saved: after a restore the stream is read again from its start, or from the last
    error of the function. An iterator with `state_dict` and `load_state_dict` in place of a generator continues.
    """

    operation = "pipe"

    def __init__(
        self, inner: ResumableIterator[object], function: Callable[[AsyncIterator[Any]], AsyncIterator[T]]
    ) -> None:
        super().__init__()
        self._inner = inner
        self._source = _ErrorCollector(inner)
        self._function = function
        self._output: AsyncIterator[T] | None = None
        self._pending: Any = NOTHING  # a sample to return after the error that came before it
        self._over = False
        self._closed = False
        self._read_before = 0  # samples, at the last error of the function

    async def _next(self) -> T:
        if self._pending is NOTHING and not (self._over or self._closed or self._source.errors):
            await self._advance()
        if self._source.errors:
            raise self._source.errors.popleft()
        if self._pending is NOTHING:
            raise StopAsyncIteration
        sample: T = self._pending
        self._pending = NOTHING
        return sample

    async def _advance(self) -> None:
        try:
            if self._output is None:
                self._output = aiter(self._function(self._source))
            self._pending = await anext(self._output)
        except StopAsyncIteration:
            self._over = True
            await self._close()
        except Exception as error:
            self._source.errors.append(error)
            output, self._output = self._output, None
            if output is not None:
                await close_iterator(output)
            # A function that fails without reading would fail for ever.
            self._over = self._source.ended or self._source.read == self._read_before
            self._read_before = self._source.read

    def _is_exact(self) -> bool:
        if self._pending is not NOTHING or self._source.errors:
            return False
        return self._over or self._output is None or is_stateful(self._output)

    def _snapshot(self) -> Callable[[], State]:
        inner, output = snapshot(self._inner), self._output
        position: State = {
            "over": self._over,
            "ended": self._source.ended,
            "read": self._source.read - self._read_before,  # since the last error of the function
            "function": copy.deepcopy(output.state_dict()) if is_stateful(output) else None,
        }
        return lambda: {**position, "inner": inner()}

    def _restore_exact(self, state: State) -> None:
        self._over = expect_bool(state, "over")
        self._source.ended = expect_bool(state, "ended")
        self._source.read = expect_int(state, "read")
        self._inner.load_state_dict(expect_state(state, "inner"))
        if state.get("function") is not None:
            self._output = output = aiter(self._function(self._source))
            if not is_stateful(output):
                raise StateError(f"the state has one of {function_name(self._function)}, which has none now")
            output.load_state_dict(copy.deepcopy(expect_state(state, "function")))

    def _position(self) -> State:
        position = super()._position()
        return {**position, "read_again": function_name(self._function)} if position["given"] else position

    async def _close(self) -> None:
        if self._output is not None:
            await close_iterator(self._output)
        await self._source.aclose()

    async def aclose(self) -> None:
        """Close the function's generator, then the iterator that it reads."""
        self._closed = True
        await self._close()


class _ErrorCollector(AsyncIterator[object]):
    """The samples of an iterator; its errors are collected instead of raised.

    Attributes:
        errors: errors that are not yet reported.
        ended: whether the iterator has ended.
        read: number of samples returned.
    """

    def __init__(self, inner: AsyncIterator[object]) -> None:
        self._inner = inner
        self.errors: deque[Exception] = deque()
        self.ended = False
        self.read = 0

    async def __anext__(self) -> object:
        for _ in range(MAX_ERRORS_IN_A_ROW):
            try:
                sample = await anext(self._inner)
            except StopAsyncIteration:
                self.ended = True
                raise
            except Exception as error:
                self.errors.append(error)
            else:
                self.read += 1
                return sample
        return await anext(self._inner)

    async def aclose(self) -> None:
        await close_iterator(self._inner)
