"""Publishing entries of a disk cache within its bound: one, or several for which room is asked once. Blocks."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import replace

from headrace._core.cache.entry import TRAILER, entry_path, write_entry
from headrace._core.cache.folder import secure_folder
from headrace._core.cache.in_flight import Claim
from headrace._core.cache.quota import Quota, room


class Writer:
    """Writes the entries of one cache; from any thread, by whoever holds an entry's lock.

    Args:
        folder: the cache's.
        space: its room.
    """

    def __init__(self, folder: str, space: Quota) -> None:
        self._folder = folder
        self._space = space

    def write(self, name: bytes, data: memoryview) -> int:
        """Publish an entry, if there is room; returns how many others had to go.

        Raises:
            OSError: it could not be written.
        """
        path = self._place(name)
        reserved = self._space.reserve(room(TRAILER.size + data.nbytes))
        if not reserved.size:
            return reserved.gone
        written = False
        try:
            _write(0, path, name, data)
            written = True
        finally:
            gone = self._space.settle(reserved, written=written)
        return reserved.gone + gone

    def write_all(self, entries: Sequence[tuple[Claim, bytes, memoryview]]) -> int:
        """Publish entries, each under its claim; arguments of each, result and errors as for `write`."""
        # Room is asked for once: for each file by itself that takes longer than writing it does.
        rooms = [room(TRAILER.size + data.nbytes) for _, _, data in entries]
        reserved = self._space.reserve(sum(rooms))
        gone = reserved.gone
        if not reserved.size:  # for all; perhaps for some
            return gone + sum(
                claim.write(functools.partial(self.write, name, data), 0) for claim, name, data in entries
            )
        written = 0
        try:
            for (claim, name, data), size in zip(entries, rooms, strict=True):
                written += claim.write(functools.partial(_write, size, self._place(name), name, data), 0)
        finally:
            for size, there in ((written, True), (reserved.size - written, False)):
                if size:
                    gone += self._space.settle(replace(reserved, size=size), written=there)
        return gone

    def _place(self, name: bytes) -> str:
        path = entry_path(self._folder, name)
        folder = os.path.dirname(path)
        if not os.path.isdir(folder):
            secure_folder(folder)
        return path


def _write(size: int, path: str, name: bytes, data: memoryview) -> int:
    write_entry(path, f"{path}.part", name, data)
    return size
