"""Streams of the records of TFRecord files."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from headrace._core.shards.compression import SUFFIXES
from headrace._core.shards.discovery import Shard, Shards
from headrace._core.shards.reading import BadRecord, Decoder
from headrace._core.shards.stream import ShardedStream, StreamOptions
from headrace._core.streams.resumable import State, expect
from headrace.errors import MissingExtraError, ShardError, TruncatedShardError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["TFRecordDataset"]

_LARGEST = 1 << 30  # bytes of a record, which is held in memory


class TFRecordDataset(ShardedStream[Any]):
    """A stream of the records of TFRecord files: `bytes`, or with `decode` the features of a ``tf.train.Example``.

    Checksums are verified: a damaged record is a `ShardError`, after which the stream goes on with the next, or with
    the next file if its length is damaged. Neither tensorflow nor protobuf is needed.

    Args:
        shards: URLs or paths, as for `TarDataset`; in a directory, files ending in ``.tfrecord``, ``.tfrecords`` or
            ``.tfrec``, or these with ``.gz``, ``.zlib`` or ``.zst``. For ``name.tfrecord-00000-of-00100`` give a glob.
        decode: whether samples are dicts: of an int64 or float32 array or a list of `bytes` for each feature, None for
            one without a value. A ``SequenceExample`` is an error.
        options: as for `TarDataset`.

    Raises:
        MissingExtraError: google-crc32c is not installed.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "0.tfrecord"
        >>> _ = path.write_bytes(bytes.fromhex("0300000000000000 b099490e 616263 6e57f121"))
        >>> list(TFRecordDataset(path))
        [b'abc']
    """

    suffixes = tuple(name + packed for name in (".tfrecord", ".tfrecords", ".tfrec") for packed in ("", *SUFFIXES))

    def __init__(self, shards: Shards, *, decode: bool = False, **options: Unpack[StreamOptions]) -> None:
        if not importlib.util.find_spec("google_crc32c"):
            raise MissingExtraError(what="TFRecordDataset", package="google-crc32c", extra="tfrecord")
        self._decode = decode
        super().__init__(shards, **options)

    def _options(self) -> dict[str, object]:
        return {**super()._options(), "decode": self._decode}

    def decoder(self, shard: Shard) -> _Records:
        """The decoder of one shard."""
        return _Records(shard.name, self._decode)


class _Records(Decoder):
    """Decoder of one file: length, its checksum, data, its checksum; all numbers are little-endian."""

    def __init__(self, shard: str, decode: bool) -> None:
        from google_crc32c import value

        self._shard, self._crc, self._decode = shard, value, decode
        self._parts: list[bytes] = []  # from `_offset` on
        self._size, self._needed = 0, 12  # bytes in them; bytes that are needed to go on
        self._offset = self._number = 0

    def feed(self, data: Buffer) -> Iterator[Any]:
        self._parts.append(bytes(data))
        self._size += len(self._parts[-1])
        if self._size < self._needed:
            return
        held, at, self._needed = b"".join(self._parts), 0, 12
        while len(held) >= at + 12:
            length = int.from_bytes(size := held[at : at + 8], "little")
            if not self._is_right(size, held[at + 8 : at + 12]) or length > _LARGEST:
                raise self._error("length is damaged or above 1 GiB; or the file is no TFRecord, or is compressed")
            if len(held) < (end := at + 12 + length) + 4:
                self._needed = 16 + length
                break
            if self._is_right(record := held[at + 12 : end], held[end : end + 4]):
                yield self._decoded(record) if self._decode else record
            else:
                yield BadRecord(self._error("checksum is wrong"))
            self._offset, self._number, at = self._offset + 16 + length, self._number + 1, end + 4
        self._parts, self._size = [held[at:]], len(held) - at

    def _decoded(self, record: bytes) -> Any:
        try:
            return _example(record)
        except (ValueError, LookupError) as error:
            return BadRecord(self._error(f"data are no tf.train.Example, but {error}"))

    def finish(self) -> Iterator[Any]:
        if self._size:
            raise TruncatedShardError(f"truncated in record {self._number + 1}", shard=self._shard, offset=self._offset)
        return iter(())

    def position(self) -> State:
        return {"offset": self._offset, "record": self._number}

    def restore(self, position: State) -> None:
        self._offset, self._number = expect(position, "offset", int), expect(position, "record", int)

    def _is_right(self, data: bytes, masked: bytes) -> bool:
        crc: int = self._crc(data)
        return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF == int.from_bytes(masked, "little")

    def _error(self, what: str) -> ShardError:
        return ShardError(f"record {self._number + 1:,}: its {what}", shard=self._shard, offset=self._offset)


def _example(record: bytes) -> dict[str, Any]:
    features: dict[str, Any] = {}
    for number, field in _fields(record):
        if number != 1:
            raise ValueError(f"field {number}, as of a SequenceExample")
        for _, entry in _fields(field):
            name, feature = map(dict(_fields(entry)).get, (1, 2), (b"", b""))
            features[name.decode()] = None
            for kind, values in _fields(feature):
                features[name.decode()] = _values(kind, [value for _, value in _fields(values)])
    return features


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """The number and the bytes of each field of a message of protobuf."""
    at = 0
    while at < len(message):
        tag, start = _varint(message, at)
        size, at = (4, start) if tag & 7 == 5 else _varint(message, start)
        start, at = (start, at) if tag & 7 == 0 else (at, at + size)
        if tag & 7 not in (0, 2, 5) or at > len(message):
            raise ValueError(f"no field at byte {start}")
        yield tag >> 3, message[start:at]


def _varint(message: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while message[at] >= 128 and shift < 63:
        number, shift, at = number | (message[at] & 127) << shift, shift + 7, at + 1
    return number | message[at] << shift, at + 1


def _values(kind: int, parts: list[bytes]) -> Any:
    """The values of a list: of bytes (kind 1), floats (2), or integers of 1 to 10 bytes each."""
    data = b"".join(parts)
    if kind < 3:
        return parts if kind == 1 else np.frombuffer(data, "<f4").astype(np.float32)
    found = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(found < 128) + 1
    sizes = np.diff(ends, prepend=0)
    if kind != 3 or sizes.sum() != len(data) or (sizes > 10).any():
        raise ValueError(f"a list of kind {kind}, or numbers without an end")
    shifts = 7 * (np.arange(len(data)) - np.repeat(ends - sizes, sizes))
    return np.add.reduceat((found & 127).astype(np.uint64) << shifts.astype(np.uint64), ends - sizes).view(np.int64)
