"""The operations that hold no samples: take, equal length, repeat, concat, mix."""

from __future__ import annotations

import bisect
import functools
import itertools
from abc import abstractmethod
from collections.abc import AsyncIterable, Callable, Sequence
from typing import Any, Literal, TypeVar

from headrace._core.ranks.distributed import Remainder
from headrace._core.ranks.rankinfo import bound
from headrace._core.seeding import batch_seed
from headrace._core.streams.operation import NOTHING, InContext, StreamOperation, read_again
from headrace._core.streams.order import Draws, Order, child_seeds, current_repetition, spawn_key
from headrace._core.streams.resumable import (
    ResumableIterator,
    State,
    close_iterator,
    expect_state,
    start_stream,
)
from headrace.errors import ShortStreamError, StateError

T = TypeVar("T")
Stop = Literal["first", "all"]


class Take(StreamOperation[T]):
    """The first samples."""

    operation = "take"
    options = ("count",)
    fields = (("left", int),)

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


class EqualLength(StreamOperation[T]):
    """A given number of samples: truncated, or extended by the policy `remainder`.

    With ``"pad"`` the state has a position before the last sample, from which that is read again if need be.

    Args:
        start: returns an iterator; called again for ``"repeat"``, and for ``"pad"`` if it was restored near its end.
        length: number of samples.
        remainder: ``"pad"`` repeats the last sample, ``"repeat"`` starts again; they raise `ShortStreamError` if there
            is no sample, other policies if the iterator ends early.
    """

    operation = "equal length"
    options = ("length",)
    fields = (("left", int), ("gave", bool), ("restarts", int))

    def __init__(self, start: Callable[[], ResumableIterator[T]], length: int, remainder: Remainder) -> None:
        super().__init__(start())
        self._start = start
        self._length = self._left = length
        self._remainder = remainder
        self._gave = False  # whether the current inner iterator has given a sample
        self._restarts = 0
        self._last: T = NOTHING
        self._before: State | None = None  # a position before the last sample; None: the start
        self._later: State | None = None  # that of the last state
        self._gave_since = False  # whether a sample was given after `_later`

    async def __anext__(self) -> T:
        if self._closed or self._left <= 0:
            await self.aclose()  # stops its read-ahead
            raise StopAsyncIteration
        try:
            sample: T = await anext(self._inner)
        except StopAsyncIteration:
            if not self._gave or self._remainder not in ("pad", "repeat"):
                given, self._left = self._length - self._left, 0
                remedy = "Correct the number, or set remainder='pad' or remainder='repeat'."
                if self._remainder in ("pad", "repeat"):
                    remedy = "It has no sample to repeat: use fewer ranks, write more shards, or set split='samples'."
                raise ShortStreamError(given=given, declared=self._length, remedy=remedy) from None
            if self._remainder == "repeat":
                await close_iterator(self._inner)
                self._gave = False  # without a sample it would be restarted for ever
                self._restarts += 1
                self._inner = self._start()
                return await anext(self)
            if self._last is NOTHING:
                self._last = await self._read_last()
            sample = self._last
        else:
            self._gave = self._gave_since = True
            if self._remainder == "pad":
                self._last = sample
        self._left -= 1
        return sample

    async def _read_last(self) -> T:
        iterator = self._start()
        if self._before is not None:
            iterator.load_state_dict(self._before)
        for last in await read_again(iterator, None):
            return last
        raise StateError("the last sample, which is to be repeated, could not be read again")

    def state_dict(self) -> State:
        state = super().state_dict()
        if self._remainder == "pad":
            if self._gave_since:
                self._before, self._gave_since = self._later, False
            self._later = expect_state(state, "inner")
            state["before"] = self._before
        return state

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        if self._remainder == "pad":
            self._before = None if state.get("before") is None else expect_state(state, "before")
            self._later = expect_state(state, "inner")


class _InSuccession(StreamOperation[Any]):
    """Streams one after the other: each is started when the one before it has ended."""

    fields = (("begun", int), ("gave", bool))
    _numbered = False

    def __init__(self) -> None:
        super().__init__(None)
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
                await close_iterator(inner)
            else:
                self._gave = True
                return (self._begun - 1, sample) if self._numbered else sample
        raise StopAsyncIteration

    @abstractmethod
    def _is_over(self) -> bool:
        """Whether the stream that has ended was the last."""

    @abstractmethod
    def _open(self, *_: object) -> ResumableIterator[object]:
        """Start the stream with the number `_begun`, from 1."""


