"""Indices of tar shards on a local disk, made once on a machine, by the first process that needs them."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path

from headrace._core.cache.disk_cache import DiskCache
from headrace._core.shards.discovery import Shard
from headrace._core.shards.tar.index import VERSION, TarIndex
from headrace.errors import CacheFolderError

LIMIT = 2 << 30  # bytes; an index is about 30 bytes for a member
# Seconds to wait for another process that makes the same index: as long as it takes to read a large shard.
BUILD_TIMEOUT = 600.0


class IndexCache:
    """The indices of shards in a folder.

    Args:
        folder: where; made for this user alone if it does not exist.

    Raises:
        CacheFolderError: it belongs to another user, or others may write to it.
        OSError: it cannot be made.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._cache = DiskCache(folder, LIMIT, fetch_timeout=BUILD_TIMEOUT)

    async def find(self, shard: Shard, *, uniform: bool) -> TarIndex | None:
        """The index of a shard; None if there is none of this version of it.

        Args:
            shard: the shard, with its head.
            uniform: whether the samples must have the same fields.
        """
        name = _name(shard, uniform)
        return None if name is None else await self._cache.find(name, _loader(shard))

    async def get(self, shard: Shard, build: Callable[[], Awaitable[TarIndex]], *, uniform: bool) -> TarIndex:
        """The index of a shard, made by `build` if neither this process nor another one of the machine has made it.

        Args:
            shard: as for `find`.
            build: makes it; its exceptions are raised.
            uniform: as for `find`.
        """
        name = _name(shard, uniform)
        if name is None:
            return await build()

        async def dumped() -> memoryview:
            return memoryview((await build()).dump())

        return await self._cache.get(name, dumped, _loader(shard))


def index_cache(folder: str | os.PathLike[str] | bool) -> IndexCache | None:
    """The cache in a folder, or for True in the user's cache folder; None, with a warning, if that cannot be used.

    Raises:
        CacheFolderError: a folder that was named belongs to another user, or others may write to it.
        OSError: a folder that was named cannot be made.
    """
    if folder is False:
        return None
    if folder is not True:
        return IndexCache(folder)
    try:
        return IndexCache(_users_folder())
    except (CacheFolderError, OSError) as error:
        warnings.warn(
            f"indices of shards cannot be kept on this machine, and are built again each time; name a folder with "
            f"cache_folder=, or store them beside the shards with save=True: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _users_folder() -> Path:
    """``$XDG_CACHE_HOME/headrace/tar-index``."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # to be ignored then, by the XDG base directory specification
        base = Path(os.path.expanduser("~/.cache"))
    if not base.is_absolute():
        raise FileNotFoundError("this user has no home directory")
    return base / "headrace" / "tar-index"


def _name(shard: Shard, uniform: bool) -> bytes | None:
    """An identifier of this version of a shard; None if versions cannot be distinguished."""
    head, store = shard.head, shard.store.store_id
    if head is None or store is None or (head.etag or head.modified) is None:
        return None
    said = [VERSION, store, shard.key, head.size, head.etag or head.modified, uniform]
    return hashlib.sha256(ascii(said).encode()).digest()


def _loader(shard: Shard) -> Callable[[memoryview], TarIndex]:
    def load(data: memoryview) -> TarIndex:
        index = TarIndex.load(shard, bytes(data))
        if index is None:
            raise ValueError("it is damaged, or of another version")
        return index

    return load
