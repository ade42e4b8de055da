"""Datasets out of datasets: concatenated, mixed, cut, shuffled, split over ranks. All lazy, the same in every run."""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

from headrace._core.interface.base import (
    AsyncDataset,
    AsyncIterableDataset,
    FirstOfStream,
    FirstSamples,
    ShuffledStream,
    SplitStream,
)
from headrace._core.interface.concatenation import RangedConcatenation
from headrace._core.interface.distributed import RankChoice, Remainder
from headrace._core.interface.epochs import FollowsEpoch, repeated, repetition
from headrace._core.interface.iterators import NOTHING, close_iterator
from headrace._core.interface.kinds import kind_of, propagate_epoch, sample_key
from headrace._core.interface.ranged import FirstRanges, reads_ranges
from headrace._core.interface.repeat_and_pipe import PipeIterator
from headrace._core.interface.reprs import dataset_repr, function_name
from headrace._core.seeding import batch_seed

__all__ = ["concat", "from_async_iterable", "mix", "pipe", "shuffle", "split", "take"]

Stop = Literal["first", "all"]


def concat(datasets: Sequence[Any]) -> Any:
    """Datasets one behind the other: all map-style, or all streams.

    Args:
        datasets: at least one.

    Returns:
        A dataset of the same kind.

    Raises:
        ValueError: there is none.
        TypeError: their kinds differ, or one is not async.

    Example:
        >>> from headrace.testing import SlowDataset
        >>> both = concat([SlowDataset(2, 0.0), SlowDataset(3, 0.0)])
        >>> len(both), both[4]
        (5, 2)
    """
    if _are_streams(datasets):
        return _ConcatStream(datasets)
    return _ConcatRanges(datasets) if all(map(reads_ranges, datasets)) else _ConcatMap(datasets)


def mix(datasets: Sequence[Any], weights: Sequence[float], *, seed: int = 0, stop: Stop = "first") -> Any:
    """A stream that draws each sample from one of several streams, by weight.

    Which stream comes next depends on nothing but `seed` and the epoch, so that all ranks draw alike; where each stream
    gives every rank the same number of samples, so does the mix.

    Args:
        datasets: streams, at least one.
        weights: how often each is drawn from; they need not add up to 1.
        seed: of the order, with the epoch.
        stop: ``"first"``: the mix ends where a stream that is drawn has ended. ``"all"``: a stream that has ended
            begins again, in another order if it is shuffled by headrace, until each has ended once.

    Raises:
        ValueError: a weight is not positive, their number is another, or `stop` is neither.
        TypeError: one is not an async stream.

    Example:
        >>> async def a():
        ...     for _ in range(100): yield "a"
        >>> async def b():
        ...     for _ in range(100): yield "b"
        >>> mixed = list(mix([from_async_iterable(a), from_async_iterable(b)], [3, 1]))
        >>> mixed.count("a") > 2 * mixed.count("b") > 0
        True
    """
    if not _are_streams(datasets):
        raise TypeError("mix() draws from streams; of map-style datasets, give a weighted sampler concat(...)")
    if len(weights) != len(datasets) or not all(weight > 0 for weight in weights):
        raise ValueError(f"weights={list(weights)!r} must be {len(datasets)} numbers above zero")
    if stop not in ("first", "all"):
        raise ValueError(f"stop={stop!r} must be 'first' or 'all'")
    return _MixStream(datasets, weights, seed, stop)


def pipe(dataset: Any, function: Callable[[AsyncIterator[Any]], AsyncIterator[Any]]) -> AsyncIterableDataset[Any]:
    """A stream passed through an async generator function: packing, windows over a log, anything over several samples.

    The function runs on the loader's event loop, and should only put samples together: heavy work belongs in a `map`
    before or after it, which runs in the loader's workers. A sample that fails before it bypasses the function and
    is reported; after an error of the function itself it is called again with the samples that follow, and samples that
    it had buffered are lost.

    Args:
        dataset: the stream.
        function: gets an async iterator over the samples, and gives another; it is called at each epoch.

    Raises:
        TypeError: `dataset` is not an async stream, or `function` cannot be called.

    Example:
        >>> async def numbers():
        ...     for i in range(5): yield i
        >>> async def pairs(samples):
        ...     pair = []
        ...     async for sample in samples:
        ...         pair.append(sample)
        ...         if len(pair) == 2:
        ...             yield tuple(pair)
        ...             pair.clear()
        >>> list(pipe(from_async_iterable(numbers), pairs))
        [(0, 1), (2, 3)]
    """
    if not _are_streams([dataset]):
        raise TypeError("pipe() is for streams, but got a map-style dataset")
    if not callable(function):
        raise TypeError(f"function must be an async generator function, but got {function!r}")
    return _PipedStream(dataset, function)


