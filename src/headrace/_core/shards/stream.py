"""A stream out of shards: which of them this process reads, in what order, and how many samples it gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, TypedDict, TypeVar, Unpack

from headrace._core.interface.distributed import RankChoice, Remainder, ShardOptions
from headrace._core.shards.discovery import Shard, Shards, find_shards
from headrace._core.shards.interleave import Decoder, InterleavedShards, ReadAhead
from headrace._core.shards.partition import PartStream
from headrace._core.store.store import StoreLike

T_co = TypeVar("T_co", covariant=True)

SHARDS_IN_PARALLEL = 4
REQUESTS_PER_SHARD = 4
# Bytes of one request. Over loopback, nginx: 4 requests at once give 2.4 GB/s in pieces of 2 MiB, 1.4 GB/s in pieces
# of 8 MiB, and one GET streamed for each of 4 shards 2.1 GB/s (`benchmarks/tar_stream.py`); a store of 30 ms to the
# first byte gives about 0.5 GB/s with the 16 requests that the defaults come to.
CHUNK = 2 << 20


class StreamOptions(TypedDict, total=False):
    """What every stream out of shards takes; see `ShardedStream`."""

    shuffle: bool
    buffer_size: int
    seed: int
    rank: int | None
    world_size: int | None
    split: Literal["shards", "samples"]
    remainder: Remainder
    counts: Sequence[int] | None
    samples_per_rank: int | None
    shards_in_parallel: int
    requests_per_shard: int
    chunk_bytes: int
    store: StoreLike | None


class ShardedStream(PartStream[T_co]):
    """What `TarDataset` and `LinesDataset` share.

    Making one waits for a listing where there is a glob or a directory; in an async program use
    ``await TarDataset.open(...)``.

    Args:
        shards: URLs or paths, or one of them; each with ``{0000..0127}`` or ``{a,b}``, a glob, or a directory.
        shuffle: whether the shards are read in a new order at each epoch, the same on all ranks.
        buffer_size: samples of which one at random goes out for each that comes in; 0 to keep their order.
        seed: what both orders derive from, together with the epoch.
        rank: which part of the stream to read; by default that of `headrace.get_rank_info` whenever reading begins.
        world_size: how many parts there are.
        split: ``"shards"``: each rank reads some shards. ``"samples"``: each reads all and gives every n-th sample,
            which needs no counts, and n times the bandwidth. Workers of a stock torch loader count as ranks.
        remainder: how ranks come to the same number of samples: ``"drop"``, ``"pad"`` (a rank's last sample again) or
            ``"repeat"`` (the rank's samples from the beginning); ``"keep"`` gives each sample once, and ranks may
            differ.
        counts: the number of samples in each shard; needed with ``split="shards"`` and several ranks unless
            `samples_per_rank` is given or ``remainder="keep"``.
        samples_per_rank: as many as every rank gives, whatever there is; ``remainder`` says how.
        shards_in_parallel: shards that are read at once; their samples come in turn.
        requests_per_shard: requests under way for each of them.
        chunk_bytes: bytes of one request. Memory holds about
            ``shards_in_parallel × (requests_per_shard + 6) × chunk_bytes``, more where samples are larger than a chunk.
        store: their store, a `headrace.Store` or its URL. `shards` are then keys in it, or URLs under its URL. Without
            it, each URL's own store is opened with default options.

    Raises:
        EmptyListingError: a glob or a directory has no shard.
        StoreError: a listing failed.
        ValueError: an argument makes no sense, or does not go with another. Where `rank` is not given, what does not go
            with the number of ranks is raised when reading begins.
    """

    suffixes: ClassVar[tuple[str, ...]]
    """How the names of shards end, in a directory."""

    def __init__(self, shards: Shards | Sequence[Shard], **options: Unpack[StreamOptions]) -> None:
        ranks = RankChoice(options.get("rank"), options.get("world_size"))
        buffer_size = _at_least(0, "buffer_size", options.get("buffer_size", 0))
        seed = _at_least(0, "seed", options.get("seed", 0))
        split = options.get("split", "shards")
        self._ahead = ReadAhead(
            _at_least(1, "shards_in_parallel", options.get("shards_in_parallel", SHARDS_IN_PARALLEL)),
            _at_least(1, "requests_per_shard", options.get("requests_per_shard", REQUESTS_PER_SHARD)),
            _at_least(1, "chunk_bytes", options.get("chunk_bytes", CHUNK)),
        )
        self._declared = options.get("samples_per_rank")
        if self._declared is not None:
            _at_least(1, "samples_per_rank", self._declared)
        super().__init__(
            ranks=ranks,
            shuffle=options.get("shuffle", False),
            buffer_size=buffer_size,
            seed=seed,
            by_sample=split == "samples",
            remainder=options.get("remainder", "drop"),
        )
        if split not in ("shards", "samples"):
            raise ValueError(f"split={split!r} must be 'shards' or 'samples'")
        self._shards = find_shards(
            shards,
            suffixes=self.suffixes,
            store=options.get("store"),
        )
        counts = options.get("counts")
        self._counts = None if counts is None else tuple(counts)
        if self._counts is not None and len(self._counts) != len(self._shards):
            raise ValueError(f"counts= has {len(self._counts)} numbers for {len(self._shards)} shards")
        if ranks.given is not None:
            self._check_counts(ranks.given)

    @property
    def shards(self) -> tuple[str, ...]:
        """The shards' URLs, without secrets, of all ranks."""
        return tuple(shard.name for shard in self._shards)

    def __len__(self) -> int:
        """The number of samples of this rank in this epoch.

        Raises:
            TypeError: it is not known: there are neither `counts` nor `samples_per_rank`.
        """
        rank, order = self._ranks.shard(), self._order()
        length = self._length(rank, rank, order)
        if length is None and self._counts is not None:
            mine = order[rank.index :: rank.count]
            length = sum(self._counts[number] for number in mine)
        if length is None:
            raise TypeError(
                f"the length of this {type(self).__name__} is not known: it has neither counts nor an index"
            )
        return length

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._shards)} shards from {self._shards[0].name!r})"

    def _decoder(self, shard: Shard) -> Decoder:
        """Makes samples of one shard's bytes."""
        raise NotImplementedError  # each format has its own

    def _parts(self) -> Sequence[int]:
        return range(len(self._shards))

    def _read(self, parts: Sequence[int]) -> InterleavedShards:
        return InterleavedShards((self._shards[number] for number in parts), self._decoder, self._ahead)

    def _check_counts(self, rank: ShardOptions) -> None:
        if self._needs_evening(rank) and self._counts is None and self._declared is None:
            raise ValueError(
                f"{rank.count} ranks would get different numbers of samples, and training would wait for ever at the "
                f"end of an epoch. Give counts= (an index has them: TarDataset.index(...).stream()), or "
                f"samples_per_rank=, or split='samples', or allow it by remainder='keep'"
            )

    def _length(self, rank: ShardOptions, shard: ShardOptions, order: list[int]) -> int | None:
        if self._declared is not None:
            workers = shard.count // rank.count
            declared = self._declared * self._ranks.ranks_per_pass()
            return declared // workers + (shard.index % workers < declared % workers)
        if not self._needs_evening(rank):
            return None
        self._check_counts(rank)
        if len(order) < shard.count:
            raise ValueError(f"{len(order)} shards cannot be split over {shard.count} readers; use split='samples'")
        assert self._counts is not None
        lengths = [sum(self._counts[number] for number in order[part :: shard.count]) for part in range(shard.count)]
        return min(lengths) if self._remainder == "drop" else max(lengths)


def _at_least(least: int, name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, but got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, but got {value}")
    return value
