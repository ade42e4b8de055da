"""Fetching from a dataset of ranges: those of all planned batches that lie near each other are read by one request."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headrace.batches import BatchPlan, RawBatch, Rows
from headrace.datasets.ranged import RangedDataset, RangedView
from headrace.engine.fetch import Deliver, Filling, SampleFetch, Spawn
from headrace.engine.racing import Races
from headrace.io.cachefile import Look
from headrace.io.control import Control
from headrace.io.ranges import Ranges, Span, plan_spans
from headrace.io.traffic import Traffic

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["RangeFetch"]

SLICE = 256  # samples that are handed out or made before others have their turn; some 0.5 ms for windows of 2,048


class _Filling(Filling):
    """A batch whose slots are being filled, with bytes first; `None` in `views` where a sample came by itself."""

    __slots__ = ("views",)

    def __init__(self, plan: BatchPlan) -> None:
        super().__init__(plan)
        self.views: list[memoryview | None] = [_NOTHING] * self.missing


@dataclass(frozen=True, slots=True)
class _Round:
    """What was planned together: the ranges that were wanted at one time, and whose they are.

    Attributes:
        fillings: the batches.
        ranges: of all of them, one behind the other.
        owners: for each range, the position of its batch in `fillings`.
        slots: for each range, its slot in that.
    """

    fillings: Sequence[_Filling]
    ranges: Ranges
    owners: NDArray[np.int64]
    slots: NDArray[np.int64]

    @classmethod
    def of(cls, wanted: Sequence[tuple[_Filling, Ranges]]) -> _Round:
        sizes = [filling.missing for filling, _ in wanted]
        return cls(
            [filling for filling, _ in wanted],
            Ranges.joined([ranges for _, ranges in wanted]),
            np.repeat(np.arange(len(sizes)), sizes),
            np.concatenate([np.arange(size) for size in sizes]),
        )

    def only(self, positions: Sequence[int]) -> _Round:
        """Some of it."""
        some = np.array(positions, dtype=np.intp)
        ranges = Ranges(*(column[some] for column in self.ranges))
        return _Round(self.fillings, ranges, self.owners[some], self.slots[some])

    def oldest(self, span: Span) -> int:
        """The number of the first batch that waits for a request."""
        return self.fillings[int(self.owners[span.members].min())].plan.number

    def members(self, positions: NDArray[np.intp]) -> Iterator[tuple[_Filling, int]]:
        """The batch and the slot of each of those ranges."""
        fillings = self.fillings
        pairs = zip(self.owners[positions].tolist(), self.slots[positions].tolist(), strict=True)
        return ((fillings[owner], slot) for owner, slot in pairs)


class RangeFetch(SampleFetch):
    """As `SampleFetch`, by requests that serve several samples.

    Whatever is wanted when a fetcher is free is planned together, the request that the oldest batch waits for first.
    The first batch is planned alone: joined with all that are behind it, it would come last.

    Args:
        dataset: where samples are fetched.
        concurrency: how many requests may be in flight, or what finds that out.
        deliver: takes the batches that are complete.
        spawn: starts a fetcher as a task.
        requests: where refusals are noted, for what finds it out.
        hedge: whether slow requests are made again.
    """

    def __init__(
        self,
        dataset: RangedDataset[Any] | RangedView,
        concurrency: int | Control,
        deliver: Deliver,
        spawn: Spawn,
        requests: Traffic,
        *,
        hedge: bool = False,
    ) -> None:
        super().__init__(dataset.aget, concurrency, deliver, spawn, requests)  # type: ignore[union-attr]
        self._dataset = dataset
        self._races = Races(spawn, requests) if hedge else None
        self._cached = dataset.at_hand([]) is not None
        self._wanted: list[tuple[_Filling, Ranges]] = []
        self._spans: deque[tuple[_Round, Span]] = deque()
        self._alone: deque[tuple[_Filling, int, Any]] = deque()
        self._first = True

    def admit(self, plan: BatchPlan) -> None:
        """Note the plan's ranges."""
        if not plan.indices:
            self._deliver(RawBatch(plan, ()))
            return
        filling = _Filling(plan)
        try:
            ranges = self._dataset.ranges(plan.indices)
            ranges.check(filling.missing)
            self._wanted.append((filling, ranges))
        except Exception:  # user code, or one of the indices is wrong: its own `aget` says which
            for slot in range(filling.missing):
                self._fetch_alone_soon(filling, slot)
        self._begin()

    def stop(self) -> None:
        """Draw nothing more."""
        super().stop()
        self._wanted.clear()
        self._spans.clear()
        self._alone.clear()

    @property
    def _queued(self) -> int:
        return len(self._alone) + len(self._spans)

    async def _fetch(self) -> None:
        alone, spans, window = self._alone, self._spans, self._window
        while True:
            while True:
                if not spans and self._wanted:
                    around = self._take()
                    self._plan(await self._not_at_hand(around) if self._cached else around)
                if self._queued > 1 or self._wanted:
                    window.call_one()
                if alone:
                    await self._fetch_alone(*alone.popleft())
                elif spans:
                    await (self._read_cached if self._cached else self._read)(*spans.popleft())
                elif not self._wanted:
                    break
                if self._stopping:
                    return
                if window.shrinking and window.must_rest():
                    break
            await window.rest()

    def _take(self) -> _Round:
        """What is wanted."""
        wanted = self._wanted[:1] if self._first else self._wanted[:]
        del self._wanted[: len(wanted)]
        self._first = False
        return _Round.of(wanted)

    def _plan(self, around: _Round) -> None:
        """Make requests of it."""
        spans = plan_spans(around.ranges)
        spans.sort(key=lambda span: int(span.members.min()))
        self._spans.extend((around, span) for span in spans)
        self._admitted += len(spans)
        for filling, slot in around.members(np.flatnonzero(around.ranges.stops == around.ranges.starts)):
            self._put(filling, slot, _NOTHING)

    async def _read(self, around: _Round, span: Span) -> None:
        """Make one request, and hand out what it brings."""
        members = around.members(span.members)
        try:
            read = functools.partial(self._dataset.read_range, span.object, span.start, span.stop)
            if self._races is None:
                data = await read()
            else:
                data = await self._races.first(around.oldest(span), span.stop - span.start, read)
            if len(data) != span.stop - span.start:
                raise ValueError(f"read_range gave {len(data)} bytes in place of {span.stop - span.start}")
        except BaseException:  # user code: what is wrong, and with which sample, each one's own `aget` says
            if not self._stopping:
                for filling, slot in members:
                    self._fetch_alone_soon(filling, slot)
            return
        begins = (around.ranges.starts[span.members] - span.start).tolist()
        ends = (around.ranges.stops[span.members] - span.start).tolist()
        for number, ((filling, slot), begin, end) in enumerate(zip(members, begins, ends, strict=True), 1):
            if self._put(filling, slot, data[begin:end]) or not number % SLICE:
                await asyncio.sleep(0)

    async def _not_at_hand(self, around: _Round) -> _Round:
        """Hand out what is on a disk nearby, and return the rest."""
        if self._wanted:
            self._window.call_one()
        members = list(around.members(np.arange(len(around.owners))))
        rest: list[int] = []
        for first in range(0, len(members), SLICE):
            chosen = members[first : first + SLICE]
            try:
                looks = self._dataset.at_hand([filling.plan.indices[slot] for filling, slot in chosen]) or []
                there = iter(await asyncio.gather(*(look for look in looks if look is not None)))
                found = [None if look is None else next(there) for look in looks]
            except BaseException:  # user code, or a folder that must not be read
                if self._stopping:
                    raise
                for filling, slot in chosen:
                    self._fetch_alone_soon(filling, slot)
                continue
            for position, (member, view) in enumerate(zip(chosen, found, strict=True), first):
                if isinstance(view, memoryview):
                    self._requests.cache_hits += 1
                    self._put(*member, view)
                else:
                    self._requests.cache_damaged += view is Look.DAMAGED
                    rest.append(position)
        return around.only(rest)

    async def _read_cached(self, around: _Round, span: Span) -> None:
        """As `_read`, for bytes that are cached on their way."""
        members: list[tuple[_Filling, int] | None] = list(around.members(span.members))
        ranges = Ranges(*(column[span.members] for column in around.ranges))
        indices = [filling.plan.indices[slot] for filling, slot in around.members(span.members)]
        request = _simply if self._races is None else functools.partial(self._races.first, around.oldest(span))
        async with contextlib.aclosing(self._dataset.read_members(span.object, ranges, indices, request)) as groups:
            while True:
                try:
                    positions, views = await anext(groups)
                except StopAsyncIteration:
                    break
                except BaseException:  # user code, as above
                    if self._stopping:
                        return
                    break
                for number, (position, view) in enumerate(zip(positions, views, strict=True), 1):
                    member, members[position] = members[position], None
                    if member is not None and (self._put(*member, view) or not number % SLICE):
                        await asyncio.sleep(0)
        for member in members:
            if member is not None:
                self._fetch_alone_soon(*member)

    def _fetch_alone_soon(self, filling: _Filling, slot: int) -> None:
        filling.views[slot] = None
        self._alone.append((filling, slot, filling.plan.indices[slot]))
        self._admitted += 1

    async def _fetch_alone(self, filling: _Filling, slot: int, index: Any) -> None:
        try:
            sample = await self._aget(index)
        except BaseException as error:  # user code
            if self._stopping:
                return
            sample = self._failed(error, filling, index)
        filling.samples[slot] = sample
        self._put(filling, slot, None)

    def _put(self, filling: _Filling, slot: int, view: memoryview | None) -> bool:
        """Note what has come; returns whether it was the last of its batch."""
        filling.views[slot] = view
        filling.missing -= 1
        if filling.missing:
            return False
        self._make(filling)
        return True

    def _make(self, filling: _Filling) -> None:
        """Make samples of the bytes of a batch, and deliver it; what cannot be made is fetched by itself first."""
        indices, views = filling.plan.indices, filling.views
        if None not in views:
            try:
                made = self._dataset.samples_of(indices, views)  # type: ignore[arg-type]
                samples = Rows(made) if isinstance(made, torch.Tensor) else list(made)
                if len(samples) != len(indices):
                    raise ValueError(f"samples_of gave {len(samples)} samples for {len(indices)} indices")
            except BaseException:  # user code; which sample it is about, shows one by one
                pass
            else:
                self._deliver(RawBatch(filling.plan, samples))
                return
        for slot, view in enumerate(views):
            if view is None:
                continue
            try:
                filling.samples[slot] = self._dataset.sample_of(indices[slot], view)
                views[slot] = None
            except BaseException:  # user code, or the bytes are damaged: by itself it may come whole
                filling.missing += 1
                self._fetch_alone_soon(filling, slot)
        if not filling.missing:
            self._deliver(RawBatch(filling.plan, filling.samples))


async def _simply(size: int, read: Callable[[], Awaitable[memoryview]]) -> memoryview:
    return await read()


_NOTHING = memoryview(b"")
