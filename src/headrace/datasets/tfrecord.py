"""Streams of the records of TFRecord files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Unpack

from headrace._extras import require
from headrace._shards.compression import also_compressed
from headrace._shards.discovery import Shard, Shards
from headrace._shards.reading import BadRecord, RecordDecoder
from headrace.datasets.sharded import ShardedStream, StreamOptions
from headrace.errors import TruncatedShardError

if TYPE_CHECKING:
    from typing_extensions import Buffer


_LARGEST = 1 << 30  # bytes of a record; a whole record is held in memory


class TFRecordDataset(ShardedStream[bytes]):
    """A stream of the records of TFRecord files, as `bytes`.

    Decode a record by ``Example.FromString`` of protobuf. TensorFlow is not needed.

    Checksums are verified: a damaged record is a `ShardError`. The stream then continues with the
    next record, or with the next file if the record's length is damaged.

    Args:
        shards: URLs or paths, as for `TarDataset`. In a directory, files ending in ``.tfrecord``,
            ``.tfrecords`` or ``.tfrec``, optionally with ``.gz``, ``.zlib`` or ``.zst``. For
            ``name.tfrecord-00000-of-00100`` give a glob.
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

    suffixes = also_compressed(".tfrecord", ".tfrecords", ".tfrec")

    def __init__(self, shards: Shards, **options: Unpack[StreamOptions]) -> None:
        require("google_crc32c", "TFRecordDataset", "google-crc32c", "tfrecord")
        super().__init__(shards, **options)

    def decoder(self, shard: Shard) -> _Records:
        """Return the decoder of a shard."""
        return _Records(shard.name)


class _Records(RecordDecoder):
    """Decoder of a file.

    A record is the length, the length's checksum, the data and the data's checksum. All numbers are
    little-endian.
    """

    format, record = "records of TFRecord", "record"

    def __init__(self, shard: str) -> None:
        from google_crc32c import value

        super().__init__(shard)
        self._crc = value
        self._needed = 12  # bytes needed to continue

    def feed(self, data: Buffer) -> Iterator[bytes | BadRecord]:
        self._parts.append(bytes(data))
        if sum(map(len, self._parts)) < self._needed:
            return
        held, at, self._needed = b"".join(self._parts), 0, 12
        while len(held) >= at + 12:
            length = int.from_bytes(size := held[at : at + 8], "little")
            if not self._is_right(size, held[at + 8 : at + 12]) or length > _LARGEST:
                what = "length is damaged or above 1 GiB; or the file is compressed, or no TFRecord"
                raise self._error(f"{self._name}: its {what}")
            if len(held) < (end := at + 12 + length) + 4:
                self._needed = 16 + length
                break
            self.complete = self._offset + 16 + length
            if self._is_right(record := held[at + 12 : end], held[end : end + 4]):
                yield record
            else:
                yield BadRecord(self._error(f"{self._name}: its checksum is wrong"))
            self._passed(self.complete)
            at = end + 4
        self._parts = [held[at:]]

    def finish(self) -> Iterator[bytes | BadRecord]:
        if any(self._parts):
            raise TruncatedShardError(
                f"truncated in {self._name}", shard=self._shard, offset=self._offset
            )
        return iter(())

    def restore(self, position: Any) -> None:
        super().restore(position)
        self._needed = 12

    def _is_right(self, data: bytes, masked: bytes) -> bool:
        crc: int = self._crc(data)
        return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF == int.from_bytes(
            masked, "little"
        )
