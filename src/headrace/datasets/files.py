"""Local files as samples."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiofiles

from headrace._base.text import sample_repr
from headrace._eventloop.blocking import run_blocking
from headrace._shards.discovery import glob_expression
from headrace._store.listing import KeyedSamples, Labels
from headrace._store.redaction import redact_url
from headrace._streams.map_style import AsyncDataset
from headrace.errors import EmptyListingError

# Bytes; read from the page cache in 5 ms, during which the thread is occupied.
LARGE = 16 * 2**20
# Bytes; a call in a thread costs 40 µs, reading a piece more than 0.5 ms.
PIECE = 2 * 2**20


class FileSample(NamedTuple):
    """A file: the key, the bytes and the label.

    Attributes:
        key: the path relative to the dataset's root, with forward slashes.
        data: the whole content.
        label: from `labels=`, or None.
    """

    key: str
    data: bytes
    label: Any

    def __repr__(self) -> str:
        return sample_repr(self)


class FileDataset(KeyedSamples, AsyncDataset[FileSample]):
    """The files under a directory, one sample each.

    A sample is a `FileSample(key, data, label)`. The directory is searched once, when the dataset
    is made. The keys are sorted, so an index means the same file every time. Only regular files
    count, and links to regular files. Links to directories are followed.

    Args:
        root: the directory.
        pattern: pattern of the files, as for `pathlib.Path.glob`, relative to `root`. By default
            all files, at any depth.
        suffix: only files with this ending, e.g. ``".jpg"`` or ``(".jpg", ".png")``.
        labels: the label of each key. ``"folder"`` gives the number, in `classes`, of the first
            folder of the key. Or a function of the key, a mapping from the key, or a sequence in
            the order of `keys`.
        classes: names of the folders in the order of the numbers. By default all folders found,
            sorted. Give the validation set ``classes=train.classes``: otherwise a class without a
            file there would renumber the other classes.

    Raises:
        FileNotFoundError: `root` does not exist, or (`EmptyListingError`) no file matches.
        NotADirectoryError: `root` is something else.
        ValueError: `root` is a URL, or `labels` does not fit the files.
        OSError: a directory cannot be read.

    Example:
        >>> import pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "7.txt").write_bytes(b"seven")
        >>> FileDataset(folder, labels=lambda key: int(key[0]))[0]
        FileSample(key='7.txt', data=<5 bytes>, label=7)
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        pattern: str = "**/*",
        *,
        suffix: str | tuple[str, ...] | None = None,
        labels: Labels = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        if "://" in os.fspath(root):
            raise ValueError(
                "FileDataset reads a directory by its path; ObjectDataset takes URLs: "
                f"{redact_url(str(root))}"
            )
        # Absolute: another process, or this process in another directory, opens the same files.
        self._root = str(Path(root).absolute())
        parts = Path(pattern).parts
        match = glob_expression("/".join(parts), hidden=True)
        levels = None if any("**" in part for part in parts) else len(parts)
        keys = [
            key
            for key in _regular_files(self._root, "", levels, frozenset())
            if match.fullmatch(key)
        ]
        self._keys = tuple(
            sorted(key for key in keys if suffix is None or key.endswith(suffix))
        )
        if not self._keys:
            searched = f"pattern={pattern!r}, suffix={suffix!r}"
            raise EmptyListingError(
                f"no file matches {searched}", url=Path(self._root).as_uri()
            )
        self._set_labels(labels, classes)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._root!r}, {len(self)} files)"

    async def aget(self, index: int) -> FileSample:
        """Read the file at `index`.

        Raises:
            FileNotFoundError: the file is gone.
            IndexError: there is no such index.
        """
        key = self._keys[index]
        path = f"{self._root}/{key}"
        data = await run_blocking(_read, path)
        if data is None:
            data = await _read_in_pieces(path)
        return FileSample(
            key, data, None if self._labels is None else self._labels[index]
        )


async def _read_in_pieces(path: str) -> bytes:
    """Read a large file, or a file of unknown size, in pieces.

    Other reads can use the thread between two pieces, and the read can be cancelled.
    """
    pieces: list[bytes] = []
    async with aiofiles.open(path, "rb", buffering=0) as file:
        while piece := await file.read(PIECE):
            pieces.append(piece)
    return b"".join(pieces)


def _read(path: str) -> bytes | None:
    """Read the whole file; return None if one read cannot return the file.

    The file is large, or the file system reports no size or a wrong size.
    """
    # Four system calls, where `open` and `read` make nine. After each call, the thread may have to
    # wait for the GIL.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        data = os.read(descriptor, size) if size <= LARGE else b""
        return data if len(data) == size > 0 else None
    finally:
        os.close(descriptor)


def _regular_files(
    folder: str, prefix: str, levels: int | None, above: frozenset[tuple[int, int]]
) -> Iterator[str]:
    """Yield the keys of the regular files in a directory, through links.

    Args:
        folder: path of the directory.
        prefix: the beginning of the keys.
        levels: number of directory levels to search, including `folder`. None for all.
        above: device and inode of each directory above. A directory reached again by a link is left
            out.
    """
    status = os.stat(folder)
    if levels == 0 or (here := (status.st_dev, status.st_ino)) in above:
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            # The entry may be a link to nothing, or a file removed during the search.
            with contextlib.suppress(FileNotFoundError):
                if entry.is_dir():
                    below = None if levels is None else levels - 1
                    yield from _regular_files(
                        entry.path, f"{prefix}{entry.name}/", below, above | {here}
                    )
                elif entry.is_file():
                    yield f"{prefix}{entry.name}"
