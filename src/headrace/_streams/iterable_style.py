"""`AsyncIterableDataset`, the base class of async streams, and its operations."""

from __future__ import annotations

import operator
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, NoReturn, TypeVar, get_args, overload

from torch.utils.data import IterableDataset

from headrace._base.text import (
    check_function,
    dataset_repr,
    function_name,
    is_async,
    whole_number,
)
from headrace._ranks.distributed import RankChoice, undivided
from headrace._ranks.rankinfo import bound
from headrace._streams.blocking import SyncStream
from headrace._streams.composition import ConcatComposition, MapComposition, plan
from headrace._streams.epochs import FollowsEpoch, checked_seed
from headrace._streams.fetch_functions import FetchFunctions
from headrace._streams.kinds import T_co, children
from headrace._streams.mixing import Mix
from headrace._streams.operators import Concat, Repeat, ShuffleBuffer, Split, Take
from headrace._streams.packing import Pack, PackLabels, PackStrategy, PackTooLong
from headrace._streams.sample_functions import SampleFunction, SampleFunctions

U = TypeVar("U")


class AsyncIterableDataset(IterableDataset[T_co]):
    """A stream of samples, read with `async for`.

    Subclasses define `__aiter__` as an async generator. The dataset also works in a stock torch
    loader and in a plain `for`: `__iter__` reads the stream on a background loop.

    Example:
        >>> class Count(AsyncIterableDataset[int]):
        ...     async def __aiter__(self):
        ...         for i in range(3): yield i
        >>> list(Count())
        [0, 1, 2]
    """

    def __aiter__(self) -> AsyncIterator[T_co]:
        """Start to read the stream from the first sample."""
        # Not an abstract method: the error appears at the first use, with the remedy.
        raise NotImplementedError(
            f"{type(self).__name__} must define `async def __aiter__(self)` with `yield`"
        )

    @overload
    def map(self, fn: Callable[[T_co], Awaitable[U]]) -> AsyncIterableDataset[U]: ...
    @overload
    def map(self, fn: Callable[[T_co], U]) -> AsyncIterableDataset[U]: ...

    def map(self, fn: Callable[[T_co], Any]) -> AsyncIterableDataset[Any]:
        """Apply `fn` to each sample.

        A function runs in the loader's CPU workers. The result is the same as with the loader's
        `transform`. As the last operation, `fn` runs together with `transform`, a batch at a time.
        If other operations follow (`filter`, `shuffle`, `pack`, …), small groups of samples go to a
        worker and return in order, before batching.

        A coroutine function runs on the loader's event loop: for example, `fn` fetches the images
        that a row names. The loader's `concurrency` is the number of rows fetched at the same time,
        and `memory_budget` limits their bytes. Samples stay in order. The state is the position of
        a row. Rows dropped by an earlier `filter` are not fetched.

        Example:
            >>> from headrace import from_async_iterable
            >>> async def rows():
            ...     for name in "abc": yield name
            >>> async def fetch(name): return name + ".png"
            >>> list(from_async_iterable(rows).filter(lambda name: name != "b").map(fetch))
            ['a.png', 'c.png']
        """
        if is_async(fn):
            shown = f"{{}}.map({function_name(fn)})"
            return OperatedStream(self, shown, FetchFunctions, functions=(fn,))
        return MappedStream(self, fn)

    def filter(self, fn: Callable[[T_co], object]) -> AsyncIterableDataset[T_co]:
        """Keep the samples for which ``fn(sample)`` is true.

        A loader calls `fn` in the CPU workers before batching, so batches are full. A `map` before
        a `filter` runs there too, in the same request. Samples go to a worker and back for the
        filter: if small values (a key, a header) are enough for the decision, filter before
        decoding. Ranks may be left with different numbers of samples: apply `split` after the
        filter.

        Example:
            >>> from headrace import from_async_iterable
            >>> async def numbers():
            ...     for i in range(6): yield i
            >>> squares = from_async_iterable(numbers).map(lambda i: i * i)
            >>> list(squares.filter(lambda square: square % 2))
            [1, 9, 25]
        """
        check_function("the function of filter", fn)
        return OperatedStream(
            self,
            f"{{}}.filter({function_name(fn)})",
            SampleFunctions,
            functions=(SampleFunction(fn, True),),
        )

    def repeat(self, times: int | None = None) -> AsyncIterableDataset[T_co]:
        """Repeat this stream several times, or without end.

        Shuffled streams have another order in each repetition.

        Args:
            times: number of repetitions; None for no end. Even with None, the stream ends after a
                repetition without samples.

        Raises:
            ValueError: `times` is negative.

        Example:
            >>> from headrace import from_async_iterable
            >>> async def letters():
            ...     for letter in "ab": yield letter
            >>> list(from_async_iterable(letters).repeat(2))
            ['a', 'b', 'a', 'b']
        """
        times = None if times is None else whole_number("times", times)
        return OperatedStream(
            self, f"{{}}.repeat({'' if times is None else times})", Repeat, times=times
        )

    def take(self, count: int) -> AsyncIterableDataset[T_co]:
        """Take at most the first `count` samples.

        If the stream is split over ranks, the count is for each rank.

        Raises:
            ValueError: `count` is negative.
        """
        count = whole_number("count", count)
        return OperatedStream(self, f"{{}}.take({count})", Take, count=count)

    def shuffle(
        self, buffer_size: int, seed: int | None = None
    ) -> AsyncIterableDataset[T_co]:
        """Shuffle this stream, in another order at each epoch.

        Each window of `buffer_size` samples is permuted. For each sample given, a sample of the
        next window is read, so memory holds a single buffer. A sample moves by less than
        `buffer_size` places. To continue from a saved position, at most two windows are read again.

        Args:
            buffer_size: size of the buffer, in samples.
            seed: seed of the order, combined with the epoch; None for the loader's seed, else 0.

        Raises:
            ValueError: `buffer_size` is not positive, or `seed` is out of range.

        Example:
            >>> from headrace import from_async_iterable
            >>> async def numbers():
            ...     for i in range(8): yield i
            >>> sorted(from_async_iterable(numbers).shuffle(4)) == list(range(8))
            True
        """
        buffer_size = whole_number("buffer_size", buffer_size, 1)
        seed = checked_seed(seed)
        shown = f"{{}}.shuffle({buffer_size}, seed={seed})"
        return OperatedStream(
            self, shown, ShuffleBuffer, buffer_size=buffer_size, seed=seed
        )

    def split(
        self, *, rank: int | None = None, world_size: int | None = None
    ) -> AsyncIterableDataset[T_co]:
        """Give each rank every n-th sample, equally many.

        The stream must not be split yet. Each rank reads the whole stream, so the stream must be
        the same on all ranks. The workers of a stock torch loader also read the whole stream and
        count as ranks. An inner stream of shards does not split itself then. An incomplete last
        round is dropped.

        Args:
            rank: which part; by default the rank of `headrace.get_rank_info` when reading starts.
            world_size: number of parts.

        Raises:
            ValueError: an argument is out of range, or only one of `rank` and `world_size` is
                given.

        Example:
            >>> from headrace import from_async_iterable
            >>> async def numbers():
            ...     for i in range(7): yield i
            >>> stream = from_async_iterable(numbers)
            >>> [list(stream.split(rank=rank, world_size=2)) for rank in range(2)]
            [[0, 2, 4], [1, 3, 5]]
        """
        return SplitStream(self, RankChoice(rank, world_size))

    def pack(
        self,
        seq_len: int,
        strategy: PackStrategy = "concat",
        *,
        window: int = 32,
        fields: Sequence[str] = ("tokens",),
        labels: PackLabels | None = None,
        carry: Sequence[str] = (),
        limits: Mapping[str, int] | None = None,
        align: int = 1,
        pad_to: int | None = None,
        too_long: PackTooLong = "cut",
    ) -> AsyncIterableDataset[dict[str, Any]]:
        """Pack documents of tokens into sequences of `seq_len` tokens.

        A document is a list, array or tensor of integers, or a dict of several. A document longer
        than a sequence is cut, and each piece counts as a document. No token is left out, unless
        `too_long` says so. A document without tokens gives nothing. Packing runs on the loader's
        event loop.

        A sequence is a dict of tensors of shape (seq_len,): ``"tokens"`` (int64);
        ``"segment_ids"``, 1 for the first document in the sequence, 2 for the next, …, and 0 for
        padding; ``"positions"``, which restart at each document and at padding; further `fields`
        with the dtypes of the documents. Padding is 0, and -100 in a field named ``"labels"``.
        Each key of `carry` is a list with an entry for each segment.

        Ranks that pack different shards have different numbers of sequences: `split` the result, or
        use ``coordinated=True``. After a restore, documents are read again from the oldest document
        of an incomplete sequence.

        Args:
            seq_len: length of a sequence, in tokens.
            strategy: ``"concat"``: a document continues in the next sequence, and only the last
                sequence is padded. ``"first_fit"``, ``"best_fit"``: a document is placed whole, in
                the oldest or the fullest open sequence with room.
            window: number of open sequences of ``"first_fit"`` and ``"best_fit"``. If no open
                sequence has room, the fullest is given out. Every sequence is given out after at
                most 4 × `window` other sequences.
            fields: keys of the per-token values of a dict, first the key of the tokens. A dict may
                have no other keys than `fields`, `carry` and `limits`: remove other keys by `map`
                before.
            labels: ``"next"`` adds ``"labels"``: the following token of the document. ``"same"``:
                the token itself, except for the first of a document; for models that shift labels,
                as in transformers. -100 elsewhere.
            carry: keys of the values to list, such as an image grid or a source: entry i - 1 is of
                the document of segment i. Each piece of a document that is cut has the entry.
            limits: for keys of a document, the most in a sequence, such as ``{"images": 32}``. The
                values are ints, and are listed only if `carry` has the key. Each piece of a
                document counts in full. A sequence that reached a limit is padded.
            align: each document begins at a multiple of `align` tokens, after padding.
            pad_to: the length of a sequence is padded to a multiple of `pad_to`; by default to
                `seq_len`. Sequences then differ in length, unless `pad_to` is at least `seq_len`.
            too_long: for documents longer than a sequence. ``"truncate"`` keeps the first `seq_len`
                tokens, ``"drop"`` none. ``"too_long"`` in a sequence then counts such documents of
                the epoch so far. A dropped document after the last sequence is not counted.

        Raises:
            ValueError: an argument is out of range, or a document is not made of integers, lacks a
                key, has other keys, or alone exceeds a limit.

        Example:
            >>> from headrace import from_async_iterable
            >>> async def documents():
            ...     for document in ([1, 2, 3], [4, 5, 6], [7]): yield document
            >>> packed = list(from_async_iterable(documents).pack(4, "first_fit"))
            >>> [sequence["tokens"].tolist() for sequence in packed]
            [[1, 2, 3, 7], [4, 5, 6, 0]]
            >>> packed[0]["segment_ids"].tolist(), packed[0]["positions"].tolist()
            ([1, 1, 1, 2], [0, 1, 2, 0])
        """
        seq_len = whole_number("seq_len", seq_len, 1)
        window = whole_number("window", window, 1)
        choices = (
            get_args(PackStrategy),
            (None, *get_args(PackLabels)),
            get_args(PackTooLong),
        )
        if not all(map(operator.contains, choices, (strategy, labels, too_long))):
            raise ValueError(
                f"strategy={strategy!r}, labels={labels!r} and too_long={too_long!r} must be of "
                f"{choices}"
            )
        made = ("segment_ids", "positions", "too_long", *(("labels",) if labels else ()))
        names = [*fields, *carry, *made]
        if isinstance(fields, str) or not fields or len({*names}) < len(names):
            raise ValueError(
                f"fields={fields!r} must be keys, that of the tokens first, without carry={carry!r}"
                f" and {made}"
            )
        return OperatedStream(
            self,
            f"{{}}.pack({seq_len}, {strategy!r})",
            Pack,
            seq_len=seq_len,
            strategy=str(strategy),
            window=window,
            names=tuple(fields),
            labels=labels,
            carry=tuple(carry),
            limits={key: whole_number(key, most) for key, most in (limits or {}).items()},
            align=whole_number("align", align, 1),
            pad_to=seq_len if pad_to is None else whole_number("pad_to", pad_to, 1),
            too_long=str(too_long),
        )

    def __getitem__(self, index: object) -> NoReturn:
        raise TypeError(
            f"{dataset_repr(self)} is a stream, without indices: iterate over it"
        )

    def __iter__(self) -> Iterator[T_co]:
        return SyncStream(*plan(self))


