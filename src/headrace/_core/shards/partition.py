"""Base of streams of parts (shards, row groups): the order of an epoch, and the division among ranks and workers."""

from __future__ import annotations

import functools
import random
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Self, TypeVar

import anyio.to_thread

from headrace._core.interface.distributed import RankChoice, Remainder, ShardOptions, check_remainder
from headrace._core.interface.epochs import FollowsEpoch, Order, order_seed, repetition
from headrace._core.interface.equal_length import EqualLength
from headrace._core.interface.iterable_style import AsyncIterableDataset
from headrace._core.interface.iterators import ShardIterator
from headrace._core.interface.shuffle_buffer import ShuffleBuffer
from headrace._core.interface.stream_state import ResumableIterator
from headrace._core.shards.discovery import Shards
from headrace._core.shards.part_iterator import PartIterator
from headrace._core.shards.positions import Share, names_digest

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

    def __init__(
        self, *, ranks: RankChoice, shuffle: bool, buffer_size: int, seed: int, by_sample: bool, remainder: Remainder
    ) -> None:
        check_remainder(remainder)
        self._ranks = ranks
        self._shuffle, self._buffer_size, self._seed = shuffle, buffer_size, seed
        self._by_sample, self._remainder = by_sample, remainder

    @classmethod
    async def open(cls, shards: Shards, **options: Any) -> Self:
        """Construct without blocking the caller's loop; arguments and errors are those of the class."""
        make: Callable[..., Self] = cls  # the subclass takes shards first, not `ranks`
        return await anyio.to_thread.run_sync(functools.partial(make, shards, **options), abandon_on_cancel=True)

    def __aiter__(self) -> AsyncIterator[T_co]:
        """Start a pass."""
        if self._shuffle or self._buffer_size:
            self._warn_of_repeated_order()
        rank = self._ranks.shard()
        shard = rank.in_worker()
        return PartIterator(
            type(self).__name__,
            functools.partial(self._options, shard),
            functools.partial(self._start, rank, shard),
            epoch=self._current_epoch(),
            repetition=repetition(),
        )

    @property
    def divides_samples(self) -> bool:
        """Whether each rank reads the whole stream, so that a position is one of all ranks."""
        return self._by_sample

    def _start(self, rank: ShardOptions, shard: ShardOptions, epoch: int, repetition: int) -> ResumableIterator[Any]:
        order = self._order(epoch, repetition)
        start = functools.partial(self._start_share, shard, order)
        length = self._length(rank, shard, order)
        stream = start() if length is None else EqualLength(start, length, self._remainder)
        if self._buffer_size:
            stream = ShuffleBuffer(stream, self._buffer_size, Order(self._seed, epoch, repetition, 1 + shard.index))
        return stream

    def _start_share(self, shard: ShardOptions, order: list[int]) -> ResumableIterator[Any]:
        if self._by_sample and shard.count > 1:
            return ShardIterator(functools.partial(self._read, Share(order)), shard, self._remainder)
        return self._read(Share(order, shard.index, shard.count))

    def _current_order(self) -> list[int]:
        return self._order(self._current_epoch(), repetition())

    def _order(self, epoch: int, repetition: int) -> list[int]:
        """The numbers of all parts."""
        order = list(range(self._part_count()))
        if self._shuffle:
            random.Random(order_seed(self._seed, epoch, repetition)).shuffle(order)
        return order

    def _options(self, shard: ShardOptions) -> dict[str, object]:
        """What must be the same where a state is loaded."""
        options: dict[str, object] = {
            "parts": self._parts_digest,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "buffer_size": self._buffer_size,
            "remainder": self._remainder,
            "split": "samples" if self._by_sample else "shards",
        }
        return options if self._by_sample else {**options, "reader": shard.index, "readers": shard.count}

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
    def _read(self, share: Share) -> ResumableIterator[Any]:
        """Start reading the samples of a share."""

    @abstractmethod
    def _length(self, rank: ShardOptions, shard: ShardOptions, order: list[int]) -> int | None:
        """Number of samples that a shard (a rank, or a worker of it) must yield; None if it yields all it reads."""
