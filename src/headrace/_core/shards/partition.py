"""Base of streams of parts (shards, row groups): the order of an epoch, and the division among ranks and workers."""

from __future__ import annotations

import functools
import random
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Self, TypeVar

import anyio.to_thread

from headrace._core.interface.distributed import RankChoice, Remainder, ShardOptions, check_remainder
from headrace._core.interface.epochs import FollowsEpoch
from headrace._core.interface.iterable_style import AsyncIterableDataset
from headrace._core.interface.iterators import EqualLength, ShardIterator, ShuffleBuffer
from headrace._core.shards.discovery import Shards

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
        rank, order = self._ranks.shard(), self._order()
        shard = rank.in_worker()
        start = functools.partial(self._start, shard, order)
        length = self._length(rank, shard, order)
        stream = start() if length is None else EqualLength(start, length, self._remainder)
        if self._buffer_size:
            stream = ShuffleBuffer(stream, self._buffer_size, self._order_seed(self._seed, 1 + shard.index))
        return stream

    def _order(self) -> list[Any]:
        order = list(self._parts())
        if self._shuffle:
            random.Random(self._order_seed(self._seed)).shuffle(order)
        return order

    def _start(self, shard: ShardOptions, order: list[Any]) -> AsyncIterator[Any]:
        if self._by_sample and shard.count > 1:
            return ShardIterator(self._read(order), shard, self._remainder)
        return self._read(order[shard.index :: shard.count])

    def _needs_equal_length(self, rank: ShardOptions) -> bool:
        """Whether ranks would otherwise yield different numbers of samples. Workers of one rank may."""
        return rank.count > 1 and not self._by_sample and self._remainder != "keep"

    @abstractmethod
    def _parts(self) -> Sequence[Any]:
        """All parts, in the order given by the user."""

    @abstractmethod
    def _read(self, parts: Sequence[Any]) -> AsyncIterator[Any]:
        """Start reading the samples of some parts."""

    @abstractmethod
    def _length(self, rank: ShardOptions, shard: ShardOptions, order: list[Any]) -> int | None:
        """Number of samples that a shard (a rank, or a worker of it) must yield; None if it yields all it reads."""
