"""Publication of entries within the cache's quota. Blocks."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import replace

from headrace._core.cache.entry import TRAILER, entry_path, write_entry
from headrace._core.cache.folder import secure_folder
from headrace._core.cache.in_flight import Flight
from headrace._core.cache.quota import Quota, disk_usage


class Writer:
    """Writes the entries of one cache, from any thread; the caller holds the entry's lock."""

    def __init__(self, folder: str, quota: Quota) -> None:
        self._folder = folder
        self._quota = quota

    def write(self, name: bytes, data: memoryview) -> int:
        """Publish an entry if the quota allows it; returns the number of entries evicted for it.

        Raises:
            OSError: it could not be written.
        """
        path = self._path(name)
        reserved = self._quota.reserve(disk_usage(TRAILER.size + data.nbytes))
        if not reserved.size:
            return reserved.evicted
        written = False
        try:
            _write(0, path, name, data)
            written = True
        finally:
            evicted = self._quota.settle(reserved, written=written)
        return reserved.evicted + evicted

    def write_all(self, entries: Sequence[tuple[Flight, bytes, memoryview]]) -> int:
        """Publish entries, each under the lock of its flight; result and errors as for `write`."""
        # One reservation for all: reserving for each file takes longer than writing it.
        sizes = [disk_usage(TRAILER.size + data.nbytes) for _, _, data in entries]
        reserved = self._quota.reserve(sum(sizes))
        evicted = reserved.evicted
        if not reserved.size:  # not for all of them; perhaps for some
            return evicted + sum(
                flight.write(functools.partial(self.write, name, data), 0) for flight, name, data in entries
            )
        written = 0
        try:
            for (flight, name, data), size in zip(entries, sizes, strict=True):
                written += flight.write(functools.partial(_write, size, self._path(name), name, data), 0)
        finally:
            for size, is_written in ((written, True), (reserved.size - written, False)):
                if size:
                    evicted += self._quota.settle(replace(reserved, size=size), written=is_written)
        return evicted

    def _path(self, name: bytes) -> str:
        path = entry_path(self._folder, name)
        folder = os.path.dirname(path)
        if not os.path.isdir(folder):
            secure_folder(folder)
        return path


def _write(size: int, path: str, name: bytes, data: memoryview) -> int:
    write_entry(path, f"{path}.part", name, data)
    return size
