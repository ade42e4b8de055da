"""Datasets made of datasets: concatenated or mixed. Lazy and deterministic."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

from headrace._core.streams.iterable_style import AsyncIterableDataset, ConcatenatedStreams, OperatedStream
from headrace._core.streams.map_style import IndexedParts
from headrace._core.streams.operators import Mix, Stop
from headrace._core.streams.resumable import is_stateful, start_stream
from headrace._core.streams.torch_views import require_async
from headrace._core.text import function_name

__all__ = ["concat", "from_async_iterable", "mix"]

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
        >>> from headrace import AsyncDataset
        >>> class Numbers(AsyncDataset):
        ...     def __init__(self, count): self.count = count
        ...     def __len__(self): return self.count
        ...     async def aget(self, index): return index
        >>> both = concat([Numbers(2), Numbers(3)])
        >>> len(both), both[4]
        (5, 2)
    """
    datasets, are_streams = require_async(datasets)
    return ConcatenatedStreams(datasets) if are_streams else IndexedParts(datasets)


def mix(datasets: Sequence[object], weights: Sequence[float], *, seed: int | None = None, stop: Stop = "first") -> Any:
    """A stream that draws each sample from one of several streams, by weight.

    The choice of streams depends only on `seed` and the epoch, so all ranks make the same one; if each stream gives
    every rank the same number of samples, so does the mix.

    Args:
        datasets: streams, at least one.
        weights: how often each is drawn from; they need not add up to 1.
        seed: seed of the order, combined with the epoch; None for that of the loader, else 0.
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
    shown = f"mix({{}}, {list(weights)}, seed={seed}, stop={stop!r})"
    return OperatedStream(tuple(datasets), shown, Mix, weights=tuple(weights), stop=stop, seed=seed)


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
