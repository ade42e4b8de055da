"""Indices of tar shards on the local disk, each built by the first process of the machine that needs it."""

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

MAX_BYTES = 2 << 30  # an index takes about 30 bytes per member
BUILD_TIMEOUT = 600.0  # seconds to wait for another process that builds the same index: time to read a large shard


class IndexCache:
    """The indices in a folder, which is created for this user alone.

    Raises:
        CacheFolderError: the folder belongs to another user, or others may write to it.
        OSError: it cannot be created.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._cache = DiskCache(folder, MAX_BYTES, fetch_timeout=BUILD_TIMEOUT)

    async def find(self, shard: Shard, *, uniform: bool) -> TarIndex | None:
        """The index of this version of a shard, whose head is known; None on a miss."""
        name = _cache_name(shard, uniform)
        return None if name is None else await self._cache.find(name, _loader(shard))

    async def get(self, shard: Shard, build: Callable[[], Awaitable[TarIndex]], *, uniform: bool) -> TarIndex:
        """The index of a shard; calls `build` on a miss, unless another process of the machine is building it."""
        name = _cache_name(shard, uniform)
        if name is None:
            return await build()

        async def dumped() -> memoryview:
            return memoryview((await build()).dump())

        return await self._cache.get(name, dumped, _loader(shard))


def index_cache(folder: str | os.PathLike[str] | bool) -> IndexCache | None:
    """The cache in `folder`, for True in the user's cache folder; None for False, or with a warning if that fails.

    Raises:
        CacheFolderError: the named folder belongs to another user, or others may write to it.
        OSError: the named folder cannot be created.
    """
    if folder is False:
        return None
    if folder is not True:
        return IndexCache(folder)
    try:
        return IndexCache(_user_folder())
    except (CacheFolderError, OSError) as error:
        warnings.warn(
            f"indices of shards cannot be cached on this machine, and are built again each time; name a folder with "
            f"cache_folder=, or store them beside the shards with save=True: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _user_folder() -> Path:
    """``$XDG_CACHE_HOME/headrace/tar-index``."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # the XDG base directory specification says to ignore it then
        base = Path(os.path.expanduser("~/.cache"))
    if not base.is_absolute():
        raise FileNotFoundError("this user has no home directory")
    return base / "headrace" / "tar-index"


def _cache_name(shard: Shard, uniform: bool) -> bytes | None:
    """Identifies this version of a shard; None if versions cannot be distinguished."""
    head, store = shard.head, shard.store.store_id
    if head is None or store is None or head.version is None:
        return None
    parts = [VERSION, store, shard.key, head.size, head.version, uniform]
    return hashlib.sha256(ascii(parts).encode()).digest()


def _loader(shard: Shard) -> Callable[[memoryview], TarIndex]:
    def load(data: memoryview) -> TarIndex:
        index = TarIndex.load(shard, bytes(data))
        if index is None:
            raise ValueError("corrupt, or of another version")
        return index

    return load
