"""The base class of async streams (iterable-style datasets), and the streams that its methods make."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

from torch.utils.data import IterableDataset

from headrace._core.interface.background_loop import SyncStream
from headrace._core.interface.distributed import RankChoice, Remainder, check_remainder, undivided
from headrace._core.interface.fetch_plan import MapComposition, plan
from headrace._core.interface.kinds import check_times
from headrace._core.interface.operation import InContext
from headrace._core.interface.operators import Repeat, Split, Take
from headrace._core.interface.order import FollowsEpoch
from headrace._core.interface.resumable import start_stream
from headrace._core.interface.shuffle_buffer import ShuffleBuffer
from headrace._core.interface.steps import Step, Steps
from headrace._core.interface.traversal import propagate_epoch
from headrace._core.rankinfo import bound
from headrace._core.text import dataset_repr, function_name

T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")


class AsyncIterableDataset(IterableDataset[T_co]):
    """A stream of samples, read with `async for`: subclass it and define `__aiter__`, as an async generator.

    The dataset also works in a stock torch loader, and in a plain `for`: `__iter__` reads the stream on a background
    loop.

    Example:
        >>> class Count(AsyncIterableDataset[int]):
        ...     async def __aiter__(self):
        ...         for i in range(3): yield i
        >>> list(Count())
        [0, 1, 2]
    """

    def __aiter__(self) -> AsyncIterator[T_co]:
        """Start to read the stream from its first sample."""
        # Not an abstract method: the error is raised where it is used, with the remedy.
        raise NotImplementedError(f"{type(self).__name__} must define `async def __aiter__(self)` with `yield`")

    def map(self, fn: Callable[[T_co], U]) -> MappedIterableDataset[U]:
        """This stream with `fn` applied to each sample, in the loader's CPU workers; the same as its `transform`."""
        return MappedIterableDataset(self, fn)

    def filter(self, fn: Callable[[T_co], object]) -> FilteredStream[T_co]:
        """The samples of this stream for which ``fn(sample)`` is true.

        A loader calls `fn` in its CPU workers before samples are batched, so that batches are full; a `map` before a
        `filter` runs there too, in the same request. Samples are sent to a worker and back for this: if small values (a
        key, a header) are enough for the decision, filter before the bytes are decoded. Ranks may be left with
        different numbers of samples: apply `split` after it.

        Example:
            >>> from headrace import from_async_iterable
            >>> async def numbers():
            ...     for i in range(6): yield i
            >>> list(from_async_iterable(numbers).map(lambda i: i * i).filter(lambda square: square % 2))
            [1, 9, 25]
        """
        return FilteredStream(self, fn)

    def repeat(self, times: int | None = None) -> RepeatedStream[T_co]:
        """This stream several times in succession, or for ever; shuffled streams in another order each time.

        Args:
            times: number of repetitions; None for no end, except after a repetition without a sample.

        Raises:
            ValueError: `times` is negative.

        Example:
            >>> from headrace import from_async_iterable
            >>> async def letters():
            ...     for letter in "ab": yield letter
            >>> list(from_async_iterable(letters).repeat(2))
            ['a', 'b', 'a', 'b']
        """
        return RepeatedStream(self, times)

    def take(self, count: int) -> FirstOfStream[T_co]:
        """The first `count` samples of this stream, or all if it has fewer; of each rank, if split over ranks.

        Raises:
            ValueError: `count` is negative.
        """
        return FirstOfStream(self, count)

    def shuffle(self, buffer_size: int, seed: int = 0) -> ShuffledStream[T_co]:
        """This stream in another order at each epoch; see `headrace.shuffle`."""
        return ShuffledStream(self, buffer_size, seed)

    def split(
        self, *, rank: int | None = None, world_size: int | None = None, remainder: Remainder = "drop"
    ) -> SplitStream[T_co]:
        """Every n-th sample of this stream, so that every rank gets the same number; see `headrace.split`."""
        return SplitStream(self, RankChoice(rank, world_size), remainder)

    def __iter__(self) -> Iterator[T_co]:
        return SyncStream(*plan(self))


