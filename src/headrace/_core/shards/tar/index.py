"""The positions of a tar shard's samples, in memory and as a file."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace._core.shards.discovery import Shard

if TYPE_CHECKING:
    from numpy.typing import NDArray

VERSION = 1
ABSENT = -1  # the offset of a field that a sample lacks

IndexRow = tuple[str, Mapping[str, tuple[int, int, int]]]
"""A sample's key, and for each field the offset and size of its content in bytes, and its CRC-32."""


@dataclass(frozen=True, slots=True)
class TarIndex:
    """Positions of the samples of one shard.

    Attributes:
        shard: the shard, with size and version.
        fields: names of the columns of the arrays below.
        keys: keys of the samples.
        offsets: positions of the contents, int64, (samples, fields); `ABSENT` for a missing field.
        sizes: their lengths in bytes, int64.
        checksums: their CRC-32, uint32.
    """

    shard: Shard
    fields: tuple[str, ...]
    keys: tuple[str, ...]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    checksums: NDArray[np.uint32]

    @classmethod
    def of(cls, shard: Shard, rows: Sequence[IndexRow]) -> TarIndex:
        """Make an index of all samples of a shard."""
        fields = tuple(dict.fromkeys(field for _, members in rows for field in members))
        shape = (len(rows), len(fields))
        offsets, sizes = np.full(shape, ABSENT, np.int64), np.zeros(shape, np.int64)
        checksums = np.zeros(shape, np.uint32)
        columns = {field: number for number, field in enumerate(fields)}
        for row, (_, members) in enumerate(rows):
            for field, values in members.items():
                at = row, columns[field]
                offsets[at], sizes[at], checksums[at] = values
        return cls(shard, fields, tuple(key for key, _ in rows), offsets, sizes, checksums)

    def bounds(self, columns: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Start and stop of each sample's bytes with the fields of `columns`, int64, (samples,); 0 and 0 if empty."""
        offsets, sizes = self.offsets[:, list(columns)], self.sizes[:, list(columns)]
        there = (offsets != ABSENT) & (sizes > 0)
        limits = np.iinfo(np.int64)
        starts = np.where(there, offsets, limits.max).min(axis=1, initial=limits.max)
        stops = np.where(there, offsets + sizes, 0).max(axis=1, initial=0)
        return np.where(there.any(axis=1), starts, 0), stops

    def dump(self) -> bytes:
        """Serialize as an ``.npz`` file: plain arrays, no pickle."""
        assert self.shard.head is not None
        stream = io.BytesIO()
        np.savez(
            stream,
            version=np.int64(VERSION),
            size=np.int64(self.shard.head.size),
            etag=_pack_texts([self.shard.head.etag or ""]),
            fields=_pack_texts(self.fields),
            keys=_pack_texts(self.keys),
            offsets=self.offsets,
            sizes=self.sizes,
            checksums=self.checksums,
        )
        return stream.getvalue()

    @classmethod
    def load(cls, shard: Shard, data: bytes) -> TarIndex | None:
        """Read the output of `dump`; None if it is corrupt, of another format or of another version of the shard."""
        assert shard.head is not None
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                if int(arrays["version"]) != VERSION or int(arrays["size"]) != shard.head.size:
                    return None
                if _unpack_texts(arrays["etag"])[0] != (shard.head.etag or ""):
                    return None
                fields, keys = _unpack_texts(arrays["fields"]), _unpack_texts(arrays["keys"])
                index = cls(shard, fields, keys, arrays["offsets"], arrays["sizes"], arrays["checksums"])
        except (OSError, ValueError, KeyError, IndexError, EOFError, zipfile.BadZipFile, zlib.error, TypeError):
            return None  # numpy and zipfile raise each of these for some corrupt file
        return index if index._is_valid() else None

    def _is_valid(self) -> bool:
        """Whether the arrays fit together and every range lies within the shard."""
        assert self.shard.head is not None
        shape = (len(self.keys), len(self.fields))
        kinds = ((self.offsets, np.int64), (self.sizes, np.int64), (self.checksums, np.uint32))
        if any(array.shape != shape or array.dtype != kind for array, kind in kinds):
            return False
        limit = self.shard.head.size
        within = (self.offsets >= 0) & (self.sizes >= 0) & (self.sizes <= limit) & (self.offsets <= limit - self.sizes)
        return bool((within | (self.offsets == ABSENT)).all())


def _pack_texts(texts: Sequence[str]) -> NDArray[np.uint8]:
    """Texts in one array of bytes, each after its length in 4 bytes."""
    parts: list[bytes] = []
    for text in texts:
        data = text.encode("utf-8", "surrogateescape")
        parts.append(len(data).to_bytes(4, "little") + data)
    return np.frombuffer(b"".join(parts), dtype=np.uint8)


def _unpack_texts(array: Any) -> tuple[str, ...]:
    data = array.tobytes()
    texts: list[str] = []
    position = 0
    while position < len(data):
        stop = position + 4 + int.from_bytes(data[position : position + 4], "little")
        if stop > len(data):
            raise ValueError("a text extends past the end of its array")
        texts.append(data[position + 4 : stop].decode("utf-8", "surrogateescape"))
        position = stop
    return tuple(texts)
