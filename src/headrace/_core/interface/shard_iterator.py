"""One shard of a stream that every shard reads whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from headrace._core.interface.distributed import Remainder, ShardOptions
from headrace._core.interface.replay_iterator import ReplayIterator
from headrace._core.interface.stream_seeds import child_seeds, spawn_key
from headrace._core.interface.stream_state import (
    ResumableIterator,
    State,
    close_iterator,
    expect_bool,
    expect_same,
    expect_state,
    snapshot,
)

T = TypeVar("T")


class ShardIterator(ReplayIterator[T]):
    """Every n-th sample of an iterator that is the same in all shards; every shard gets the same number.

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

    def __init__(self, start: Callable[[], ResumableIterator[T]], shard: ShardOptions, remainder: Remainder) -> None:
        super().__init__()
        self._key = spawn_key()
        self._start = start
        self._inner = self._started()
        self._shard = shard
        self._remainder = remainder
        self._first: list[T] = []  # the first group, for "repeat"
        self._restored = False  # the first group was read before the state was saved
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
                if self._remainder == "repeat" and not (self._first or self._restored):
                    self._first = self._group
                self._group = []
                return sample
        raise StopAsyncIteration

    async def _from_last_group(self) -> T:
        last, index = self._group, self._shard.index
        if not last or self._remainder == "drop" or (self._remainder == "keep" and index >= len(last)):
            self._end()
            raise StopAsyncIteration
        if index >= len(last) and self._remainder == "repeat":
            if self._restored:
                await self._read_first_group()
            first = self._first or last  # fewer samples in all than shards
            last = [*last, *(first[number % len(first)] for number in range(index + 1 - len(last)))]
        self._end()
        return last[min(index, len(last) - 1)]

    def _end(self) -> None:
        self._ended = True
        self._group = []

    async def _read_first_group(self) -> None:
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
        self._first, self._restored = first, False

    def _is_exact(self) -> bool:
        return not self._group

    def _snapshot(self) -> Callable[[], State]:
        inner, ended = snapshot(self._inner), self._ended
        return lambda: {"world_size": self._shard.count, "inner": inner(), "ended": ended}

    def _restore_exact(self, state: State) -> None:
        if self._reread.left:
            expect_same(state, "world_size", self._shard.count)
        self._inner.load_state_dict(expect_state(state, "inner"))
        self._ended = expect_bool(state, "ended")
        self._restored = True

    async def aclose(self) -> None:
        await close_iterator(self._inner)
