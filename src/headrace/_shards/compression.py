"""Incremental decompression with bounded output."""

from __future__ import annotations

import codecs
import sys
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from headrace._extras import require
from headrace.errors import ShardError, TruncatedShardError

if TYPE_CHECKING:
    from typing_extensions import Buffer

STREAM_BYTES = 256 << 10
"""Minimum unpacked bytes between two places from which unpacking can begin."""

MAX_OUTPUT = 4 << 20
"""Maximum bytes unpacked at once.

Bounds a decompression bomb of any ratio.
"""

# Packed bytes taken at a time. A stream that ends within a piece gives back a copy of the rest.
# 512 KiB of only ends of gzip streams took 91 ms in a single piece, growing as the square, and take
# 22 ms in pieces of 64 KiB.
_INPUT_BYTES = 64 << 10


_FORMATS = {
    ".gz": "gzip",
    ".zst": "zstd",
    ".zstd": "zstd",
    ".zlib": "zlib",
    ".tgz": "gzip",
    ".tzst": "zstd",
}

SUFFIXES = (".gz", ".zst", ".zstd", ".zlib")
"""Suffixes of compressed files."""

_UNSUPPORTED = (".bz2", ".xz", ".lz4", ".snappy", ".br", ".tbz", ".tbz2", ".txz")
_LOOKED_AT = 400  # bytes at the start of an object that are checked
_HTML = (b"<!doctype html", b"<html")
_BEGINNINGS = {
    b"\x1f\x8b\x08": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ\0": "xz",
    b"BZh91AY&SY": "bzip2",
}


class Codec:
    """Unpacks an object by the suffix of the object's name.

    The formats are gzip (RFC 1952), zstd (RFC 8878) and zlib. Objects with other suffixes pass
    unchanged. Several compressed streams in a row are unpacked to a single output. Checksums are
    verified.

    Attributes:
        compressed: whether the object has a compressed format. Then `feed` takes long enough to be
            worth a thread, and bytes have to be read from the start of the object.
        begins: places from which unpacking can begin: packed bytes and unpacked bytes before the
            place.
        taken: bytes of the object so far.
    """

    def __init__(self, key: str, shard: str, *, pages: bool = False) -> None:
        self._pages = pages
        self._format = compression_of(key)
        self.compressed = self._format is not None
        self._shard = shard
        self._stream: Any = None
        self.begins: list[tuple[int, int]] = []
        self.taken = 0
        self._offset = 0  # bytes unpacked so far
        if self._format == "zstd":
            module = (
                "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
            )
            zstd = require(module, "reading zstd", "backports.zstd", "zstd")
            self._open, self._error = zstd.ZstdDecompressor, zstd.ZstdError
        else:
            wbits = zlib.MAX_WBITS + 16 * (self._format == "gzip")
            self._open, self._error = lambda: zlib.decompressobj(wbits), zlib.error

    def feed(self, data: Buffer) -> Iterator[Buffer]:
        """Unpack the next bytes, in pieces of at most `MAX_OUTPUT`.

        The iterator must be exhausted.
        """
        view = memoryview(data).cast("B")
        if not self.taken:
            check_content(view, self._shard, pages=self._pages)
            for magic, name in _BEGINNINGS.items():
                if not self.compressed and view[: len(magic)] == magic:
                    what = (
                        f"{name} by its first bytes, but not by its name; "
                        f"only {', '.join(SUFFIXES)} are unpacked"
                    )
                    raise ShardError(what, shard=self._shard, offset=0)
        if not self.compressed:
            self.taken += len(view)
            yield data
            return
        for start in range(0, len(view), _INPUT_BYTES):
            piece = bytes(view[start : start + _INPUT_BYTES])
            self.taken += len(piece)
            yield from self._unpack(piece)

    def finish(self) -> None:
        """Signal the end of the input.

        Raises:
            TruncatedShardError: the input is incomplete.
        """
        if self.compressed and (self._stream is not None or not self.begins):
            what = f"this {self._format} stream is truncated"
            raise TruncatedShardError(what, shard=self._shard, offset=self._offset)

    def _unpack(self, rest: bytes) -> Iterator[bytes]:
        # zlib hands back the bytes that were not taken. zstd keeps the bytes.
        while rest or (
            self._stream is not None and not getattr(self._stream, "needs_input", True)
        ):
            if self._stream is None:
                if self.begins and self._format == "gzip":
                    # Padding after a stream; gzip itself accepts padding.
                    rest = rest.lstrip(b"\0")
                    if not rest:
                        return
                if not self.begins or self._offset - self.begins[-1][1] >= STREAM_BYTES:
                    self.begins.append((self.taken - len(rest), self._offset))
                self._stream = self._open()
            try:
                piece = self._stream.decompress(rest, MAX_OUTPUT)
            except self._error as error:
                what = f"not {self._format}, or corrupt: {error}"
                raise ShardError(what, shard=self._shard, offset=self._offset) from None
            self._offset += len(piece)
            if piece:
                yield piece
            if self._stream.eof:
                rest = self._stream.unused_data
                self._stream = None
            else:
                rest = getattr(self._stream, "unconsumed_tail", b"")


def also_compressed(*endings: str) -> tuple[str, ...]:
    """Return endings of plain files, each also with the suffixes of compressed files."""
    return tuple(ending + suffix for ending in endings for suffix in ("", *SUFFIXES))


def compression_of(key: str) -> str | None:
    """Return the compression of a key, or None for a plain object."""
    _, dot, suffix = key.rpartition(".")
    return _FORMATS.get(dot + suffix.lower())


def unpack_object(data: Buffer, key: str, shard: str, size: int) -> bytearray:
    """Unpack the first `size` bytes of a compressed object.

    Raises:
        ShardError: the object is damaged, or has fewer bytes.
    """
    codec, output = Codec(key, shard, pages=True), bytearray()
    for piece in codec.feed(data):
        output += piece
        if len(output) >= size:
            return output
    codec.finish()
    raise TruncatedShardError(
        f"{len(output)} bytes unpacked, and {size} in its index", shard=shard, offset=0
    )


def check_content(data: Buffer, shard: str, *, pages: bool = False) -> None:
    """Raise `ShardError` if an object is obviously not a shard.

    A Git LFS pointer or a web page may be in place of the file.

    Args:
        data: the first bytes of the object.
        shard: name of the object.
        pages: whether web pages are allowed.
    """
    first = (
        bytes(memoryview(data)[:_LOOKED_AT])
        .removeprefix(codecs.BOM_UTF8)
        .lstrip()
        .lower()
    )
    if first.startswith(b"version https://git-lfs"):
        what = "a Git LFS pointer in place of the file; run git lfs pull where it was copied from"
    elif not pages and (
        first.startswith(_HTML) or (first.startswith(b"<?xml") and b"<error" in first)
    ):
        what = (
            "a web page, as of an error or a log-in, in place of the file; "
            "open its URL in a browser"
        )
    else:
        return
    raise ShardError(what, shard=shard, offset=0)


def refuse_unsupported(name: str) -> None:
    """Raise `ShardError` for the suffix of a compression without support."""
    if name.lower().endswith(_UNSUPPORTED):
        what = f"this compression is not supported; supported are {', '.join(SUFFIXES)}"
        raise ShardError(what, shard=name)


def refuse_compressed(name: str) -> None:
    """Raise `ShardError` for the suffix of any compression."""
    if name.lower().endswith((*_FORMATS, *_UNSUPPORTED)):
        raise ShardError(
            "a compressed shard cannot be read at an offset; decompress it", shard=name
        )
