"""Operations on streams: take, concat, repeat, split and shuffle."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterable, Sequence
from typing import Any, TypeVar

import numpy as np

from headrace._random.seeding import batch_seed
from headrace._ranks.distributed import ReaderShare, undivided
from headrace._ranks.rankinfo import bound
from headrace._streams.epochs import Order, child_seeds, current_repetition, spawn_key
from headrace._streams.resumable import (
    NOTHING,
    InContext,
    Mark,
    ReplayOperation,
    ResumableIterator,
    State,
    StreamOperation,
    close_all,
    start_stream,
)

T = TypeVar("T")


class Take(StreamOperation[T]):
    operation = "take"
    options = ("count",)
    fields = ("left",)

    def __init__(self, source: AsyncIterable[T], count: int) -> None:
        super().__init__(source)
        self._count = self._left = count

    async def __anext__(self) -> T:
        if self._left <= 0:
            await self.aclose()  # stops reading ahead
            raise StopAsyncIteration
        sample: T = await anext(self._inner)
        self._left -= 1
        return sample

    def origin(self, number: int) -> Any:
        return self._inner.origin(number)


class Concat(StreamOperation[Any]):
    """Streams in succession.

    `numbered` samples are pairs: the number of the stream, and the sample.
    """

    operation = "concat"
    options = ("parts",)
    fields = ("begun", "gave")

    def __init__(self, datasets: Sequence[Any], *, numbered: bool = False) -> None:
        super().__init__(None)
        self._datasets = datasets
        self._parts = len(datasets)
        self._numbered = numbered
        self._begun = 0  # number of started streams
        self._gave = True  # whether the current stream has given a sample
        self._key = spawn_key()

    async def __anext__(self) -> Any:
        while not self._closed:
            if self._inner is None:
                if self._is_over():
                    break
                self._gave = False
                self._begun += 1
                self._inner = self._open()
            try:
                sample = await anext(self._inner)
            except StopAsyncIteration:
                inner, self._inner = self._inner, None
                await close_all(inner)
            else:
                self._gave = True
                return (self._begun - 1, sample) if self._numbered else sample
        raise StopAsyncIteration

    def _is_over(self) -> bool:
        return self._begun >= self._parts

    def _open(self) -> ResumableIterator[object]:
        """Start stream number `_begun`, counted from 1."""
        with child_seeds(self._key, self._begun - 1):
            return start_stream(self._datasets[self._begun - 1])


class Repeat(Concat):
    """A stream repeated several times.

    With ``times=None``, the stream ends after a repetition without samples.
    """

    operation = "repeat"
    options = ("times",)

    def __init__(self, dataset: Any, times: int | None) -> None:
        super().__init__([dataset])
        self._times = times
        # Of this iterator, in an outer `Repeat`.
        self._repetition = current_repetition.get()

    def _is_over(self) -> bool:
        return not self._gave if self._times is None else self._begun == self._times

    def _open(self) -> ResumableIterator[object]:
        if self._times is None:
            self.endless_passes = self._begun - 1
        with child_seeds(self._key, self._begun):
            if self._begun == 1:
                return start_stream(self._datasets[0])
            repetition = batch_seed(self._repetition, 0, self._begun)
            return InContext(bound(current_repetition, repetition), self._datasets[0])


class Split(ReplayOperation[T]):
    """Every n-th sample of a stream, the same number for all shards.

    The source must give all shards the same samples. A group has a sample for each shard. A sample
    is returned when the group is complete, so no shard is ahead of another by more than the time to
    read a group. An incomplete last group is dropped. Between groups the states of all shards are
    equal.
    """

    operation = "split"
    options = ("world_size",)

    def __init__(self, source: AsyncIterable[T], shard: ReaderShare) -> None:
        # Read all samples, even of a stream that splits by rank.
        with child_seeds(spawn_key(), 0):
            super().__init__(
                InContext(bound(undivided, True), source) if shard.count > 1 else source
            )
        self._index = shard.index
        self._world_size = shard.count
        self._group: list[T] = []
        self._origins.append(
            (0, lambda number: self._inner.origin(number * shard.count + shard.index))
        )

    def _put(self, sample: T) -> Any:
        group = self._group
        group.append(sample)
        if len(group) < self._world_size:
            return NOTHING
        self._group = []
        return group[self._index]

    def _latest_mark(self) -> Mark:
        return self._mark if self._group and self._mark else self._new_mark()


class ShuffleBuffer(ReplayOperation[T]):
    """A shuffled stream: each window of `buffer_size` samples is permuted.

    In TensorFlow's `Dataset.shuffle`, each sample that enters the buffer replaces a random sample.
    The buffered samples may then come from anywhere in the stream, and the state would be the
    samples themselves. Here the state is the position before the window, and the number of samples
    already given from the window. After a restore the window is read again.
    """

    operation = "shuffle"
    options = ("size",)
    fields = ("order", "window")

    def __init__(self, source: AsyncIterable[T], buffer_size: int, order: Order) -> None:
        super().__init__(source)
        self._size = buffer_size
        self._order = order
        self._window = 0  # number of the window being read
        self._ahead: list[T] = []  # samples of the window being read
        self._errors_before = 0  # errors given before the window being read
        # Position before the window being read. None for the first window: the position of the
        # mark.
        self._ahead_position: State | None = None
        self._read_before = 0  # samples and errors read before the window being read
        # Rest of the window being given, the next sample last.
        self._samples: list[T] = []

    def _put(self, sample: T) -> Any:
        self._ahead.append(sample)
        if not self._samples:
            if len(self._ahead) < self._size:
                return NOTHING
            self._begin_window()
        return self._samples.pop()

    async def _rest(self) -> T:
        if not self._samples:
            if not self._ahead:
                raise StopAsyncIteration
            self._begin_window()
        return self._samples.pop()

    def _begin_window(self) -> None:
        self._mark = self._latest_mark()
        ahead, first = self._ahead, self._read_before
        order = functools.partial(
            _order, batch_seed(self._order.key(), 0, self._window), len(ahead)
        )
        without_errors = self._read - first == len(ahead)
        origin = (
            (lambda place: self._inner.origin(first + order()[place]))
            if without_errors
            else None
        )
        self._origins.append((self._given, origin))
        self._read_before = self._read
        self._window += 1
        self._samples = [ahead[place] for place in reversed(order())]
        self._ahead, self._errors_before = [], self._errors
        self._ahead_position = self._exact_state()

    def _latest_mark(self) -> Mark:
        """Return the mark before the current window.

        At the end of a window, return the mark before the next window. Errors already given from
        the next window then count as given after the mark.
        """
        mark = self._mark or self._new_mark()
        if self._samples:
            return mark
        errors = self._errors - self._errors_before
        return Mark(
            self._given - errors,
            self._errors - errors,
            self._ahead_position or mark.position,
        )


def _order(seed: int, size: int) -> list[int]:
    order: list[int] = np.random.default_rng(seed).permutation(size).tolist()
    return order
