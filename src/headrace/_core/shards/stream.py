"""Streams of parts (shards, row groups): options, the order of an epoch, the share of each reader, and its position."""

from __future__ import annotations

import contextlib
import functools
import random
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypedDict, TypeVar, Unpack

from headrace._core.ranks.distributed import RankChoice, Remainder, ShardOptions, check_remainder
from headrace._core.shards.compression import refuse_unsupported
from headrace._core.shards.discovery import Shard, Shards, find_shards
from headrace._core.shards.positions import PartPosition, names_digest
from headrace._core.shards.reading import Decoder, PartReader, ReadAhead, ShardReader
from headrace._core.store.store import StoreLike
from headrace._core.streams.epochs import FollowsEpoch, Order
from headrace._core.streams.iterable_style import AsyncIterableDataset
from headrace._core.streams.kinds import signature_of
from headrace._core.streams.operators import EqualLength, ShuffleBuffer
from headrace._core.streams.resumable import ResumableIterator, State, expect
from headrace._core.text import check_keywords, check_number, warn_user
from headrace.errors import StateError

T_co = TypeVar("T_co", covariant=True)

SHARDS_IN_PARALLEL = 4
REQUESTS_PER_SHARD = 4
# Bytes of one request. Over loopback, nginx: 4 requests at once give 2.4 GB/s in pieces of 2 MiB, 1.4 GB/s in pieces
# of 8 MiB, and one GET streamed for each of 4 shards 2.1 GB/s (`benchmarks/tar_stream.py`); a store with 30 ms to the
# first byte gives about 0.5 GB/s with the 16 requests of the defaults.
CHUNK_BYTES = 2 << 20
# After the first free block of this size, the greatest that counts, glibc keeps up to twice as much of what is freed.
# Else it returns the memory of chunks and samples to the kernel all the time, for which a sample of 56 KB has 3 page
# faults, and a loader 0.86 of the rate. The environment's MALLOC_TRIM_THRESHOLD_ and the like take precedence.
_KEPT_BYTES = (32 << 20) - (64 << 10)


