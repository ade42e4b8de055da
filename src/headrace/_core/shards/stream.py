"""Base of streams of shards: options, the samples of each rank, length."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal, TypedDict, TypeVar, Unpack

from headrace._core.ranks.distributed import RankChoice, Remainder, ShardOptions
from headrace._core.shards.compression import refuse_unsupported
from headrace._core.shards.discovery import Shard, Shards, find_shards
from headrace._core.shards.part_stream import PartStream
from headrace._core.shards.positions import Part, names_digest
from headrace._core.shards.reading import Decoder, InterleavedShards, ReadAhead, ShardReader
from headrace._core.store.store import StoreLike
from headrace._core.text import users_stacklevel

T_co = TypeVar("T_co", covariant=True)

SHARDS_IN_PARALLEL = 4
REQUESTS_PER_SHARD = 4
# Bytes of one request. Over loopback, nginx: 4 requests at once give 2.4 GB/s in pieces of 2 MiB, 1.4 GB/s in pieces
# of 8 MiB, and one GET streamed for each of 4 shards 2.1 GB/s (`benchmarks/tar_stream.py`); a store with 30 ms to the
# first byte gives about 0.5 GB/s with the 16 requests of the defaults.
CHUNK_BYTES = 2 << 20


class StreamOptions(TypedDict, total=False):
    """Options of every stream of shards; see `ShardedStream`."""

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
    """Base of `TarDataset` and `LinesDataset`.

    The constructor waits for a listing if there is a glob or a directory; in an async program use
    ``await asyncio.to_thread(TarDataset, ...)``.

    Args:
        shards: a URL or a path, or several; each may have braces (``{0000..0127}``, ``{a,b}``), be a glob (``*``, ``?``
            and ``[…]`` within a directory, ``**`` across directories) or a directory. A file that is matched by a glob,
            or named in a store that can list, may have any ending.
        shuffle: whether to shuffle the shards at each epoch, equally on all ranks.
        buffer_size: samples of the shuffle buffer; 0 for none.
        seed: seed of both orders, together with the epoch.
        rank: the share of the stream to read; by default that of `headrace.get_rank_info` when reading starts.
        world_size: number of ranks.
        split: ``"shards"``: each rank reads some shards. ``"samples"``: each rank reads all and yields every n-th
            sample, which needs no counts, and n times the bandwidth. Workers of a stock torch loader count as ranks.
        remainder: policy for ranks with unequal numbers of samples: ``"drop"``, ``"pad"`` (repeats a rank's last
            sample) or ``"repeat"`` (starts the rank's samples again); ``"keep"`` yields each sample once, and numbers
            may differ.
        counts: number of samples in each shard; needed with ``split="shards"`` and several ranks unless
            `samples_per_rank` is given or ``remainder="keep"``. A shard that turns out to have another number, as far
            as it is read, is a warning.
        samples_per_rank: number of samples that every rank yields, whatever there is; see `remainder`.
        shards_in_parallel: shards that are read at once; their samples are interleaved.
        requests_per_shard: requests in flight for each of them.
        chunk_bytes: bytes of one request. Memory holds about
            ``shards_in_parallel × (requests_per_shard + 6) × chunk_bytes``, more where samples are larger than a chunk.
        store: store of all shards, a `headrace.Store` or its URL. `shards` are then keys in it, or URLs under its URL.
            By default each URL's own store is opened with default options.

    Raises:
        EmptyListingError: a glob or a directory has no shard, or there is no such file or directory.
        ShardError: the ending of a name is that of a compression that is not supported.
        StoreError: a listing failed.
        ValueError: an argument is invalid or conflicts with another. If `rank` is not given, conflicts with the number
            of ranks are raised when reading starts.
    """

    parts_name = "shards"
    split_by_sample = "samples"

    suffixes: ClassVar[tuple[str, ...]]
    """Endings of the names of shards in a directory."""

    _warned_of_counts = False

    def __init__(self, shards: Shards | Sequence[Shard], **options: Unpack[StreamOptions]) -> None:
        ranks = RankChoice(options.get("rank"), options.get("world_size"))
        buffer_size = _at_least(0, "buffer_size", options.get("buffer_size", 0))
        seed = _at_least(0, "seed", options.get("seed", 0))
        split = options.get("split", "shards")
        self._ahead = ReadAhead(
            _at_least(1, "shards_in_parallel", options.get("shards_in_parallel", SHARDS_IN_PARALLEL)),
            _at_least(1, "requests_per_shard", options.get("requests_per_shard", REQUESTS_PER_SHARD)),
            _at_least(1, "chunk_bytes", options.get("chunk_bytes", CHUNK_BYTES)),
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
        for shard in self._shards:
            refuse_unsupported(shard.name)
        counts = options.get("counts")
        self._counts = None if counts is None else tuple(counts)
        if self._counts is not None and len(self._counts) != len(self._shards):
            raise ValueError(f"counts= has {len(self._counts)} numbers for {len(self._shards)} shards")
        if ranks.given is not None:
            self._check_counts(ranks.given)

    @property
    def not_by_shards(self) -> str | None:
        """The reason why lanes cannot each read some of the shards; None if they can."""
        if self._declared is not None:
            return "samples_per_rank= is a number for the whole rank; counts= has one for each shard"
        return super().not_by_shards

    @property
    def shards(self) -> tuple[str, ...]:
        """URLs of the shards of all ranks, without secrets."""
        return tuple(shard.name for shard in self._shards)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._shards)} shards from {self._shards[0].name!r})"

    def _decoder(self, shard: Shard) -> Decoder:
        """The decoder of one shard."""
        raise NotImplementedError  # each format has its own

    def _part_count(self) -> int:
        return len(self._shards)

    def _sample_counts(self) -> Sequence[int] | None:
        return self._counts

    def _part_names(self) -> Iterable[str]:
        return self.shards

    def _options(self) -> dict[str, object]:
        own = {
            "samples_per_rank": self._declared,
            "counts": self._counts_digest,
            "shards_in_parallel": self._ahead.shards_in_parallel,
        }
        return {**super()._options(), **own}

    @functools.cached_property
    def _counts_digest(self) -> str | None:
        return None if self._counts is None else names_digest(map(str, self._counts))

    def _read(self, parts: Sequence[Part]) -> InterleavedShards:
        check = None if self._counts is None else self._check_count
        return InterleavedShards(self._shards, parts, self._decoder, self._ahead, check)

    def _check_count(self, reader: ShardReader) -> None:
        """Warn, once, of a shard with another number of samples than in `counts`."""
        if self._counts is None or self._warned_of_counts or not reader.differs_from(self._counts[reader.part]):
            return
        self._warned_of_counts = True
        warnings.warn(
            f"{self._shards[reader.part].name} does not have the number of samples that counts= gives for it, "
            f"{self._counts[reader.part]}: len() is wrong, and with split='shards' and several ranks, samples may be "
            f"left out or repeated, or a rank may run out of them. Correct counts=, as TarDataset.index(...).counts "
            f"has them for tar files, or set split='samples', which needs none.",
            UserWarning,
            stacklevel=users_stacklevel(),
        )

    def _check_counts(self, rank: ShardOptions) -> None:
        if self._needs_equal_length(rank) and self._counts is None and self._declared is None:
            raise ValueError(
                f"{rank.count} ranks would get unequal numbers of samples, and training would hang at the end of an "
                f"epoch. Give counts= (an index has them: TarDataset.index(...).stream()), samples_per_rank= or "
                f"split='samples', or allow it by remainder='keep', with coordinated=True of the loader"
            )

    def _length(self, rank: ShardOptions, shard: ShardOptions, order: list[int]) -> int | None:
        if self._declared is not None:
            workers = shard.count // rank.count
            declared = self._declared * self._ranks.ranks_per_pass()
            return declared // workers + (shard.index % workers < declared % workers)
        self._check_counts(rank)
        return super()._length(rank, shard, order)


def _at_least(least: int, name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, but got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, but got {value}")
    return value
