"""Streams of parts (shards, row groups): the order of an epoch, and what of it each rank and worker reads."""

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
    """Reads its parts in the order of the epoch, which is the same for all ranks: some parts each, or some samples.

    Args:
        ranks: which rank's part of the stream is read.
        shuffle: whether the parts come in a new order at each epoch.
        buffer_size: samples of which one at random goes out for each that comes in; 0 to keep their order.
        seed: what both orders derive from, together with the epoch.
        by_sample: whether each reader reads all parts and gives every n-th sample, or reads every n-th part.
        remainder: how readers come to the same number of samples.

    Raises:
        ValueError: `remainder` is no such policy.
    """

    splits_by_rank = True

    splits_over_workers = True
    """In a torch loader each worker reads its own part."""

    def __init__(
        self, *, ranks: RankChoice, shuffle: bool, buffer_size: int, seed: int, by_sample: bool, remainder: Remainder
    ) -> None:
        check_remainder(remainder)
        self._ranks = ranks
        self._shuffle, self._buffer_size, self._seed = shuffle, buffer_size, seed
        self._by_sample, self._remainder = by_sample, remainder

    @classmethod
    async def open(cls, shards: Shards, **options: Any) -> Self:
        """Make a dataset without blocking the caller's loop; arguments and errors are those of the class."""
        make: Callable[..., Self] = cls  # whose own arguments begin with the shards, not with `place`
        return await anyio.to_thread.run_sync(functools.partial(make, shards, **options), abandon_on_cancel=True)

    def __aiter__(self) -> AsyncIterator[T_co]:
        """Begin a pass."""
        if self._shuffle or self._buffer_size:
            self._warn_of_repeated_order()
        rank, order = self._ranks.shard(), self._order()
        shard = rank.in_worker()
        begin = functools.partial(self._begin, shard, order)
        length = self._length(rank, shard, order)
        stream = begin() if length is None else EqualLength(begin, length, self._remainder)
        if self._buffer_size:
            stream = ShuffleBuffer(stream, self._buffer_size, self._order_seed(self._seed, 1 + shard.index))
        return stream

    def _order(self) -> list[Any]:
        order = list(self._parts())
        if self._shuffle:
            random.Random(self._order_seed(self._seed)).shuffle(order)
        return order

    def _begin(self, shard: ShardOptions, order: list[Any]) -> AsyncIterator[Any]:
        if self._by_sample and shard.count > 1:
            return ShardIterator(self._read(order), shard, self._remainder)
        return self._read(order[shard.index :: shard.count])

    def _needs_evening(self, rank: ShardOptions) -> bool:
        """Whether ranks would give different numbers of samples; workers of one rank may."""
        return rank.count > 1 and not self._by_sample and self._remainder != "keep"

    @abstractmethod
    def _parts(self) -> Sequence[Any]:
        """All parts, in the order in which they were given."""

    @abstractmethod
    def _read(self, parts: Sequence[Any]) -> AsyncIterator[Any]:
        """Begin to read the samples of some parts."""

    @abstractmethod
    def _length(self, rank: ShardOptions, shard: ShardOptions, order: list[Any]) -> int | None:
        """How many samples a shard (a rank, or a worker of it) has to give, so that all give the same; None for all."""