class PartStream(FollowsEpoch, AsyncIterableDataset[T_co]):
    """Base of streams that read parts in the order of the epoch, which is the same on all ranks."""

    splits_by_rank = True

    splits_over_workers = True
    """In a torch loader each worker reads its own share."""

    parts_name: ClassVar[str]
    """What the parts are, in errors."""

    _remainder_warned = False
    _counts_remedy = "With filters=, only reading shows them. Apply"

    def __init__(
        self,
        ranks: RankChoice,
        shuffle: bool,
        buffer_size: int,
        seed: int | None,
        remainder: Remainder,
    ) -> None:
        check_remainder(remainder)
        self._ranks = ranks
        self._shuffle, self._buffer_size, self._seed = bool(shuffle), buffer_size, seed
        self._remainder = remainder

    def __aiter__(self) -> AsyncIterator[T_co]:
        """Start a pass."""
        rank = self._ranks.shard()
        return PartIterator(self, rank, rank.in_worker(), self._order_for(self._seed))

    def __len__(self) -> int:
        """The number of samples of this rank in this epoch.

        Raises:
            TypeError: it is unknown.
        """
        rank, order = self._ranks.shard(), self._parts_in(self._order_for(self._seed))
        self._counts_to_equalize(rank)
        counts = self._sample_counts()
        if counts is None:
            what = f"the length of this {type(self).__name__} is unknown"
            raise TypeError(f"{what}, since the numbers of samples in its {self.parts_name} are")
        return self._samples_in(rank, rank, order, counts)

    def _parts_in(self, order: Order) -> list[int]:
        """The numbers of all parts."""
        parts = list(range(self._part_count()))
        if self._shuffle:
            random.Random(order.key()).shuffle(parts)
        return parts

    def _options(self) -> dict[str, object]:
        """What must be the same where a state is loaded."""
        return {
            "parts": self._parts_digest,
            "shuffle": self._shuffle,
            "buffer_size": self._buffer_size,
            "remainder": self._remainder,
        }

    def _sample_counts(self) -> Sequence[int] | None:
        """The number of samples in each part, if they are known."""
        return None

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
    def _name_of(self, part: int, number: int) -> str:
        """The file and the place of the sample with a number in a part, in words."""

    @abstractmethod
    def _read(self, parts: Sequence[int]) -> PartReader[Any]:
        """Start reading the samples of some parts."""

    def _length(self, rank: ShardOptions, shard: ShardOptions, order: list[int]) -> int | None:
        """Number of samples that a shard (a rank, or a worker of it) must yield; None if it yields all it reads."""
        counts = self._counts_to_equalize(rank)
        return None if counts is None else self._samples_in(rank, shard, order, counts)

    def _counts_to_equalize(self, rank: ShardOptions) -> Sequence[int] | None:
        """The number of samples in each part, if ranks would otherwise yield different numbers. Workers of one may."""
        if rank.count == 1 or self._remainder == "keep":
            return None
        if (counts := self._sample_counts()) is None:
            raise ValueError(
                f"{rank.count} ranks would get unequal numbers of samples, and training would hang at the end of an "
                f"epoch. {self._counts_remedy} .split() to the stream, or allow it by remainder='keep', with "
                f"coordinated=True of the loader"
            )
        return counts

    def _check_ranks(self) -> None:
        """Raise, or warn at the user's line, if the ranks known by now would have unequal numbers of samples."""
        if self._ranks.given is not None:
            self._counts_to_equalize(self._ranks.given)
        with contextlib.suppress(TypeError, ValueError):  # raised where reading starts
            PartStream.__len__(self)

    def _samples_in(self, rank: ShardOptions, shard: ShardOptions, order: list[int], counts: Sequence[int]) -> int:
        """The number of samples of a rank, or of a worker of the rank, by the number in each part."""
        lengths = [sum(counts[part] for part in order[reader :: shard.count]) for reader in range(shard.count)]
        if self._remainder == "keep":
            return lengths[shard.index]
        if 1 < shard.count > len(order):
            raise ValueError(
                f"{len(order)} {self.parts_name} cannot be split over {shard.count} "
                f"{'ranks' if shard.count == rank.count else 'workers'}; apply .split() to the stream"
            )
        if shard.count * min(lengths) < sum(lengths) and not self._remainder_warned:
            self._remainder_warned = True
            # Without numbers, which differ in each epoch: Python shows the same warning once.
            warn_user(
                f"remainder='drop' leaves out samples in each epoch: every rank gives as many as the rank with the "
                f"fewest, and the {self.parts_name} that ranks read hold different numbers. Apply "
                f".split() to the stream, or use remainder='keep' with coordinated=True of the loader"
            )
        return min(lengths)


