"""WebDataset shards: tar files whose members are the fields of samples."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Unpack

from headrace._base.text import check_names
from headrace._shards.compression import also_compressed
from headrace._shards.discovery import Shard, Shards
from headrace._shards.indexing import OpenedIndex
from headrace._shards.tar import MEMBER_LIMIT, TarSamples
from headrace.datasets.sharded import IndexedDataset, ShardedStream, StreamOptions
from headrace.errors import ShardError


class TarDataset(ShardedStream[dict[str, Any]]):
    """A stream of the samples in WebDataset shards.

    A sample is a dict: ``{"__key__": …, "__url__": …, "jpg": b"…", "cls": b"…"}``. Consecutive
    members with the same path up to the first dot of the file name form a sample. The rest after
    the dot, in lower case, is the field. Fields are undecoded `bytes`: decode in the loader's
    `transform`. Files without an extension, and files whose names start with a dot, belong to no
    sample.

    Several shards are read at once, each by several ranged requests. The samples of the shards are
    interleaved, in the same order in every run. Shards may be plain, gzip or zstd (``.tar``,
    ``.tar.gz``, ``.tar.zst``). Before Python 3.14, zstd needs ``pip install headrace[zstd]``.

    A corrupt or truncated archive raises a `ShardError` with shard, member and offset, after the
    samples before the damage. The stream then continues with the other shards. An epoch with the
    loader's ``on_error="skip"`` continues too. A member with an unsafe name, a link or a member
    above `member_limit` is an error of the member's sample alone. A flipped bit *within* a member
    of a plain tar goes undetected. gzip and zstd have checksums.

    For a glob or a directory, the constructor waits for a listing. In an async program use ``await
    asyncio.to_thread(TarDataset, ...)``.

    Args:
        shards: a URL, a path, or several. Each may contain braces (``{0000..0127}``, ``{a,b}``), be
            a glob (``*``, ``?`` and ``[…]`` within a directory, ``**`` across directories) or be a
            directory. A file matched by a glob, or named in a store that can list, may have any
            ending. In a directory, hidden files are left out, and so is the content of hidden
            directories and of directories with a leading underscore (Spark's ``_temporary``). A
            store's directory with the name of a shard is given as ``x.tar/``. Or a
            `headrace.Store`, for all shards in the store.
        fields: fields to return. Every sample must have all `fields`. None returns all fields, and
            every sample must have the same fields as the first sample of its shard.
        uniform: if False, without `fields`, samples may have different fields.
        member_limit: maximum size of a member in bytes. A larger member is an error, since a whole
            member is held in memory.
        shuffle: whether to shuffle the shards at each epoch, equally on all ranks.
        buffer_size: samples of the shuffle buffer. 0 for no buffer.
        seed: seed of both orders, combined with the epoch. None takes the seed of the loader, else
            0. The loader's seed must then be the same on all ranks.
        rank: the share of the stream to read. The default is the rank of `headrace.get_rank_info`
            when reading starts. Each rank reads whole shards, so ranks may have different numbers
            of samples.
        world_size: number of ranks.
        shards_in_parallel: number of shards to read at once. The samples of the shards are
            interleaved.
        requests_per_shard: number of requests in flight for each shard.
        chunk_bytes: bytes of a request. Memory holds at most about
            ``shards_in_parallel × (2 × requests_per_shard + 5) × chunk_bytes``, or more if samples
            are larger.
        store: store of all shards, a `headrace.Store` or its URL. `shards` are then keys in the
            store, or URLs under the store's URL. By default each URL's own store is opened with
            default options.

    Raises:
        EmptyListingError: a glob or a directory has no shard, or the file or directory does not
            exist.
        ShardError: the ending of a name belongs to an unsupported compression.
        StoreError: a listing failed.
        ValueError: an argument is invalid or conflicts with another.

    Example:
        >>> import io, pathlib, tarfile, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> with tarfile.open(folder / "0000.tar", "w") as archive:
        ...     for name in ("a.txt", "a.cls", "b.txt", "b.cls"):
        ...         info = tarfile.TarInfo(name); info.size = len(name)
        ...         archive.addfile(info, io.BytesIO(name.encode()))
        >>> samples = TarDataset(folder / "{0000..0000}.tar")
        >>> [(sample["__key__"], sample["txt"], sample["cls"]) for sample in samples]
        [('a', b'a.txt', b'a.cls'), ('b', b'b.txt', b'b.cls')]
    """

    suffixes = (*also_compressed(".tar"), ".tgz", ".tzst")

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
        """Return the decoder of a shard."""
        return TarSamples(
            shard.name,
            fields=self._fields,
            uniform=self._uniform,
            member_limit=self._member_limit,
        )

    def index_decoder(self, shard: Shard) -> TarSamples:
        """Return the decoder for indexing a shard, with all fields."""
        return TarSamples(shard.name, uniform=True)

    def _indexed(
        self, opened: OpenedIndex, unpacked_bytes: int
    ) -> IndexedDataset[dict[str, Any]]:
        if self._member_limit != MEMBER_LIMIT:
            raise ValueError("member_limit= is an option of the stream alone")
        flawed = opened.numbers[opened.file.flawed[opened.numbers] > 0]
        if self._uniform and self._fields is None and len(flawed):
            raise ShardError(opened.file.shard(flawed[0]).problem or "")
        return super()._indexed(opened, unpacked_bytes)
