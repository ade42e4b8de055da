"""Compressed shards that are read as a whole.

A shard is fetched and unpacked once for all samples that wait for the shard.
"""

from __future__ import annotations

import asyncio
import copy
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from typing import Any

import numpy as np

from headrace._base.array_types import ByteArray
from headrace._eventloop.per_loop import end_all
from headrace._extras import require
from headrace._shards.discovery import Shard, shard_errors
from headrace.errors import ShardError

UNPACKED_BYTES = 256 << 20
_MOST_RATIO = 100  # maximum ratio of unpacked to stored bytes, above `UNPACKED_BYTES`
FORMATS = {
    "br": "brotli",
    "bz2": "bzip2",
    "gz": "gzip",
    "snappy": "snappy",
    "zstd": "zstd",
}
"""Names of compressions in indices, and names of the modules of cramjam."""


def unpacker(format: str) -> Any:
    """Return the function that unpacks bytes into an array.

    The function returns the number of unpacked bytes. Needs cramjam.
    """
    cramjam = require("cramjam", f"reading {format}", "cramjam", "compression")
    module = getattr(cramjam, FORMATS[format])
    return module.decompress_raw_into if format == "snappy" else module.decompress_into


def check_unpacked(size: int, stored: int, largest: int = 0) -> None:
    """Raise `ValueError` if few stored bytes would unpack to very many.

    Args:
        size: unpacked bytes, by an index or a header.
        stored: bytes of the object.
        largest: unpacked bytes that are always allowed, if more than `UNPACKED_BYTES`.
    """
    if size > (limit := max(largest, UNPACKED_BYTES, _MOST_RATIO * stored)):
        raise ValueError(
            f"{stored:,} bytes are said to unpack to {size:,}, and {limit:,} are the most"
        )


def unpack(
    data: memoryview, format: str, size: int, shard: Shard, largest: int
) -> ByteArray:
    """Unpack bytes to `size` bytes, the size in an index.

    Raises:
        ShardError: the bytes are corrupt, or have another size unpacked.
    """
    what = f"not {format} of {size:,} bytes unpacked, as its index says"
    with shard_errors(what, shard.name):
        check_unpacked(size, len(data), largest)
        output = np.empty(size, np.uint8)
        found = unpacker(format)(data, output)
    if found != size:
        raise shard.error(f"{found:,} bytes unpacked, and {size:,} in its index")
    return output


class UnpackedShards:
    """Cache of arrays by key, for example of unpacked bytes.

    The cache holds the latest arrays up to `limit` bytes, and all arrays with views in use. A
    pickled copy is empty.

    Attributes:
        limit: bytes of the latest arrays.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._in_use: weakref.WeakValueDictionary[Hashable, Any] = (
            weakref.WeakValueDictionary()
        )
        self._latest: OrderedDict[Hashable, Any] = OrderedDict()
        self._latest_bytes = 0
        self._lock = threading.Lock()  # guards the arrays: event loops share the cache
        self._tasks: dict[Hashable, asyncio.Task[Any]] = {}  # by loop and key
        self._waiting: Counter[Hashable] = Counter()
        self._corrupt: dict[Hashable, ShardError] = {}

    def __reduce__(self) -> tuple[object, ...]:
        return UnpackedShards, (self.limit,)

    def peek(self, key: Hashable) -> Any:
        return self._in_use.get(key)

    async def get(
        self, key: Hashable, load: Callable[[], Coroutine[Any, Any, Any]]
    ) -> Any:
        """Return the result of `load`, called once for all waiting callers.

        Corrupt data may have been damaged in transit: `load` runs a second time, and then never
        again.
        """
        if (data := self._in_use.get(key)) is not None:
            return self._keep(key, data)
        if key in self._corrupt:
            # A copy for each sample, since the sample adds notes to the error.
            raise copy.deepcopy(self._corrupt[key])
        here = asyncio.get_running_loop(), key
        task = self._tasks.get(here) or self._tasks.setdefault(
            here, asyncio.create_task(loaded(load))
        )
        self._waiting[here] += 1
        try:
            await asyncio.wait((task,))
            return self._keep(key, task.result())
        except Exception as error:
            if isinstance(error, ShardError):
                self._corrupt[key] = error
            raise copy.deepcopy(error) from None
        finally:
            self._waiting[here] -= 1
            if not self._waiting[here]:
                del self._tasks[here], self._waiting[here]
                await end_all((task,))

    def _keep(self, key: Hashable, data: Any) -> Any:
        with self._lock:
            self._in_use[key] = data
            self._latest_bytes += data.nbytes if key not in self._latest else 0
            self._latest[key] = data
            self._latest.move_to_end(key)
            while self._latest_bytes > self.limit and len(self._latest) > 1:
                self._latest_bytes -= self._latest.popitem(last=False)[1].nbytes
        return data


async def loaded(load: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Return the result of `load`.

    If the first result is corrupt, perhaps in transit, `load` is called again.
    """
    try:
        return await load()
    except ShardError:
        return await load()
