"""Tables of keys as files, local or in a store: read whole, split into lines, replaced atomically."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from headrace._core.interface.background_loop import background_loop
from headrace._core.shards.compression import codec_for
from headrace._core.shards.discovery import split_url
from headrace._core.store.client import StoreClient
from headrace._core.store.options import traits_of
from headrace._core.store.redaction import redact_url
from headrace.errors import ManifestError, ShardError

if TYPE_CHECKING:
    from typing_extensions import Buffer

LINE_LIMIT = 16 << 20  # characters; a decompression bomb of zeros is one endless line
PathOrUrl = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class TableFile:
    """A file, local or in a store.

    Attributes:
        name: name in errors, without secrets.
        path: local path; None for a file in a store.
        client: its store.
        key: its key in the store.
    """

    name: str
    path: Path | None = None
    client: StoreClient | None = None
    key: str = ""

    def read(self) -> Buffer:
        """Read all of it; blocks.

        Raises:
            FileNotFoundError: there is no such file (`ObjectNotFoundError` in a store).
            OSError: it cannot be read (`StoreError` in a store).
        """
        if self.client is not None:
            return background_loop().run(self.client.read_all(self.key))
        assert self.path is not None
        return self.path.read_bytes()

    def write(self, data: bytes) -> None:
        """Replace the content atomically; blocks.

        Raises:
            OSError: it cannot be written (`StoreError` in a store).
        """
        if self.client is None:
            self._replace(data)
            return
        background_loop().run(self.client.put(self.key, data))

    def _replace(self, data: bytes) -> None:
        assert self.path is not None
        # In the same directory: a rename works within one file system only.
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.{os.urandom(4).hex()}")
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        except BaseException:  # an interruption too leaves no part of a file
            with contextlib.suppress(FileNotFoundError):  # it was not created
                temporary.unlink()
            raise


def find_table(name: PathOrUrl, client: StoreClient) -> TableFile:
    """Locate the file that a user named.

    Args:
        name: path or URL.
        client: the dataset's store. Its options are used for the same host, or the same kind of bucket, and for nothing
            else. If the user opened the store, URLs under the dataset's URL are keys in it.

    Raises:
        ValueError: the URL names no store.
    """
    named = os.fspath(name)
    if "://" not in named:
        return TableFile(named, path=Path(named).absolute())
    inside = client.url.rstrip("/") + "/"
    if client.backend is not None and named.startswith(inside):
        return TableFile(redact_url(named), client=client, key=named[len(inside) :])
    base, key = split_url(named)
    there, here = urlsplit(base), urlsplit(client.url)
    same = there.scheme == here.scheme and (there.netloc == here.netloc or traits_of(base).bucket)
    return TableFile(redact_url(named), client=client.sibling(base, same_options=same), key=key)


class _Unpacked(io.RawIOBase):
    """The unpacked bytes of a compressed file as a stream."""

    def __init__(self, pieces: Iterator[Buffer]) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        while not len(self._rest):
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        count = min(len(into), len(self._rest))
        into[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def _pieces(data: Buffer, name: str) -> Iterator[Buffer]:
    codec = codec_for(name)(name)
    yield from codec.feed(data)
    codec.finish()


def text_lines(data: Buffer, name: str, encoding: str) -> Iterator[str]:
    """Yield the lines of a file with their ends, decompressed by the suffix of `name`.

    Raises:
        ManifestError: corrupt compression, text in another encoding, or a line longer than `LINE_LIMIT`.
        MissingExtraError: it is zstd, which is not installed.
    """
    text = io.TextIOWrapper(io.BufferedReader(_Unpacked(_pieces(data, name))), encoding=encoding, newline="")
    for number in itertools.count(1):
        try:
            line = text.readline(LINE_LIMIT)
        except UnicodeDecodeError as error:
            what = f"this line or one after it is not {encoding}: {error.reason}"
            raise ManifestError(what, source=name, line=number) from None
        except ShardError as error:
            raise ManifestError(f"cannot decompress: {error}", source=name, line=number) from None
        if not line:
            return
        if len(line) >= LINE_LIMIT:
            raise ManifestError(f"a line is longer than {LINE_LIMIT} characters", source=name, line=number)
        yield line
