"""Streams made of several streams: concatenated, or mixed by weight."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from headrace._core.interface.epochs import FollowsEpoch, Order, repeated
from headrace._core.interface.fetch_plan import ConcatComposition
from headrace._core.interface.iterable_style import AsyncIterableDataset
from headrace._core.interface.iterators import OperationIterator
from headrace._core.interface.reprs import dataset_repr
from headrace._core.interface.stream_seeds import Draws, child_seeds, spawn_key
from headrace._core.interface.stream_state import (
    ResumableIterator,
    State,
    close_iterator,
    expect_bool,
    expect_int,
    expect_ints,
    expect_list,
    expect_same,
    expect_state,
    in_state_of,
    start_stream,
)
from headrace._core.interface.traversal import propagate_epoch
from headrace._core.seeding import batch_seed
from headrace.errors import StateError

Stop = Literal["first", "all"]


class _MultiStream(FollowsEpoch, AsyncIterableDataset[object]):
    sources: Sequence[object]

    def __init__(self, datasets: Sequence[object]) -> None:
        self.sources = tuple(datasets)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        for source in self.sources:
            propagate_epoch(source, epoch)


class ConcatenatedStreams(ConcatComposition, _MultiStream):
    """Streams one after the other; made by `headrace.concat`, and of torch's `ChainDataset`."""

    same_by_lanes = True

    def __repr__(self) -> str:
        return f"concat([{', '.join(map(dataset_repr, self.sources))}])"

    def __aiter__(self) -> AsyncIterator[object]:
        return _ConcatIterator(self.sources, numbered=self.numbered)


class _ConcatIterator(OperationIterator[object]):
    operation = "concat"

    def __init__(self, datasets: Sequence[Any], *, numbered: bool) -> None:
        self._datasets = datasets
        self._numbered = numbered
        self._key = spawn_key()
        self._part = -1  # the last that was begun
        self._stream: ResumableIterator[object] | None = None
        self._closed = False

    async def __anext__(self) -> object:
        while not self._closed:
            if self._stream is None:
                if self._part + 1 >= len(self._datasets):
                    raise StopAsyncIteration
                self._part += 1
                self._stream = self._started()
            try:
                sample = await anext(self._stream)
                return (self._part, sample) if self._numbered else sample
            except StopAsyncIteration:  # the end of this part
                stream, self._stream = self._stream, None
                await close_iterator(stream)
        raise StopAsyncIteration

    def _started(self) -> ResumableIterator[object]:
        with child_seeds(self._key, self._part):
            return start_stream(self._datasets[self._part])

    def _position(self) -> State:
        inner = None if self._stream is None else self._stream.state_dict()
        return {"parts": len(self._datasets), "begun": self._part + 1, "inner": inner}

    def _restore(self, state: State) -> None:
        expect_same(state, "parts", len(self._datasets))
        self._part = expect_int(state, "begun", most=len(self._datasets)) - 1
        if state.get("inner") is not None:
            inner = expect_state(state, "inner")
            if self._part < 0:
                raise StateError("the state is damaged: 'inner' is the state of a part, but 'begun' is 0")
            self._stream = self._started()
            with in_state_of(f"part {self._part}"):
                self._stream.load_state_dict(inner)

    async def aclose(self) -> None:
        self._closed = True
        if self._stream is not None:
            await close_iterator(self._stream)


class MixedStreams(_MultiStream):
    """Samples drawn from several streams by weight; made by `headrace.mix`."""

    def __init__(self, datasets: Sequence[object], weights: Sequence[float], seed: int, stop: Stop) -> None:
        super().__init__(datasets)
        self._weights = tuple(weights)
        self._seed = seed
        self._stop = stop

    def __repr__(self) -> str:
        datasets = ", ".join(map(dataset_repr, self.sources))
        return f"mix([{datasets}], {list(self._weights)}, seed={self._seed}, stop={self._stop!r})"

    def __aiter__(self) -> AsyncIterator[object]:
        self._warn_of_repeated_order()
        return _MixIterator(self.sources, self._weights, self._order_for(self._seed), self._stop)


