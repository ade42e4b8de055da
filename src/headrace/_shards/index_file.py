"""The file format of an index.

An index has the places of the samples in the shards of a dataset.

The first 64 bytes are the magic, a hash of all bytes after the hash, the length of the header, and
the CRC-32 of the header and the arrays. The CRC-32 is checked when an index is mapped. The header
is JSON, padded to 8 bytes, and has the type and the size of each array. The arrays follow, in
little-endian order:

- for each shard: columns of `IndexFile.counts`, of the sizes of the entries in the last array, of
  `IndexFile.ends`, of `IndexFile.pieces` and of `IndexFile.flawed` (int64);
- for each sample: the offset (uint32; int64 if a sample begins after 4 GiB);
- for each sample: the length, if lengths were asked for (uint32);
- for each shard: an `IndexedShard` as JSON (bytes).

A sample ends where the next sample of the shard begins. Offsets in a compressed shard are offsets
of the unpacked bytes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import mmap
import struct
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headrace._base.array_types import AnyArray, IntArray, Uint32Array
from headrace._shards.discovery import shard_errors
from headrace.errors import ShardError

if TYPE_CHECKING:
    from typing_extensions import Buffer

DAMAGED = "no index of shards, or a damaged one; make it again by `headrace index`"
MAGIC = b"headrace index 5"
PREFIX = struct.Struct("<16s 32s Q Q")  # magic, hash, bytes of the header, CRC-32
HASHED_FROM = 48  # after the hash


class IndexedShard(NamedTuple):
    """A shard in an index.

    Attributes:
        name: name of the shard, without the folder of the index.
        format: format of the samples, as "tar".
        size: bytes of the object.
        etag: entity tag; None if unknown, and for local files: a copy has another tag.
        modified: time of the last modification; None if unknown.
        samples: number of samples.
        end: the byte after the last sample, unpacked.
        problem: error of the first sample that breaks a rule of the shard; None without an error.
        begins: offset in the object and offset in the unpacked bytes of each piece of a compressed
            shard that can be unpacked alone, as base 64 of int64.
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
        """Return the borders of the pieces.

        Shape [pieces + 1, 2]: offsets in the object and in the unpacked bytes.
        """
        begins = np.frombuffer(base64.b64decode(self.begins), "<i8")
        return np.append(begins, (self.size, self.end)).reshape(-1, 2)