def take(dataset: Any, count: int) -> Any:
    """The first `count` samples of a dataset, or all where it has fewer; of a stream split over ranks, of each rank.

    Raises:
        ValueError: `count` is negative.

    Example:
        >>> from headrace.testing import SlowDataset
        >>> len(take(SlowDataset(9, 0.0), 4))
        4
    """
    return FirstOfStream(dataset, count) if _are_streams([dataset]) else FirstSamples(dataset, count)


def shuffle(dataset: Any, buffer_size: int, *, seed: int = 0) -> Any:
    """A stream in another order at each epoch: of a buffer of samples, one at random goes out for each that comes in.

    Args:
        dataset: the stream. The order of a map-style dataset is the loader's: ``DataLoader(..., shuffle=True)``.
        buffer_size: samples that are held.
        seed: of the order, with the epoch.

    Raises:
        ValueError: `buffer_size` is not positive.
        TypeError: `dataset` is not an async stream.

    Example:
        >>> async def numbers():
        ...     for i in range(8): yield i
        >>> sorted(shuffle(from_async_iterable(numbers), 4)) == list(range(8))
        True
    """
    if not _are_streams([dataset]):
        raise TypeError("shuffle() is for streams; of a map-style dataset, say DataLoader(..., shuffle=True)")
    return ShuffledStream(dataset, buffer_size, seed)


def split(
    dataset: Any, *, rank: int | None = None, world_size: int | None = None, remainder: Remainder = "drop"
) -> Any:
    """Every n-th sample of a stream, so that every rank gets the same number: for streams that do not split themselves.

    Each rank reads the whole stream, which must be the same on all; so do the workers of a stock torch loader, which
    count as ranks. A stream of shards inside does not split itself then.

    Args:
        dataset: the stream; of batches, too (`batch_by_tokens`): every rank then gets the same number of batches.
        rank: which part; by default that of `headrace.get_rank_info` whenever reading begins.
        world_size: how many parts.
        remainder: what is done with a last round that does not go round: ``"drop"`` it; ``"pad"`` with its last sample;
            ``"repeat"`` the stream's first; ``"keep"`` it, so that ranks may differ by one.

    Raises:
        ValueError: an argument makes no sense.
        TypeError: `dataset` is not an async stream.

    Example:
        >>> async def numbers():
        ...     for i in range(7): yield i
        >>> [list(split(from_async_iterable(numbers), rank=rank, world_size=2)) for rank in range(2)]
        [[0, 2, 4], [1, 3, 5]]
    """
    if not _are_streams([dataset]):
        raise TypeError("split() is for streams; of a map-style dataset, use torch's DistributedSampler")
    return SplitStream(dataset, RankChoice(rank, world_size), remainder)


def from_async_iterable(make: Callable[[], AsyncIterable[Any]]) -> AsyncIterableDataset[Any]:
    """Whatever an async generator can read, as a stream: a socket, a queue, a database's cursor.

    Args:
        make: an async generator function, or another function that gives something to read with `async for`. It is
            called at each epoch, on the loader's event loop: connections are opened, and closed in a `finally` or an
            `async with`, inside.

    Raises:
        TypeError: `make` cannot be called.

    Example:
        >>> async def numbers():
        ...     for i in range(3): yield i
        >>> list(from_async_iterable(numbers))
        [0, 1, 2]
    """
    if not callable(make):
        raise TypeError(
            f"make must be a function that gives an async iterable, but got {make!r}: it could be read once"
        )
    return _Made(make)


class _Made(AsyncIterableDataset[Any]):
    def __init__(self, make: Callable[[], AsyncIterable[Any]]) -> None:
        self._make = make

    def __repr__(self) -> str:
        return f"from_async_iterable({function_name(self._make)})"

    def __aiter__(self) -> AsyncIterator[Any]:
        return aiter(self._make())


class _PipedStream(AsyncIterableDataset[Any]):
    def __init__(self, dataset: Any, function: Callable[[AsyncIterator[Any]], AsyncIterator[Any]]) -> None:
        self.dataset = dataset
        self._function = function

    def __repr__(self) -> str:
        return f"pipe({dataset_repr(self.dataset)}, {function_name(self._function)})"

    def __aiter__(self) -> AsyncIterator[Any]:
        return PipeIterator(aiter(self.dataset), self._function)

    def set_epoch(self, epoch: int) -> None:
        propagate_epoch(self.dataset, epoch)


