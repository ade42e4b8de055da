"""What a dataset is: the two base classes, and the datasets that their methods make of one."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, TypeVar

from torch.utils.data import Dataset, IterableDataset

from headrace._core.interface.background_loop import SyncStream, read_blocking
from headrace._core.interface.distributed import RankChoice, Remainder, check_remainder
from headrace._core.interface.epochs import FollowsEpoch
from headrace._core.interface.iterators import ShardIterator, ShuffleBuffer, Take, UndividedIterator, check_times
from headrace._core.interface.kinds import get_all, propagate_epoch, sample_key
from headrace._core.interface.repeat_and_pipe import RepeatIterator
from headrace._core.interface.reprs import dataset_repr, function_name
from headrace._core.interface.steps import Step, begin_steps

T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")


class AsyncDataset(Dataset[T_co]):
    """A map-style dataset that fetches with `await`: subclass it, define `aget` and `__len__`.

    A loader runs `aget` as a coroutine on an event loop of its own, hundreds at once; it should wait for I/O and do
    nothing heavy. CPU work (decoding, augmentation) belongs in the loader's `transform` or in `map`.

    `agets(indices)` may be defined too, for stores that answer many keys at once: it gets the indices of a whole batch
    and returns their samples in order. `sample_key(index)` may name a sample (a path, an object's key) for errors.

    A dataset that is an async context manager is entered before its first `aget`, on the loop that it is read on, and
    left when the loader closes: that is where connections are opened and closed. See docs/connections.md.

    The dataset also works in a stock torch loader: `__getitem__` and `__getitems__` run the async methods on a
    background loop and wait.

    Example:
        >>> class Squares(AsyncDataset[int]):
        ...     def __len__(self): return 4
        ...     async def aget(self, index): return index * index
        >>> Squares()[3]
        9
    """

    async def aget(self, index: Any) -> T_co:
        """Fetch the sample at `index`."""
        raise NotImplementedError(f"{type(self).__name__} must define `async def aget(self, index)`")

    def map(self, fn: Callable[[T_co], U]) -> MappedDataset[U]:
        """This dataset with `fn` applied to each sample, in the loader's CPU workers; the same as its `transform`."""
        return MappedDataset(self, fn)

    def take(self, count: int) -> FirstSamples[T_co]:
        """The first `count` samples of this dataset, or all where it has fewer."""
        return FirstSamples(self, count)

    def repeat(self, times: int) -> RepeatedSamples[T_co]:
        """This dataset several times in one epoch: its samples have `times` indices each.

        To go on for ever, give the loader an endless sampler, as
        ``RandomSampler(dataset, replacement=True, num_samples=10**12)``.

        Args:
            times: how often.

        Raises:
            ValueError: `times` is negative.

        Example:
            >>> from headrace.testing import SlowDataset
            >>> len(SlowDataset(3, 0.0).repeat(4)), SlowDataset(3, 0.0).repeat(4)[10]
            (12, 1)
        """
        return RepeatedSamples(self, times)

    def cache(self, folder: str | os.PathLike[str], **options: Any) -> Any:
        """This dataset with its bytes cached on disk: of those over stores only, see `headrace.datasets.cached`.

        Raises:
            TypeError: this is none of them.
        """
        raise TypeError(
            f"{type(self).__name__} cannot be cached: cache() keeps the bytes of an ObjectDataset, a TokenDataset or "
            f"TarDataset.index(...). Call it on one of these, before map, take or concat: "
            f"dataset.cache(folder).map(fn)."
        )

    def __getitem__(self, index: Any) -> T_co:
        return read_blocking(self, lambda: self.aget(index))

    def __getitems__(self, indices: Sequence[Any]) -> list[T_co]:
        """The samples at `indices`, fetched at once; torch's loader calls this for a batch."""
        return read_blocking(self, lambda: get_all(self, indices))


class AsyncIterableDataset(IterableDataset[T_co]):
    """A stream of samples, read with `async for`: subclass it and define `__aiter__` (an async generator will do).

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
        """Start the stream anew."""
        raise NotImplementedError(f"{type(self).__name__} must define `async def __aiter__(self)` with `yield`")

    def map(self, fn: Callable[[T_co], U]) -> MappedIterableDataset[U]:
        """This stream with `fn` applied to each sample, in the loader's CPU workers; the same as its `transform`."""
        return MappedIterableDataset(self, fn)

    def filter(self, fn: Callable[[T_co], object]) -> FilteredStream[T_co]:
        """The samples of this stream for which ``fn(sample)`` is true.

        A loader calls `fn` in its CPU workers before samples are batched, so that batches are full; `map` below a
        `filter` runs there too, in the same request. Samples are sent to a worker and back for this: if it can be done
        on small values (a key, a header), filter before the bytes are decoded. Ranks may be left with different numbers
        of samples: apply `split` after it.

        Example:
            >>> from headrace import from_async_iterable
            >>> async def numbers():
            ...     for i in range(6): yield i
            >>> list(from_async_iterable(numbers).map(lambda i: i * i).filter(lambda square: square % 2))
            [1, 9, 25]
        """
        return FilteredStream(self, fn)

    def repeat(self, times: int | None = None) -> RepeatedStream[T_co]:
        """This stream several times, one after the other, or for ever; shuffled streams in another order each time.

        Args:
            times: how often; None for ever, so that the loop that reads it decides when to stop.

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
        """The first `count` samples of this stream, or all where it has fewer; split over ranks, of each rank."""
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
        return SyncStream(self)


class MappedDataset(AsyncDataset[T_co]):
    """An async map-style dataset with CPU work queued for the pool; made by `AsyncDataset.map`.

    Args:
        dataset: where samples are fetched.
        fn: what is applied to each. A loader takes the two apart (`split_maps`) and runs `fn` in its workers.
    """

    def __init__(self, dataset: Any, fn: Callable[[Any], T_co]) -> None:
        self.dataset = dataset
        self.fn = fn

    def __repr__(self) -> str:
        return f"{dataset_repr(self.dataset)}.map({function_name(self.fn)})"

    def __len__(self) -> int:
        return len(self.dataset)

    async def aget(self, index: Any) -> T_co:
        """Fetch and map; loaders call the inner `aget`, and `fn` in a worker."""
        return self.fn(await self.dataset.aget(index))

    def sample_key(self, index: Any) -> str | None:
        """What the inner dataset calls that sample."""
        return sample_key(self.dataset, index)

    def set_epoch(self, epoch: int) -> None:
        """Tell the inner dataset, if it wants to know."""
        propagate_epoch(self.dataset, epoch)


class _SteppedStream(AsyncIterableDataset[T_co]):
    """A stream with a function applied to each sample.

    Args:
        dataset: the stream.
        fn: the function. A loader applies it in its workers: together with `transform` where no operation follows this
            stream, before batching otherwise.
    """

    keeps = False
    """Whether the function is a predicate."""

    def __init__(self, dataset: Any, fn: Callable[[Any], Any]) -> None:
        self.dataset = dataset
        self.fn = fn

    def __repr__(self) -> str:
        return f"{dataset_repr(self.dataset)}.{'filter' if self.keeps else 'map'}({function_name(self.fn)})"

    def __aiter__(self) -> AsyncIterator[T_co]:
        """Read, and apply the functions of this and of the steps directly below it in one request."""
        steps: list[Step] = []
        dataset: Any = self
        while isinstance(dataset, _SteppedStream):
            steps.append(Step(dataset.fn, dataset.keeps))
            dataset = dataset.dataset
        return begin_steps(aiter(dataset), tuple(reversed(steps)))

    def set_epoch(self, epoch: int) -> None:
        """Tell the inner dataset, if it wants to know."""
        propagate_epoch(self.dataset, epoch)


class MappedIterableDataset(_SteppedStream[T_co]):
    """An async stream with CPU work queued for the pool; made by `AsyncIterableDataset.map`."""

    def __len__(self) -> int:
        return len(self.dataset)


class FilteredStream(_SteppedStream[T_co]):
    """The samples of a stream for which a predicate holds; made by `filter`."""

    keeps = True


class FirstSamples(AsyncDataset[T_co]):
    """The first samples of a map-style dataset; made by `take`.

    Args:
        dataset: the dataset.
        count: how many, at most.

    Raises:
        ValueError: `count` is negative.
    """

    def __init__(self, dataset: Any, count: int) -> None:
        if count < 0:
            raise ValueError(f"count={count} must not be negative")
        self.dataset = dataset
        self._length = min(count, len(dataset))

    def __repr__(self) -> str:
        return f"{dataset_repr(self.dataset)}.take({self._length})"

    def __len__(self) -> int:
        return self._length

    async def aget(self, index: int) -> T_co:
        """Fetch the sample at `index`; raises `IndexError` beyond the length."""
        sample: T_co = await self.dataset.aget(self._inner(index))
        return sample

    def sample_key(self, index: int) -> str | None:
        """What the inner dataset calls that sample."""
        return sample_key(self.dataset, self._inner(index))

    def set_epoch(self, epoch: int) -> None:
        """Tell the inner dataset, if it wants to know."""
        propagate_epoch(self.dataset, epoch)

    def _inner(self, index: int) -> int:
        if not -self._length <= index < self._length:
            raise IndexError(f"index {index} is out of range for the first {self._length} samples")
        return index % self._length


class RepeatedSamples(AsyncDataset[T_co]):
    """A map-style dataset several times; made by `repeat`.

    Args:
        dataset: the dataset.
        times: how often.

    Raises:
        ValueError: `times` is negative.
    """

    def __init__(self, dataset: Any, times: int) -> None:
        check_times(times)
        self.dataset = dataset
        self._times = times

    def __repr__(self) -> str:
        return f"{dataset_repr(self.dataset)}.repeat({self._times})"

    def __len__(self) -> int:
        return self._times * len(self.dataset)

    async def aget(self, index: int) -> T_co:
        """Fetch the sample at `index`; raises `IndexError` beyond the length."""
        sample: T_co = await self.dataset.aget(self._inner(index))
        return sample

    def sample_key(self, index: int) -> str | None:
        """The inner dataset's name for that sample."""
        return sample_key(self.dataset, self._inner(index))

    def set_epoch(self, epoch: int) -> None:
        """Set the inner dataset's epoch, if it has one."""
        propagate_epoch(self.dataset, epoch)

    def _inner(self, index: int) -> int:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} samples, each of them {self._times} times")
        return index % len(self.dataset)


