"""Incremental decompression with a bound on the output held at once."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from headrace.errors import MissingExtraError, ShardError, TruncatedShardError

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAX_OUTPUT = 4 << 20
"""Maximum bytes unpacked at once: bounds a decompression bomb, whatever its ratio."""

# Packed bytes taken at a time. A stream that ends within them hands back a copy of the rest: 512 KiB of nothing but
# ends of gzip streams took 91 ms in one piece, growing as the square, and take 22 ms in these.
_INPUT_BYTES = 64 << 10


class Plain:
    """No compression; the interface of the decompressors.

    Args:
        shard: the object's name in errors.
    """

    compressed = False
    """Whether `feed` computes long enough to be worth a thread, and bytes are read from the start of the object on."""

    def __init__(self, shard: str) -> None:
        self._shard = shard

    def feed(self, data: Buffer) -> Iterator[Buffer]:
        """Unpack the next bytes, in pieces of at most `MAX_OUTPUT`. The iterator must be exhausted."""
        yield data

    def finish(self) -> None:
        """Signal the end of the input; raises `TruncatedShardError` if it is incomplete."""


class _Decompressor(Plain):
    """Base of formats in which several compressed streams in a row unpack to one."""

    compressed = True
    stream_name: ClassVar[str]

    def __init__(self, shard: str) -> None:
        super().__init__(shard)
        self._stream: Any = None
        self._complete_streams = 0
        self._offset = 0

    def feed(self, data: Buffer) -> Iterator[Buffer]:
        view = memoryview(data)
        for start in range(0, len(view), _INPUT_BYTES):
            yield from self._unpack(bytes(view[start : start + _INPUT_BYTES]))

    def finish(self) -> None:
        if self._stream is not None or not self._complete_streams:
            raise TruncatedShardError(f"this {self.stream_name} is truncated", shard=self._shard, offset=self._offset)

    def _unpack(self, rest: bytes) -> Iterator[bytes]:
        raise NotImplementedError  # each format has its own

    def _end_stream(self) -> bytes:
        """Forget the complete stream; returns the bytes after it."""
        rest: bytes = self._stream.unused_data
        self._stream, self._complete_streams = None, self._complete_streams + 1
        return rest

    def _corrupt(self, format: str, error: Exception) -> ShardError:
        return ShardError(f"not {format}, or corrupt: {error}", shard=self._shard, offset=self._offset)


class Gzip(_Decompressor):
    """Gzip (RFC 1952): one stream, or several in a row; checksums are verified."""

    stream_name = "gzip stream"

    def _unpack(self, rest: bytes) -> Iterator[bytes]:
        while rest:
            if self._stream is None:
                if self._complete_streams:
                    rest = rest.lstrip(b"\0")  # padding after a stream, which gzip itself accepts
                    if not rest:
                        return
                self._stream = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
            try:
                piece = self._stream.decompress(rest, MAX_OUTPUT)
            except zlib.error as error:
                raise self._corrupt("gzip", error) from None
            self._offset += len(piece)
            if piece:
                yield piece
            rest = self._end_stream() if self._stream.eof else self._stream.unconsumed_tail


class Zstd(_Decompressor):
    """Zstandard (RFC 8878): one frame, or several in a row; checksums are verified where a frame has one.

    Raises:
        MissingExtraError: before Python 3.14, the package is not installed.
    """

    stream_name = "zstd frame"

    def __init__(self, shard: str) -> None:
        super().__init__(shard)
        try:
            if sys.version_info >= (3, 14):
                from compression import zstd
            else:
                from backports import zstd
        except ImportError:
            raise MissingExtraError(what="reading zstd", package="backports.zstd", extra="zstd") from None
        self._zstd: Any = zstd

    def _unpack(self, rest: bytes) -> Iterator[bytes]:
        while rest or (self._stream is not None and not self._stream.needs_input):
            if self._stream is None:
                self._stream = self._zstd.ZstdDecompressor()
            try:
                piece = self._stream.decompress(rest, MAX_OUTPUT)
            except self._zstd.ZstdError as error:
                raise self._corrupt("zstd", error) from None
            self._offset += len(piece)
            if piece:
                yield piece
            rest = self._end_stream() if self._stream.eof else b""


_CODECS: dict[str, type[Plain]] = {".gz": Gzip, ".zst": Zstd, ".zstd": Zstd, ".tgz": Gzip, ".tzst": Zstd}

TAR_SUFFIXES = tuple(suffix for suffix in _CODECS if suffix.startswith(".t"))
"""Suffixes of compressed tars that replace ``.tar``."""

SUFFIXES = tuple(suffix for suffix in _CODECS if suffix not in TAR_SUFFIXES)
"""Suffixes of compressed files. A new compression is a class and a line here."""

_UNSUPPORTED = (".bz2", ".xz", ".lz4", ".snappy", ".br", ".tbz", ".tbz2", ".txz")


def codec_for(key: str) -> type[Plain]:
    """The decompressor of an object, by the suffix of its name.

    Example:
        >>> codec_for("train/0000.tar.gz").__name__, codec_for("train/0000.tar").__name__
        ('Gzip', 'Plain')
    """
    name = key.lower()
    return next((codec for suffix, codec in _CODECS.items() if name.endswith(suffix)), Plain)


def without_suffix(name: str) -> str:
    """A lower-case name without the suffix of a compression.

    Example:
        >>> without_suffix("a.jsonl.gz"), without_suffix("a.jsonl")
        ('a.jsonl', 'a.jsonl')
    """
    return next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)


def refuse_unsupported(name: str) -> None:
    """Raise `ShardError` if the shard's name has the suffix of a compression that is not supported."""
    suffix = next((suffix for suffix in _UNSUPPORTED if name.lower().endswith(suffix)), None)
    if suffix is not None:
        what = f"{suffix} is not supported; supported compressions are {', '.join(SUFFIXES)}"
        raise ShardError(what, shard=name)


def refuse_compressed(name: str) -> None:
    """Raise `ShardError` if the shard's name has the suffix of a compression, supported or not."""
    if name.lower().endswith((*_CODECS, *_UNSUPPORTED)):
        raise ShardError("a compressed shard cannot be read at an offset; decompress it", shard=name)
