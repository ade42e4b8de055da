"""Streams of shards, and the same shards map-style, with an index."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar, TypedDict, Unpack

import numpy as np

from headrace._base.array_types import ByteArray, Uint32Array
from headrace._base.text import check_keywords, whole_number
from headrace._ranks.distributed import RankChoice
from headrace._shards.compression import refuse_unsupported, unpack_object
from headrace._shards.discovery import Shard, Shards, find_shards
from headrace._shards.indexing import (
    DecoderOf,
    Indexing,
    OpenedIndex,
    beside,
    open_all,
    open_index,
    place_of,
)
from headrace._shards.reading import Decoder, ReadAhead, names_digest
from headrace._shards.stream import ShardIterator
from headrace._shards.unpacked import UNPACKED_BYTES, UnpackedShards
from headrace._store.ranges import Ranges, map_all
from headrace._store.store import StoreLike, as_store
from headrace._streams.blocking import background_loop
from headrace._streams.epochs import FollowsEpoch, checked_seed
from headrace._streams.iterable_style import AsyncIterableDataset
from headrace._streams.kinds import Blocks, T_co, signature_of
from headrace._streams.operators import ShuffleBuffer
from headrace.datasets.cached import RangedShards

# Size of a block that is freed untouched. After freeing a block of this size, the largest size that
# counts, glibc keeps up to twice as many freed bytes. Otherwise glibc returns the memory of chunks
# and samples to the kernel all the time: a sample of 56 KB then has 3 page faults, and a
# loader 0.86 of the rate. The environment's MALLOC_TRIM_THRESHOLD_ and similar settings take
# precedence.
_KEPT_BYTES = (32 << 20) - (64 << 10)
# Pieces of a compressed shard in a block; a block reads about one more piece.
PARTS_IN_BLOCK = 4
MOST_DECODERS = 1024  # in memory, a kilobyte each


class StreamOptions(TypedDict, total=False):
    """Options of every stream of shards, as described by `TarDataset`."""

    shuffle: bool
    buffer_size: int
    seed: int | None
    rank: int | None
    world_size: int | None
    shards_in_parallel: int
    requests_per_shard: int
    chunk_bytes: int
    store: StoreLike | None


class ShardedStream(FollowsEpoch, AsyncIterableDataset[T_co]):
    """Base of streams of shards, such as `TarDataset` and `LinesDataset`.

    Shards are read from start to end. The order of the shards in an epoch is the same on all ranks.
    Each rank reads every W-th shard, and may have more samples than another rank.

    A subclass defines `suffixes` and `decoder`. The options are those of `TarDataset`. If the
    decoder keeps `Decoder.complete`, the shards can be indexed.
    """

    splits_by_rank = True

    splits_over_workers = True
    """Whether each worker of a torch loader reads its own share."""

    ranks_differ = True
    """Whether ranks may have different numbers of samples."""

    suffixes: ClassVar[tuple[str, ...]]
    """Endings of the names of shards in a directory. Empty if shards are not read whole."""

    def __init__(self, shards: Shards, **options: Unpack[StreamOptions]) -> None:
        known = [*StreamOptions.__annotations__, *_parameters(type(self))]
        check_keywords(f"{type(self).__name__}.__init__", options, known)
        self._ranks = RankChoice(options.get("rank"), options.get("world_size"))
        given: Mapping[str, Any] = options
        defaults = ReadAhead._field_defaults.items()
        sizes = (
            whole_number(name, given.get(name, default), 1) for name, default in defaults
        )
        self._ahead = ReadAhead(*sizes)
        self._shuffle = bool(options.get("shuffle", False))
        self._buffer_size = whole_number("buffer_size", options.get("buffer_size", 0))
        self._seed = checked_seed(options.get("seed"))
        self._parts = find_shards(
            shards, suffixes=self.suffixes, store=options.get("store")
        )
        for shard in self._parts if self.suffixes else ():
            refuse_unsupported(shard.name)

    @property
    def shards(self) -> tuple[str, ...]:
        """URLs of the shards of all ranks, without secrets."""
        return tuple(shard.name for shard in self._parts)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._parts)} shards from {self._parts[0].name!r})"

    def decoder(self, shard: Shard) -> Decoder:
        """Return the decoder of a shard."""
        raise NotImplementedError  # each format has its own

    def index_decoder(self, shard: Shard) -> Decoder:
        """Return the decoder for indexing, whatever the options."""
        return self.decoder(shard)

    @classmethod
    def index(
        cls,
        shards: Shards | None = None,
        *,
        index: str | os.PathLike[str] | None = None,
        save: bool = False,
        store: StoreLike | None = None,
        unpacked_bytes: int = UNPACKED_BYTES,
        **options: Any,
    ) -> IndexedDataset[T_co]:
        """Open the same samples map-style, through an index.

        Any sample is read by a single ranged request. An index file has the places of the samples
        of all shards. The file is ``headrace.index`` in the folder of the shards. The command
        ``headrace index URL`` makes the file. Without the file, each shard is read once. The index
        is then kept in the user's cache folder (``~/.cache/headrace``) for these versions of the
        shards.

        A compressed shard is read as a whole, or in parts if the shard has several gzip streams or
        zstd frames. Each part is unpacked once for all waiting samples.

        The method blocks. In an async program use ``await asyncio.to_thread(TarDataset.index,
        ...)``.

        An invalid sample raises the same `ShardError` as the stream, when the sample is read.

        Args:
            shards: as for the class. None for all shards of the index: then no shards are listed.
            index: path or URL of the index. With `store`, a key or URL as for `shards`. None for
                ``headrace.index`` in the folder of the shards.
            save: make the index, and store the index at `index`, if the stored index is missing,
                damaged or of other shards. If storing fails, there is a warning.
            store: as for the class.
            unpacked_bytes: bytes of unpacked shards kept by each process, beside shards with
                waiting samples.
            options: options of the class about the content of samples, such as ``fields=`` or
                ``format=``.

        Raises:
            ShardError: a shard is corrupt, missing in the index, or was replaced after the index
                was made. Or the index is damaged.
            StoreError: a request failed, or there is no index at `index`.
            TypeError: an option is unknown.

        Example:
            >>> dataset = TarDataset.index("s3://bucket/train/{0000..0127}.tar")  # doctest: +SKIP
        """
        of_streams = StreamOptions.__annotations__
        own = [name for name in _parameters(cls) if name not in of_streams]
        check_keywords(f"{cls.__name__}.index", options, own)
        opened = None if store is None else as_store(store)
        place = None if index is None else place_of(index, opened)
        if shards is None and place is None:
            raise TypeError(f"{cls.__name__}.index: give shards, or index=")
        named: Any = [place] if shards is None else shards
        stream = cls(named, store=opened, **options)
        # The dataset needs only the decoders of the stream: the pickle has the shards once.
        found, stream._parts = stream._parts, ()
        indexing = Indexing(stream.index_decoder)
        if shards is None:
            opening = open_all(named[0], indexing, opened)
        else:
            required = place is not None
            place = place or beside(found)
            if save and place is None:
                raise ValueError(
                    "save=True: no folder has all shards; give index=, for the place of the index"
                )
            opening = open_index(found, indexing, place, required=required, save=save)
        return stream._indexed(background_loop().run(opening), unpacked_bytes)

    def _indexed(self, opened: OpenedIndex, unpacked_bytes: int) -> IndexedDataset[T_co]:
        """Return the map-style dataset of shards in an index."""
        return IndexedDataset(opened, unpacked_bytes, self.decoder)

    def __aiter__(self) -> AsyncIterator[T_co]:
        """Start a pass."""
        bytes(_KEPT_BYTES)  # freed at once, untouched
        rank = self._ranks.shard()
        if 1 < rank.count > len(self._parts):
            raise ValueError(
                f"{len(self._parts)} shards cannot be divided among {rank.count} ranks; "
                "apply .split() to the stream"
            )
        order, reader = self._order_for(self._seed), rank.in_worker()
        samples = ShardIterator(self, reader, order)
        if not self._buffer_size:
            return samples
        return ShuffleBuffer(
            samples, self._buffer_size, order._replace(number=1 + reader.index)
        )

    def _options(self) -> dict[str, object]:
        """Return the options that must match a loaded state."""
        return {
            "list of shards": self._names_digest,
            "shuffle": self._shuffle,
            "shards_in_parallel": self._ahead.shards_in_parallel,
        }

    @functools.cached_property
    def _names_digest(self) -> str:
        """Number of shards, and a checksum of the shards' names.

        The names are in the order given by the user, without secrets.
        """
        return names_digest(self.shards)

    def _name_of(self, part: int, number: int) -> str:
        """Return the file and the number of a sample, in words."""
        return f"{self._parts[part].name}, sample {number + 1:,}"


def _parameters(kind: type[object]) -> Iterable[str]:
    """Return the names of a class's parameters, without `shards` and `options`."""
    return signature_of(kind).parameters.keys() - {"options", "shards"}