class Repeat(_InSuccession):
    """A stream several times; with ``times=None`` until a repetition without a sample."""

    operation = "repeat"
    options = ("times",)
    same_by_lanes = True

    def __init__(self, dataset: Any, times: int | None) -> None:
        super().__init__()
        self._dataset = dataset
        self._times = times
        self._repetition = current_repetition.get()  # of this iterator itself, if it is repeated

    def _is_over(self) -> bool:
        return not self._gave if self._times is None else self._begun == self._times

    def _open(self, *_: object) -> ResumableIterator[object]:
        with child_seeds(self._key, self._begun):
            if self._begun == 1:
                return start_stream(self._dataset)
            number = batch_seed(self._repetition, 0, self._begun)
            return InContext(bound(current_repetition, number), functools.partial(start_stream, self._dataset))


class Concat(_InSuccession):
    """Streams one after the other; `numbered` samples are pairs of the stream's number and its sample."""

    operation = "concat"
    options = ("parts",)

    def __init__(self, datasets: Sequence[Any], *, numbered: bool) -> None:
        super().__init__()
        self._datasets = datasets
        self._parts = len(datasets)
        self._numbered = numbered

    def _is_over(self) -> bool:
        return self._begun >= self._parts

    def _open(self, *_: object) -> ResumableIterator[object]:
        with child_seeds(self._key, self._begun - 1):
            return start_stream(self._datasets[self._begun - 1])


class Mix(StreamOperation[object]):
    """Samples drawn from several streams by weight."""

    operation = "mix"
    options = ("weights", "stop")
    fields = (
        ("order", Order),
        ("drawn", int),
        ("over", bool),
        ("ended", [bool]),
        ("gave", [bool]),
        ("left_out", [bool]),
        ("passes", [int]),
    )
    streams = ("parts",)

    def __init__(self, datasets: Sequence[Any], weights: Sequence[float], order: Order, stop: Stop) -> None:
        super().__init__(None)
        count = len(datasets)
        self._datasets = datasets
        self._weights = [float(weight) for weight in weights]
        self._stop = stop
        self._order = order
        self._drawn = 0  # numbers
        self._over = False
        self._ended = [False] * count  # streams that have ended once
        self._gave = [False] * count  # whether the current pass of each has given a sample
        self._left_out = [False] * count  # streams that gave nothing in a whole pass
        self._passes = [0] * count  # completed passes of each
        self._key = spawn_key()
        self._parts = [self._start(number) for number in range(count)]
        self._replaced: list[ResumableIterator[object]] = []  # to be closed
        self._derive()

    def _start(self, number: int) -> ResumableIterator[Any]:
        passes, start = self._passes[number], functools.partial(start_stream, self._datasets[number])
        with child_seeds(self._key, passes * len(self._datasets) + number):
            if not passes:
                return start()
            repetition = batch_seed(self._order.repetition, 0, passes)
            return InContext(bound(current_repetition, repetition), start)

    def _derive(self) -> None:
        self._draws = Draws(self._order.key())
        weights = (0.0 if out else weight for weight, out in zip(self._weights, self._left_out, strict=True))
        self._ends = list(itertools.accumulate(weights))  # of the streams' ranges among the numbers drawn

    async def __anext__(self) -> object:
        while self._replaced:
            await close_iterator(self._replaced.pop())
        while not (self._over or self._closed):
            chosen = bisect.bisect_right(self._ends, self._draws.at(self._drawn) * self._ends[-1])
            try:
                sample = await anext(self._parts[chosen])
            except StopAsyncIteration:
                await self._on_end(chosen)
            except Exception:  # of this sample; the next call draws anew
                self._drawn += 1
                raise
            else:
                self._drawn += 1
                self._gave[chosen] = True
                return sample
        raise StopAsyncIteration

    async def _on_end(self, chosen: int) -> None:
        self._ended[chosen] = True
        if self._stop == "first" or all(self._ended):
            self._over = True
            await self.aclose()
            return
        await close_iterator(self._parts[chosen])
        if not self._gave[chosen]:  # it would be started again for ever
            self._left_out[chosen] = True
            self._derive()
            return
        self._passes[chosen] += 1
        self._parts[chosen] = self._start(chosen)
        self._gave[chosen] = False

    def _restored(self) -> None:
        if all(self._left_out) and not self._over:
            raise StateError("the state is damaged: no stream of the mix is to be read")
        self._derive()
        for number, passes in enumerate(self._passes):
            if passes:
                self._replaced.append(self._parts[number])
                self._parts[number] = self._start(number)

    async def aclose(self) -> None:
        await super().aclose()
        for stream in self._replaced:
            await close_iterator(stream)
