"""Streams of parts, as shards: options, the order of an epoch, the share of each reader, and its position."""

from __future__ import annotations

import functools
import random
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from typing import Any, ClassVar

from headrace._core.ranks.distributed import RankChoice, ShardOptions
from headrace._core.shards.positions import names_digest
from headrace._core.shards.reading import PartReader
from headrace._core.streams.epochs import FollowsEpoch, Order, checked_seed
from headrace._core.streams.iterable_style import AsyncIterableDataset
from headrace._core.streams.kinds import T_co
from headrace._core.streams.operators import ShuffleBuffer
from headrace._core.streams.resumable import ResumableIterator, State, expect
from headrace._core.text import whole_number
from headrace.errors import StateError


class PartStream(FollowsEpoch, AsyncIterableDataset[T_co]):
    """Base of streams that read parts in the order of the epoch, which is the same on all ranks.

    Each rank reads every W-th part. Ranks may have different numbers of samples.
    """

    splits_by_rank = True

    splits_over_workers = True
    """In a torch loader each worker reads its own share."""

    ranks_differ = True
    """Whether ranks may have different numbers of samples."""

    parts_name: ClassVar[str]
    """What the parts are, in errors."""

    _parts: Sequence[Any]

    def __init__(self, ranks: RankChoice, shuffle: bool, buffer_size: int, seed: int | None) -> None:
        self._ranks = ranks
        self._shuffle = bool(shuffle)
        self._buffer_size = whole_number("buffer_size", buffer_size)
        self._seed = checked_seed(seed)

    def __aiter__(self) -> AsyncIterator[T_co]:
        """Start a pass."""
        rank = self._ranks.shard()
        if 1 < rank.count > len(self._parts):
            raise ValueError(
                f"{len(self._parts)} {self.parts_name} cannot be divided among {rank.count} ranks; apply .split() "
                f"to the stream"
            )
        return PartIterator(self, rank, rank.in_worker(), self._order_for(self._seed))

    def _parts_of(self, reader: ShardOptions, order: Order) -> list[int]:
        """The numbers of the parts of one reader, in the order of the epoch."""
        parts = list(range(len(self._parts)))
        if self._shuffle:
            random.Random(order.key()).shuffle(parts)
        return parts[reader.index :: reader.count]

    def _reader_of(self, reader: ShardOptions, order: Order) -> PartReader[Any]:
        """Start to read the samples of one reader."""
        samples = self._read(self._parts_of(reader, order))
        samples.name_of = self._name_of
        return samples

    def _options(self) -> dict[str, object]:
        """What must be the same where a state is loaded."""
        return {"parts": self._parts_digest, "shuffle": self._shuffle, "buffer_size": self._buffer_size}

    @functools.cached_property
    def _parts_digest(self) -> str:
        return names_digest(self._part_names())

    @abstractmethod
    def _part_names(self) -> Iterable[str]:
        """The names of the parts, in the order given by the user, without secrets."""

    def _name_of(self, part: int, number: int) -> str:
        """The file and the place of the sample with a number in a part, in words."""
        raise NotImplementedError  # each kind of part has its own

    def _read(self, parts: Sequence[int]) -> PartReader[Any]:
        """Start reading the samples of some parts."""
        raise NotImplementedError  # each kind of part has its own


class PartIterator(ResumableIterator[T_co]):
    """The samples of one reader in one epoch; its state says which stream, reader and epoch it is of.

    The state of another epoch can be loaded: the iterator then continues in that epoch's order. The reader is the rank,
    or a worker of the rank.
    """

    def __init__(self, stream: PartStream[T_co], rank: ShardOptions, reader: ShardOptions, order: Order) -> None:
        self._stream = stream
        self._reader = reader
        self._order = order
        self._read_by = [reader.index, reader.count, rank.count]
        self._fixed: State | None = None  # the part of the state that stays the same
        self._samples = self._start()

    def __anext__(self) -> Awaitable[T_co]:
        return self._samples.__anext__()

    def _options(self) -> dict[str, object]:
        return {**self._stream._options(), "seed": self._order.seed}

    def state_dict(self) -> State:
        if self._fixed is None:
            self._fixed = {
                "of": self._options(),
                "reader": self._read_by,
                "epoch": self._order.epoch,
                "repetition": self._order.repetition,
            }
        return {**self._fixed, "stream": self._samples.state_dict()}

    def load_state_dict(self, state: State) -> None:
        stream, name = self._stream, type(self._stream).__name__
        saved, present = expect(state, "of", dict), self._options()
        different = [option for option, now in present.items() if saved.get(option) != now]
        if different:
            words = {"parts": f"the list of {stream.parts_name} (number, and checksum of names)"}
            values = ((words.get(one, one), saved.get(one), present[one]) for one in different)
            listed = "; ".join(f"{what} was {old!r}, and is {new!r}" for what, old, new in values)
            raise StateError(f"the state does not fit this {name}: {listed}")
        self._order = self._order._replace(
            epoch=expect(state, "epoch", int), repetition=expect(state, "repetition", int)
        )
        self._fixed = None
        if (saved_by := expect(state, "reader", list, length=3)) != self._read_by:
            raise StateError(
                f"the state does not fit this {name}: it was saved by {_reader_name(*saved_by)}, and this is "
                f"{_reader_name(*self._read_by)}. Use as many as before; or a stream with .split() as its last "
                f"operation, or shards with an index, which any number of ranks can continue"
            )
        self._samples = self._start()
        self._samples.load_state_dict(expect(state, "stream", dict))

    def origin(self, number: int) -> Any:
        return self._samples.origin(number)

    async def aclose(self) -> None:
        await self._samples.aclose()

    def _start(self) -> ResumableIterator[T_co]:
        """Start to read; nothing is read before the first `anext`."""
        buffer_size = self._stream._buffer_size
        samples = self._stream._reader_of(self._reader, self._order)
        if not buffer_size:
            return samples
        return ShuffleBuffer(samples, buffer_size, self._order._replace(number=1 + self._reader.index))


def _reader_name(index: int, count: int, ranks: int) -> str:
    if count == ranks:
        return f"rank {index} of {ranks}"
    return f"reader {index} of {count}, the workers of {ranks} ranks"
