"""Streams of the records of TFRecord files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Unpack

from headrace._core.extras import require
from headrace._core.shards.compression import SUFFIXES
from headrace._core.shards.discovery import Shard, Shards
from headrace._core.shards.reading import BadRecord, Decoder
from headrace._core.streams.resumable import State, expect
from headrace.datasets.sharded import ShardedStream, StreamOptions
from headrace.errors import ShardError, TruncatedShardError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["TFRecordDataset"]

_LARGEST = 1 << 30  # bytes of a record, which is held in memory


class TFRecordDataset(ShardedStream[bytes]):
    """A stream of the records of TFRecord files, as `bytes`; ``Example.FromString`` of protobuf decodes them.

    Checksums are verified: a damaged record is a `ShardError`, after which the stream goes on with the next, or with
    the next file if its length is damaged. Tensorflow is not needed.

    Args:
        shards: URLs or paths, as for `TarDataset`; in a directory, files ending in ``.tfrecord``, ``.tfrecords`` or
            ``.tfrec``, or these with ``.gz``, ``.zlib`` or ``.zst``. For ``name.tfrecord-00000-of-00100`` give a glob.
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

    def __init__(self, shards: Shards, **options: Unpack[StreamOptions]) -> None:
        require("google_crc32c", "TFRecordDataset", "google-crc32c", "tfrecord")
        super().__init__(shards, **options)

    def decoder(self, shard: Shard) -> _Records:
        """The decoder of one shard."""
        return _Records(shard.name)


class _Records(Decoder):
    """Decoder of one file: length, its checksum, data, its checksum; all numbers are little-endian."""

    format = "records of TFRecord"

    def __init__(self, shard: str) -> None:
        from google_crc32c import value

        self._shard, self._crc = shard, value
        self._parts: list[bytes] = []  # from `_offset` on
        self._size, self._needed = 0, 12  # bytes in them; bytes that are needed to go on
        self._offset = 0
        self._number: int | None = 1  # of the next record; None if unknown

    def feed(self, data: Buffer) -> Iterator[bytes | BadRecord]:
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
            self.complete = self._offset + 16 + length
            if self._is_right(record := held[at + 12 : end], held[end : end + 4]):
                yield record
            else:
                yield BadRecord(self._error("checksum is wrong"))
            self._offset, at = self.complete, end + 4
            if self._number is not None:
                self._number += 1
        self._parts, self._size = [held[at:]], len(held) - at

    def finish(self) -> Iterator[bytes | BadRecord]:
        if self._size:
            raise TruncatedShardError(f"truncated in {self._name}", shard=self._shard, offset=self._offset)
        return iter(())

    def position(self) -> State:
        return {"offset": self._offset, "number": self._number}

    def restore(self, position: State) -> None:
        self._parts, self._size, self._needed = [], 0, 12  # of a sample that the decoder made before
        self._offset = expect(position, "offset", int)
        self._number = None if position.get("number") is None else expect(position, "number", int)

    @property
    def _name(self) -> str:
        return "record" if self._number is None else f"record {self._number:,}"

    def _is_right(self, data: bytes, masked: bytes) -> bool:
        crc: int = self._crc(data)
        return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF == int.from_bytes(masked, "little")

    def _error(self, what: str) -> ShardError:
        return ShardError(f"{self._name}: its {what}", shard=self._shard, offset=self._offset)
