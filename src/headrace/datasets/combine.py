"""Datasets made of datasets: concatenated, mixed, truncated, shuffled, split over ranks. Lazy and deterministic."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

from headrace._core.interface.compositions import require_async, require_stream
from headrace._core.interface.concatenation import ConcatenatedDatasets
from headrace._core.interface.distributed import RankChoice, Remainder
from headrace._core.interface.iterable_style import AsyncIterableDataset, FirstOfStream, ShuffledStream, SplitStream
from headrace._core.interface.map_style import FirstSamples
from headrace._core.interface.multi_streams import ConcatenatedStreams, MixedStreams
from headrace._core.interface.operators import Stop
from headrace._core.interface.pipe import Pipe
from headrace._core.interface.resumable import is_stateful, start_stream
from headrace._core.interface.traversal import propagate_epoch
from headrace._core.text import dataset_repr, function_name

__all__ = ["concat", "from_async_iterable", "mix", "pipe", "shuffle", "split", "take"]

T = TypeVar("T")


def concat(datasets: Sequence[object]) -> Any:
    """Datasets one after the other: all map-style, or all streams.

    Functions of `map` on the parts run in the loader's workers. Batches are read with `agets` if all parts have it, and
    neighbouring byte ranges by one request if all parts can.

    Args:
        datasets: at least one; torch's `Subset`, `ConcatDataset`, … of async datasets, too.

    Returns:
        A dataset of the same kind.

    Raises:
        ValueError: `datasets` is empty.
        TypeError: their kinds differ, or one is not async.

    Example:
        >>> from headrace.testing import SlowDataset
        >>> both = concat([SlowDataset(2, 0.0), SlowDataset(3, 0.0)])
        >>> len(both), both[4]
        (5, 2)
    """
    datasets, are_streams = require_async(datasets)
    return ConcatenatedStreams(datasets) if are_streams else ConcatenatedDatasets(datasets)


def mix(datasets: Sequence[object], weights: Sequence[float], *, seed: int = 0, stop: Stop = "first") -> Any:
    """A stream that draws each sample from one of several streams, by weight.

    The choice of streams depends only on `seed` and the epoch, so all ranks make the same one; if each stream gives
    every rank the same number of samples, so does the mix.

    Args:
        datasets: streams, at least one.
        weights: how often each is drawn from; they need not add up to 1.
        seed: seed of the order, combined with the epoch.
        stop: ``"first"``: the mix ends when a stream that is drawn has ended. ``"all"``: a stream that has ended starts
            again, in another order if headrace shuffles it, until each has ended once. One that ends without a sample
            is not drawn from any more.

    Raises:
        ValueError: a weight is not positive, there is not one for each stream, or `stop` is unknown.
        TypeError: a dataset is not an async stream.

    Example:
        >>> async def a():
        ...     for _ in range(100): yield "a"
        >>> async def b():
        ...     for _ in range(100): yield "b"
        >>> mixed = list(mix([from_async_iterable(a), from_async_iterable(b)], [3, 1]))
        >>> mixed.count("a") > 2 * mixed.count("b") > 0
        True
    """
    datasets, are_streams = require_async(datasets)
    if not are_streams:
        raise TypeError("mix() draws from streams; of map-style datasets, give a weighted sampler concat(...)")
    if len(weights) != len(datasets) or not all(weight > 0 for weight in weights):
        raise ValueError(f"weights={list(weights)!r} must be {len(datasets)} numbers above zero")
    if stop not in ("first", "all"):
        raise ValueError(f"stop={stop!r} must be 'first' or 'all'")
    return MixedStreams(datasets, weights, seed, stop)


def pipe(dataset: object, function: Callable[[AsyncIterator[Any]], AsyncIterator[T]]) -> AsyncIterableDataset[T]:
    """A stream passed through an async generator function: packing, windows over a log, any work on several samples.

    The function runs on the loader's event loop and should only combine samples: heavy work belongs in a `map` before
    or after it, which runs in the loader's workers. A sample that fails before it bypasses the function and is
    reported. After an error of the function itself, it is called again with the samples that follow; samples that it
    had buffered are lost.

    What a generator holds cannot be saved: after a restore the stream is read again from its start, with a warning. An
    iterator with `state_dict()` and `load_state_dict(state)` in place of a generator continues.

    Args:
        dataset: the stream.
        function: takes an async iterator over the samples and returns another; called at each epoch.

    Raises:
        TypeError: `dataset` is not an async stream, or `function` is not callable.

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
    stream = require_stream(dataset, "pipe() is for streams, but got a map-style dataset")
    if not callable(function):
        raise TypeError(f"function must be an async generator function, but got {function!r}")
    return _PipedStream(stream, function)


