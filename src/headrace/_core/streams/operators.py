"""The operations on streams: take, equal length, concat, repeat; split, shuffle and pipe, which hold samples."""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from headrace._core.ranks.distributed import Remainder, ShardOptions
from headrace._core.ranks.rankinfo import bound
from headrace._core.seeding import batch_seed
from headrace._core.streams.epochs import Order, child_seeds, current_repetition, spawn_key
from headrace._core.streams.resumable import (
    MAX_ERRORS_IN_A_ROW,
    NOTHING,
    InContext,
    Mark,
    ReplayOperation,
    ResumableIterator,
    State,
    StreamOperation,
    close_all,
    expect,
    expect_same,
    is_stateful,
    load_copy,
    start_stream,
)
from headrace._core.text import function_name

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
        start = functools.partial(start_stream, self._datasets[0])
        with child_seeds(self._key, self._begun):
            if self._begun == 1:
                return start()
            return InContext(bound(current_repetition, batch_seed(self._repetition, 0, self._begun)), start)


class Split(ReplayOperation[T]):
    """Every n-th sample of a stream that is the same in all shards; every shard gets the same number.

    A group is one sample for each shard. Samples are returned when their group is complete, so that no shard is ahead
    of another by more than the time to read a group. Its states between groups are the same for all shards, and can be
    restored with another number of shards.
    """

    operation = "split"
    fields = ("world_size", "ended")

    def __init__(self, start: Callable[[], ResumableIterator[T]], shard: ShardOptions, remainder: Remainder) -> None:
        with child_seeds(spawn_key(), 0):
            super().__init__(start())
        self._index, self._count = shard.index, shard.count
        self._world_size = shard.count  # of the state, while one is restored
        self._remainder = remainder
        self._group: list[T] = []
        self._origins.append((0, lambda number: self._inner.origin(number * shard.count + shard.index)))

    def _put(self, sample: T) -> Any:
        group = self._group
        group.append(sample)
        if len(group) < self._world_size:
            return NOTHING
        self._group = []
        return group[self._index]

    async def _rest(self) -> T:
        last, self._group = self._group, []
        if self._remainder == "drop" or self._index >= len(last):
            raise StopAsyncIteration
        return last[self._index]

    def _is_exact(self) -> bool:
        return not self._group

    def _restored(self) -> None:
        if self._reread.left:
            expect_same({"world_size": self._world_size}, "world_size", self._count)
        self._world_size = self._count


class ShuffleBuffer(ReplayOperation[T]):
    """Another order: each window of `buffer_size` samples is permuted.

    In TensorFlow's `Dataset.shuffle`, each sample that enters the buffer replaces one drawn at
    random, so that the samples in the buffer can be from anywhere in the stream: its state would be the samples
    themselves. Here it is the position before the window, from which the window is read again, and the number of
    samples given of it.
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
        self._ahead_position: State | None = None  # before it; None before the first: that of the mark
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
        order = functools.partial(_order, batch_seed(self._order.key(), 0, self._window), len(ahead))
        without_errors = self._read - first == len(ahead)
        origin = (lambda place: self._inner.origin(first + order()[place])) if without_errors else None
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
        return Mark(self._given - errors, self._errors - errors, self._ahead_position or mark.position)


def _order(seed: int, size: int) -> list[int]:
    order: list[int] = np.random.default_rng(seed).permutation(size).tolist()
    return order


class Pipe(ReplayOperation[T]):
    """The samples that an async generator function yields for those of a stream.

    After a restore the stream is read again from its start, or from the last error of the function.
    """

    operation = "pipe"
    ranks_differ = True
    fields = ("over", "exhausted", "taken")
    most_dropped = 100_000  # the function may hold samples

    def __init__(
        self, source: AsyncIterable[object], function: Callable[[AsyncIterator[Any]], AsyncIterator[T]]
    ) -> None:
        super().__init__(source)
        self._ended = True  # the function reads the stream
        self._function = function
        self._output: AsyncIterator[T] | None = None
        self._pending: Any = NOTHING  # a sample to return after the errors that came before it
        self._source_errors: deque[Exception] = deque()  # not yet reported
        self._over = False  # the function has ended
        self._exhausted = False  # the stream has ended
        self._taken = 0  # samples that the function has read since its last error

    @property
    def ended_early(self) -> bool:
        """Whether the function has failed without reading, before the end of the stream."""
        return self._over and not self._exhausted

    async def _rest(self) -> T:
        if self._pending is NOTHING and not (self._over or self._source_errors):
            try:
                if self._output is None:
                    self._output = aiter(self._function(_Source(self)))
                self._pending = await anext(self._output)
            except StopAsyncIteration:
                self._over = True
            except Exception as error:
                self._source_errors.append(error)
                output, self._output = self._output, None
                await close_all(output)
                # A function that fails without reading would fail for ever.
                self._over = self._exhausted or not self._taken
                self._taken = 0
        if self._source_errors:
            raise self._source_errors.popleft()
        if self._pending is NOTHING:
            await self.aclose()
            raise StopAsyncIteration
        sample: T = self._pending
        self._pending = NOTHING
        return sample

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
            self._output = aiter(self._function(_Source(self)))
            load_copy(self._output, expect(state, "function", dict), function_name(self._function))

    async def aclose(self) -> None:
        self._closed = True
        await close_all(self._inner, self._output)


class _Source(AsyncIterator[object]):
    """The stream that a function reads; errors are collected instead of raised."""

    def __init__(self, pipe: Pipe[Any]) -> None:
        self._pipe = pipe

    async def __anext__(self) -> object:
        pipe = self._pipe
        for _ in range(MAX_ERRORS_IN_A_ROW):
            try:
                sample = await anext(pipe._inner)
            except StopAsyncIteration:
                pipe._exhausted = True
                raise
            except Exception as error:
                pipe._source_errors.append(error)
            else:
                pipe._taken += 1
                pipe._drop(1)
                return sample
        return await anext(pipe._inner)