class _MixIterator(OperationIterator[object]):
    operation = "mix"

    def __init__(self, datasets: Sequence[Any], weights: Sequence[float], order: Order, stop: Stop) -> None:
        self._datasets = datasets
        self._weights = [float(weight) for weight in weights]
        self._order = order
        self._stop = stop
        self._key = spawn_key()
        self._passes = [0] * len(datasets)  # completed passes of each
        self._streams = [self._started(number) for number in range(len(datasets))]
        self._replaced: list[ResumableIterator[object]] = []  # to be closed
        self._unread = set(range(len(datasets)))  # streams that have not ended yet
        self._gave = [False] * len(datasets)  # whether the current pass of each has given a sample
        self._left_out: set[int] = set()  # streams that gave nothing in a whole pass
        self._ends = self._new_ends()
        self._draws = Draws(order.key())
        self._chosen: int | None = None
        self._over = False
        self._closed = False

    def _started(self, number: int) -> ResumableIterator[Any]:
        with self._again(number), child_seeds(self._key, self._passes[number] * len(self._datasets) + number):
            return start_stream(self._datasets[number])

    def _new_ends(self) -> list[float]:
        """The ends of the streams' ranges among the numbers drawn; that of a stream that is left out is empty."""
        left_out = self._left_out
        return list(itertools.accumulate(0.0 if n in left_out else one for n, one in enumerate(self._weights)))

    def _again(self, number: int) -> AbstractContextManager[object]:
        passes = self._passes[number]
        return repeated(batch_seed(self._order.repetition, 0, passes)) if passes else nullcontext()

    async def __anext__(self) -> object:
        while self._replaced:
            await close_iterator(self._replaced.pop())
        while not (self._over or self._closed):
            if self._chosen is None:  # otherwise the stream whose wait was cancelled
                self._chosen = bisect.bisect_right(self._ends, self._draws.next() * self._ends[-1])
            chosen = self._chosen
            try:
                sample = await self._next(chosen)
            except StopAsyncIteration:
                await self._on_end(chosen)
            except Exception:  # of this sample; the next call draws anew
                self._chosen = None
                raise
            else:
                self._chosen = None
                self._gave[chosen] = True
                return sample
        raise StopAsyncIteration

    async def _next(self, chosen: int) -> object:
        if not self._passes[chosen]:
            return await anext(self._streams[chosen])
        with self._again(chosen):  # a generator starts its inner streams here
            return await anext(self._streams[chosen])

    async def _on_end(self, chosen: int) -> None:
        self._unread.discard(chosen)
        if self._stop == "first" or not self._unread:
            self._over = True
            await self.aclose()
            return
        if not self._gave[chosen]:  # it would be started again for ever
            self._left_out.add(chosen)
            self._ends = self._new_ends()
            self._chosen = None
            await close_iterator(self._streams[chosen])
            return
        await close_iterator(self._streams[chosen])
        self._passes[chosen] += 1
        self._streams[chosen] = self._started(chosen)
        self._gave[chosen] = False

    def _position(self) -> State:
        return {
            "weights": self._weights,
            **self._order.to_state(),
            "stop": self._stop,
            "drawn": self._draws.drawn - (self._chosen is not None),
            "over": self._over,
            "unread": sorted(self._unread),
            "gave": list(self._gave),
            "left_out": sorted(self._left_out),
            "passes": list(self._passes),
            "parts": [stream.state_dict() for stream in self._streams],
        }

    def _restore(self, state: State) -> None:
        expect_same(state, "weights", self._weights)
        self._order = self._order.restored(state)
        expect_same(state, "stop", self._stop)
        self._over = expect_bool(state, "over")
        self._draws = Draws(self._order.key())
        self._draws.skip(expect_int(state, "drawn"))
        count = len(self._datasets)
        self._unread = set(expect_ints(state, "unread", most=count - 1))
        self._gave = [expect_bool({"gave": gave}, "gave") for gave in expect_list(state, "gave", length=count)]
        self._left_out = set(expect_ints(state, "left_out", most=count - 1))
        if self._unread & self._left_out or not (self._unread or self._over):
            raise StateError(f"the state is damaged: {state.get('unread')} to be read, without {state.get('left_out')}")
        self._ends = self._new_ends()
        passes = expect_ints(state, "passes", length=count)
        for number, inner in enumerate(expect_list(state, "parts", length=count)):
            self._passes[number] = passes[number]
            if self._passes[number]:
                self._replaced.append(self._streams[number])
                self._streams[number] = self._started(number)
            with self._again(number), in_state_of(f"part {number}"):
                self._streams[number].load_state_dict(expect_state({"parts": inner}, "parts"))

    async def aclose(self) -> None:
        self._closed = True
        for stream in (*self._replaced, *self._streams):
            await close_iterator(stream)
