"""Finding, building and opening the index of shards.

An index is built in parts, a part for each shard. The parts are joined at the end.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import json
import os
import re
import shutil
import warnings
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import obstore
from obstore.store import MemoryStore

from headrace._base.array_types import IntArray
from headrace._shards.discovery import Shard, split_url
from headrace._shards.index_file import (
    PREFIX,
    IndexedShard,
    IndexFile,
    content_digest,
    dump_index,
    map_index,
)
from headrace._shards.reading import (
    BadRecord,
    Decoder,
    PartPosition,
    ReadAhead,
    ShardReader,
)
from headrace._store.disk_cache import secure_folder
from headrace._store.errors import RequestFailure
from headrace._store.head import Head, check_version
from headrace._store.ranges import map_all
from headrace._store.store import Store
from headrace.errors import ObjectNotFoundError, ShardError, StoreError

if TYPE_CHECKING:
    from typing_extensions import Buffer

NAME = "headrace.index"
PARTS = ".parts"  # suffix of the folder of parts, after the name of the index
MOST_SHARDS = 1024  # objects of shards in memory
PARALLEL_REQUESTS = 64  # small requests
PARALLEL_BUILDS = 4  # whole shards

DecoderOf = Callable[[Shard], Decoder]
"""Makes the decoder of a shard."""


class Indexing(NamedTuple):
    """How shards are indexed.

    Attributes:
        decoder_of: makes the decoder of a shard.
        length: function of a sample that returns the length, as the number of tokens; None for no
            lengths.
    """

    decoder_of: DecoderOf
    length: Callable[[Any], int] | None = None


def describe_functions(*functions: Any) -> str:
    """Describe functions by module, code, constants and closure, without addresses.

    The description tells apart functions of the same name.
    """
    return re.sub(" at 0x[0-9a-f]+", "", repr([_described(each) for each in functions]))


def _described(function: Any) -> list[object]:
    if isinstance(function, functools.partial):
        return [*_described(function.func), function.args, function.keywords]
    code = getattr(function, "__code__", None) or getattr(
        type(function).__call__, "__code__", None
    )
    own = [] if code is None else [code.co_code, code.co_names, *code.co_consts]
    held = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    # The order of a set differs between processes.
    return [
        sorted(map(repr, each)) if isinstance(each, set | frozenset) else each
        for each in (getattr(function, "__module__", None), function, *own, *held)
    ]


class OpenedIndex(NamedTuple):
    """An index and shards.

    Attributes:
        file: the index.
        shards: the shards, in the indexed versions.
        numbers: number of each shard in the index.
    """

    file: IndexFile
    shards: Sequence[Shard]
    numbers: IntArray


class IndexingDecoder(Decoder):
    """Notes where the samples of another decoder end.

    The decoder yields nothing.

    A sample begins where the sample before ends.
    """

    def __init__(self, shard: Shard, indexing: Indexing) -> None:
        self._shard, self._indexing = shard, indexing
        self._decoder = indexing.decoder_of(shard)
        self.pages, self.format = self._decoder.pages, self._decoder.format
        self._borders = array("q", (0,))
        self._lengths = array("I")
        self._problem: str | None = None

    def feed(self, data: Buffer) -> Iterator[Any]:
        return self._note(self._decoder.feed(data))

    def finish(self) -> Iterator[Any]:
        return self._note(self._decoder.finish())

    def _note(self, samples: Iterator[Any]) -> Iterator[Any]:
        for sample in samples:
            self._borders.append(self._decoder.complete)
            is_bad = type(sample) is BadRecord
            if is_bad and self._problem is None:
                self._problem = str(sample.error)
            if self._indexing.length is not None:
                self._lengths.append(0 if is_bad else self._indexing.length(sample))
        return iter(())

    def index(self, begins: Sequence[tuple[int, int]] = ()) -> bytes:
        """Return the bytes of an index of the shard.

        Args:
            begins: pieces of a compressed shard; see `Codec`.
        """
        head = self._shard.head
        assert head is not None
        row = IndexedShard(
            name=self._shard.name,
            format=self.format,
            size=head.size,
            # The tag of a local file has the number of the inode. A copy has another inode.
            etag=head.etag if self._shard.store.local_root is None else None,
            modified=head.modified,
            samples=len(self._borders) - 1,
            end=self._borders[-1],
            problem=self._problem,
            begins=base64.b64encode(np.array(begins, "<i8").tobytes()).decode(),
        )
        return dump_index(
            "", [row], np.array(self._borders[:-1]), np.array(self._lengths)
        )


def folder_of(shards: Sequence[Shard]) -> str:
    """Return the URL of the folder with all shards.

    The URL ends with a slash. Empty if the shards have no folder in common.
    """
    folder = _common_folder([shard.name for shard in shards])
    return "" if folder.endswith("//") else folder


def _common_folder(names: Sequence[str]) -> str:
    folder, slash, _ = os.path.commonprefix(names).rpartition("/")  # noqa: RUF071  # of URLs too
    return folder + slash


def beside(shards: Sequence[Shard]) -> Shard | None:
    """Return the place of an index beside shards.

    None if no folder has all shards.
    """
    folder, store = folder_of(shards), shards[0].store
    if folder and all(shard.store is store for shard in shards):
        return Shard(store, _common_folder([shard.key for shard in shards]) + NAME)
    return place_of(folder + NAME, None) if folder else None


def place_of(index: str | os.PathLike[str], store: Store | None) -> Shard:
    """Return the place of an index by name.

    The place is in the given store, if the name is a key or a URL of the store.
    """
    name = os.fspath(index)
    if store is not None:
        with contextlib.suppress(ValueError):  # of another store
            return Shard(store, store.key_of(name))
    base, key = split_url(name)
    return Shard(Store(base), key)


async def open_index(
    shards: Sequence[Shard],
    indexing: Indexing,
    place: Shard | None,
    *,
    required: bool,
    save: bool,
) -> OpenedIndex:
    """Find or build the index of shards.

    Args:
        shards: the shards, as named by the user.
        indexing: how shards are indexed.
        place: where an index may be; None for no place.
        required: whether a missing index is an error.
        save: whether a missing or damaged index, or an index of other shards, is built and stored
            at `place`.

    """
    if place is not None:
        try:
            return match(await fetch_index(place), shards, indexing)
        except StoreError as error:
            # Without the right to list a bucket, S3 answers 403 for a missing object.
            missing = isinstance(error, ObjectNotFoundError) or error.status == 403
            if not missing or (required and not save):
                raise
        except ShardError:
            if not save:
                raise
    return match(
        await _built(shards, indexing, place if save else None), shards, indexing
    )


async def fetch_index(place: Shard) -> IndexFile:
    """Map an index.

    The index of a remote store is fetched once into the cache folder.

    Raises:
        StoreError: there is no index, or a request failed.
        ShardError: the index is damaged.
    """
    if place.store.local_root is not None:
        await place.store.head(place.key)  # for the error if there is none
        return map_index(_path(place))
    place, start = await place.read_version(PREFIX.size)
    cached = _cached(bytes(start[16:48]).hex())
    with contextlib.suppress(ShardError, ObjectNotFoundError):
        return await fetch_index(cached)
    data = await place.read(0, place.size)
    IndexFile(place.name, data)  # an error if the bytes are damaged
    return await _stored(cached, data)


async def _stored(place: Shard, data: memoryview | bytes) -> IndexFile:
    """Store the bytes of an index; map the index if there is a file."""
    await place.store.put(place.key, bytes(data))
    if place.store.local_root is not None:
        return map_index(_path(place))
    return IndexFile(place.name, data)


def _cached(name: str) -> Shard:
    """Return the place of an index in the user's cache folder.

    In memory if the folder cannot be used.
    """
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(
        os.path.expanduser("~"), ".cache"
    )
    folder = os.path.join(home, "headrace")
    try:
        secure_folder(folder)
        return Shard(Store(folder), f"{name}.index")
    except OSError as error:
        _warn(f"the index stays in memory, of which each process has a copy: {error}")
        return _in_memory()


def _in_memory() -> Shard:
    return Shard(Store("memory://index", backend=MemoryStore()), NAME)


def _path(place: Shard) -> str:
    return os.path.join(place.store.local_root or "", place.key)


def match(index: IndexFile, shards: Sequence[Shard], indexing: Indexing) -> OpenedIndex:
    """Return shards in the indexed versions.

    Raises:
        ShardError: a shard is not in the index, was replaced, or is indexed as another format.
    """
    rows = [index.shard(number) for number in range(len(index))]
    known = {row.name: number for number, row in enumerate(rows)}
    moved = not all(shard.name.startswith(index.folder) for shard in shards)
    folder = folder_of(shards) if moved else index.folder
    numbers, versions = [], []
    for shard in shards:
        number = known.get(shard.name.removeprefix(folder))
        row = None if number is None else rows[number]
        versions.append(_as_indexed(index, row, shard, indexing, folder))
        numbers.append(number)
    return OpenedIndex(index, versions, np.array(numbers, np.int64))


def _as_indexed(
    index: IndexFile,
    row: IndexedShard | None,
    shard: Shard,
    indexing: Indexing,
    folder: str,
) -> Shard:
    """Return a shard in the indexed version.

    Raises:
        ShardError: the shard has no entry, or differs from the entry.
    """

    def error(problem: str) -> ShardError:
        return shard.error(f"{problem}; make it again: headrace index {folder or 'URL'}")

    if row is None:
        raise error(f"not in the index {index.name}")
    format = indexing.decoder_of(shard).format
    if row.format != format:
        raise error(f"indexed as {row.format} in {index.name}, and not as {format}")
    known = Head(shard.key, row.size, row.etag, row.modified)
    if folder != index.folder:  # a copy has another tag and time
        known = replace(known, etag=None, modified=None)
    if shard.head is None:
        return replace(shard, head=known)
    try:
        check_version(known, shard.head)
    except RequestFailure:
        raise error(f"replaced since the index {index.name} was made") from None
    return shard


class _AllShards(Sequence[Shard]):
    """All shards of an index, each made at the first access."""

    def __init__(self, index: IndexFile, indexing: Indexing, folder: Shard) -> None:
        self._index, self._indexing, self._folder = index, indexing, folder
        self._made: dict[int, Shard] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _AllShards, (self._index, self._indexing, self._folder)

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, number: Any) -> Any:
        if (shard := self._made.get(number)) is None:
            row, folder = self._index.shard(number), self._folder
            shard = replace(folder, key=folder.key + row.name)
            shard = _as_indexed(self._index, row, shard, self._indexing, folder.name)
            if len(self._made) >= MOST_SHARDS:
                self._made.clear()
            self._made[number] = shard
        return shard


async def open_all(place: Shard, indexing: Indexing, store: Store | None) -> OpenedIndex:
    """Open all shards of an index, in the folder of the index.

    Args:
        place: where the index is.
        indexing: how shards are indexed.
        store: a store with the folder; None for the store of the folder's URL.

    Raises:
        ShardError: shards are indexed as another format, or the index is damaged.
        StoreError: there is no index, or a request failed.
        ValueError: the shards have no folder in common.
    """
    index = await fetch_index(place)
    if not index.folder:
        raise ValueError(f"{index.name} has shards of several folders: name the shards")
    base, folder = split_url(index.folder)
    shards = _AllShards(index, indexing, Shard(store or Store(base), folder))
    for number in index.kinds:
        shards[number]  # raises an error for another format
    return OpenedIndex(index, shards, np.arange(len(index)))


async def _built(
    shards: Sequence[Shard], indexing: Indexing, place: Shard | None
) -> IndexFile:
    """Return the index of these versions of shards, cached or built.

    The index is also stored at `place`, unless `place` is None.
    """
    shards = await with_heads(shards)
    # Shards in the memory of this process have no name in other processes.
    cached = _in_memory()
    if all(shard.store.store_id is not None for shard in shards):
        cached = _cached(
            _hash([folder_of(shards), *(part_name(shard, indexing) for shard in shards)])
        )
    try:
        index = await fetch_index(cached)
    except (ShardError, ObjectNotFoundError):
        index = await build_index(shards, indexing, cached)
    if place is not None:
        try:
            await place.store.put(place.key, bytes(index.data))
        except StoreError as error:
            _warn(f"cannot store the index beside its shards: {error}")
    return index


def _warn(what: str) -> None:
    with contextlib.suppress(Warning):  # of a filter "error": the index is complete
        warnings.warn(what, RuntimeWarning, stacklevel=2)


async def with_heads(shards: Sequence[Shard]) -> list[Shard]:
    """Return shards with sizes and versions.

    A request is made for each shard without a size in a listing.
    """

    async def one(shard: Shard) -> Shard:
        return replace(shard, head=shard.head or await shard.store.head(shard.key))

    return await map_all(one, shards, PARALLEL_REQUESTS)


def _hash(values: Sequence[Any]) -> str:
    return content_digest(json.dumps(values).encode()).hex()


def part_name(shard: Shard, indexing: Indexing) -> str:
    """Return the name of the part for a version of a shard."""
    head = shard.head
    assert head is not None
    identity = (
        shard.store.store_id,
        shard.name,
        head.size,
        head.version,
        indexing.decoder_of(shard).format,
        describe_functions(indexing.length),
    )
    return _hash(identity) + ".part"


async def index_shard(shard: Shard, indexing: Indexing) -> bytes:
    """Read a shard, and return the bytes of an index of the shard.

    Raises:
        ShardError: the shard is damaged.
    """
    decoder = IndexingDecoder(shard, indexing)
    reader = ShardReader(shard, decoder, ReadAhead(), PartPosition(0))
    try:
        while reader.block.after is not None:
            await reader.fill()
    finally:
        await reader.aclose()
    if reader.block.error is not None:
        raise reader.block.error
    return decoder.index(reader.codec.begins)


async def build_parts(
    shards: Sequence[Shard], indexing: Indexing, place: Shard
) -> list[IndexFile]:
    """Return an index of each shard.

    A part is taken from the folder of parts, or built and stored there.

    Args:
        shards: the shards, with versions.
        indexing: how shards are indexed.
        place: where the index will be.
    """
    builds = asyncio.Semaphore(PARALLEL_BUILDS)

    async def one(shard: Shard) -> IndexFile:
        key = part_key(place, shard, indexing)
        with contextlib.suppress(ShardError, ObjectNotFoundError):
            return IndexFile(place.store.name(key), await place.store.read_all(key))
        async with builds:
            data = await index_shard(shard, indexing)
            await place.store.put(key, data)
        return IndexFile(shard.name, data)

    return await map_all(one, shards, PARALLEL_REQUESTS)


def part_key(place: Shard, shard: Shard, indexing: Indexing) -> str:
    """Return the key of the part for a version of a shard."""
    return f"{place.key}{PARTS}/{part_name(shard, indexing)}"


async def build_index(
    shards: Sequence[Shard], indexing: Indexing, place: Shard
) -> IndexFile:
    """Build an index and store the index at `place`.

    Parts of an earlier call are used.

    Args:
        shards: the shards, with versions.
        indexing: how shards are indexed.
        place: where to store the index.

    Raises:
        ShardError: a shard is damaged.
        StoreError: a request failed.
    """
    parts = await build_parts(shards, indexing, place)
    index = await _stored(place, IndexFile.joined(folder_of(shards), parts))
    if place.store.local_root is not None:
        shutil.rmtree(_path(place) + PARTS, ignore_errors=True)
        return index
    keys = [part_key(place, shard, indexing) for shard in shards]
    with contextlib.suppress(Exception):  # of any store: the parts may stay
        await obstore.delete_async(place.store.backend(), keys)
    return index
