"""Iterators over streams that wrap another iterator, which they own and close.

They are classes, not generators: an error of one sample is raised by `anext`, and the next call continues after it. A
generator would have ended, and with it the rest of the epoch.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import Any

from headrace._core.interface.distributed import Remainder, ShardOptions, undivided
from headrace._core.interface.stream_state import close_iterator
from headrace.errors import ShortStreamError

NOTHING: Any = object()


def check_times(times: int) -> None:
    """Raise for a number of repetitions that is not an int (`TypeError`) or negative (`ValueError`)."""
    if isinstance(times, bool) or not isinstance(times, int):
        raise TypeError(f"times must be an int, but got {times!r}")
    if times < 0:
        raise ValueError(f"times={times} must not be negative")


class StreamIterator(AsyncIterator[Any]):
    """An iterator that wraps another."""

    def __init__(self, inner: AsyncIterator[Any]) -> None:
        self._inner = inner

    async def __anext__(self) -> Any:
        return await anext(self._inner)

    async def aclose(self) -> None:
        await close_iterator(self._inner)


class UndividedIterator(StreamIterator):
    """All samples of a stream, even of one that splits itself by rank."""

    def __init__(self, dataset: AsyncIterable[Any]) -> None:
        token = undivided.set(True)
        try:
            super().__init__(aiter(dataset))
        finally:
            undivided.reset(token)

    async def __anext__(self) -> Any:
        token = undivided.set(True)  # a generator starts its inner streams here
        try:
            return await anext(self._inner)
        finally:
            undivided.reset(token)


class Take(StreamIterator):
    """The first samples."""

    def __init__(self, inner: AsyncIterator[Any], count: int) -> None:
        super().__init__(inner)
        self._left = count

    async def __anext__(self) -> Any:
        if self._left <= 0:
            await self.aclose()  # stops its read-ahead
            raise StopAsyncIteration
        sample = await anext(self._inner)
        self._left -= 1
        return sample


class ShuffleBuffer(StreamIterator):
    """Another order: each sample that enters a buffer replaces one that is drawn at random.

    The order depends only on `seed` and the order of `inner`. (The method of TensorFlow's `Dataset.shuffle`.)
    """

    def __init__(self, inner: AsyncIterator[Any], size: int, seed: int) -> None:
        super().__init__(inner)
        self._size = size
        self._random = random.Random(seed)
        self._buffer: list[Any] = []
        self._ended = False

    async def __anext__(self) -> Any:
        buffer = self._buffer
        while len(buffer) < self._size and not self._ended:
            try:
                buffer.append(await anext(self._inner))
            except StopAsyncIteration:
                self._ended = True
        if not buffer:
            raise StopAsyncIteration
        # To remove an element from the middle of a list in constant time, swap it with the last.
        chosen = self._random.randrange(len(buffer))
        buffer[chosen], buffer[-1] = buffer[-1], buffer[chosen]
        return buffer.pop()

    async def aclose(self) -> None:
        self._ended = True
        self._buffer.clear()
        await super().aclose()


class ShardIterator(StreamIterator):
    """Every n-th sample of an iterator that is the same in all shards; every shard gets the same number.

    A group is one sample for each shard. Samples are returned when their group is complete, so that no shard is ahead
    of another by more than the time to read a group.

    Args:
        inner: the iterator.
        shard: the shard to return.
        remainder: policy for an incomplete last group. ``"pad"`` completes it with its last sample, ``"repeat"`` with
            the first samples of all.
    """

    def __init__(self, inner: AsyncIterator[Any], shard: ShardOptions, remainder: Remainder) -> None:
        super().__init__(inner)
        self._shard = shard
        self._remainder = remainder
        self._first: list[Any] = []  # the first group, for "repeat"
        self._group: list[Any] = []
        self._ended = False

    async def __anext__(self) -> Any:
        count, index = self._shard.count, self._shard.index
        while not self._ended:
            try:
                self._group.append(await anext(self._inner))
            except StopAsyncIteration:
                self._ended = True
                return self._from_last_group()
            if len(self._group) == count:
                sample = self._group[index]
                if self._remainder == "repeat" and not self._first:
                    self._first = self._group
                self._group = []
                return sample
        raise StopAsyncIteration

    def _from_last_group(self) -> Any:
        last, index = self._group, self._shard.index
        self._group = []
        if not last or self._remainder == "drop" or (self._remainder == "keep" and index >= len(last)):
            raise StopAsyncIteration
        if index < len(last):
            return last[index]
        if self._remainder == "pad":
            return last[-1]
        first = self._first or last  # fewer samples in all than shards
        return first[(index - len(last)) % len(first)]


class EqualLength(AsyncIterator[Any]):
    """A given number of samples: truncated, or extended by the policy `remainder`.

    Args:
        start: returns an iterator; called again for ``"repeat"``.
        length: number of samples.
        remainder: ``"pad"`` repeats the last sample, ``"repeat"`` starts again; other policies raise
            `ShortStreamError` if the iterator ends early.
    """

    def __init__(self, start: Callable[[], AsyncIterator[Any]], length: int, remainder: Remainder) -> None:
        self._start = start
        self._inner = start()
        self._length = length
        self._left = length
        self._remainder = remainder
        self._last: Any = NOTHING
        self._gave = False  # whether the current inner iterator has given a sample

    async def __anext__(self) -> Any:
        if self._left <= 0:
            await self.aclose()  # stops its read-ahead
            raise StopAsyncIteration
        try:
            sample = await anext(self._inner)
        except StopAsyncIteration:
            if await self._restart():
                return await anext(self)
            sample = self._last
        self._left -= 1
        self._gave = True
        if self._remainder == "pad":
            self._last = sample
        return sample

    async def _restart(self) -> bool:
        if self._remainder == "pad" and self._last is not NOTHING:
            return False
        if self._remainder != "repeat" or not self._gave:  # without a sample it would be restarted for ever
            given, self._left = self._length - self._left, 0
            raise ShortStreamError(given=given, declared=self._length)
        await close_iterator(self._inner)
        self._gave = False
        self._inner = self._start()
        return True

    async def aclose(self) -> None:
        self._left = 0
        await close_iterator(self._inner)