def take(dataset: object, count: int) -> Any:
    """The first `count` samples of a dataset, or all if it has fewer; of a stream split over ranks, of each rank.

    The same as ``dataset.take(count)``, also for datasets without that method and for torch's compositions.

    Raises:
        ValueError: `count` is negative.
        TypeError: `dataset` is not async.

    Example:
        >>> from headrace.testing import SlowDataset
        >>> len(take(SlowDataset(9, 0.0), 4))
        4
    """
    (dataset,), is_stream = require_async([dataset])
    return FirstOfStream(dataset, count) if is_stream else FirstSamples(dataset, count)


def shuffle(dataset: object, buffer_size: int, *, seed: int = 0) -> Any:
    """A stream in another order at each epoch: each window of `buffer_size` samples is permuted.

    For each sample given, one of the next window is read, so memory holds one buffer. A sample moves by less than
    `buffer_size` places. TensorFlow's `Dataset.shuffle` replaces a sample drawn at random by each that enters the
    buffer; samples can then stay in it for long, and to continue from a saved position, the stream would have to be
    read again from its start. Here it is at most two windows.

    Args:
        dataset: the stream. The order of a map-style dataset is the loader's: ``DataLoader(..., shuffle=True)``.
        buffer_size: size of the buffer, in samples.
        seed: seed of the order, combined with the epoch.

    Raises:
        ValueError: `buffer_size` is not positive.
        TypeError: `dataset` is not an async stream.

    Example:
        >>> async def numbers():
        ...     for i in range(8): yield i
        >>> sorted(shuffle(from_async_iterable(numbers), 4)) == list(range(8))
        True
    """
    message = "shuffle() is for streams; of a map-style dataset, say DataLoader(..., shuffle=True)"
    return ShuffledStream(require_stream(dataset, message), buffer_size, seed)


def split(
    dataset: object, *, rank: int | None = None, world_size: int | None = None, remainder: Remainder = "drop"
) -> Any:
    """Every n-th sample of a stream, so that every rank gets the same number: for streams that do not split themselves.

    Each rank reads the whole stream, which must be the same on all; so do the workers of a stock torch loader, which
    count as ranks. A stream of shards inside does not split itself then.

    Args:
        dataset: the stream; also one of batches (`batch_by_tokens`), of which every rank then gets the same number.
        rank: which part; by default the rank of `headrace.get_rank_info` when reading starts.
        world_size: number of parts.
        remainder: policy for an incomplete last round: ``"drop"`` it; ``"pad"`` it with its last sample; ``"repeat"``
            the stream's first samples; ``"keep"`` it, so that ranks may differ by one.

    Raises:
        ValueError: an argument is out of range, or only one of `rank` and `world_size` is given.
        TypeError: `dataset` is not an async stream.

    Example:
        >>> async def numbers():
        ...     for i in range(7): yield i
        >>> [list(split(from_async_iterable(numbers), rank=rank, world_size=2)) for rank in range(2)]
        [[0, 2, 4], [1, 3, 5]]
    """
    message = "split() is for streams; of a map-style dataset, use torch's DistributedSampler"
    return SplitStream(require_stream(dataset, message), RankChoice(rank, world_size), remainder)


def from_async_iterable(make: Callable[[], AsyncIterable[T]]) -> AsyncIterableDataset[T]:
    """A stream of anything that can be read with `async for`: a socket, a queue, a database's cursor.

    Args:
        make: an async generator function, or another function that returns an async iterable. It is called at each
            epoch, on the loader's event loop: open connections inside, and close them in a `finally` or `async with`.
            After a restore, its samples are read again from the first, unless what it returns has `state_dict()` and
            `load_state_dict(state)`.

    Raises:
        TypeError: `make` is not callable.

    Example:
        >>> async def numbers():
        ...     for i in range(3): yield i
        >>> list(from_async_iterable(numbers))
        [0, 1, 2]
    """
    if not callable(make):
        raise TypeError(
            f"make must be a function that returns an async iterable, but got {make!r}, which can be read only once"
        )
    return _FunctionStream(make)


class _FunctionStream(AsyncIterableDataset[T]):
    def __init__(self, make: Callable[[], AsyncIterable[T]]) -> None:
        self._make = make

    def __repr__(self) -> str:
        return f"from_async_iterable({function_name(self._make)})"

    def __aiter__(self) -> AsyncIterator[T]:
        made = self._make()
        stateful = is_stateful(made)
        return start_stream(made) if stateful else aiter(made)


class _PipedStream(AsyncIterableDataset[T]):
    def __init__(self, dataset: Any, function: Callable[[AsyncIterator[Any]], AsyncIterator[T]]) -> None:
        self.dataset = dataset
        self._function = function

    def __repr__(self) -> str:
        return f"pipe({dataset_repr(self.dataset)}, {function_name(self._function)})"

    def __aiter__(self) -> AsyncIterator[T]:
        return Pipe(self.dataset, self._function)

    def set_epoch(self, epoch: int) -> None:
        propagate_epoch(self.dataset, epoch)
