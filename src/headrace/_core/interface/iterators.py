"""One pass over a stream, and what can be put around it: iterators that close what they read from.

They are classes, not generators: a sample that fails is raised by `anext`, and the next call goes on behind it. A
generator would have ended, and the rest of the epoch with it.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import Any

from headrace._core.interface.distributed import Remainder, ShardOptions, undivided
from headrace.errors import ShortStreamError

NOTHING: Any = object()


async def close_iterator(stream: Any) -> None:
    """Close an async iterator, if it can be closed."""
    close = getattr(stream, "aclose", None)
    if close is not None:
        await close()


def check_times(times: int) -> None:
    """Check a number of repetitions.

    Raises:
        TypeError: it is no int.
        ValueError: it is negative.
    """
    if isinstance(times, bool) or not isinstance(times, int):
        raise TypeError(f"times must be an int, but got {times!r}")
    if times < 0:
        raise ValueError(f"times={times} must not be negative")


class StreamIterator(AsyncIterator[Any]):
    """A pass around another; closes it with itself.

    Args:
        inner: what is read; owned from here on.
    """

    def __init__(self, inner: AsyncIterator[Any]) -> None:
        self._inner = inner

    async def __anext__(self) -> Any:
        return await anext(self._inner)

    async def aclose(self) -> None:
        """Read no more."""
        await close_iterator(self._inner)


class UndividedIterator(StreamIterator):
    """A pass over all of a stream, also where the stream splits itself by rank.

    Args:
        dataset: the stream.
    """

    def __init__(self, dataset: AsyncIterable[Any]) -> None:
        token = undivided.set(True)
        try:
            super().__init__(aiter(dataset))
        finally:
            undivided.reset(token)

    async def __anext__(self) -> Any:
        token = undivided.set(True)  # a generator begins its inner streams here
        try:
            return await anext(self._inner)
        finally:
            undivided.reset(token)


class Take(StreamIterator):
    """The first samples of a pass.

    Args:
        inner: what is read.
        count: how many, at most.
    """

    def __init__(self, inner: AsyncIterator[Any], count: int) -> None:
        super().__init__(inner)
        self._left = count

    async def __anext__(self) -> Any:
        if self._left <= 0:
            await self.aclose()  # what it reads ahead is not wanted
            raise StopAsyncIteration
        sample = await anext(self._inner)
        self._left -= 1
        return sample


class ShuffleBuffer(StreamIterator):
    """A pass in another order: of a buffer of samples, one at random goes out for each that comes in.

    Each sample comes exactly once. The order depends on nothing but `seed` and the order of `inner`. (The method is
    that of TensorFlow's `Dataset.shuffle`.)

    Args:
        inner: what is read.
        size: samples in the buffer.
        seed: of the order.
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
        # Behind the end the rest is drawn the same way. To take one from the middle of a list, the last goes there.
        chosen = self._random.randrange(len(buffer))
        buffer[chosen], buffer[-1] = buffer[-1], buffer[chosen]
        return buffer.pop()

    async def aclose(self) -> None:
        """Read no more, and let go of the buffer."""
        self._ended = True
        self._buffer.clear()
        await super().aclose()


class ShardIterator(StreamIterator):
    """Every n-th sample of a pass that all parts read alike; every part gets the same number.

    A round is one sample for each part. Samples go out when their round is complete, so that no part is ahead of
    another by more than the reading of a round.

    Args:
        inner: what is read; the same in every part.
        shard: this rank's part.
        remainder: what is done with a last round that is not complete. ``"pad"``: parts beyond its end get its last
            sample; ``"repeat"``: they get the stream's first ones.
    """

    def __init__(self, inner: AsyncIterator[Any], shard: ShardOptions, remainder: Remainder) -> None:
        super().__init__(inner)
        self._shard = shard
        self._remainder = remainder
        self._first: list[Any] = []  # of the stream, for "repeat"
        self._round: list[Any] = []
        self._ended = False

    async def __anext__(self) -> Any:
        count, number = self._shard.count, self._shard.index
        while not self._ended:
            try:
                self._round.append(await anext(self._inner))
            except StopAsyncIteration:
                self._ended = True
                return self._last_round()
            if len(self._round) == count:
                mine = self._round[number]
                if self._remainder == "repeat" and not self._first:
                    self._first = self._round
                self._round = []
                return mine
        raise StopAsyncIteration

    def _last_round(self) -> Any:
        last, number = self._round, self._shard.index
        self._round = []
        if not last or self._remainder == "drop" or (self._remainder == "keep" and number >= len(last)):
            raise StopAsyncIteration
        if number < len(last):
            return last[number]
        if self._remainder == "pad":
            return last[-1]
        first = self._first or last  # fewer samples in all than parts
        return first[(number - len(last)) % len(first)]


class EqualLength(AsyncIterator[Any]):
    """A pass with a given number of samples: cut where it has more, gone on with where it has fewer.

    Args:
        begin: begins a pass; called again for ``"repeat"``.
        length: how many samples.
        remainder: what is done where the pass ends before: ``"pad"`` gives its last sample again, ``"repeat"``
            begins it again, the others raise `ShortStreamError`.
    """

    def __init__(self, begin: Callable[[], AsyncIterator[Any]], length: int, remainder: Remainder) -> None:
        self._begin = begin
        self._inner = begin()
        self._length = length
        self._left = length
        self._remainder = remainder
        self._last: Any = NOTHING
        self._gave = False

    async def __anext__(self) -> Any:
        if self._left <= 0:
            await self.aclose()  # what it reads ahead is not wanted
            raise StopAsyncIteration
        try:
            sample = await anext(self._inner)
        except StopAsyncIteration:
            if await self._begun_again():
                return await anext(self)
            sample = self._last
        self._left -= 1
        self._gave = True
        if self._remainder == "pad":
            self._last = sample
        return sample

    async def _begun_again(self) -> bool:
        if self._remainder == "pad" and self._last is not NOTHING:
            return False
        if self._remainder != "repeat" or not self._gave:  # a pass without a sample would be begun for ever
            given, self._left = self._length - self._left, 0
            raise ShortStreamError(given=given, declared=self._length)
        await close_iterator(self._inner)
        self._gave = False
        self._inner = self._begin()
        return True

    async def aclose(self) -> None:
        """Read no more."""
        self._left = 0
        await close_iterator(self._inner)
