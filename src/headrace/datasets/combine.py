"""Concatenated and mixed datasets, lazy and deterministic."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar, Unpack, cast, get_args, overload

import numpy as np

from headrace._base.text import dataset_repr, function_name, shorten, whole_number
from headrace._ranks.distributed import RankChoice
from headrace._streams.epochs import checked_seed
from headrace._streams.iterable_style import (
    AsyncIterableDataset,
    ConcatenatedStreams,
    OperatedStream,
)
from headrace._streams.map_style import AsyncDataset, IndexedParts, MixedParts
from headrace._streams.mixing import Mix, Stop
from headrace._streams.resumable import is_stateful, start_stream
from headrace._streams.torch_views import require_async

T = TypeVar("T")
Kind = TypeVar("Kind", AsyncDataset[Any], AsyncIterableDataset[Any])
MixWeights = Sequence[float] | Mapping[str, float]
_Weights = MixWeights | Sequence[tuple[int, MixWeights]]


class _MixOptions(TypedDict, total=False):
    """Options of `mix`."""

    temperature: float
    seed: int | None
    stop: Stop
    unit: Literal["samples", "lengths"]


@overload
def concat(datasets: Sequence[Kind]) -> Kind: ...
@overload
def concat(datasets: Sequence[object]) -> Any: ...
def concat(datasets: Sequence[object]) -> Any:
    """Concatenate datasets: all map-style, or all streams.

    Functions of `map` on the datasets run in the loader's workers. A loader reads batches by
    `agets` if all datasets have the method. A loader joins neighbouring byte ranges into one
    request if all datasets support ranges.

    Args:
        datasets: at least one. Also torch's `Subset`, `ConcatDataset` and others, of async
            datasets.

    Returns:
        A dataset of the same kind.

    Raises:
        ValueError: `datasets` is empty, or equal label numbers stand for different classes.
        TypeError: the datasets are of different kinds, or a dataset is not async.

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


@overload
def mix(
    datasets: Sequence[Kind] | Mapping[str, Kind],
    weights: _Weights,
    **options: Unpack[_MixOptions],
) -> Kind: ...
@overload
def mix(
    datasets: Sequence[object] | Mapping[str, object],
    weights: _Weights,
    **options: Unpack[_MixOptions],
) -> Any: ...
def mix(
    datasets: Sequence[object] | Mapping[str, object],
    weights: _Weights,
    *,
    temperature: float = 1.0,
    seed: int | None = None,
    stop: Stop = "first",
    unit: Literal["samples", "lengths"] = "samples",
) -> Any:
    """Mix several datasets: each sample is drawn by weight.

    All datasets are streams, or all are map-style. Each rank draws for itself, so the batches of a
    training step, over all ranks, have samples of all datasets. The same seed, epoch and rank draw
    the same samples. A dataset given twice is shuffled differently the second time.

    **Streams** are drawn from at random. Ranks may get different numbers of samples, unless the
    streams are endless (`repeat`). Below `split`, all ranks draw alike.

    **Map-style datasets** are mixed by arithmetic. The mix is the concatenation of the datasets,
    and a loader without `sampler=` uses an order by weight. At every position, over all ranks, the
    number of samples drawn from each dataset matches the weight to within a few samples. For
    indexed datasets the difference is at most about 3 times the square root of the number of blocks
    read side by side. Ranks get the same number of samples, any number of ranks can continue, and
    `batch_at`, `samples_at` and `exclude` work. Other loaders, and loaders with another sampler,
    see the concatenation.

    Args:
        datasets: at least one dataset. A dict names the datasets for states and reports.
        weights: how often each dataset is drawn from. The sum need not be 1. Give a dict of weights
            for a dict of datasets. A schedule is a list of ``(samples, weights)``: from this number
            of samples on, draw by these weights. The numbers ascend from 0, and count samples that
            raised an error too. For map-style datasets, and for streams below `split`, the samples
            of all ranks count. For other streams, the samples of each rank count. Weights in a
            schedule may be zero.
        temperature: draw by ``weight ** (1 / temperature)``. With sizes as weights, 1 draws by size
            and larger values draw more evenly.
        seed: seed of the order, combined with the epoch. None takes the seed of the loader, else 0.
        stop: ``"first"`` ends the mix when a drawn dataset has ended.
            ``"all"`` starts an ended dataset again, in another order if the dataset is shuffled,
            until every dataset with a weight, now or later, has ended once.
            For each block read side by side, ``"first"`` may end 2 samples earlier and ``"all"`` 2
            samples later: 3 % of the dataset at most.
            A stream that ends without a sample is not drawn from any more.
            ``"once"``, for streams only, does not draw from an ended stream any more. The mix ends
            with the last stream that has a weight.
        unit: the unit of the weights. ``"samples"``, or ``"lengths"`` such as tokens. Lengths need
            map-style datasets with `lengths` (`TokenDataset`, or an index made with ``--length``).

    Raises:
        ValueError: a weight is not positive, there is not one weight for each dataset, the numbers
            of a schedule do not ascend from 0, a dataset has no lengths, or another argument is
            unknown or only for streams. A loader raises the error if a map-style dataset with a
            weight is empty.
        TypeError: a dataset is not async, the kinds differ, or a map-style dataset is itself a mix.

    Example:
        >>> async def a():
        ...     for _ in range(100): yield "a"
        >>> async def b():
        ...     for _ in range(100): yield "b"
        >>> mixed = list(mix([from_async_iterable(a), from_async_iterable(b)], [3, 1]))
        >>> mixed.count("a") > 2 * mixed.count("b") > 0
        True
        >>> parts = {"a": from_async_iterable(a), "b": from_async_iterable(b)}
        >>> list(mix(parts, [(0, {"a": 1, "b": 0}), (2, {"a": 0, "b": 1})]).take(4))
        ['a', 'a', 'b', 'b']
    """
    named = (
        datasets
        if isinstance(datasets, Mapping)
        else {str(number): each for number, each in enumerate(datasets)}
    )
    names = list(named)
    parts, are_streams = require_async([*named.values()])
    if stop not in get_args(Stop) or not temperature > 0:
        raise ValueError(
            f"stop={stop!r} must be one of {get_args(Stop)}, "
            f"and temperature={temperature!r} above zero"
        )
    weights_at = functools.partial(_weights_of, names, float(temperature))
    schedule: Any
    if not isinstance(weights, Mapping) and any(
        isinstance(each, Sequence) for each in weights
    ):
        entries = cast("Sequence[Any]", weights)
        schedule = [
            [whole_number("samples", start), weights_at(each)] for start, each in entries
        ]
        starts = [start for start, _ in schedule]
        if starts[0] or any(one >= other for one, other in itertools.pairwise(starts)):
            raise ValueError(
                f"the numbers of samples in weights={starts} must ascend from 0"
            )
    else:
        if not all(_weights_of(names, 1.0, weights)):
            raise ValueError(f"weights={weights!r} must be above zero, but in a schedule")
        schedule = [[0, weights_at(weights)]]
    seed = checked_seed(seed)
    shown = (
        f"mix([{', '.join(map(dataset_repr, parts))}], {shorten(repr(weights))}, "
        f"seed={seed}, stop={stop!r})"
    )
    names = [*map(str, names)]
    if not are_streams:
        if stop == "once":
            raise ValueError('stop="once" is for streams')
        if unit == "lengths":
            means = [
                _mean_length(name, part) for name, part in zip(names, parts, strict=True)
            ]
            for entry in schedule:
                entry[1] = [
                    weight / mean for weight, mean in zip(entry[1], means, strict=True)
                ]
        return MixedParts(parts, shown, names, schedule, seed, stop)
    if unit != "samples":
        raise ValueError(
            f"unit={unit!r} must be 'samples'; 'lengths' is for map-style datasets"
        )
    return OperatedStream(
        tuple(parts),
        shown,
        Mix,
        names=names,
        weights=schedule,
        stop=str(stop),
        seed=seed,
        ranks=RankChoice(None, None),
    )