class IndexFile:
    """An index, mapped from a file or held in memory.

    All arrays are views of the file. An object for a shard is made when `shard` is called.
    A pickled index is the path and the hash of the file. Without a path, the pickle has the bytes.

    Args:
        name: path or URL of the file, for errors.
        data: all bytes of the file.
        path: the file from which `data` are mapped; None for bytes in memory.
        digest: the expected hash; None for any.

    Attributes:
        data: all bytes of the file.
        digest: hash of the content.
        folder: URL of the folder that has all shards when the index was made.
        kinds: for each format, the number of a shard of the format.
        firsts: number of the first sample of each shard, int64. Shards are sorted by name.
        counts: number of samples of each shard, int64.
        ends: the byte after the last sample of each shard, unpacked, int64.
        pieces: number of pieces of each shard, int64; 0 if the shard is not compressed.
        flawed: whether a sample of each shard breaks a rule, int64.
        lengths: length of each sample, uint32; empty without lengths.

    Raises:
        ShardError: the file is damaged, is no index, or has another hash.
    """

    def __init__(
        self,
        name: str,
        data: Buffer,
        path: str | None = None,
        digest: bytes | None = None,
    ) -> None:
        self.name, self.path, self.data = name, path, data
        with shard_errors(DAMAGED, name):
            self._parse(memoryview(data).cast("B"), digest)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.path is None:
            return IndexFile, (self.name, bytes(self.data))
        return map_index, (self.path, self.digest)

    def _parse(self, data: memoryview, expected: bytes | None) -> None:
        magic, self.digest, length, check = PREFIX.unpack_from(data)
        if magic != MAGIC:
            raise ValueError(
                "its first bytes are not those of an index, or are of another version"
            )
        if expected not in (None, self.digest):
            raise ValueError("it was replaced")
        if zlib.crc32(data[PREFIX.size :]) != check:
            raise ValueError("its checksum is wrong")
        header = json.loads(bytes(data[PREFIX.size : PREFIX.size + length]))
        self.folder, self.kinds = header["folder"], header["kinds"]
        offset, arrays = PREFIX.size + length, []
        for kind, count in header["arrays"]:
            arrays.append(np.frombuffer(data, kind, count, offset))
            offset += arrays[-1].nbytes
        columns, self._begins, lengths, self._texts = arrays
        self.lengths: Uint32Array = lengths
        self.counts, sizes, self.ends, self.pieces, self.flawed = columns.reshape(5, -1)
        self.firsts = np.cumsum(self.counts) - self.counts
        self._text_ends = np.cumsum(sizes)
        self._text_firsts = self._text_ends - sizes
        if offset != len(data) or self.counts.sum() != len(self._begins):
            raise ValueError("the lengths of its arrays are wrong")

    def __len__(self) -> int:
        return len(self.counts)

    def shard(self, number: int) -> IndexedShard:
        """Return the entry of a shard."""
        text = self._texts[self._text_firsts[number] : self._text_ends[number]]
        with shard_errors(DAMAGED, self.name):
            return IndexedShard(*json.loads(text.tobytes()))

    def bounds(self, shards: IntArray, rows: IntArray) -> tuple[IntArray, IntArray]:
        """Return start and stop of samples.

        Args:
            shards: number of each sample's shard.
            rows: number of each sample in the shard.

        Raises:
            ShardError: a sample is not within the shard.
        """
        places, is_last = self.firsts[shards] + rows, rows + 1 == self.counts[shards]
        # Each sample, and the next in the shard.
        both = np.stack((places, places + ~is_last))
        starts, stops = self._begins[both].astype(np.int64)
        ends = self.ends[shards]
        stops = np.where(is_last, ends, stops)
        if ((starts < 0) | (stops < starts) | (stops > ends)).any():
            raise ShardError("damaged: a sample is not within its shard", shard=self.name)
        return starts, stops

    @staticmethod
    def joined(folder: str, parts: Sequence[IndexFile]) -> bytes:
        """Join indices of single shards in a folder; return the bytes."""
        parts = sorted(parts, key=lambda part: part.shard(0).name)
        shards = [part.shard(0) for part in parts]
        shards = [
            shard._replace(name=shard.name.removeprefix(folder)) for shard in shards
        ]
        begins = np.concatenate([part._begins for part in parts])
        lengths = np.concatenate([part.lengths for part in parts])
        return dump_index(folder, shards, begins, lengths)


def map_index(path: str, digest: bytes | None = None) -> IndexFile:
    """Map the file of an index.

    Raises:
        ShardError: there is no file, or the file is damaged or has another hash.
    """
    try:
        with open(path, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (FileNotFoundError, ValueError) as error:  # ValueError: the file is empty
        raise ShardError(f"{DAMAGED}: {error}", shard=path) from None
    return IndexFile(path, data, path, digest)


def dump_index(
    folder: str, shards: Sequence[IndexedShard], begins: AnyArray, lengths: AnyArray
) -> bytes:
    """Return the bytes of an index.

    Args:
        folder: URL of the folder that has all shards; empty for no folder.
        shards: the entries.
        begins: offset of each sample.
        lengths: length of each sample; empty without lengths.
    """
    texts = [json.dumps(shard).encode() for shard in shards]
    rows = [
        (
            shard.samples,
            len(text),
            shard.end,
            len(shard.borders()) - 1,
            bool(shard.problem),
        )
        for shard, text in zip(shards, texts, strict=True)
    ]
    arrays = [
        np.transpose(rows).astype("<i8"),
        begins.astype("<i8" if begins.max(initial=0) >> 32 else "<u4"),
        lengths.astype("<u4"),
        np.frombuffer(b"".join(texts), "u1"),
    ]
    kinds = {shard.format: number for number, shard in enumerate(shards)}
    content = {
        "folder": folder,
        "kinds": [*kinds.values()],
        "arrays": [(array.dtype.str, array.size) for array in arrays],
    }
    header = json.dumps(content).encode()
    header += b" " * (-len(header) % 8)
    body = b"".join([header, *(array.tobytes() for array in arrays)])
    rest = PREFIX.pack(MAGIC, b"", len(header), zlib.crc32(body))[HASHED_FROM:] + body
    return MAGIC + content_digest(rest) + rest


def content_digest(data: Buffer) -> bytes:
    """Return the hash of bytes."""
    return hashlib.blake2b(data, digest_size=32).digest()
