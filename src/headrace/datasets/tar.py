"""WebDataset shards: tar files whose members are the fields of samples."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any, Unpack

from headrace._core.shards.compression import SUFFIXES, TAR_SUFFIXES
from headrace._core.shards.discovery import Shard, Shards
from headrace._core.shards.indexing import OpenedIndex
from headrace._core.shards.tar import MEMBER_LIMIT, TarSamples, plain_sample
from headrace._core.text import check_names
from headrace.datasets.indexed import IndexedDataset
from headrace.datasets.sharded import ShardedStream, StreamOptions
from headrace.errors import ShardError

__all__ = ["IndexedTarDataset", "TarDataset", "tar_decoder"]

_SUFFIXES = (".tar", *(f".tar{suffix}" for suffix in SUFFIXES), *TAR_SUFFIXES)


class TarDataset(ShardedStream[dict[str, Any]]):
    """A stream of the samples in WebDataset shards: ``{"__key__": …, "__url__": …, "jpg": b"…", "cls": b"…"}``.

    Consecutive members with the same path up to the first dot of the file name are a sample; the
    rest after the dot, in lower case, is the field. Fields are undecoded `bytes`: decode in the
    loader's `transform`. Files without an extension, and files whose names start with a dot, belong
    to no sample.

    Several shards are read at once, each by several ranged requests, and their samples are
    interleaved: the same order in every run. Shards may be plain, gzip or zstd (``.tar``,
    ``.tar.gz``, ``.tar.zst``; zstd needs ``pip install headrace[zstd]`` before Python 3.14).

    A corrupt or truncated archive raises a `ShardError` with shard, member and offset, after the
    samples before the damage. The stream then continues with the other shards; so does an epoch
    with the loader's ``on_error="skip"``. A member with an unsafe name, a link or a member above
    `member_limit` is an error of its sample alone. A flipped bit *within* a member of a plain tar
    goes undetected; gzip and zstd have checksums.

    The constructor waits for a listing if there is a glob or a directory; in an async program use
    ``await asyncio.to_thread(TarDataset, ...)``.

    Args:
        shards: a URL or a path, or several; each may have braces (``{0000..0127}``, ``{a,b}``), be
            a glob (``*``, ``?`` and ``[…]`` within a directory, ``**`` across directories) or a
            directory. A file that is matched by a glob, or named in a store that can list, may have
            any ending. Of a directory, hidden files are left out, and what is in hidden directories
            and in those that begin with an underscore (Spark's ``_temporary``). A directory of a
            store that has a shard's name is given as ``x.tar/``. Or a `headrace.Store`, for all
            that is in it.
        fields: fields to return, each of which every sample must have. None: all of them, and every
            sample must have the same as its shard's first.
        uniform: with False and no `fields`, samples may have different fields.
        member_limit: bytes; a larger member is an error, since members are held in memory whole.
        shuffle: whether to shuffle the shards at each epoch, equally on all ranks.
        buffer_size: samples of the shuffle buffer; 0 for none.
        seed: seed of both orders, together with the epoch; None for that of the loader, which is
            then to be the same on all ranks, else 0.
        rank: the share of the stream to read; by default that of `headrace.get_rank_info` when
            reading starts. Each rank reads whole shards, so that ranks may have different numbers
            of samples.
        world_size: number of ranks.
        shards_in_parallel: shards that are read at once; their samples are interleaved.
        requests_per_shard: requests in flight for each of them.
        chunk_bytes: bytes of one request. Memory holds at most about
            ``shards_in_parallel × (2 × requests_per_shard + 5) × chunk_bytes``, or more if samples
            are larger.
        store: store of all shards, a `headrace.Store` or its URL. `shards` are then keys in it, or
            URLs under its URL. By default each URL's own store is opened with default options.

    Raises:
        EmptyListingError: a glob or a directory has no shard, or there is no such file or
            directory.
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
        return TarSamples(
            shard.name, fields=self._fields, uniform=self._uniform, member_limit=self._member_limit
        )

    def index_decoder(self, shard: Shard) -> TarSamples:
        """The decoder by which a shard is indexed: for all fields."""
        return tar_decoder(shard)

    def _indexed(self, opened: OpenedIndex, unpacked_bytes: int) -> IndexedTarDataset:
        if self._member_limit != MEMBER_LIMIT:
            raise ValueError("member_limit= is an option of the stream alone")
        uniform = self._uniform and self._fields is None
        return IndexedTarDataset(opened, unpacked_bytes, self._fields, uniform)


def tar_decoder(shard: Shard) -> TarSamples:
    """The decoder by which shards are indexed."""
    return TarSamples(shard.name, uniform=True)


class IndexedTarDataset(IndexedDataset[dict[str, Any]]):
    """The samples of indexed tar shards, map-style; made by `TarDataset.index`.

    Args:
        opened: the shards, as they are in their index.
        unpacked_bytes: bytes of unpacked shards that each process keeps.
        fields: fields to return, each of which every sample must have; None for all that a sample
            has.
        uniform: whether all samples of a shard must have the same fields.

    Raises:
        ShardError: samples of a shard have different fields.
    """

    def __init__(
        self,
        opened: OpenedIndex,
        unpacked_bytes: int,
        fields: tuple[str, ...] | None,
        uniform: bool,
    ) -> None:
        super().__init__(opened, unpacked_bytes, functools.partial(_sample_decoder, fields))
        flawed = opened.numbers[opened.file.flawed[opened.numbers] > 0]
        if uniform and len(flawed):
            raise ShardError(opened.file.shard(flawed[0]).problem or "")
        self._selected = None if fields is None else frozenset(fields)
        self._names: dict[bytes, str] = {}  # fields by what comes after the key in headers

    def decode(self, number: int, start: int, data: memoryview) -> dict[str, Any]:
        """Make a sample of its members."""
        sample = plain_sample(data, self._shards[number].name, self._names, self._selected)
        if sample is None:
            sample = self._decoder_of(self._shards[number]).whole_sample(data, start)
        return sample


def _sample_decoder(fields: tuple[str, ...] | None, shard: Shard) -> TarSamples:
    return TarSamples(shard.name, fields=fields, uniform=False)