class _Around(FollowsEpoch, AsyncIterableDataset[T_co]):
    """A stream with something put around each pass."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, of the inner dataset too; loaders call this."""
        super().set_epoch(epoch)
        propagate_epoch(self.dataset, epoch)


class FirstOfStream(_Around[T_co]):
    """The first samples of a stream; made by `take`.

    Args:
        dataset: the stream.
        count: how many, at most.

    Raises:
        ValueError: `count` is negative.
    """

    def __init__(self, dataset: Any, count: int) -> None:
        super().__init__(dataset)
        if count < 0:
            raise ValueError(f"count={count} must not be negative")
        self._count = count

    def __repr__(self) -> str:
        return f"{dataset_repr(self.dataset)}.take({self._count})"

    def __aiter__(self) -> AsyncIterator[T_co]:
        return Take(aiter(self.dataset), self._count)


class ShuffledStream(_Around[T_co]):
    """A stream by way of a buffer from which samples are drawn at random; made by `shuffle`.

    Args:
        dataset: the stream.
        buffer_size: samples that are held.
        seed: of the order, with the epoch.

    Raises:
        ValueError: `buffer_size` is not positive.
    """

    def __init__(self, dataset: Any, buffer_size: int, seed: int) -> None:
        super().__init__(dataset)
        if buffer_size < 1:
            raise ValueError(f"buffer_size={buffer_size} must be at least 1")
        self._buffer_size = buffer_size
        self._seed = seed

    def __repr__(self) -> str:
        return f"{dataset_repr(self.dataset)}.shuffle({self._buffer_size}, seed={self._seed})"

    def __aiter__(self) -> AsyncIterator[T_co]:
        self._note_pass()
        return ShuffleBuffer(aiter(self.dataset), self._buffer_size, self._order_seed(self._seed))


