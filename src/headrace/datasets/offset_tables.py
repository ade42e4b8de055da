"""Shards with a table of offsets, as of Mosaic and LitData."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from headrace._base.array_types import ByteArray, IntArray
from headrace._shards.compression import check_content
from headrace._shards.discovery import Shard, map_shards, shard_errors
from headrace._shards.unpacked import FORMATS, UnpackedShards, unpack, unpacker
from headrace._store.ranges import Ranges
from headrace._store.store import Store, StoreLike, as_store
from headrace._streams.blocking import background_loop
from headrace._streams.kinds import Blocks, Capabilities, T_co
from headrace.datasets.cached import Extent, RangedShards
from headrace.errors import ShardError

FieldDecoder = Callable[[memoryview], Any]


@dataclass(frozen=True, slots=True)
class TableFile:
    """A shard as described by the index.

    The shard has a 32-bit number of rows, the offsets of the rows and of the end, and the rows.
    """

    key: str
    rows: int
    size: int  # bytes, unpacked
    format: str | None = None  # of the compression
    stored: int | None = None  # bytes of the compressed object, if known

    @property
    def begin(self) -> int:
        """Number of bytes before the first row."""
        return 4 * self.rows + 8


class OffsetTableDataset(RangedShards[T_co]):
    """Rows of shards with a table of offsets.

    A subclass defines `decode`. If a shard is compressed, all shards are read as a whole. Otherwise
    shards are read by ranges.
    """

    def __init__(
        self,
        store: Store,
        files: Sequence[TableFile],
        unpacked_bytes: int,
        counts: Sequence[int] = (),
    ) -> None:
        self._files = tuple(files)
        formats = {file.format for file in files if file.format}
        self._whole = bool(formats)
        for format in formats:
            unpacker(format)  # raises an error now if a package is missing
        if len(keys := [file.key for file in files]) > len(set(keys)):
            raise ShardError(
                "its index has it twice", shard=store.name(max(keys, key=keys.count))
            )
        self._unpacked = UnpackedShards(unpacked_bytes)
        self._tables: dict[int, IntArray] = {}  # offsets of shards read as a whole
        opened = map_shards(partial(self._open, store), files)
        super().__init__(
            [shard for shard, _ in opened], counts or [file.rows for file in files]
        )
        self._offsets = np.concatenate(
            [table for _, table in opened] or [np.zeros(1, np.int64)]
        ).astype(np.uint32)

    async def _open(self, store: Store, file: TableFile) -> tuple[Shard, IntArray]:
        if self._whole:
            shard, data = Shard(store, file.key, await store.head(file.key)), None
        else:
            shard, data = await Shard(store, file.key).read_version(file.begin)
        size = file.stored if file.format else file.size
        if size not in (None, shard.size):
            raise shard.error(f"{shard.size:,} bytes, and {size:,} in its index")
        # A store without ranges returns more bytes than requested.
        return shard, np.empty(0, np.int64) if data is None else self._table(
            file, data[: file.begin], shard
        )

    def _table(self, file: TableFile, data: memoryview, shard: Shard) -> IntArray:
        """Check the table of a shard, and return the offsets.

        The offsets are the beginning of each sample and the end of the last sample. `data` has the
        first bytes of the shard.
        """
        if len(data) < file.begin:
            raise shard.error(
                f"no room for {file.rows:,} samples, which its index says it has"
            )
        rows, offsets = np.split(
            np.frombuffer(data[: file.begin], "<u4").astype(np.int64), [1]
        )
        if rows != file.rows:
            raise shard.error(
                f"{rows[0]:,} samples, and {file.rows:,} in its index", offset=0
            )
        check_offsets(offsets, file.begin, file.size, shard)
        return offsets

    def _capabilities(self) -> Capabilities:
        found = super()._capabilities()
        return found._replace(ranges=False) if self._whole else found

    @cached_property
    def blocks(self) -> Blocks:
        """Sizes of blocks for a random order.

        If shards are read as a whole, the shards are the blocks.
        """
        if not self._whole:
            return super().blocks
        return Blocks.whole(
            self._unpacked.limit, sum(file.size for file in self._files), self.counts
        )

    def ranges(self, indices: Sequence[int]) -> Ranges:
        """Return the bytes of the samples at `indices`.

        For shards read as a whole, row numbers take the place of bytes.
        """
        shards, rows, places = self._rows(indices)
        if self._whole:
            return Ranges(shards, rows, rows + 1)
        at = places + shards  # a table has one offset more than samples
        return Ranges(
            shards,
            self._offsets[at].astype(np.int64),
            self._offsets[at + 1].astype(np.int64),
        )

    def extent(self, index: int) -> Extent:
        """Describe the bytes of the sample at `index`, for a cache.

        Raises:
            IndexError: `index` is out of range.
        """
        return (
            super()
            .extent(index)
            ._replace(checksum="row of an unpacked shard" if self._whole else None)
        )

    async def read_range(
        self, number: int, start: int, stop: int, *, index: Any = None
    ) -> memoryview:
        """Read bytes of a shard, or take a row of a whole shard."""
        if not self._whole:
            return await super().read_range(number, start, stop, index=index)
        unpacked = await self._unpacked.get(number, partial(self._load, number))
        begin, end = self._tables[number][start : start + 2].tolist()
        data: memoryview = unpacked.data.toreadonly()
        return data[begin:end]

    async def _load(self, number: int) -> ByteArray:
        file, shard = self._files[number], self._shards[number]
        stored = await shard.read(0, shard.size)
        unpacked, table = await asyncio.to_thread(self._unpack, file, shard, stored)
        self._tables[number] = table
        return unpacked

    def _unpack(
        self, file: TableFile, shard: Shard, data: memoryview
    ) -> tuple[ByteArray, IntArray]:
        """Return the unpacked bytes of a shard, and the offsets of the samples."""
        found = np.frombuffer(data, np.uint8)
        if file.format:
            found = unpack(data, file.format, file.size, shard, self._unpacked.limit)
        return found, self._table(file, found.data, shard)

    def sample_of(self, index: int, data: memoryview) -> T_co:
        """Make the sample at `index` from the sample's bytes.

        Raises:
            ShardError: the bytes are corrupt.
        """
        number, row = self.locate(index)
        try:
            return self.decode(number, data)
        except Exception as error:  # a decoder may raise any error
            what = f"sample {row:,} is corrupt: {type(error).__name__}: {error}"
            raise self._shards[number].error(what) from None

    def decode(self, number: int, data: memoryview) -> T_co:
        """Make a sample of the shard `number` from the sample's bytes."""
        raise NotImplementedError  # each format has its own

    def sample_key(self, index: int) -> str:
        """Return the shard and the row of the sample at `index`."""
        number, row = self.locate(index)
        return f"{self._shards[number].key}[{row}]"


