"""The file format of an index: where the samples of a dataset's shards are.

The first 64 bytes have the magic, a hash of the rest, the length of the header, and the CRC-32 of
what follows, which is checked when an index is mapped. The header is JSON, padded to 8 bytes. Three
little-endian arrays follow:

- for each 4 GiB of a shard but the first, the number of the first sample there (int64);
- for each sample, the offset in these 4 GiB (uint32);
- the length of each sample, if lengths were asked for (uint32).

A sample ends where the next sample of its shard begins. Offsets in a compressed shard are those of
the unpacked bytes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headrace._core.array_types import IntArray
from headrace._core.shards.discovery import shard_errors
from headrace._core.store.head import Head
from headrace.errors import ShardError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

MAGIC = b"headrace index 3"
PREFIX = struct.Struct(
    "<16s 32s Q Q"
)  # magic, hash of all that follows, bytes of the header, CRC-32
HASHED_FROM = 48  # after the hash
ARRAYS = ("<i8", "<u4", "<u4")
PART_BITS = 32  # of an offset within 4 GiB


class IndexedShard(NamedTuple):
    """A shard in an index.

    Attributes:
        name: the shard's name after that of the index's folder.
        format: what its samples are, as "tar".
        size: bytes of the object.
        etag: entity tag; None if unknown, and for local files: their tags depend on the machine.
        modified: time of the last modification; None if unknown.
        samples: number of samples.
        end: the byte after the last sample, unpacked.
        problem: error of the first sample that breaks a rule of its shard; None if there is none.
        begins: the places from which a compressed shard can be unpacked, as base 64 of int64:
            offset in the object and offset in the unpacked bytes of each.
    """

    name: str
    format: str
    size: int
    etag: str | None
    modified: str | None
    samples: int
    end: int
    problem: str | None
    begins: str

    def borders(self) -> IntArray:
        """Borders of the parts of a compressed shard: offsets in the object and in the unpacked bytes."""
        begins = np.frombuffer(base64.b64decode(self.begins), "<i8")
        return np.append(begins, (self.size, self.end)).reshape(-1, 2)

    def head(self, key: str, *, moved: bool = False) -> Head:
        """The indexed version of the shard, under a key."""
        # Copies in another place have other tags and times.
        etag, modified = (None, None) if moved else (self.etag, self.modified)
        return Head(key, self.size, etag, modified)


class IndexFile:
    """An index, mapped from its file or held in memory.

    A pickled index is the path and the hash of its file, which is mapped again. Without a path,
    the pickle has the bytes.

    Args:
        name: path or URL of the file, for errors.
        data: all bytes of the file.
        path: the file from which `data` are mapped; None if there is none.
        digest: the expected hash; None for any.

    Attributes:
        digest: hash of the content.
        folder: URL of the folder that has all shards when the index was made.
        shards: the shards, sorted by name.
        counts: number of samples of each shard, int64.
        firsts: number of the first sample of each shard, int64.
        lengths: length of each sample, uint32; empty without lengths.
        length: the function that gave the lengths; empty without lengths.

    Raises:
        ShardError: the file is damaged, is no index, or has another hash.
    """

    def __init__(
        self, name: str, data: Buffer, path: str | None = None, digest: bytes | None = None
    ) -> None:
        self.name, self.path, self._data = name, path, data
        what = "no index of shards, or a damaged one; make it again by `headrace index`"
        with shard_errors(what, name):
            self._parse(memoryview(data).cast("B"), digest)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.path is None:
            return IndexFile, (self.name, self.to_bytes())
        return map_index, (self.path, self.digest)

    def to_bytes(self) -> bytes:
        """All bytes of the file."""
        return bytes(self._data)

    def _parse(self, data: memoryview, expected: bytes | None) -> None:
        magic, self.digest, length, check = PREFIX.unpack_from(data)
        if magic != MAGIC:
            raise ValueError("its first bytes are not those of an index, or are of another version")
        if expected not in (None, self.digest):
            raise ValueError("it was replaced")
        if zlib.crc32(data[PREFIX.size :]) != check:
            raise ValueError("its checksum is wrong")
        header = json.loads(bytes(data[PREFIX.size : PREFIX.size + length]))
        self.folder, self.length = header["folder"], header["length"]
        self.shards = [IndexedShard(*row) for row in header["shards"]]
        self.counts: IntArray = np.array([shard.samples for shard in self.shards], np.int64)
        self._shard_ends: IntArray = np.array([shard.end for shard in self.shards], np.int64)
        self._ends = np.cumsum(self.counts)
        self.firsts = self._ends - self.counts
        total = int(self.counts.sum())
        offset, arrays = PREFIX.size + length, []
        lengths = total if self.length else 0
        for count, kind in zip((header["parts"], total, lengths), ARRAYS, strict=True):
            arrays.append(np.frombuffer(data, kind, count, offset))
            offset += arrays[-1].nbytes
        if offset != len(data):
            raise ValueError(f"{len(data)} bytes in place of {offset}")
        self._parts, self._begins, self.lengths = arrays
        self._parts_before = np.searchsorted(self._parts, self.firsts)  # each shard

    def verify(self) -> None:
        """Raise `ShardError` if the hash is not that of the content, which is read."""
        if self.digest != content_digest([memoryview(self._data)[HASHED_FROM:]]):
            raise ShardError(
                "the index is damaged; make it again by `headrace index`", shard=self.name
            )

    def bounds(self, shards: IntArray, places: IntArray) -> tuple[IntArray, IntArray]:
        """Start and stop of the samples at `places`, in their shards, which are known.

        Raises:
            ShardError: a sample is not within its shard.
        """
        is_last = places + 1 == self._ends[shards]
        starts, ends = self.starts(shards, places), self._shard_ends[shards]
        stops = np.where(is_last, ends, self.starts(shards, np.where(is_last, places, places + 1)))
        if ((starts < 0) | (stops < starts) | (stops > ends)).any():
            raise ShardError("damaged: a sample is not within its shard", shard=self.name)
        return starts, stops

    def starts(self, shards: IntArray, places: IntArray) -> IntArray:
        """Start of the samples at `places`, in their shards, which are known."""
        parts = np.searchsorted(self._parts, places, side="right") - self._parts_before[shards]
        starts: IntArray = (parts << PART_BITS) + self._begins[places]
        return starts

    @staticmethod
    def joined(folder: str, parts: Sequence[IndexFile]) -> bytes:
        """The bytes of an index of the shards in a folder, of the indices of one shard each."""
        parts = sorted(parts, key=lambda part: part.shards[0].name)
        shards = [
            part.shards[0]._replace(name=part.shards[0].name.removeprefix(folder)) for part in parts
        ]
        firsts = np.cumsum([0, *(shard.samples for shard in shards)]).tolist()
        columns = [
            np.concatenate(
                [part._parts + first for part, first in zip(parts, firsts, strict=False)]
            ),
            np.concatenate([part._begins for part in parts]),
            np.concatenate([part.lengths for part in parts]),
        ]
        return _dump(folder, shards, parts[0].length, columns)

    @staticmethod
    def of_shard(shard: IndexedShard, begins: IntArray, lengths: IntArray, length: str) -> bytes:
        """The bytes of an index of one shard, of the offsets and lengths of its samples."""
        parts = np.repeat(np.arange(1, len(begins)), np.diff(begins >> PART_BITS))
        return _dump("", [shard], length, [parts, begins & (1 << PART_BITS) - 1, lengths])


def map_index(path: str, digest: bytes | None = None) -> IndexFile:
    """Map the file of an index; raises `ShardError` if the file is not the one expected."""
    try:
        with open(path, "rb") as file:
            empty = not os.fstat(file.fileno()).st_size
            data: Buffer = b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        what = "the index is gone, or not on this machine; make it again by `headrace index`"
        raise ShardError(what, shard=path) from None
    return IndexFile(path, data, path, digest)


def _dump(
    folder: str, shards: Sequence[IndexedShard], length: str, arrays: Sequence[NDArray[Any]]
) -> bytes:
    content = {"folder": folder, "length": length, "parts": len(arrays[0]), "shards": shards}
    header = json.dumps(content, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    parts = [header]
    parts += [array.astype(kind).tobytes() for array, kind in zip(arrays, ARRAYS, strict=True)]
    check = zlib.crc32(b"".join(parts))
    rest = PREFIX.pack(MAGIC, bytes(32), len(header), check)[HASHED_FROM:]
    return b"".join(
        [PREFIX.pack(MAGIC, content_digest([rest, *parts]), len(header), check), *parts]
    )


def content_digest(parts: Iterable[Buffer]) -> bytes:
    """Hash of bytes in some pieces."""
    digest = hashlib.blake2b(digest_size=32)
    for part in parts:
        digest.update(part)
    return digest.digest()
