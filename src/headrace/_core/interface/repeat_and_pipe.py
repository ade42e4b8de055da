"""Iterators that repeat a stream, or pass it through an async generator function."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from headrace._core.interface.epochs import repeated, repetition
from headrace._core.interface.iterators import NOTHING, StreamIterator
from headrace._core.interface.stream_state import close_iterator
from headrace._core.seeding import batch_seed

MAX_ERRORS_IN_A_ROW = 100  # errors of a stream that bypass a function; the next one ends the function


class RepeatIterator(AsyncIterator[Any]):
    """A stream several times; with ``times=None`` for ever, or until a repetition without a sample."""

    def __init__(self, dataset: Any, times: int | None) -> None:
        self._dataset = dataset
        self._left = times
        self._started = 0  # repetitions
        self._repetition = repetition()  # of this iterator itself, if it is repeated
        self._gave = True  # whether the current repetition has given a sample
        self._inner: AsyncIterator[Any] | None = None

    async def __anext__(self) -> Any:
        while True:
            if self._inner is None and not self._start():
                raise StopAsyncIteration
            assert self._inner is not None
            try:
                with repeated(self._seed()):  # a generator starts its inner streams here
                    sample = await anext(self._inner)
            except StopAsyncIteration:
                inner, self._inner = self._inner, None
                await close_iterator(inner)
                continue
            self._gave = True
            return sample

    def _start(self) -> bool:
        if self._left == 0 or not self._gave:
            return False
        if self._left is not None:
            self._left -= 1
        self._gave = False
        self._started += 1
        with repeated(self._seed()):
            self._inner = aiter(self._dataset)
        return True

    def _seed(self) -> int:
        return self._repetition if self._started == 1 else batch_seed(self._repetition, 0, self._started)

    async def aclose(self) -> None:
        self._left = 0
        if self._inner is not None:
            await close_iterator(self._inner)
            self._inner = None


class PipeIterator(AsyncIterator[Any]):
    """The samples that an async generator function yields for those of an iterator.

    An error of the inner iterator bypasses the function, which would end with it, and is raised by `anext` here. After
    an error of the function itself, the function is called again with the samples that follow.
    """

    def __init__(self, inner: AsyncIterator[Any], function: Callable[[AsyncIterator[Any]], AsyncIterator[Any]]) -> None:
        self._source = _ErrorCollector(inner)
        self._function = function
        self._output: AsyncIterator[Any] | None = None
        self._pending: Any = NOTHING  # a sample to return after the error that came before it
        self._over = False
        self._read_before = 0  # samples, at the last error of the function

    async def __anext__(self) -> Any:
        if self._pending is NOTHING and not self._over and not self._source.errors:
            await self._advance()
        if self._source.errors:
            raise self._source.errors.popleft()
        if self._pending is NOTHING:
            raise StopAsyncIteration
        sample, self._pending = self._pending, NOTHING
        return sample

    async def _advance(self) -> None:
        try:
            if self._output is None:
                self._output = aiter(self._function(self._source))
            self._pending = await anext(self._output)
        except StopAsyncIteration:
            self._over = True
            await self.aclose()
        except Exception as error:
            self._source.errors.append(error)
            if self._output is not None:
                await close_iterator(self._output)
            self._output = None
            # A function that fails without reading would fail for ever.
            self._over = self._source.ended or self._source.read == self._read_before
            self._read_before = self._source.read

    async def aclose(self) -> None:
        """Close the function's generator, then the iterator that it reads."""
        self._over = True
        if self._output is not None:
            await close_iterator(self._output)
        await self._source.aclose()


class _ErrorCollector(StreamIterator):
    """The samples of an iterator; its errors are collected instead of raised.

    Attributes:
        errors: errors that are not yet reported.
        ended: whether the iterator has ended.
        read: number of samples returned.
    """

    def __init__(self, inner: AsyncIterator[Any]) -> None:
        super().__init__(inner)
        self.errors: deque[Exception] = deque()
        self.ended = False
        self.read = 0

    async def __anext__(self) -> Any:
        for _ in range(MAX_ERRORS_IN_A_ROW):
            try:
                sample = await super().__anext__()
            except StopAsyncIteration:
                self.ended = True
                raise
            except Exception as error:
                self.errors.append(error)
            else:
                self.read += 1
                return sample
        return await super().__anext__()
