"""Incremental decompression with a bound on the output held at once."""

from __future__ import annotations

import sys
import zlib
from collections import deque
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

# Packed bytes from one noted start of a compressed stream to the next: bounds their number.
_START_DISTANCE = 4 << 10


class Plain:
    """No compression; the interface of the decompressors.

    Args:
        shard: the object's name in errors.
    """

    heavy = False
    """Whether `feed` computes long enough to be worth a thread."""

    def __init__(self, shard: str) -> None:
        self._shard = shard

    def feed(self, data: Buffer) -> Iterator[Buffer]:
        """Unpack the next bytes, in pieces of at most `MAX_OUTPUT`. The iterator must be exhausted."""
        yield data

    def finish(self) -> None:
        """Signal the end of the input; raises `TruncatedShardError` if it is incomplete."""

    def restart(self, offset: int) -> tuple[int, int]:
        """Where unpacking can start to reach an unpacked `offset`: a byte of the input, and its unpacked offset.

        `offset` must not decrease from call to call.
        """
        return offset, offset

    def restore(self, packed: int, unpacked: int) -> None:
        """Start in the middle, at a place that `restart` gave; called before the first `feed`."""


class _Decompressor(Plain):
    """Base of formats in which several compressed streams in a row unpack to one."""

    heavy = True
    stream_name: ClassVar[str]

    def __init__(self, shard: str) -> None:
        super().__init__(shard)
        self._stream: Any = None
        self._complete_streams = 0
        self._offset = 0
        self._packed = 0  # bytes fed
        self._starts = deque([(0, 0)])  # of streams, packed and unpacked

    def feed(self, data: Buffer) -> Iterator[Buffer]:
        view = memoryview(data)
        for start in range(0, len(view), _INPUT_BYTES):
            part = bytes(view[start : start + _INPUT_BYTES])
            self._packed += len(part)
            yield from self._unpack(part)

    def finish(self) -> None:
        if self._stream is not None or not self._complete_streams:
            raise TruncatedShardError(f"this {self.stream_name} is truncated", shard=self._shard, offset=self._offset)

    def restart(self, offset: int) -> tuple[int, int]:
        starts = self._starts
        while len(starts) > 1 and starts[1][1] <= offset:
            starts.popleft()
        return starts[0]

    def restore(self, packed: int, unpacked: int) -> None:
        self._packed, self._offset = packed, unpacked
        self._starts = deque([(packed, unpacked)])
        self._complete_streams = int(packed > 0)

    def _unpack(self, rest: bytes) -> Iterator[bytes]:
        raise NotImplementedError

    def _start_stream(self, stream: Any, rest: bytes) -> None:
        """Unpack `rest`, the last bytes fed, by a new stream."""
        self._stream = stream
        packed = self._packed - len(rest)
        if packed - self._starts[-1][0] >= _START_DISTANCE:
            self._starts.append((packed, self._offset))

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
                self._start_stream(zlib.decompressobj(wbits=16 + zlib.MAX_WBITS), rest)
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
                self._start_stream(self._zstd.ZstdDecompressor(), rest)
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
