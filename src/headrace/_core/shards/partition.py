"""Base of streams of parts (shards, row groups): the order of an epoch, and the division among ranks and workers."""

from __future__ import annotations

import functools
import random
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from headrace._core.interface.distributed import RankChoice, Remainder, ShardOptions, check_remainder, current_lane
from headrace._core.interface.iterable_style import AsyncIterableDataset
from headrace._core.interface.operators import EqualLength, Split, Take
from headrace._core.interface.order import FollowsEpoch, Order, current_repetition
from headrace._core.interface.resumable import ResumableIterator, State, expect_int, expect_state
from headrace._core.interface.shuffle_buffer import ShuffleBuffer
from headrace._core.shards.discovery import Shard
from headrace._core.shards.part_iterator import Occasion, PartIterator
from headrace._core.shards.positions import Part, PartPosition, names_digest
from headrace._core.shards.redistribution import Dealing, Division, Readers, deal_parts
from headrace._core.shards.windows import WindowRest

T_co = TypeVar("T_co", covariant=True)


class PartStream(FollowsEpoch, AsyncIterableDataset[T_co]):
    """Base of streams that read parts in the order of the epoch, which is the same on all ranks.

    Args:
        ranks: the rank whose share is read.
        shuffle: whether to shuffle the parts at each epoch.
        buffer_size: samples of the shuffle buffer; 0 for none.
        seed: seed of both orders, together with the epoch.
        by_sample: every reader reads all parts and yields every n-th sample, instead of reading every n-th part.
        remainder: policy for readers with unequal numbers of samples.

    Raises:
        ValueError: unknown `remainder`.
    """

    splits_by_rank = True

    splits_over_workers = True
    """In a torch loader each worker reads its own share."""

    parts_name: ClassVar[str]
    """What the parts are, in errors."""

    split_by_sample: ClassVar[str]
    """The value of ``split=`` with which each reader reads all parts, in errors."""

    def __init__(
        self, *, ranks: RankChoice, shuffle: bool, buffer_size: int, seed: int, by_sample: bool, remainder: Remainder
    ) -> None:
        check_remainder(remainder)
        self._ranks = ranks
        self._shuffle, self._buffer_size, self._seed = shuffle, buffer_size, seed
        self._by_sample, self._remainder = by_sample, remainder

    def __aiter__(self) -> AsyncIterator[T_co]:
        """Start a pass."""
        rank = self._ranks.shard()
        return PartIterator(
            _Reader(self, rank, rank.in_worker()), Occasion(self._current_epoch(), current_repetition.get())
        )

    def __len__(self) -> int:
        """The number of samples of this rank in this epoch.

        Raises:
            TypeError: it is unknown.
        """
        rank, order = self._ranks.shard(), self._current_order()
        shard = rank if current_lane.get() is None else rank.in_worker()
        length = self._length(rank, shard, order)
        if length is not None:
            return length
        counts = self._sample_counts()
        if counts is None:
            raise TypeError(f"the length of this {type(self).__name__} is unknown: it has neither counts nor an index")
        return self._samples_in(rank, shard, order, counts)

    @property
    def divides_samples(self) -> bool:
        """Whether each rank reads the whole stream, so that a position is one of all ranks."""
        return self._by_sample and not self._buffer_size

    @property
    def not_by_shards(self) -> str | None:
        """The reason why lanes cannot each read some of the parts; None if they can."""
        return "split by samples" if self._by_sample else None

    def most_lanes(self) -> int:
        """The number of parts that every rank has."""
        return self._part_count() // self._ranks.shard().count

    def _current_order(self) -> list[int]:
        return self._order(self._current_epoch(), current_repetition.get())

    def _order(self, epoch: int, repetition: int) -> list[int]:
        """The numbers of all parts."""
        order = list(range(self._part_count()))
        if self._shuffle:
            random.Random(Order(self._seed, epoch, repetition).key()).shuffle(order)
        return order

    def _options(self) -> dict[str, object]:
        """What must be the same where a state is loaded."""
        return {
            "parts": self._parts_digest,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "buffer_size": self._buffer_size,
            "remainder": self._remainder,
            "split": "samples" if self._by_sample else "shards",
        }

    def _sample_counts(self) -> Sequence[int] | None:
        """The number of samples in each part, if they are known."""
        return None

    def _needs_equal_length(self, rank: ShardOptions) -> bool:
        """Whether ranks would otherwise yield different numbers of samples. Workers of one rank may."""
        return rank.count > 1 and not self._by_sample and self._remainder != "keep"

    @functools.cached_property
    def _parts_digest(self) -> str:
        return names_digest(self._part_names())

    @abstractmethod
    def _part_count(self) -> int:
        """Number of parts."""

    @abstractmethod
    def _part_names(self) -> Iterable[str]:
        """The names of the parts, in the order given by the user, without secrets."""

    @abstractmethod
    def _part_shard(self, part: int) -> Shard:
        """The object that a part is in."""

    @abstractmethod
    def _read(self, parts: Sequence[Part]) -> ResumableIterator[object]:
        """Start reading the samples of some parts."""

    def _length(self, rank: ShardOptions, shard: ShardOptions, order: list[int]) -> int | None:
        """Number of samples that a shard (a rank, or a worker of it) must yield; None if it yields all it reads."""
        counts = self._sample_counts() if self._needs_equal_length(rank) else None
        return None if counts is None else self._samples_in(rank, shard, order, counts)

    def _samples_in(self, rank: ShardOptions, shard: ShardOptions, order: list[int], counts: Sequence[int]) -> int:
        """The number of samples of a rank, or of a worker or lane of it, by the number in each part.

        Raises:
            ValueError: there are fewer parts than readers, or one of these has no sample to repeat.
        """
        readers = shard.equalized(rank.count)
        lengths = [sum(counts[part] for part in order[reader :: shard.count]) for reader in readers]
        if self._by_sample:
            whole, rest = divmod(sum(lengths), shard.count)
            over = shard.index < rest if self._remainder == "keep" else rest > 0 and self._remainder != "drop"
            return whole + over
        if self._remainder == "keep":
            return lengths[readers.index(shard.index)]
        if 1 < shard.count > len(order):
            raise ValueError(
                f"{len(order)} {self.parts_name} cannot be split over {shard.count} readers; "
                f"use split={self.split_by_sample!r}"
            )
        if self._remainder == "drop":
            return min(lengths)
        if not min(lengths) and max(lengths):
            reader = readers[lengths.index(0)]
            raise ValueError(
                f"the {self.parts_name} of reader {reader} of {shard.count} have no samples, so that "
                f"remainder={self._remainder!r} has none to repeat: use fewer ranks or workers, write more "
                f"{self.parts_name}, or set split={self.split_by_sample!r}"
            )
        return max(lengths)


