"""The operations on streams: take, concat, repeat; split and shuffle, which hold samples."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterable, Sequence
from typing import Any, TypeVar

import numpy as np

from headrace._core.ranks.distributed import ShardOptions, undivided
from headrace._core.ranks.rankinfo import bound
from headrace._core.seeding import batch_seed
from headrace._core.streams.epochs import Order, child_seeds, current_repetition, spawn_key
from headrace._core.streams.resumable import (
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
            await self.aclose()  # stops its read-ahead
            raise StopAsyncIteration
        sample: T = await anext(self._inner)
        self._left -= 1
        return sample

    def origin(self, number: int) -> Any:
        return self._inner.origin(number)


class Concat(StreamOperation[Any]):
    """Streams one after the other; `numbered` samples are pairs of the stream's number and its sample."""

    operation = "concat"
    options = ("parts",)
    fields = ("begun", "gave")

    def __init__(self, datasets: Sequence[Any], *, numbered: bool = False) -> None:
        super().__init__(None)
        self._datasets = datasets
        self._parts = len(datasets)
        self._numbered = numbered
        self._begun = 0  # streams
        self._gave = True  # whether the current one has given a sample
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
        """Start the stream with the number `_begun`, from 1."""
        with child_seeds(self._key, self._begun - 1):
            return start_stream(self._datasets[self._begun - 1])


class Repeat(Concat):
    """A stream several times; with ``times=None`` until a repetition without a sample."""

    operation = "repeat"
    options = ("times",)
    works_on_parts = True

    def __init__(self, dataset: Any, times: int | None) -> None:
        super().__init__([dataset])
        self._times = times
        self._repetition = current_repetition.get()  # of this iterator itself, if it is repeated

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
    """Every n-th sample of a stream that is the same in all shards; every shard gets the same number.

    A group is one sample for each shard. Samples are returned when their group is complete, so that
    no shard is ahead of another by more than the time to read a group. An incomplete last group is
    dropped. Between groups the states of all shards are equal.
    """

    operation = "split"
    options = ("world_size",)

    def __init__(self, source: AsyncIterable[T], shard: ShardOptions) -> None:
        with child_seeds(
            spawn_key(), 0
        ):  # all samples, even of a stream that splits itself by rank
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
    """Another order: each window of `buffer_size` samples is permuted.

    In TensorFlow's `Dataset.shuffle`, each sample that enters the buffer replaces one drawn at
    random, so that the samples in the buffer can be from anywhere in the stream: its state would be
    the samples themselves. Here it is the position before the window, from which the window is read
    again, and the number of samples given of it.
    """

    operation = "shuffle"
    options = ("size",)
    works_on_parts = True
    fields = ("order", "window")

    def __init__(self, source: AsyncIterable[T], buffer_size: int, order: Order) -> None:
        super().__init__(source)
        self._size = buffer_size
        self._order = order
        self._window = 0  # number of the window that is read
        self._ahead: list[T] = []  # its samples
        self._errors_before = 0  # errors given before them
        self._ahead_position: State | None = (
            None  # before it; None before the first: that of the mark
        )
        self._read_before = 0  # samples and errors that were read before them
        self._samples: list[T] = []  # left of the window that is given, the next one last

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
            (lambda place: self._inner.origin(first + order()[place])) if without_errors else None
        )
        self._origins.append((self._given, origin))
        self._read_before = self._read
        self._window += 1
        self._samples = [ahead[place] for place in reversed(order())]
        self._ahead, self._errors_before = [], self._errors
        self._ahead_position = self._exact_state()

    def _latest_mark(self) -> Mark:
        """The position before the current window; where that ends, that before the next, with the errors in it."""
        mark = self._mark or self._new_mark()
        if self._samples:
            return mark
        errors = self._errors - self._errors_before
        return Mark(
            self._given - errors, self._errors - errors, self._ahead_position or mark.position
        )


def _order(seed: int, size: int) -> list[int]:
    order: list[int] = np.random.default_rng(seed).permutation(size).tolist()
    return order
