"""Fetching from a dataset of ranges whose bytes are cached on disk: what is there is not asked for."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Sequence

from headrace._core.engine.range_fetch import RangeFetch, RangeFilling
from headrace._core.engine.read_plan import ReadPlan

SLICE = 256  # samples that are looked for, or handed out, before others have their turn


class CachedRangeFetch(RangeFetch):
    """As `RangeFetch`, from a dataset with a cache: by `read_missing`, which caches what it reads."""

    async def _uncached(self, around: ReadPlan[RangeFilling]) -> Sequence[int]:
        """Hand out what is on disk."""
        if self._wanted:
            self._window.wake_one()  # this one waits for a disk
        missing: list[int] = []
        for first in range(0, len(around), SLICE):
            positions = range(first, min(first + SLICE, len(around)))
            try:
                found = await self._dataset.cached_reads(
                    [filling.plan.indices[slot] for filling, slot in around.whose(positions)]
                )
            except BaseException:  # user code, or a folder that must not be read
                if self._stopping:
                    raise
                for filling, slot in around.whose(positions):
                    self._fetch_alone_soon(filling, slot)
                continue
            for position, view in zip(positions, found, strict=True):
                if view is None:
                    missing.append(position)
                else:
                    self._came(around.put(position, view), 1)
        return missing

    async def _read(self, around: ReadPlan[RangeFilling], number: int) -> None:
        """Make the requests for one span, and hand out what they bring."""
        span = around.spans[number]
        missing: list[int | None] = span.members.tolist()
        indices = [filling.plan.indices[slot] for filling, slot in around.whose(span.members)]
        read = functools.partial(self._read_range, around.first(number))
        reading = self._dataset.read_missing(span.object, around.ranges.at(span.members), indices, read)
        async with contextlib.aclosing(reading) as groups:
            while True:
                try:
                    places, views = await anext(groups)
                except StopAsyncIteration:
                    break
                except BaseException:  # user code: what is wrong, and with which sample, each one's own `aget` says
                    if self._stopping:
                        return
                    break
                for count, (place, view) in enumerate(zip(places, views, strict=True), 1):
                    position, missing[place] = missing[place], None
                    if position is None:
                        continue
                    if self._came(around.put(position, view), 1) or not count % SLICE:
                        await asyncio.sleep(0)
        for filling, slot in around.whose([position for position in missing if position is not None]):
            self._fetch_alone_soon(filling, slot)