class _ConcatMap(AsyncDataset[Any]):
    def __init__(self, datasets: Sequence[Any]) -> None:
        self.sources = tuple(datasets)
        self._ends = list(itertools.accumulate(map(len, self.sources)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __repr__(self) -> str:
        return f"concat([{', '.join(map(dataset_repr, self.sources))}])"

    async def aget(self, index: int) -> Any:
        number, within = self.find(index)
        return await self.sources[number].aget(within)

    def sample_key(self, index: int) -> str | None:
        number, within = self.find(index)
        return sample_key(self.sources[number], within)

    def set_epoch(self, epoch: int) -> None:
        for dataset in self.sources:
            propagate_epoch(dataset, epoch)

    def find(self, index: int) -> tuple[int, int]:
        """The number of the dataset, and the index in it."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} samples of {len(self.sources)} datasets")
        index %= len(self)
        number = bisect.bisect_right(self._ends, index)
        return number, index - (self._ends[number - 1] if number else 0)


class _ConcatRanges(RangedConcatenation, _ConcatMap):
    def take(self, count: int) -> FirstSamples[Any]:
        return FirstRanges(self, count)


class _Several(FollowsEpoch, AsyncIterableDataset[Any]):
    """A stream out of several."""

    def __init__(self, datasets: Sequence[Any]) -> None:
        self._datasets = tuple(datasets)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        for dataset in self._datasets:
            propagate_epoch(dataset, epoch)


class _ConcatStream(_Several):
    def __repr__(self) -> str:
        return f"concat([{', '.join(map(dataset_repr, self._datasets))}])"

    def __aiter__(self) -> AsyncIterator[Any]:
        return _ConcatPass(self._datasets)


class _ConcatPass(AsyncIterator[Any]):
    def __init__(self, datasets: Sequence[Any]) -> None:
        self._rest = iter(datasets)
        self._stream: AsyncIterator[Any] | None = None

    async def __anext__(self) -> Any:
        while True:
            if self._stream is None:
                dataset = next(self._rest, NOTHING)
                if dataset is NOTHING:
                    raise StopAsyncIteration
                self._stream = aiter(dataset)
            try:
                return await anext(self._stream)
            except StopAsyncIteration:  # this one's end; the next one's turn
                await close_iterator(self._stream)
                self._stream = None

    async def aclose(self) -> None:
        self._rest = iter(())
        if self._stream is not None:
            await close_iterator(self._stream)
            self._stream = None


class _MixStream(_Several):
    def __init__(self, datasets: Sequence[Any], weights: Sequence[float], seed: int, stop: Stop) -> None:
        super().__init__(datasets)
        self._weights = tuple(weights)
        self._seed = seed
        self._stop = stop

    def __repr__(self) -> str:
        datasets = ", ".join(map(dataset_repr, self._datasets))
        return f"mix([{datasets}], {list(self._weights)}, seed={self._seed}, stop={self._stop!r})"

    def __aiter__(self) -> AsyncIterator[Any]:
        self._note_pass()
        return _MixPass(self._datasets, self._weights, self._order_seed(self._seed), self._stop)


class _MixPass(AsyncIterator[Any]):
    def __init__(self, datasets: Sequence[Any], weights: Sequence[float], seed: int, stop: Stop) -> None:
        self._datasets = datasets
        self._streams = [aiter(dataset) for dataset in datasets]
        self._ends = list(itertools.accumulate(weights))
        self._random = random.Random(seed)
        self._stop = stop
        self._unread = set(range(len(datasets)))  # those that have not ended yet
        self._gave = [False] * len(datasets)  # in this pass over it
        self._passes = [0] * len(datasets)  # that have ended
        self._repetition = repetition()  # of this pass itself, in a mix of mixes
        self._chosen: int | None = None
        self._over = False

    async def __anext__(self) -> Any:
        while not self._over:
            if self._chosen is None:  # else the one that was being waited for when the wait was cancelled
                self._chosen = bisect.bisect_right(self._ends, self._random.random() * self._ends[-1])
            chosen = self._chosen
            try:
                sample = await self._next(chosen)
            except StopAsyncIteration:
                await self._ended(chosen)
            except Exception:  # that sample's; the next call draws anew
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
        with self._again(chosen):  # a generator begins its inner streams here
            return await anext(self._streams[chosen])

    def _again(self, chosen: int) -> AbstractContextManager[None]:
        return repeated(batch_seed(self._repetition, 0, self._passes[chosen]))

    async def _ended(self, chosen: int) -> None:
        self._unread.discard(chosen)
        # One that gave nothing in a whole pass would be begun for ever.
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


def _are_streams(datasets: Sequence[Any]) -> bool:
    if not datasets:
        raise ValueError("no dataset was given")
    kinds = [kind_of(dataset) for dataset in datasets]
    if not all(kind.is_async for kind in kinds):
        which = next(type(dataset).__name__ for dataset, kind in zip(datasets, kinds, strict=True) if not kind.is_async)
        raise TypeError(f"{which} is not an async dataset; torch's own can be combined by torch.utils.data")
    if len(set(kinds)) > 1:
        raise TypeError("map-style datasets and streams cannot be combined")
    return kinds[0].is_iterable