class _SteppedStream(AsyncIterableDataset[T_co]):
    """A stream with a function applied to each sample.

    A loader applies the last functions of the expression together with `transform`; those before another operation, in
    its workers before batching.
    """

    is_filter = False
    """Whether the function is a predicate."""

    same_by_lanes = True
    """Whether it does the same to a part of the shards as to all of them."""

    def __init__(self, dataset: object, fn: Callable[[Any], object]) -> None:
        self.dataset = dataset
        self.fn = fn

    def __repr__(self) -> str:
        return f"{dataset_repr(self.dataset)}.{'filter' if self.is_filter else 'map'}({function_name(self.fn)})"

    def __aiter__(self) -> AsyncIterator[T_co]:
        """Read, and apply adjacent functions in one request."""
        steps: list[Step] = []
        dataset: Any = self
        while isinstance(dataset, _SteppedStream):
            steps.append(Step(dataset.fn, dataset.is_filter))
            dataset = dataset.dataset
        return Steps(dataset, tuple(reversed(steps)))

    def set_epoch(self, epoch: int) -> None:
        propagate_epoch(self.dataset, epoch)


class MappedIterableDataset(MapComposition, _SteppedStream[T_co]):
    """An async stream with a function applied to each sample; made by `AsyncIterableDataset.map`."""

    def __len__(self) -> int:
        return len(self.dataset)


class FilteredStream(_SteppedStream[T_co]):
    """The samples of a stream for which a predicate holds; made by `filter`."""

    is_filter = True


class _StreamOperation(FollowsEpoch, AsyncIterableDataset[T_co]):
    """An operation on one stream."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        propagate_epoch(self.dataset, epoch)


class FirstOfStream(_StreamOperation[T_co]):
    """The first samples of a stream; made by `take`."""

    def __init__(self, dataset: object, count: int) -> None:
        super().__init__(dataset)
        if count < 0:
            raise ValueError(f"count={count} must not be negative")
        self._count = count

    def __repr__(self) -> str:
        return f"{dataset_repr(self.dataset)}.take({self._count})"

    def __aiter__(self) -> AsyncIterator[T_co]:
        return Take(self.dataset, self._count)


class ShuffledStream(_StreamOperation[T_co]):
    """A stream whose samples are permuted in windows of a buffer's size; made by `shuffle`."""

    same_by_lanes = True

    def __init__(self, dataset: object, buffer_size: int, seed: int) -> None:
        super().__init__(dataset)
        if buffer_size < 1:
            raise ValueError(f"buffer_size={buffer_size} must be at least 1")
        self._buffer_size = buffer_size
        self._seed = seed

    def __repr__(self) -> str:
        return f"{dataset_repr(self.dataset)}.shuffle({self._buffer_size}, seed={self._seed})"

    def __aiter__(self) -> AsyncIterator[T_co]:
        return ShuffleBuffer(self.dataset, self._buffer_size, self._order_for(self._seed))


class SplitStream(_StreamOperation[T_co]):
    """One rank's part of a stream that every rank reads whole; made by `split`."""

    splits_by_rank = True
    splits_over_workers = True
    """In a torch loader each worker reads its own part."""

    divides_samples = True
    """Each rank reads the whole stream, so that a position is one of all ranks."""

    def __init__(self, dataset: Any, ranks: RankChoice, remainder: Remainder) -> None:
        super().__init__(dataset)
        check_remainder(remainder)
        self._ranks = ranks
        self._remainder: Remainder = remainder

    def __repr__(self) -> str:
        return f"{dataset_repr(self.dataset)}.split(remainder={self._remainder!r})"

    def __aiter__(self) -> AsyncIterator[T_co]:
        shard = self._ranks.shard().in_worker()
        start: Any = functools.partial(start_stream, self.dataset)
        if shard.count > 1:  # all samples, even of a stream that splits itself by rank
            start = functools.partial(InContext, functools.partial(bound, undivided, True), start)
        return Split(start, shard, self._remainder)


class RepeatedStream(_StreamOperation[T_co]):
    """A stream several times; made by `repeat`."""

    same_by_lanes = True

    def __init__(self, dataset: Any, times: int | None) -> None:
        super().__init__(dataset)
        if times is not None:
            check_times(times)
        self._times = times

    def __repr__(self) -> str:
        return f"{dataset_repr(self.dataset)}.repeat({'' if self._times is None else self._times})"

    def __aiter__(self) -> AsyncIterator[T_co]:
        return Repeat(self.dataset, self._times)
