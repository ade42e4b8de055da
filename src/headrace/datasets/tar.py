"""WebDataset shards: tar files whose members are the fields of samples."""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Unpack

import anyio.to_thread
import numpy as np

from headrace._core.interface.background_loop import background_loop
from headrace._core.interface.ranged import RangedDataset, positions
from headrace._core.shards.discovery import Shard, Shards, find_shards
from headrace._core.shards.stream import ShardedStream, StreamOptions
from headrace._core.shards.tar.format import MEMBER_LIMIT
from headrace._core.shards.tar.index import ABSENT, TarIndex
from headrace._core.shards.tar.index_cache import index_cache
from headrace._core.shards.tar.indexing import load_indices
from headrace._core.shards.tar.samples import TarSamples
from headrace._core.store.ranges import Ranges
from headrace._core.store.store import StoreLike
from headrace.datasets.cached import Cacheable, Extent
from headrace.errors import ShardError

__all__ = ["IndexedTarDataset", "Span", "TarDataset"]

_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tar.zstd", ".tzst")


class TarDataset(ShardedStream[dict[str, Any]]):
    """A stream of the samples in WebDataset shards: ``{"__key__": …, "__url__": …, "jpg": b"…", "cls": b"…"}``.

    Members that stand together and have the same path up to the first dot of their names are a sample; what is behind
    the dot, in lower case, is the field. Fields are `bytes`, undecoded: decode in the loader's `transform`. Files
    without an extension, and those whose names begin with a dot, belong to no sample.

    Several shards are read at once, each by several ranged requests, and their samples come in turn: the same order in
    every run. Shards may be plain, gzip or zstd (``.tar``, ``.tar.gz``, ``.tar.zst``; zstd needs
    ``pip install headrace[zstd]`` before Python 3.14).

    An archive that is damaged or ends too early raises a `ShardError` with shard, member and offset, behind the samples
    before the damage. The next sample is then of the other shards; with the loader's ``on_error="skip"`` the epoch goes
    on so. A flipped bit *within* a member of a plain tar cannot be seen in a stream; gzip, zstd and `index` have
    checksums.

    Args:
        shards: see `ShardedStream`, as for all other options.
        fields: the fields to give, each of which every sample must have. None: all of them, and every sample must have
            the same as its shard's first.
        uniform: with False and without `fields`, each sample has what it has.
        member_limit: bytes; a larger member is an error, since members are held in memory whole.
        options: see `ShardedStream`.

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
        shards: Shards | Sequence[Shard],
        *,
        fields: Collection[str] | None = None,
        uniform: bool = True,
        member_limit: int = MEMBER_LIMIT,
        **options: Unpack[StreamOptions],
    ) -> None:
        if isinstance(fields, str):
            raise TypeError("fields= must be several names, not one str")
        self._fields = None if fields is None else tuple(fields)
        self._uniform = uniform
        self._member_limit = member_limit
        super().__init__(shards, **options)

    def _decoder(self, shard: Shard) -> TarSamples:
        return TarSamples(shard.name, fields=self._fields, uniform=self._uniform, member_limit=self._member_limit)

    @staticmethod
    def index(
        shards: Shards,
        *,
        fields: Collection[str] | None = None,
        uniform: bool = True,
        save: bool = False,
        cache_folder: str | os.PathLike[str] | bool = True,
        progress: bool | None = None,
        store: StoreLike | None = None,
    ) -> IndexedTarDataset:
        """The samples of plain tar shards by number: a map-style dataset that reads each with one ranged request.

        An index says where the members of a shard are, and their CRC-32. It is made by reading the whole shard once,
        and kept on this machine, for this version of the shard. Processes that make the same index at the same time,
        such as the ranks on a machine, share the work. An index beside the shard (``0000.tar.index.npz``) that fits its
        size and version is read in place of the shard; it serves every machine. Blocks; in an async program use
        ``await TarDataset.aindex(...)``.

        Args:
            shards: as for the class.
            fields: as for the class; the index has all fields.
            uniform: as for the class.
            save: whether indices that are not beside their shards are stored there. If that fails, it is a warning.
            cache_folder: where indices are kept on this machine: True for ``$XDG_CACHE_HOME/headrace/tar-index``, in
                ``~/.cache`` by default, False for nowhere. It is this user's only, and takes 2 GiB at most.
            progress: whether progress is written to standard error, after 2 seconds; None if that is a terminal.
            store: as for the class.

        Raises:
            ShardError: a shard is damaged, or compressed, so that nothing can be read from its middle.
            StoreError: reading a shard failed.
            CacheFolderError: `cache_folder` names a folder of another user, or one that others may write to.

        Example:
            >>> import io, pathlib, tarfile, tempfile
            >>> folder = pathlib.Path(tempfile.mkdtemp())
            >>> with tarfile.open(folder / "0000.tar", "w") as archive:
            ...     for name, data in (("a.txt", b"first"), ("b.txt", b"second")):
            ...         info = tarfile.TarInfo(name); info.size = len(data)
            ...         archive.addfile(info, io.BytesIO(data))
            >>> dataset = TarDataset.index(folder / "0000.tar")
            >>> len(dataset), dataset[1]["txt"]
            (2, b'second')
        """
        if isinstance(fields, str):
            raise TypeError("fields= must be several names, not one str")
        found = find_shards(shards, suffixes=_SUFFIXES, store=store)
        cache = index_cache(cache_folder)
        indices = background_loop().run(
            load_indices(found, uniform=uniform and fields is None, save=save, cache=cache, progress=progress)
        )
        return IndexedTarDataset(indices, fields=fields)

    @staticmethod
    async def aindex(shards: Shards, **options: Any) -> IndexedTarDataset:
        """As `index`, without blocking the caller's loop."""
        make = functools.partial(TarDataset.index, shards, **options)
        return await anyio.to_thread.run_sync(make, abandon_on_cancel=True)


