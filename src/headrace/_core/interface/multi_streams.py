"""Streams made of several streams: concatenated, or mixed by weight."""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

from headrace._core.interface.epochs import FollowsEpoch, repeated, repetition
from headrace._core.interface.fetch_plan import ConcatComposition
from headrace._core.interface.iterable_style import AsyncIterableDataset
from headrace._core.interface.reprs import dataset_repr
from headrace._core.interface.stream_state import close_iterator
from headrace._core.interface.traversal import propagate_epoch
from headrace._core.seeding import batch_seed

Stop = Literal["first", "all"]


class _MultiStream(FollowsEpoch, AsyncIterableDataset[Any]):
    sources: Sequence[Any]

    def __init__(self, datasets: Sequence[Any]) -> None:
        self.sources = tuple(datasets)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        for source in self.sources:
            propagate_epoch(source, epoch)


class ConcatenatedStreams(ConcatComposition, _MultiStream):
    """Streams one after the other; made by `headrace.concat`, and of torch's `ChainDataset`."""

    def __repr__(self) -> str:
        return f"concat([{', '.join(map(dataset_repr, self.sources))}])"

    def __aiter__(self) -> AsyncIterator[Any]:
        return _ConcatIterator(self.sources, numbered=self.numbered)


class _ConcatIterator(AsyncIterator[Any]):
    def __init__(self, datasets: Sequence[Any], *, numbered: bool) -> None:
        self._rest = enumerate(datasets)
        self._numbered = numbered
        self._part = 0
        self._stream: AsyncIterator[Any] | None = None

    async def __anext__(self) -> Any:
        while True:
            if self._stream is None:
                following = next(self._rest, None)
                if following is None:
                    raise StopAsyncIteration
                self._part = following[0]
                self._stream = aiter(following[1])
            try:
                sample = await anext(self._stream)
                return (self._part, sample) if self._numbered else sample
            except StopAsyncIteration:  # the end of this part
                await close_iterator(self._stream)
                self._stream = None

    async def aclose(self) -> None:
        self._rest = enumerate(())
        if self._stream is not None:
            await close_iterator(self._stream)
            self._stream = None


class MixedStreams(_MultiStream):
    """Samples drawn from several streams by weight; made by `headrace.mix`."""

    def __init__(self, datasets: Sequence[Any], weights: Sequence[float], seed: int, stop: Stop) -> None:
        super().__init__(datasets)
        self._weights = tuple(weights)
        self._seed = seed
        self._stop = stop

    def __repr__(self) -> str:
        datasets = ", ".join(map(dataset_repr, self.sources))
        return f"mix([{datasets}], {list(self._weights)}, seed={self._seed}, stop={self._stop!r})"

    def __aiter__(self) -> AsyncIterator[Any]:
        self._warn_of_repeated_order()
        return _MixIterator(self.sources, self._weights, self._order_seed(self._seed), self._stop)


class _MixIterator(AsyncIterator[Any]):
    def __init__(self, datasets: Sequence[Any], weights: Sequence[float], seed: int, stop: Stop) -> None:
        self._datasets = datasets
        self._streams = [aiter(dataset) for dataset in datasets]
        self._ends = list(itertools.accumulate(weights))
        self._random = random.Random(seed)
        self._stop = stop
        self._unread = set(range(len(datasets)))  # streams that have not ended yet
        self._gave = [False] * len(datasets)  # whether the current pass of each has given a sample
        self._passes = [0] * len(datasets)  # completed passes of each
        self._repetition = repetition()  # of this iterator itself, in a mix of mixes
        self._chosen: int | None = None
        self._over = False

    async def __anext__(self) -> Any:
        while not self._over:
            if self._chosen is None:  # otherwise the stream whose wait was cancelled
                self._chosen = bisect.bisect_right(self._ends, self._random.random() * self._ends[-1])
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

    async def _next(self, chosen: int) -> Any:
        if not self._passes[chosen]:
            return await anext(self._streams[chosen])
        with self._again(chosen):  # a generator starts its inner streams here
            return await anext(self._streams[chosen])

    def _again(self, chosen: int) -> AbstractContextManager[None]:
        return repeated(batch_seed(self._repetition, 0, self._passes[chosen]))

    async def _on_end(self, chosen: int) -> None:
        self._unread.discard(chosen)
        # A stream that gave nothing in a whole pass would be started again for ever.
        if self._stop == "first" or not self._unread or not self._gave[chosen]:
            await self.aclose()
            return
        await close_iterator(self._streams[chosen])
        self._passes[chosen] += 1
        with self._again(chosen):
            self._streams[chosen] = aiter(self._datasets[chosen])
        self._gave[chosen] = False

    async def aclose(self) -> None:
        self._over = True
        for stream in self._streams:
            await close_iterator(stream)