class IndexedDataset(RangedShards[T_co]):
    """A map-style dataset of shards with an index.

    `index` of a stream makes the dataset. A sample is one ranged GET. A corrupt sample is read a
    second time. A loader reads neighbouring samples of the look-ahead by one request.

    Args:
        opened: the index and the shards.
        unpacked_bytes: bytes of unpacked shards in each process.
        decoder_of: makes the decoder of a shard.
    """

    def __init__(
        self, opened: OpenedIndex, unpacked_bytes: int, decoder_of: DecoderOf
    ) -> None:
        super().__init__(opened.shards, opened.file.counts[opened.numbers])
        self._unpacked = UnpackedShards(unpacked_bytes)
        self._index, self._numbers = opened.file, opened.numbers
        self._decoder_of = decoder_of
        self._decoders: dict[int, Decoder] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_decoders": {}}

    def ranges(self, indices: Sequence[int]) -> Ranges:
        """Return byte ranges of samples; raises `IndexError` out of range."""
        shards, rows, _ = self._rows(indices)
        return Ranges(shards, *self._index.bounds(self._numbers[shards], rows))

    def sample_of(self, index: int, data: memoryview) -> T_co:
        """Make the sample at `index`; raises `ShardError` for invalid bytes."""
        return self.samples_of([index], [data])[0]

    def samples_of(
        self, indices: Sequence[int], data: Sequence[memoryview]
    ) -> list[T_co]:
        """Make the samples of a batch.

        Invalid bytes raise `ShardError`.
        """
        ranges = self.ranges(indices)
        return list(
            map(self.decode, ranges.objects.tolist(), ranges.starts.tolist(), data)
        )

    @property
    def lengths(self) -> Uint32Array:
        """Length of each sample, uint32.

        Raises:
            ValueError: the index has no lengths.
        """
        index = self._index
        if len(index.lengths) < index.counts.sum():
            what = f"the index {index.name} has no lengths"
            raise ValueError(
                f"{what}; make it again: headrace index URL --length module:function"
            )
        firsts, counts = index.firsts[self._numbers], index.counts[self._numbers]
        return index.lengths[
            np.repeat(firsts - self._firsts, counts) + np.arange(len(self))
        ]

    @functools.cached_property
    def blocks(self) -> Blocks:
        """Sizes of blocks: compressed shards, or some of the pieces."""
        index, numbers = self._index, self._numbers
        if not (pieces := int(index.pieces[numbers].sum())):
            return super().blocks
        nbytes = int(index.ends[numbers].sum())
        size = -(-len(self) // max(len(numbers), pieces // PARTS_IN_BLOCK))
        return Blocks.within(self._unpacked.limit, nbytes, len(self), size)

    def shard_size(self, number: int) -> int:
        """Return the number of unpacked bytes of a shard."""
        index, place = self._index, self._numbers[number]
        return (
            int(index.ends[place]) if index.pieces[place] else super().shard_size(number)
        )

    async def read_range(
        self, number: int, start: int, stop: int, *, index: Any = None
    ) -> memoryview:
        """Read bytes of a shard.

        A piece of a compressed shard is unpacked once for all samples that wait.
        """
        place = self._numbers[number]
        if not self._index.pieces[place]:
            return await super().read_range(number, start, stop, index=index)
        borders = self._index.shard(place).borders()
        first, last = np.searchsorted(borders[:, 1], (start, stop - 1), side="right")
        parts = [*pairwise(borders[first - 1 : last + 1].tolist())]

        async def unpacked(part: Any) -> Any:
            return await self._unpacked.get(
                (number, part[0][0]), functools.partial(self._unpack, number, *part)
            )

        found = await map_all(unpacked, parts)
        data: Any = found[0] if len(found) == 1 else np.concatenate(found)
        begin = parts[0][0][1]
        return memoryview(data)[start - begin : stop - begin]

    async def _unpack(self, number: int, first: list[int], last: list[int]) -> ByteArray:
        shard, (start, begin), (stop, end) = self._shards[number], first, last
        data = await shard.read(start, stop)
        unpacked = await asyncio.to_thread(
            unpack_object, data, shard.key, shard.name, end - begin
        )
        return np.frombuffer(unpacked, np.uint8)

    def decode(self, number: int, start: int, data: memoryview) -> T_co:
        """Make a sample; raises `ShardError` for invalid bytes.

        Args:
            number: number of the shard.
            start: offset of the sample in the shard.
            data: bytes of the sample.
        """
        # A decoder is used again after a good sample: a third less time.
        decoder = self._decoders.pop(number, None) or self._decoder_of(
            self._shards[number]
        )
        sample: T_co = decoder.whole_sample(data, start)
        if len(self._decoders) < MOST_DECODERS:
            self._decoders[number] = decoder
        return sample
