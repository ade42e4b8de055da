"""A stream passed through an async generator function."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import Any, TypeVar

from headrace._core.streams.operation import NOTHING, ReplayOperation
from headrace._core.streams.resumable import State, close_iterator, expect_state, is_stateful
from headrace._core.text import function_name
from headrace.errors import StateError

T = TypeVar("T")
MAX_ERRORS_IN_A_ROW = 100  # errors of a stream that bypass a function; the next one ends the function


class Pipe(ReplayOperation[T]):
    """The samples that an async generator function yields for those of a stream.

    An error of the stream bypasses the function, which would end with it, and is raised by `anext` here. After an error
    of the function itself, the function is called again with the samples that follow.

    What a generator holds cannot be saved: after a restore the stream is read again from its start, or from the last
    error of the function. An iterator with `state_dict` and `load_state_dict` in place of a generator continues.
    """

    operation = "pipe"
    fields = (("over", bool), ("ended", bool), ("read", int))

    def __init__(
        self, source: AsyncIterable[object], function: Callable[[AsyncIterator[Any]], AsyncIterator[T]]
    ) -> None:
        super().__init__(source)
        self._function = function
        self._output: AsyncIterator[T] | None = None
        self._pending: Any = NOTHING  # a sample to return after the errors that came before it
        self._source_errors: deque[Exception] = deque()  # not yet reported
        self._over = False  # the function has ended
        self._ended = False  # the stream has ended
        self._read = 0  # samples that the function has read since its last error
        self._closed = False

    async def _next(self) -> T:
        if self._pending is NOTHING and not (self._over or self._closed or self._source_errors):
            await self._advance()
        if self._source_errors:
            raise self._source_errors.popleft()
        if self._pending is NOTHING:
            raise StopAsyncIteration
        sample: T = self._pending
        self._pending = NOTHING
        return sample

    async def _advance(self) -> None:
        try:
            if self._output is None:
                self._output = aiter(self._function(_Source(self)))
            self._pending = await anext(self._output)
        except StopAsyncIteration:
            self._over = True
            await self.aclose()
        except Exception as error:
            self._source_errors.append(error)
            output, self._output = self._output, None
            await close_iterator(output)
            self._over = self._ended or not self._read  # a function that fails without reading would fail for ever
            self._read = 0

    async def read(self) -> object:
        """The next sample of the stream; errors are collected instead of raised."""
        for _ in range(MAX_ERRORS_IN_A_ROW):
            try:
                sample = await anext(self._inner)
            except StopAsyncIteration:
                self._ended = True
                raise
            except Exception as error:
                self._source_errors.append(error)
            else:
                self._read += 1
                return sample
        return await anext(self._inner)

    def _is_exact(self) -> bool:
        if self._pending is not NOTHING or self._source_errors:
            return False
        return self._over or self._output is None or is_stateful(self._output)

    def _exact_state(self) -> State:
        state = super()._exact_state()
        state["function"] = copy.deepcopy(self._output.state_dict()) if is_stateful(self._output) else None
        return state

    def state_dict(self) -> State:
        state = super().state_dict()
        return {**state, "read_again": function_name(self._function)} if state["given"] else state

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        if state.get("function") is not None:
            self._output = output = aiter(self._function(_Source(self)))
            if not is_stateful(output):
                raise StateError(f"the state has one of {function_name(self._function)}, which has none now")
            output.load_state_dict(copy.deepcopy(expect_state(state, "function")))

    async def aclose(self) -> None:
        """Close the function's generator, then the stream that it reads."""
        self._closed = True
        await close_iterator(self._output)
        await super().aclose()


class _Source(AsyncIterator[object]):
    """What a function reads."""

    def __init__(self, pipe: Pipe[Any]) -> None:
        self._pipe = pipe

    async def __anext__(self) -> object:
        return await self._pipe.read()
