"""Files beside a dataset that say what is in it: fetched whole from a path or a store, read line by line, replaced."""

from __future__ import annotations

import contextlib
import io
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
from headrace._core.store.redaction import redact_url
from headrace._core.store.schemes import traits_of
from headrace.errors import ManifestError, ShardError

if TYPE_CHECKING:
    from typing_extensions import Buffer

LINE_LIMIT = 16 << 20  # characters; what a bomb of zeros unpacks to has no ends of lines
PathOrUrl = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class IndexFile:
    """Where such a file is: on this machine, or in a store.

    Attributes:
        name: what errors call it, without secrets.
        path: on this machine; None where it is in a store.
        client: of its store.
        key: within that.
    """

    name: str
    path: Path | None = None
    client: StoreClient | None = None
    key: str = ""

    def read(self) -> Buffer:
        """All of it; waits.

        Raises:
            FileNotFoundError: there is none; of a store it is an `ObjectNotFoundError`.
            OSError: it cannot be read; of a store it is a `StoreError`.
        """
        if self.client is not None:
            return background_loop().run(self.client.read_all(self.key))
        assert self.path is not None
        return self.path.read_bytes()

    def write(self, data: bytes) -> None:
        """Put `data` in its place, at once: a reader finds all of the old or all of the new. Waits.

        Raises:
            OSError: it cannot be written; of a store it is a `StoreError`.
        """
        if self.client is None:
            self._replace(data)
            return
        background_loop().run(self.client.put(self.key, data))

    def _replace(self, data: bytes) -> None:
        assert self.path is not None
        # In the same directory, since a name can be changed within a file system only.
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}.{os.urandom(4).hex()}")
        try:
            with open(beside, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, self.path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):  # it could not even be made
                beside.unlink()
            raise


def find_index(place: PathOrUrl, client: StoreClient) -> IndexFile:
    """Where the file is that a user named.

    Args:
        place: its path or URL.
        client: the dataset's. Its options go along to the same host, or the same kind of bucket, and nowhere else;
            in a store that was given ready is what is under the dataset's URL.

    Raises:
        ValueError: the URL names no store.
    """
    named = os.fspath(place)
    if "://" not in named:
        return IndexFile(named, path=Path(named).absolute())
    inside = client.url.rstrip("/") + "/"
    if client.backend is not None and named.startswith(inside):
        return IndexFile(redact_url(named), client=client, key=named[len(inside) :])
    base, key = split_url(named)
    there, here = urlsplit(base), urlsplit(client.url)
    same = there.scheme == here.scheme and (there.netloc == here.netloc or traits_of(base).bucket)
    return IndexFile(redact_url(named), client=client.sibling(base, same_options=same), key=key)


class _Unpacked(io.RawIOBase):
    """The bytes of a packed file, piece by piece."""

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
    """The lines of a file with their ends, unpacked as its name says.

    Args:
        data: the file.
        name: its name, for that and for errors.
        encoding: of its text.

    Raises:
        ManifestError: it is packed and damaged, or not text of that encoding, or a line is longer than `LINE_LIMIT`.
        MissingExtraError: it is packed with zstd, which is not installed.

    Example:
        >>> list(text_lines(b"a,b", "labels.csv", "utf-8"))
        ['a,b']
    """
    text = io.TextIOWrapper(io.BufferedReader(_Unpacked(_pieces(data, name))), encoding=encoding, newline="")
    number = 0
    while True:
        number += 1
        try:
            line = text.readline(LINE_LIMIT)
        except UnicodeDecodeError as error:
            what = f"there is text that is not {encoding}, on this line or behind it: {error.reason}"
            raise ManifestError(what, source=name, line=number) from None
        except ShardError as error:
            raise ManifestError(f"it cannot be unpacked: {error}", source=name, line=number) from None
        if not line:
            return
        if len(line) >= LINE_LIMIT:
            raise ManifestError(f"a line is longer than {LINE_LIMIT} characters", source=name, line=number)
        yield line