def check_offsets(offsets: IntArray, begin: int, end: int, shard: Shard) -> None:
    """Raise `ShardError` unless the offsets ascend from `begin` or later to `end`."""
    if offsets[0] < begin or offsets[-1] != end or (np.diff(offsets) < 0).any():
        span = f"from {offsets[0]:,} to {offsets[-1]:,}"
        raise shard.error(
            f"its offsets, {span}, are not those of {end:,} bytes", offset=4
        )


def read_index(url: StoreLike, parse: Callable[[Any], T_co]) -> tuple[Store, T_co]:
    """Return the store at `url`, and the parsed index.json."""
    store = as_store(url)
    data = background_loop().run(store.read_all("index.json"))
    name = store.name("index.json")
    check_content(data, name)
    with shard_errors("no index of such shards", name):
        return store, parse(json.loads(bytes(data)))


def checked(
    name: str, rows: int, size: int, compression: str | None, stored: int | None
) -> TableFile:
    """Make a `TableFile` of checked values from an index.

    Raises:
        ValueError: a value is impossible.
    """
    format = compression.partition(":")[0] if compression else None
    if set(name.split("/")) & {"", ".", ".."} or "\\" in name:
        raise ValueError(f"shard {name!r} is not in the folder")
    whole = isinstance(stored, int | None) and type(rows) is type(size) is int
    if not whole or not 0 <= 4 * rows + 8 <= size < 1 << 32:  # 32-bit offsets
        raise ValueError(
            f"shard {name!r} has {rows!r} samples in {size!r} bytes (compressed: {stored!r})"
        )
    if format is not None and format not in FORMATS:
        raise ValueError(
            f"shard {name!r} has compression {format!r}; {', '.join(FORMATS)} are read"
        )
    return TableFile(name, rows, size, format, stored)


def decode_fields(
    data: memoryview, fields: Sequence[tuple[str, FieldDecoder, int | None]]
) -> list[Any]:
    """Decode the fields of a sample.

    Args:
        data: bytes of the sample.
        fields: name, decoder and size in bytes of each field. The sizes of fields without a fixed
            size are stored at the beginning of the sample.

    Returns:
        The values of the fields.
    """
    begin = 4 * sum(not size for _, _, size in fields)
    sizes, values = iter(np.frombuffer(data[:begin], "<u4").tolist()), []
    for name, decoder, size in fields:
        end = begin + (size or next(sizes))
        try:
            values.append(decoder(data[begin:end]))
        except Exception as error:
            raise ValueError(f"{name}: {type(error).__name__}: {error}") from None
        begin = end
    if begin != len(data):
        raise ValueError(f"{len(data)} bytes in place of {begin}")
    return values


def raw_image(data: memoryview) -> ByteArray:
    """Return the pixels of a raw image of PIL.

    The array is uint8 of shape (height, width) or (height, width, channels).
    """
    width, height, length = np.frombuffer(data[:12], "<u4").tolist()
    mode = bytes(data[12 : 12 + length]).decode()
    pixels = np.frombuffer(data[12 + length :], np.uint8)
    channels, rest = divmod(pixels.size, width * height)
    if rest or mode[0] in "1IF":  # bits, or more than 8 bits a channel
        raise ValueError(
            f"{pixels.size} bytes are no raw image of {width} by {height} pixels in mode {mode!r}"
        )
    return pixels.reshape((height, width, channels)[: 2 + (channels > 1)]).copy()


def several(data: memoryview, decode: FieldDecoder = bytes) -> list[Any]:
    """Decode values, stored after the number of values and the sizes."""
    count = int(np.frombuffer(data[:4], "<u4")[0])
    ends = (
        4 * count
        + 4
        + np.cumsum(np.frombuffer(data[4 : 4 * count + 4], "<u4"), dtype=np.int64)
    )
    if len(ends) != count or (count and ends[-1] != len(data)):
        raise ValueError(f"{len(data)} bytes are not {count} values")
    return [
        decode(data[start:end])
        for start, end in zip([4 * count + 4, *ends], ends.tolist(), strict=False)
    ]