class SplitStream(_Around[T_co]):
    """One rank's part of a stream that every rank reads whole; made by `split`.

    Args:
        dataset: the stream.
        ranks: which rank's part.
        remainder: what is done with a last round that does not go round.

    Raises:
        ValueError: `remainder` is no such policy.
    """

    splits_by_rank = True
    splits_over_workers = True
    """In a torch loader each worker gives its own part."""

    def __init__(self, dataset: Any, ranks: RankChoice, remainder: Remainder) -> None:
        super().__init__(dataset)
        check_remainder(remainder)
        self._ranks = ranks
        self._remainder: Remainder = remainder

    def __repr__(self) -> str:
        return f"{dataset_repr(self.dataset)}.split(remainder={self._remainder!r})"

    def __aiter__(self) -> AsyncIterator[T_co]:
        shard = self._ranks.shard().in_worker()
        return (
            aiter(self.dataset)
            if shard.count == 1
            else ShardIterator(UndividedIterator(self.dataset), shard, self._remainder)
        )


class RepeatedStream(_Around[T_co]):
    """A stream several times; made by `repeat`.

    Args:
        dataset: the stream.
        times: how often; None for ever.

    Raises:
        ValueError: `times` is negative.
    """

    def __init__(self, dataset: Any, times: int | None) -> None:
        super().__init__(dataset)
        if times is not None:
            check_times(times)
        self._times = times

    def __repr__(self) -> str:
        return f"{dataset_repr(self.dataset)}.repeat({'' if self._times is None else self._times})"

    def __aiter__(self) -> AsyncIterator[T_co]:
        return RepeatIterator(self.dataset, self._times)


def split_maps(dataset: Any) -> tuple[Any, tuple[Callable[[Any], Any], ...]]:
    """Take a dataset apart into where samples are fetched and what `map` queued for them, innermost first."""
    functions: list[Callable[[Any], Any]] = []
    while isinstance(dataset, MappedDataset | MappedIterableDataset):
        functions.append(dataset.fn)
        dataset = dataset.dataset
    return dataset, tuple(reversed(functions))
