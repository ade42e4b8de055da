"""The operations that hold samples, and read some again after a restore: split, shuffle and pipe."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import Any, TypeVar

from headrace._core.ranks.distributed import Remainder, ShardOptions
from headrace._core.seeding import batch_seed
from headrace._core.streams.operation import NOTHING, Mark, ReplayOperation
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
MAX_ERRORS_IN_A_ROW = 100  # errors of a stream that bypass a function; the next one ends the function


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
        self._shard = shard
        self._world_size = shard.count
        self._remainder = remainder
        self._first: list[T] = []  # the first group, for "repeat"
        self._was_restored = False  # the first group was read before the state was saved
        self._group: list[T] = []
        self._ended = False

    def _started(self) -> ResumableIterator[T]:
        with child_seeds(self._key, 0):
            return self._start()

    async def _next(self) -> T:
        count, index = self._shard.count, self._shard.index
        while not self._ended:
            try:
                self._group.append(await anext(self._inner))
            except StopAsyncIteration:
                return await self._from_last_group()
            if len(self._group) == count:
                sample = self._group[index]
                if self._remainder == "repeat" and not (self._first or self._was_restored):
                    self._first = self._group
                self._group = []
                return sample
        raise StopAsyncIteration

    async def _from_last_group(self) -> T:
        last, index = self._group, self._shard.index
        if last and index >= len(last) and self._remainder == "repeat":
            first = await self._first_group() or last  # fewer samples in all than shards
            last = [*last, *(first[number % len(first)] for number in range(index + 1 - len(last)))]
        self._ended, self._group = True, []
        if not last or self._remainder == "drop" or (self._remainder == "keep" and index >= len(last)):
            raise StopAsyncIteration
        return last[min(index, len(last) - 1)]

    async def _first_group(self) -> list[T]:
        if self._was_restored:
            first: list[T] = []
            inner = self._started()
            try:
                while len(first) < self._shard.count:
                    try:
                        first.append(await anext(inner))
                    except StopAsyncIteration:
                        break
                    except Exception:  # it was raised when it was read for the first time
                        continue
            finally:
                await close_iterator(inner)
            self._first, self._was_restored = first, False
        return self._first

    def _is_exact(self) -> bool:
        return not self._group

    def _restored(self) -> None:
        if self._reread.left:
            expect_same({"world_size": self._world_size}, "world_size", self._shard.count)
        self._world_size = self._shard.count
        self._was_restored = True


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
    fields = (("order", Order), ("window", int))

    def __init__(self, source: AsyncIterable[T], size: int, order: Order) -> None:
        super().__init__(source)
        self._size = size
        self._order = order
        self._window = 0  # number of the window that is read
        self._ahead: list[T] = []  # its samples
        self._ahead_errors = 0  # errors before them
        self._ahead_mark: Mark | None = None  # the position before it
        self._samples: list[T] = []  # left of the window that is given
        self._random = random.Random()
        self._ended = False
        self._closed = False

    async def _next(self) -> T:
        if self._closed:
            raise StopAsyncIteration
        samples = self._samples
        if samples:
            if not self._ended and len(self._ahead) < self._size:
                await self._read_one()
        else:
            while not self._ended and len(self._ahead) < self._size:
                await self._read_one()
            samples = self._begin_window()
        # To remove an element from the middle of a list in constant time, swap it with the last.
        chosen = int(self._random.random() * len(samples))
        samples[chosen], samples[-1] = samples[-1], samples[chosen]
        return samples.pop()

    def _begin_window(self) -> list[T]:
        if not self._ahead:
            raise StopAsyncIteration
        self._mark = self._latest_mark()
        self._random.seed(batch_seed(self._order.key(), 0, self._window))
        self._window += 1
        self._samples, self._ahead, self._ahead_errors, self._ahead_mark = self._ahead, [], 0, None
        return self._samples

    async def _read_one(self) -> None:
        """Read a sample of the next window, an error, or the end."""
        if self._ahead_mark is None:
            self._ahead_mark = self._new_mark()
        try:
            self._ahead.append(await anext(self._inner))
        except StopAsyncIteration:
            self._ended = True
        except Exception:  # of user code
            self._ahead_errors += 1
            raise

    def _latest_mark(self) -> Mark:
        """The position before the current window; where that ends, that before the next, with the errors in it."""
        if self._samples and self._mark is not None:
            return self._mark
        mark, errors = self._ahead_mark or self._new_mark(), self._ahead_errors
        return Mark(self._given - errors, self._errors - errors, mark.position)

    async def aclose(self) -> None:
        self._closed = True
        await super().aclose()


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