class Span(NamedTuple):
    """The bytes of a sample: one range of one shard.

    Attributes:
        shard: the shard's number.
        start: the first byte.
        stop: behind the last.
    """

    shard: int
    start: int
    stop: int


class IndexedTarDataset(RangedDataset[dict[str, Any]], Cacheable[dict[str, Any]]):
    """The samples of indexed tar shards by number; made by `TarDataset.index`.

    A sample is one ranged GET, of the bytes from its first field to its last, and every field's CRC-32 is checked; what
    is damaged is read once more. A loader reads samples of its look-ahead that are neighbours by one request.

    Args:
        indices: one for each shard.
        fields: the fields to give, each of which every sample must have; None for those that a sample has.

    Raises:
        ShardError: a sample lacks one of `fields`.
    """

    def __init__(self, indices: Sequence[TarIndex], *, fields: Collection[str] | None = None) -> None:
        self._indices = tuple(indices)
        self._fields = None if fields is None else tuple(fields)
        self._columns = tuple(self._columns_of(index) for index in self._indices)
        self._ends = np.cumsum([len(index.keys) for index in self._indices])
        bounds = [index.bounds(columns) for index, columns in zip(self._indices, self._columns, strict=True)]
        self._starts = np.concatenate([starts for starts, _ in bounds])
        self._stops = np.concatenate([stops for _, stops in bounds])

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of samples in each shard."""
        return tuple(len(index.keys) for index in self._indices)

    def stream(self, **options: Unpack[StreamOptions]) -> TarDataset:
        """The same shards as a stream, whose counts are known, so that it can be split over ranks.

        Args:
            options: see `ShardedStream`.
        """
        shards = [index.shard for index in self._indices]
        uniform = all(bool((index.offsets != ABSENT).all()) for index in self._indices)
        options.setdefault("counts", self.counts)
        return TarDataset(shards, fields=self._fields, uniform=uniform, **options)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._indices)} shards, {len(self)} samples)"

    def ranges(self, indices: Sequence[int]) -> Ranges:
        """The bytes that the samples at `indices` are read from; negative indices count from the end.

        Raises:
            IndexError: there is no such sample.
        """
        rows = positions(indices, len(self))
        return Ranges(np.searchsorted(self._ends, rows, side="right"), self._starts[rows], self._stops[rows])

    def span(self, index: int) -> Span:
        """The bytes that the sample at `index` is read from."""
        return Span(*(int(column[0]) for column in self.ranges([index])))

    async def read_range(self, number: int, start: int, stop: int, *, index: Any = None) -> memoryview:
        """Read bytes of the shard of that number.

        Raises:
            StoreError: the store refused or failed, or the shard has changed since its index was made.
        """
        shard = self._indices[number].shard
        return await shard.read(start, stop, index=index)

    def extent(self, index: int) -> Extent:
        """Which bytes the sample at `index` is, for a cache; raises `IndexError` if there is none."""
        span = self.span(index)
        shard = self._indices[span.shard].shard
        etag = None if shard.head is None else shard.head.etag
        return Extent(shard.store.store_id, shard.key, etag, span.start, span.stop - span.start)

    def sample_of(self, index: int, data: memoryview) -> dict[str, Any]:
        """The sample at `index`, of its bytes.

        Raises:
            ShardError: a field is not what it was when the index was made.
        """
        number, row = self._locate(index)
        tar = self._indices[number]
        begin = int(self._starts[int(self._ends[number]) - len(tar.keys) + row])
        sample: dict[str, Any] = {"__key__": tar.keys[row], "__url__": tar.shard.name}
        for column in self._columns[number]:
            offset, size = int(tar.offsets[row, column]), int(tar.sizes[row, column])
            if offset == ABSENT:
                continue
            content = bytes(data[offset - begin : offset - begin + size])
            if zlib.crc32(content) != tar.checksums[row, column]:
                name = f"{tar.keys[row]}.{tar.fields[column]}"
                raise ShardError("the checksum of a member is wrong", shard=tar.shard.name, member=name, offset=offset)
            sample[tar.fields[column]] = content
        return sample

    def sample_key(self, index: int) -> str:
        """The shard and the key at `index`."""
        number, row = self._locate(index)
        tar = self._indices[number]
        return f"{tar.shard.key}/{tar.keys[row]}"

    def _locate(self, index: int) -> tuple[int, int]:
        length = len(self)
        if not -length <= index < length:
            raise IndexError(f"index {index} is out of range for {self!r}")
        index %= length
        number = int(np.searchsorted(self._ends, index, side="right"))
        return number, index - int(self._ends[number]) + len(self._indices[number].keys)

    def _columns_of(self, index: TarIndex) -> tuple[int, ...]:
        if self._fields is None:
            return tuple(range(len(index.fields)))
        missing = [field for field in self._fields if field not in index.fields]
        if missing and index.keys:
            raise ShardError(f"no sample has field {missing[0]!r}", shard=index.shard.name)
        columns = tuple(index.fields.index(field) for field in self._fields if field in index.fields)
        lacking = np.argwhere(index.offsets[:, list(columns)] == ABSENT)
        if len(lacking):
            row, column = map(int, lacking[0])
            what = f"sample {index.keys[row]!r} lacks {self._fields[column]!r}"
            raise ShardError(what, shard=index.shard.name)
        return columns
