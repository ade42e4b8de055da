"""The operations that hold samples, and read some again after a restore: split, shuffle and pipe."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import Any, TypeVar

from headrace._core.ranks.distributed import Remainder, ShardOptions
from headrace._core.seeding import batch_seed
from headrace._core.streams.operation import MAX_ERRORS_IN_A_ROW, NOTHING, Mark, ReplayOperation, read_again, snapshot
from headrace._core.streams.order import Order, child_seeds, spawn_key
from headrace._core.streams.resumable import (
    ResumableIterator,
    State,
    close_iterator,
    expect_same,
    expect_state,
    is_stateful,
)
from headrace._core.text import function_name
from headrace.errors import StateError

T = TypeVar("T")


class Split(ReplayOperation[T]):
    """Every n-th sample of a stream that is the same in all shards; every shard gets the same number.

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
    fields = (("world_size", int), ("ended", bool))

    def __init__(self, start: Callable[[], ResumableIterator[T]], shard: ShardOptions, remainder: Remainder) -> None:
        self._key = spawn_key()
        self._start = start
        super().__init__(self._started())
        self._index, self._count = shard.index, shard.count
        self._world_size = shard.count  # of the state, while one is restored
        self._remainder = remainder
        # The first group, for "repeat"; None until it is read, empty if it was before the state was saved.
        self._first: list[T] | None = None if remainder == "repeat" else []
        self._group: list[T] = []

    def _started(self) -> ResumableIterator[T]:
        with child_seeds(self._key, 0):
            return self._start()

    def _put(self, sample: T) -> Any:
        group = self._group
        group.append(sample)
        if len(group) < self._world_size:
            return NOTHING
        if self._first is None:
            self._first = group
        self._group = []
        return group[self._index]

    async def _rest(self) -> T:
        last, index = self._group, self._index
        if last and index >= len(last) and self._remainder == "repeat":
            first = last if self._first is None else self._first
            first = first or await read_again(self._started(), self._world_size) or last
            last = [*last, *(first[number % len(first)] for number in range(index + 1 - len(last)))]
        self._group = []
        if not last or self._remainder == "drop" or (self._remainder == "keep" and index >= len(last)):
            raise StopAsyncIteration
        return last[min(index, len(last) - 1)]

    def _is_exact(self) -> bool:
        return not self._group

    def _restored(self) -> None:
        if self._reread.left:
            expect_same({"world_size": self._world_size}, "world_size", self._count)
        self._world_size = self._count
        self._first = []


class ShuffleBuffer(ReplayOperation[T]):
    """Another order: each window of `size` samples is permuted. For each sample given, one of the next window is read.

    It depends only on `order` and the order of `source`. A sample moves by less than `size` places, and never leaves
    its window. In TensorFlow's `Dataset.shuffle`, each sample that enters the buffer replaces one drawn at random, so
    that a sample can be delayed without bound, and the samples in the buffer can be from anywhere in the stream: its
    state would be the samples themselves. Here it is the position before the window, from which the window is read
    again, and the number of samples given of it.
    """

    operation = "shuffle"
    options = ("size",)
    same_by_lanes = True
    fields = (("order", Order), ("window", int))

    def __init__(self, source: AsyncIterable[T], size: int, order: Order) -> None:
        super().__init__(source)
        self._size = size
        self._order = order
        self._window = 0  # number of the window that is read
        self._ahead: list[T] = []  # its samples
        self._ahead_errors = 0  # errors before them
        self._ahead_position: Callable[[], State] | None = None  # before it; None before the first: that of the mark
        self._samples: list[T] = []  # left of the window that is given
        self._random = random.Random()

    def _put(self, sample: T) -> Any:
        self._ahead.append(sample)
        if not self._samples:
            if len(self._ahead) < self._size:
                return NOTHING
            self._begin_window()
        return self._draw()

    def _skip(self) -> None:
        self._ahead_errors += 1

    async def _rest(self) -> T:
        if not self._samples:
            if not self._ahead:
                raise StopAsyncIteration
            self._begin_window()
        return self._draw()

    def _draw(self) -> T:
        # To remove an element from the middle of a list in constant time, swap it with the last.
        samples = self._samples
        chosen = int(self._random.random() * len(samples))
        samples[chosen], samples[-1] = samples[-1], samples[chosen]
        return samples.pop()

    def _begin_window(self) -> None:
        self._mark = self._latest_mark()
        self._random.seed(batch_seed(self._order.key(), 0, self._window))
        self._window += 1
        self._samples, self._ahead, self._ahead_errors = self._ahead, [], 0
        self._ahead_position = snapshot(self._exact_state)

    def _latest_mark(self) -> Mark:
        """The position before the current window; where that ends, that before the next, with the errors in it."""
        mark = self._mark or self._new_mark()
        if self._samples:
            return mark
        errors = self._ahead_errors
        return Mark(self._given - errors, self._errors - errors, self._ahead_position or mark.position)


class Pipe(ReplayOperation[T]):
    """The samples that an async generator function yields for those of a stream.

    An error of the stream bypasses the function, which would end with it, and is raised by `anext` here. After an error
    of the function itself, the function is called again with the samples that follow.

    What a generator holds cannot be saved: after a restore the stream is read again from its start, or from the last
    error of the function. An iterator with `state_dict` and `load_state_dict` in place of a generator continues.
    """

    operation = "pipe"
    fields = (("over", bool), ("exhausted", bool), ("read", int))

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
        self._read = 0  # samples that the function has read since its last error

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
                await close_iterator(output)
                # A function that fails without reading would fail for ever.
                self._over = self._exhausted or not self._read
                self._read = 0
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
            self._output = output = aiter(self._function(_Source(self)))
            if not is_stateful(output):
                raise StateError(f"the state has one of {function_name(self._function)}, which has none now")
            output.load_state_dict(copy.deepcopy(expect_state(state, "function")))

    async def aclose(self) -> None:
        """Close the function's generator, then the stream that it reads."""
        await close_iterator(self._output)
        await super().aclose()


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
                pipe._read += 1
                return sample
        return await anext(pipe._inner)
