"""WebDataset shards: tar files whose members are the fields of samples."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from typing import Any, Unpack

import numpy as np

from headrace._core.shards.compression import SUFFIXES, TAR_SUFFIXES
from headrace._core.shards.discovery import Shard, Shards, find_shards
from headrace._core.shards.stream import ShardedStream, StreamOptions
from headrace._core.shards.tar import MEMBER_LIMIT, TarSamples
from headrace._core.shards.tar_index import ABSENT, TarIndex, load_indices
from headrace._core.store.ranges import Ranges
from headrace._core.store.store import StoreLike
from headrace._core.streams.blocking import background_loop
from headrace._core.text import check_names
from headrace.datasets.cached import RangedShards
from headrace.errors import ShardError

__all__ = ["IndexedTarDataset", "TarDataset"]

_SUFFIXES = (".tar", *(f".tar{suffix}" for suffix in SUFFIXES), *TAR_SUFFIXES)


class TarDataset(ShardedStream[dict[str, Any]]):
    """A stream of the samples in WebDataset shards: ``{"__key__": …, "__url__": …, "jpg": b"…", "cls": b"…"}``.

    Consecutive members with the same path up to the first dot of the file name are a sample; the rest after the dot, in
    lower case, is the field. Fields are undecoded `bytes`: decode in the loader's `transform`. Files without an
    extension, and files whose names start with a dot, belong to no sample.

    Several shards are read at once, each by several ranged requests, and their samples are interleaved: the same order
    in every run. Shards may be plain, gzip or zstd (``.tar``, ``.tar.gz``, ``.tar.zst``; zstd needs
    ``pip install headrace[zstd]`` before Python 3.14).

    A corrupt or truncated archive raises a `ShardError` with shard, member and offset, after the samples before the
    damage. The stream then continues with the other shards; so does an epoch with the loader's ``on_error="skip"``.
    A member with an unsafe name, a link or a member above `member_limit` is an error of its sample alone.
    A flipped bit *within* a member of a plain tar goes undetected in a stream; gzip, zstd and `index` have checksums.

    The constructor waits for a listing if there is a glob or a directory; in an async program use
    ``await asyncio.to_thread(TarDataset, ...)``.

    Args:
        shards: a URL or a path, or several; each may have braces (``{0000..0127}``, ``{a,b}``), be a glob (``*``, ``?``
            and ``[…]`` within a directory, ``**`` across directories) or a directory. A file that is matched by a glob,
            or named in a store that can list, may have any ending. Of a directory, hidden files are left out, and
            what is in hidden directories and in those that begin with an underscore (Spark's ``_temporary``). A
            directory of a store that has a shard's name is given as ``x.tar/``. Or a `headrace.Store`, for all that is
            in it.
        fields: fields to return, each of which every sample must have. None: all of them, and every sample must have
            the same as its shard's first.
        uniform: with False and no `fields`, samples may have different fields.
        member_limit: bytes; a larger member is an error, since members are held in memory whole.
        shuffle: whether to shuffle the shards at each epoch, equally on all ranks.
        buffer_size: samples of the shuffle buffer; 0 for none.
        seed: seed of both orders, together with the epoch; None for that of the loader, which is then to be the same on
            all ranks, else 0.
        rank: the share of the stream to read; by default that of `headrace.get_rank_info` when reading starts. Each
            rank reads whole shards, so that ranks may have different numbers of samples.
        world_size: number of ranks.
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
        ValueError: an argument is invalid or conflicts with another.

    Example:
        >>> import io, pathlib, tarfile, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> with tarfile.open(folder / "0000.tar", "w") as archive:
        ...     for name, data in (("a.txt", b"first"), ("a.cls", b"1"), ("b.txt", b"second"), ("b.cls", b"2")):
        ...         info = tarfile.TarInfo(name); info.size = len(data)
        ...         archive.addfile(info, io.BytesIO(data))
        >>> [(sample["__key__"], sample["txt"], sample["cls"]) for sample in TarDataset(folder / "{0000..0000}.tar")]
        [('a', b'first', b'1'), ('b', b'second', b'2')]
    """

    suffixes = _SUFFIXES

    def __init__(
        self,
        shards: Shards,
        *,
        fields: Collection[str] | None = None,
        uniform: bool = True,
        member_limit: int = MEMBER_LIMIT,
        **options: Unpack[StreamOptions],
    ) -> None:
        check_names("fields", fields)
        self._fields = None if fields is None else tuple(fields)
        self._uniform = uniform
        self._member_limit = member_limit
        super().__init__(shards, **options)

    def decoder(self, shard: Shard) -> TarSamples:
        """The decoder of one shard."""
        return TarSamples(shard.name, fields=self._fields, uniform=self._uniform, member_limit=self._member_limit)

    @staticmethod
    def index(
        shards: Shards,
        *,
        fields: Collection[str] | None = None,
        uniform: bool = True,
        save: bool = False,
        store: StoreLike | None = None,
    ) -> IndexedTarDataset:
        """The samples of plain tar shards, map-style: each is read by one ranged request.

        An index has the positions of the members of a shard and their CRC-32. Building one reads the whole shard once.
        One beside the shard (``0000.tar.index.npz``) that has its size and version is read instead of the shard.
        Blocks: in an async program use ``await asyncio.to_thread(TarDataset.index, ...)``.

        Args:
            shards: as for the class.
            fields: as for the class; the index has all fields.
            uniform: as for the class.
            save: whether to store indices beside their shards. If that fails, it is a warning.
            store: as for the class.

        Raises:
            ShardError: a shard is corrupt, or compressed and so cannot be read at an offset.
            StoreError: a request failed.

        Example:
            >>> dataset = TarDataset.index("s3://bucket/train/{0000..0127}.tar")  # doctest: +SKIP
        """
        check_names("fields", fields)
        found = find_shards(shards, suffixes=_SUFFIXES, store=store)
        indices = background_loop().run(load_indices(found, uniform=uniform and fields is None, save=save))
        return IndexedTarDataset(indices, fields=fields)


class IndexedTarDataset(RangedShards[dict[str, Any]]):
    """The samples of indexed tar shards, map-style; made by `TarDataset.index`.

    A sample is one ranged GET, of the bytes from its first field to its last. The CRC-32 of every field is checked; a
    corrupt sample is read a second time. A loader reads samples of its look-ahead that are near each other by one
    request.

    Args:
        indices: one for each shard.
        fields: fields to return, each of which every sample must have; None for all that a sample has.

    Raises:
        ShardError: a sample lacks one of `fields`.
    """

    def __init__(self, indices: Sequence[TarIndex], *, fields: Collection[str] | None = None) -> None:
        super().__init__([index.shard for index in indices], [len(index.keys) for index in indices])
        self._indices = tuple(indices)
        self._names = tuple(shard.name for shard in self._shards)
        self._fields = None if fields is None else tuple(fields)
        self._columns = tuple(self._columns_of(index) for index in self._indices)
        bounds = [index.bounds(columns) for index, columns in zip(self._indices, self._columns, strict=True)]
        self._starts = np.concatenate([starts for starts, _ in bounds])
        self._stops = np.concatenate([stops for _, stops in bounds])

    def ranges(self, indices: Sequence[int]) -> Ranges:
        """The bytes of the samples at `indices`, by shard; raises `IndexError` if there is no such sample."""
        shards, _, places = self._rows(indices)
        return Ranges(shards, self._starts[places], self._stops[places])

    def sample_of(self, index: int, data: memoryview) -> dict[str, Any]:
        """Make the sample at `index` of its bytes; raises `ShardError` if the checksum of a field is wrong."""
        return self.samples_of([index], [data])[0]

    def samples_of(self, indices: Sequence[int], data: Sequence[memoryview]) -> list[dict[str, Any]]:
        """Make the samples of a batch; raises `ShardError` if the checksum of a field is wrong."""
        shards, rows, places = self._rows(indices)
        begins = self._starts[places]
        return list(map(self._sample, shards.tolist(), rows.tolist(), begins.tolist(), data))

    def _sample(self, number: int, row: int, begin: int, data: memoryview) -> dict[str, Any]:
        """The sample in a row of an index, of its bytes, which begin at a place of the shard."""
        tar, name = self._indices[number], self._names[number]
        sample: dict[str, Any] = {"__key__": tar.keys[row], "__url__": name}
        offsets, sizes = tar.offsets[row].tolist(), tar.sizes[row].tolist()
        for column in self._columns[number]:
            offset = offsets[column]
            if offset == ABSENT:
                continue
            content = bytes(data[offset - begin : offset - begin + sizes[column]])
            if zlib.crc32(content) != tar.checksums[row, column]:
                member = f"{tar.keys[row]}.{tar.fields[column]}"
                raise ShardError("the checksum of a member is wrong", shard=name, member=member, offset=offset)
            sample[tar.fields[column]] = content
        return sample

    def sample_key(self, index: int) -> str:
        """The shard and the key of the sample at `index`."""
        number, row = self.locate(index)
        tar = self._indices[number]
        return f"{tar.shard.key}/{tar.keys[row]}"

    def _columns_of(self, index: TarIndex) -> tuple[int, ...]:
        if self._fields is None:
            return tuple(range(len(index.fields)))
        missing = [field for field in self._fields if field not in index.fields]
        if missing and index.keys:
            raise index.shard.error(f"no sample has field {missing[0]!r}")
        columns = tuple(index.fields.index(field) for field in self._fields if field in index.fields)
        lacking = np.argwhere(index.offsets[:, list(columns)] == ABSENT)
        if len(lacking):
            row, column = map(int, lacking[0])
            raise index.shard.error(f"sample {index.keys[row]!r} lacks {self._fields[column]!r}")
        return columns