class _Reader:
    """One reader of a stream; a `PartReader`."""

    def __init__(self, stream: PartStream[object], rank: ShardOptions, shard: ShardOptions) -> None:
        self.name = type(stream).__name__
        self.index = shard.index
        self.readers = Readers(shard.count, rank.count)
        self.parts = stream._part_count()
        self.alike = stream._by_sample and not stream._buffer_size
        self._stream, self._rank, self._shard = stream, rank, shard

    def options(self) -> Mapping[str, object]:
        return self._stream._options()

    def start(
        self, occasion: Occasion, divisions: Sequence[Division], leaf: State | None = None
    ) -> ResumableIterator[object]:
        stream, shard = self._stream, self._shard
        order = stream._order(*occasion)
        own = order if stream._by_sample else order[shard.index :: shard.count]
        if divisions:
            dealt = deal_parts(self._dealing(order), divisions, self.readers)[self.index]
            parts, length = dealt.parts, dealt.length
            if stream._by_sample or (not parts and length and stream._remainder in ("pad", "repeat")):
                parts = own
            for part in parts:
                if isinstance(part, PartPosition):
                    part.version_of(stream._part_shard(part.part))
        else:
            parts, length = own, stream._length(self._rank, shard, order)
        samples = self._unbuffered(shard, parts, length, leaf)
        if not stream._buffer_size:
            return samples
        return ShuffleBuffer(samples, stream._buffer_size, self._buffer_order(occasion, self.index))

    def start_window(
        self, occasion: Occasion, divisions: Sequence[Division], window: WindowRest
    ) -> ResumableIterator[Any]:
        stream = self._stream
        order = stream._order(*occasion)
        shard = ShardOptions(window.index, window.readers.count)
        before = expect_state(window.shuffle, "inner")
        length = expect_int(before, "length") if before.get("operation") == EqualLength.operation else None
        parts: Sequence[Part] = order
        if not stream._by_sample:
            parts = deal_parts(self._dealing(order), divisions[: window.divisions], window.readers)[shard.index].parts
        rest = expect_state(window.shuffle, "rest")
        count, errors = expect_int(rest, "length"), expect_int(rest, "errors")
        samples = Take(self._unbuffered(shard, parts, length), count)
        shuffled = ShuffleBuffer(samples, stream._buffer_size, self._buffer_order(occasion, shard.index))
        read: State = {"given": errors + window.start, "errors": errors}
        inner: State = {"operation": Take.operation, "count": count, "left": count, "inner": before}
        shuffled.load_state_dict({**window.shuffle, **read, "inner": inner})
        return Take(shuffled, window.size)

    def own_windows(
        self, occasion: Occasion, divisions: Sequence[Division], windows: Sequence[WindowRest]
    ) -> list[WindowRest]:
        if not windows:
            return []
        dealing = self._dealing(self._stream._order(*occasion))
        own = deal_parts(dealing, divisions, self.readers, [window.size for window in windows])[self.index].windows
        return [windows[number].part(start, stop) for number, start, stop in own]

    def _unbuffered(
        self, shard: ShardOptions, parts: Sequence[Part], length: int | None, leaf: State | None = None
    ) -> ResumableIterator[object]:
        stream = self._stream

        def start() -> ResumableIterator[object]:
            samples = stream._read(parts)
            if leaf is not None:
                samples.load_state_dict(leaf)
            return samples

        def start_share() -> ResumableIterator[object]:
            return Split(start, shard, stream._remainder) if stream._by_sample else start()

        return start_share() if length is None else EqualLength(start_share, length, stream._remainder)

    def _dealing(self, order: Sequence[int]) -> Dealing:
        if self._stream._by_sample:
            return Dealing((), None, self._stream._remainder)  # each reader reads all parts
        return Dealing(order, self._stream._sample_counts(), self._stream._remainder)

    def _buffer_order(self, occasion: Occasion, index: int) -> Order:
        return Order(self._stream._seed, occasion.epoch, occasion.repetition, 1 + index)