def _mean_length(name: str, dataset: Any) -> float:
    lengths = getattr(dataset, "lengths", None)
    if lengths is None:
        raise ValueError(f'unit="lengths": dataset {name!r} has no lengths')
    return float(np.mean(lengths)) or 1.0


def _weights_of(names: Sequence[str], temperature: float, weights: Any) -> list[float]:
    """Return the checked weights in the order of the datasets."""
    found = (
        [weights.get(name, -1) for name in names]
        if isinstance(weights, Mapping)
        else weights
    )
    numbers = [*map(float, found)]
    in_range = all(0 <= number < math.inf for number in numbers)
    if len(weights) != len(names) or not any(numbers) or not in_range:
        expected = (
            f"{len(names)} numbers of at least zero, not all zero"
            + f" for {names}" * (found is not weights)
        )
        raise ValueError(f"weights={weights!r} must be {expected}")
    # Shares of the largest weight: their powers do not overflow.
    largest = max(numbers) if temperature < 1 else 1.0
    return [
        (number / largest) ** (1 / temperature) if number else 0.0 for number in numbers
    ]


def from_async_iterable(make: Callable[[], AsyncIterable[T]]) -> AsyncIterableDataset[T]:
    """Make a stream of anything readable with `async for`.

    For example a socket, a queue, or a cursor of a database.

    Args:
        make: an async generator function, or another function that returns an async iterable.
            Called at each epoch, on the loader's event loop: open connections inside, and close the
            connections in a `finally` or `async with`. After a restore, the samples are read again
            from the first, unless the returned iterable has `state_dict()` and
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
            f"make must be a function that returns an async iterable, but got {make!r}, "
            "which can be read only once"
        )
    return _FunctionStream(make)


class _FunctionStream(AsyncIterableDataset[T]):
    def __init__(self, make: Callable[[], AsyncIterable[T]]) -> None:
        self._make = make

    def __repr__(self) -> str:
        return f"from_async_iterable({function_name(self._make)})"

    def __aiter__(self) -> AsyncIterator[T]:
        made = self._make()
        if getattr(made, "ag_frame", made) is None:
            raise TypeError(
                f"{self!r}: the function returned an async generator that has ended; "
                f"return a new async generator at each call"
            )
        stateful = is_stateful(made)
        return start_stream(made) if stateful else aiter(made)
