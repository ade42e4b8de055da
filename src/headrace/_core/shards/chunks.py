"""The bytes of one shard in order, prefetched by ranged requests; bounded bytes in memory."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, replace

from headrace._core.failure import as_exception
from headrace._core.interface.block_reader import end_all
from headrace._core.shards.discovery import Shard
from headrace._core.store.head import Head, InitialRead


@dataclass(frozen=True, slots=True)
class ReadAhead:
    """How far shards are read ahead of their consumer.

    Memory holds at most about ``shards_in_parallel × (requests_per_shard + 6) × chunk_bytes``.
    """

    shards_in_parallel: int
    requests_per_shard: int
    chunk_bytes: int


class ChunkReader:
    """The bytes of one shard in order, prefetched by ranged requests.

    Args:
        shard: the shard; if its size is unknown, the first response gives it.
        ahead: limits.
        standby: keep only one request in flight until `activate` is called.
        start: the first byte to read; 0 if the shard's size is unknown.

    Attributes:
        bytes_read: number of bytes returned so far.
    """

    def __init__(self, shard: Shard, ahead: ReadAhead, *, standby: bool = False, start: int = 0) -> None:
        self._shard = shard
        self._ahead = ahead
        self._max_requests = 1 if standby else ahead.requests_per_shard
        self._head = shard.head
        # A task returns its exception instead of raising it: one that is never awaited logs no complaint.
        self._tasks: deque[asyncio.Task[InitialRead | Exception]] = deque()
        self._next = start
        self.bytes_read = 0
        self._closed = False
        if self._head is None:
            self._request_next()
        else:
            self._fill()

    @property
    def head(self) -> Head | None:
        """The shard's size and version; None before the first response, if the listing did not give them."""
        return self._head

    async def read(self) -> memoryview | None:
        """Return the next bytes, or None at the end.

        Raises:
            StoreError: the request failed.
        """
        if not self._tasks or self._closed:
            return None
        await asyncio.wait((self._tasks[0],))  # cancelling this wait does not cancel the request
        result = self._tasks.popleft().result()
        if isinstance(result, Exception):
            await self.aclose()
            raise result
        if self._head is None:
            self._head = result.head
            self._next = max(self._next, len(result.data))  # all bytes, of a store that ignores ranges
        self._fill()
        self.bytes_read += len(result.data)
        return result.data if len(result.data) else None

    @property
    def fully_requested(self) -> bool:
        """Whether every byte has been requested."""
        return self._closed or (self._head is not None and self._next >= self._head.size)

    def activate(self) -> None:
        """Leave standby: use all requests."""
        self._max_requests = self._ahead.requests_per_shard
        if self._head is not None:
            self._fill()

    async def aclose(self) -> None:
        """Cancel requests in flight."""
        self._closed = True
        await end_all(self._tasks)
        self._tasks.clear()

    def _fill(self) -> None:
        while len(self._tasks) < self._max_requests and not self.fully_requested:
            self._request_next()

    def _request_next(self) -> None:
        start, self._next = self._next, self._next + self._ahead.chunk_bytes
        stop = self._next if self._head is None else min(self._next, self._head.size)
        self._tasks.append(asyncio.get_running_loop().create_task(self._read(start, stop)))

    async def _read(self, start: int, stop: int) -> InitialRead | Exception:
        shard, head = self._shard, self._head
        try:
            if head is None:
                return await shard.store.read_start(shard.key, stop)
            return InitialRead(await replace(shard, head=head).read(start, stop), head)
        except Exception as error:
            return as_exception(error)
