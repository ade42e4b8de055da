"""Where the samples of a tar shard are, in memory and as a file."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace._core.shards.discovery import Shard
from headrace._core.shards.tar.samples import SampleMembers

if TYPE_CHECKING:
    from numpy.typing import NDArray

VERSION = 1
ABSENT = -1  # the offset of a field that a sample does not have


@dataclass(frozen=True, slots=True)
class TarIndex:
    """Where the samples of one shard are.

    Attributes:
        shard: the shard, with its size and version.
        fields: the names of fields, one for each column of the arrays below.
        keys: the samples' keys.
        offsets: where each field's content begins, int64, (samples, fields); -1 where a sample has no such field.
        sizes: its length in bytes, int64.
        checksums: its CRC-32, uint32.
    """

    shard: Shard
    fields: tuple[str, ...]
    keys: tuple[str, ...]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    checksums: NDArray[np.uint32]

    @classmethod
    def of(cls, shard: Shard, groups: Sequence[SampleMembers], checksums: Sequence[dict[str, int]]) -> TarIndex:
        """From the samples of a shard that has been read."""
        fields = tuple(dict.fromkeys(field for group in groups for field in group.members))
        shape = (len(groups), len(fields))
        offsets, sizes = np.full(shape, ABSENT, np.int64), np.zeros(shape, np.int64)
        sums = np.zeros(shape, np.uint32)
        column = {field: number for number, field in enumerate(fields)}
        for row, (group, summed) in enumerate(zip(groups, checksums, strict=True)):
            for field, member in group.members.items():
                at = row, column[field]
                offsets[at], sizes[at], sums[at] = member.data_offset, member.size, summed[field]
        return cls(shard, fields, tuple(group.key for group in groups), offsets, sizes, sums)

    def bounds(self, columns: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """From where to where each sample reaches with the fields of `columns`, int64, (samples,); 0 and 0 if empty."""
        offsets, sizes = self.offsets[:, list(columns)], self.sizes[:, list(columns)]
        there = (offsets != ABSENT) & (sizes > 0)
        limits = np.iinfo(np.int64)
        starts = np.where(there, offsets, limits.max).min(axis=1, initial=limits.max)
        stops = np.where(there, offsets + sizes, 0).max(axis=1, initial=0)
        return np.where(there.any(axis=1), starts, 0), stops

    def dump(self) -> bytes:
        """The index as the bytes of an ``.npz`` file: plain arrays, no pickle."""
        assert self.shard.head is not None
        stream = io.BytesIO()
        np.savez(
            stream,
            version=np.int64(VERSION),
            size=np.int64(self.shard.head.size),
            etag=_packed([self.shard.head.etag or ""]),
            fields=_packed(self.fields),
            keys=_packed(self.keys),
            offsets=self.offsets,
            sizes=self.sizes,
            checksums=self.checksums,
        )
        return stream.getvalue()

    @classmethod
    def load(cls, shard: Shard, data: bytes) -> TarIndex | None:
        """From what `dump` gave; None if it is damaged, of another version, or of another version of the shard."""
        assert shard.head is not None
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                if int(arrays["version"]) != VERSION or int(arrays["size"]) != shard.head.size:
                    return None
                if _unpacked(arrays["etag"])[0] != (shard.head.etag or ""):
                    return None
                fields, keys = _unpacked(arrays["fields"]), _unpacked(arrays["keys"])
                index = cls(shard, fields, keys, arrays["offsets"], arrays["sizes"], arrays["checksums"])
        except (OSError, ValueError, KeyError, IndexError, EOFError, zipfile.BadZipFile, zlib.error, TypeError):
            return None  # each is what numpy or zipfile says of some damaged file; the index is then made anew
        return index if index._is_sound() else None

    def _is_sound(self) -> bool:
        """Whether every range lies within the shard."""
        assert self.shard.head is not None
        shape = (len(self.keys), len(self.fields))
        kinds = ((self.offsets, np.int64), (self.sizes, np.int64), (self.checksums, np.uint32))
        if any(array.shape != shape or array.dtype != kind for array, kind in kinds):
            return False
        there = self.offsets != ABSENT
        limit = self.shard.head.size
        within = (self.offsets >= 0) & (self.sizes >= 0) & (self.sizes <= limit) & (self.offsets <= limit - self.sizes)
        return bool((within | ~there).all())


def _packed(texts: Sequence[str]) -> NDArray[np.uint8]:
    """Texts in one array of bytes: a length and the bytes of each."""
    parts: list[bytes] = []
    for text in texts:
        data = text.encode("utf-8", "surrogateescape")
        parts.append(len(data).to_bytes(4, "little") + data)
    return np.frombuffer(b"".join(parts), dtype=np.uint8)


def _unpacked(array: Any) -> tuple[str, ...]:
    data = array.tobytes()
    texts: list[str] = []
    position = 0
    while position < len(data):
        stop = position + 4 + int.from_bytes(data[position : position + 4], "little")
        if stop > len(data):
            raise ValueError("a text ends behind its array")
        texts.append(data[position + 4 : stop].decode("utf-8", "surrogateescape"))
        position = stop
    return tuple(texts)