class PartIterator(ResumableIterator[T_co]):
    """The samples of one reader in one epoch; its state says which stream, reader and epoch it is of.

    The state of another epoch can be loaded: the iterator then continues in that epoch's order. `shard` is the reader:
    the rank, or a worker of the rank.
    """

    def __init__(self, stream: PartStream[T_co], rank: ShardOptions, shard: ShardOptions, order: Order) -> None:
        self._stream, self._rank, self._shard, self._order = stream, rank, shard, order
        self._reader = [shard.index, shard.count, rank.count]
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
                "reader": self._reader,
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
        if (saved_by := expect(state, "reader", list, length=3)) != self._reader:
            raise StateError(
                f"the state does not fit this {name}: it was saved by {_reader_name(*saved_by)}, and this is "
                f"{_reader_name(*self._reader)}. Use as many as before; or a stream with .split() as its last "
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
        stream, shard = self._stream, self._shard
        order, counts = stream._parts_in(self._order), stream._sample_counts()
        length = stream._length(self._rank, shard, order)
        reader = stream._read(order[shard.index :: shard.count])
        reader.counts, reader.name_of = counts, stream._name_of
        samples: ResumableIterator[T_co] = reader if length is None else EqualLength(reader, length)
        if not stream._buffer_size:
            return samples
        return ShuffleBuffer(samples, stream._buffer_size, self._order._replace(number=1 + shard.index))


def _reader_name(index: int, count: int, ranks: int) -> str:
    if count == ranks:
        return f"rank {index} of {ranks}"
    return f"reader {index} of {count}, the workers of {ranks} ranks"


class StreamOptions(TypedDict, total=False):
    """Options of every stream of shards; see `TarDataset`."""

    shuffle: bool
    buffer_size: int
    seed: int | None
    rank: int | None
    world_size: int | None
    remainder: Remainder
    counts: Sequence[int] | None
    shards_in_parallel: int
    requests_per_shard: int
    chunk_bytes: int
    store: StoreLike | None


_LEAST = {"buffer_size": 0, "seed": 0} | dict.fromkeys(ReadAhead.__slots__, 1)


class ShardedStream(PartStream[T_co]):
    """Base of streams of shards that are read from their start to their end, as `TarDataset` and `LinesDataset`.

    A subclass defines `suffixes` and `decoder`; the options are those of `TarDataset`.
    """

    parts_name = "shards"
    _remedies = ("shards_in_parallel", "requests_per_shard")
    _counts_remedy = "Give counts= (an index has them: TarDataset.index(...).stream()), apply"

    suffixes: ClassVar[tuple[str, ...]]
    """Endings of the names of shards in a directory; none if they are not read as a whole."""

    _warned_of_counts = False

    def __init__(self, shards: Shards, **options: Unpack[StreamOptions]) -> None:
        own = signature_of(type(self)).parameters.keys() - {"options"}
        check_keywords(f"{type(self).__name__}.__init__", options, [*StreamOptions.__annotations__, *own])
        ranks = RankChoice(options.get("rank"), options.get("world_size"))
        given: Mapping[str, object] = options
        for name, least in _LEAST.items():
            if (value := given.get(name, least)) is not None or name != "seed":
                check_number(name, value, least, whole=True)
        self._ahead = ReadAhead(
            options.get("shards_in_parallel", SHARDS_IN_PARALLEL),
            options.get("requests_per_shard", REQUESTS_PER_SHARD),
            options.get("chunk_bytes", CHUNK_BYTES),
        )
        buffer_size, seed = options.get("buffer_size", 0), options.get("seed")
        super().__init__(ranks, options.get("shuffle", False), buffer_size, seed, options.get("remainder", "drop"))
        self._shards = find_shards(shards, suffixes=self.suffixes, store=options.get("store"))
        for shard in self._shards if self.suffixes else ():
            refuse_unsupported(shard.name)
        counts = options.get("counts")
        if isinstance(counts, int):
            raise TypeError(f"counts= must be the numbers of samples of all shards, as [1000, 995], but got {counts}")
        self._counts = None if counts is None else tuple(counts)
        if self._counts is not None and len(self._counts) != len(self._shards):
            raise ValueError(f"counts= has {len(self._counts)} numbers for {len(self._shards)} shards")
        self._check_ranks()

    @property
    def shards(self) -> tuple[str, ...]:
        """URLs of the shards of all ranks, without secrets."""
        return tuple(shard.name for shard in self._shards)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._shards)} shards from {self._shards[0].name!r})"

    def decoder(self, shard: Shard) -> Decoder:
        """The decoder of one shard."""
        raise NotImplementedError  # each format has its own

    def _part_count(self) -> int:
        return len(self._shards)

    def _sample_counts(self) -> Sequence[int] | None:
        return self._counts

    def _name_of(self, part: int, number: int) -> str:
        return f"{self._shards[part].name}, sample {number + 1:,}"

    def _part_names(self) -> Iterable[str]:
        return self.shards

    def _options(self) -> dict[str, object]:
        own = {
            "counts": self._counts_digest,
            "shards_in_parallel": self._ahead.shards_in_parallel,
        }
        return {**super()._options(), **own}

    @functools.cached_property
    def _counts_digest(self) -> str | None:
        return None if self._counts is None else names_digest(map(str, self._counts))

    def _read(self, parts: Sequence[int]) -> PartReader[Any]:
        bytes(_KEPT_BYTES)  # freed at once, untouched

        def open_part(position: PartPosition, shard: Shard, standby: bool) -> ShardReader:
            return ShardReader(shard, self.decoder(shard), self._ahead, position, standby=standby)

        return PartReader(parts, self._shards, open_part, self._ahead.shards_in_parallel, self._check_count)

    def _check_count(self, reader: ShardReader) -> None:
        """Warn, once, of a shard with another number of samples than in `counts`."""
        if self._counts is None or self._warned_of_counts or not reader.differs_from(self._counts[reader.part]):
            return
        self._warned_of_counts = True
        warn_user(
            f"{self._shards[reader.part].name} does not have the number of samples that counts= gives for it, "
            f"{self._counts[reader.part]}: len() is wrong, and with several ranks, samples may be left out or "
            f"repeated, or a rank may run out of them. Correct counts=, as TarDataset.index(...).counts has them for "
            f"tar files, or apply .split() to the stream, which needs none."
        )