class OperatedStream(FollowsEpoch, AsyncIterableDataset[T_co]):
    """An operation on a stream, or on several streams.

    Iterators have the class `operator` and are made from `dataset` and `options`, with an `order`
    in place of a `seed`. `shown` is the repr, with ``{}`` in place of the repr of `dataset`.
    """

    def __init__(self, dataset: Any, shown: str, operator: Any, **options: Any) -> None:
        self.dataset = dataset
        self._shown = shown
        self._operator = operator
        self.ranks_differ: bool = operator.ranks_differ
        self._options = options
        self.equal_on_ranks = _is_endless(self)

    def __repr__(self) -> str:
        return self._shown.replace("{}", dataset_repr(self.dataset), 1)

    def __aiter__(self) -> AsyncIterator[T_co]:
        options = dict(self._options)
        if "seed" in options:
            options["order"] = self._order_for(options.pop("seed"))
        iterator: AsyncIterator[T_co] = self._operator(self.dataset, **options)
        return iterator


def _is_endless(stream: Any) -> bool:
    """Return whether a stream is known to have no end."""
    operator = getattr(stream, "_operator", None)
    if operator is Take:
        return False
    if operator is Repeat and stream._options["times"] is None:
        return True
    has_to_end = all if operator is Mix and stream._options["stop"] == "first" else any
    return has_to_end(map(_is_endless, children(stream)))


