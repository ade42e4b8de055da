"""Streams of parts (shards, row groups): the order of an epoch, and what of it each rank and worker reads."""

from __future__ import annotations

import functools
import random
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Self, TypeVar

import anyio.to_thread

from headrace.datasets.base import AsyncIterableDataset
from headrace.datasets.passes import Evened, Parted, Shuffled
from headrace.datasets.ranks import Place, Uneven, check_uneven
from headrace.datasets.shards import Shards
from headrace.sampling import batch_seed

__all__ = ["PartStream"]

T_co = TypeVar("T_co", covariant=True)


class PartStream(AsyncIterableDataset[T_co]):
    """Reads its parts in the order of the epoch, which is the same for all ranks: some parts each, or some samples.

    Args:
        place: which part of the stream this process reads.
        shuffle: whether the parts come in a new order at each epoch.
        buffer_size: samples of which one at random goes out for each that comes in; 0 to keep their order.
        seed: what both orders derive from, together with the epoch.
        by_sample: whether each reader reads all parts and gives every n-th sample, or reads every n-th part.
        uneven: how readers come to the same number of samples.

    Raises:
        ValueError: `uneven` is no such policy.
    """

    wants_epoch = True
    """Loaders tell it the epoch before each, because its order depends on it."""

    splits_over_workers = True
    """In a torch loader each worker reads its own part."""

    def __init__(
        self, *, place: Place, shuffle: bool, buffer_size: int, seed: int, by_sample: bool, uneven: Uneven
    ) -> None:
        check_uneven(uneven)
        self._place = place
        self._shuffle, self._buffer_size, self._seed = shuffle, buffer_size, seed
        self._by_sample, self._uneven = by_sample, uneven
        self._epoch = 0

    @classmethod
    async def open(cls, shards: Shards, **options: Any) -> Self:
        """Make a dataset without blocking the caller's loop; arguments and errors are those of the class."""
        make: Callable[..., Self] = cls  # whose own arguments begin with the shards, not with `place`
        return await anyio.to_thread.run_sync(functools.partial(make, shards, **options), abandon_on_cancel=True)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next; a loader does so by itself."""
        self._epoch = epoch

    def __aiter__(self) -> AsyncIterator[T_co]:
        """Begin a pass."""
        place, order = self._place.in_worker(), self._order()
        begin = functools.partial(self._begin, place, order)
        length = self._length(place, order)
        stream = begin() if length is None else Evened(begin, length, self._uneven)
        if self._buffer_size:
            stream = Shuffled(stream, self._buffer_size, batch_seed(self._seed, self._epoch, 1 + place.number))
        return stream

    def _order(self) -> list[Any]:
        order = list(self._parts())
        if self._shuffle:
            random.Random(batch_seed(self._seed, self._epoch, 0)).shuffle(order)
        return order

    def _begin(self, place: Place, order: list[Any]) -> AsyncIterator[Any]:
        if self._by_sample and place.count > 1:
            return Parted(self._read(order), place, self._uneven)
        return self._read(order[place.number :: place.count])

    @property
    def _needs_evening(self) -> bool:
        """Whether ranks would give different numbers of samples; workers of one rank may."""
        return self._place.count > 1 and not self._by_sample and self._uneven != "keep"

    @abstractmethod
    def _parts(self) -> Sequence[Any]:
        """All parts, in the order in which they were given."""

    @abstractmethod
    def _read(self, parts: Sequence[Any]) -> AsyncIterator[Any]:
        """Begin to read the samples of some parts."""

    @abstractmethod
    def _length(self, place: Place, order: list[Any]) -> int | None:
        """How many samples a place has to give, so that all give the same; None for what there are."""
