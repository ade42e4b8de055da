"""Unpacking compressed shards piece by piece, with a bound on how much comes out at once."""

from __future__ import annotations

import gzip
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from headrace.errors import MissingExtraError, ShardError, TruncatedShardError

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Bytes that come out at once, at most: what a bomb of zeros can make of a few bytes is bounded, whatever the ratio.
PIECE = 4 << 20

# Packed bytes that are taken at a time. A stream that ends within them hands back a copy of the rest: 512 KiB that are
# nothing but ends of gzip streams took 91 ms in one piece, growing as the square, and take 22 ms in these.
_TAKEN = 64 << 10


class Codec(Protocol):
    """Takes packed bytes in any pieces, gives what they unpack to."""

    heavy: bool
    """Whether `feed` computes for long enough to be worth a thread."""

    def feed(self, data: Buffer) -> Iterator[Buffer]:
        """Take the next bytes; gives pieces of at most `PIECE` bytes. Must be read to its end."""

    def finish(self) -> None:
        """Say that there are no more bytes; raises `TruncatedShardError` if there should be."""


class Plain:
    """No compression.

    Args:
        shard: nothing here.
    """

    heavy = False

    def __init__(self, shard: str) -> None:
        pass

    def feed(self, data: Buffer) -> Iterator[Buffer]:
        """Gives `data` itself."""
        yield data

    def finish(self) -> None:
        """Nothing to check: there is no end to be found."""


class _Codec(ABC):
    """What packs bytes as one stream, or as several in a row that unpack to one.

    Args:
        shard: what errors call it.
    """

    heavy = True
    kind: ClassVar[str]
    """What it calls a stream of its own, in errors."""

    def __init__(self, shard: str) -> None:
        self._shard = shard
        self._stream: Any = None
        self._ended = 0
        self._offset = 0

    def feed(self, data: Buffer) -> Iterator[bytes]:
        """Take the next bytes; gives pieces of what they unpack to.

        Raises:
            ShardError: they are not so packed, or a checksum is wrong.
        """
        view = memoryview(data)
        for start in range(0, len(view), _TAKEN):
            yield from self._unpack(bytes(view[start : start + _TAKEN]))

    def finish(self) -> None:
        """Say that there are no more bytes.

        Raises:
            TruncatedShardError: a stream has not ended.
        """
        if self._stream is not None or not self._ended:
            raise TruncatedShardError(f"this {self.kind} is cut short", **self._where())

    @abstractmethod
    def _unpack(self, rest: bytes) -> Iterator[bytes]: ...

    def _where(self) -> dict[str, Any]:
        return {"shard": self._shard, "offset": self._offset}


class Gzip(_Codec):
    """Gzip (RFC 1952): one stream, or several in a row; checksums are verified.

    Args:
        shard: what errors call it.
    """

    kind = "gzip stream"

    def _unpack(self, rest: bytes) -> Iterator[bytes]:
        while rest:
            if self._stream is None:
                if self._ended:
                    rest = rest.lstrip(b"\0")  # padding behind a stream, as gzip itself takes it
                    if not rest:
                        return
                self._stream = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
            try:
                piece = self._stream.decompress(rest, PIECE)
            except zlib.error as error:
                raise ShardError(f"this is not gzip, or damaged: {error}", **self._where()) from None
            self._offset += len(piece)
            if piece:
                yield piece
            if self._stream.eof:
                rest, self._stream, self._ended = self._stream.unused_data, None, self._ended + 1
            else:
                rest = self._stream.unconsumed_tail


class Zstd(_Codec):
    """Zstandard (RFC 8878): one frame, or several in a row; checksums are verified where a frame has one.

    Args:
        shard: what errors call it.

    Raises:
        MissingExtraError: before Python 3.14, the package is not installed.
    """

    kind = "zstd frame"

    def __init__(self, shard: str) -> None:
        super().__init__(shard)
        self._zstd = _zstd()

    def _unpack(self, rest: bytes) -> Iterator[bytes]:
        while rest or (self._stream is not None and not self._stream.needs_input):
            if self._stream is None:
                self._stream = self._zstd.ZstdDecompressor()
            try:
                piece = self._stream.decompress(rest, PIECE)
            except self._zstd.ZstdError as error:
                raise ShardError(f"this is not zstd, or damaged: {error}", **self._where()) from None
            rest = b""
            self._offset += len(piece)
            if piece:
                yield piece
            if self._stream.eof:
                rest, self._stream, self._ended = self._stream.unused_data, None, self._ended + 1


def codec_for(key: str) -> type[Plain] | type[Gzip] | type[Zstd]:
    """How an object is packed, by the end of its name.

    Example:
        >>> codec_for("train/0000.tar.gz").__name__, codec_for("train/0000.tar").__name__
        ('Gzip', 'Plain')
    """
    name = key.lower()
    if name.endswith((".gz", ".tgz")):
        return Gzip
    if name.endswith((".zst", ".zstd", ".tzst")):
        return Zstd
    return Plain


def pack(key: str, data: bytes) -> bytes:
    """Compress as the end of a name says; the same bytes every time.

    Args:
        key: the name that it gets.
        data: all of it.

    Raises:
        MissingExtraError: zstd before Python 3.14, and the package is not installed.

    Example:
        >>> pack("labels.csv", b"a,b"), len(pack("labels.csv.gz", b"a" * 1000)) < 100
        (b'a,b', True)
    """
    codec = codec_for(key)
    if codec is Gzip:
        return gzip.compress(data, compresslevel=6, mtime=0)
    packed: bytes = _zstd().compress(data) if codec is Zstd else data
    return packed


def _zstd() -> Any:
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError:
        raise MissingExtraError(what="reading zstd", package="backports.zstd", extra="zstd") from None
    return zstd