class MappedStream(MapComposition, OperatedStream[T_co]):
    """A stream with a function applied to each sample.

    A loader applies the last functions of an expression together with `transform`. Functions before
    another operation run in the loader's workers before batching.
    """

    def __init__(self, dataset: object, fn: Callable[[Any], object]) -> None:
        check_function("the function of map", fn)
        super().__init__(
            dataset,
            f"{{}}.map({function_name(fn)})",
            SampleFunctions,
            functions=(SampleFunction(fn, False),),
        )
        self.fn = fn
        self.ranks_differ = False


class SplitStream(OperatedStream[T_co]):
    """A rank's part of a stream; made by `split`.

    Every rank reads the whole stream.
    """

    splits_by_rank = True
    splits_over_workers = True  # in a torch loader each worker reads its own part
    # Each rank reads the whole stream, so a position is valid for all ranks.
    divides_samples = True

    def __init__(self, dataset: Any, ranks: RankChoice) -> None:
        super().__init__(dataset, "{}.split()", Split)
        self._ranks = ranks
        self.equal_on_ranks = True

    def __len__(self) -> int:
        shard = self._ranks.shard()
        with bound(undivided, shard.count > 1):
            return len(self.dataset) // shard.count

    def __aiter__(self) -> AsyncIterator[T_co]:
        return Split(self.dataset, self._ranks.shard().in_worker())


class ConcatenatedStreams(ConcatComposition, FollowsEpoch, AsyncIterableDataset[object]):
    """Streams in succession; made by `headrace.concat` or torch's `ChainDataset`."""

    def __init__(self, datasets: Sequence[object]) -> None:
        self.sources = tuple(datasets)

    def __aiter__(self) -> AsyncIterator[object]:
        return Concat(self.sources, numbered=self.numbered)
