"""One trial: a loader with a number of fetches in flight, measured while it runs steadily."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.cli.bench.reads import Listing, Reads
from headrace.errors import HeadraceError, StoreUnreachableError
from headrace.loader import DataLoader
from headrace.options import MEMORY_BUDGET
from headrace.telemetry.stages import percentile

__all__ = ["PERCENTILES", "Percentiles", "Trial", "Trials", "percentiles_of"]

PERCENTILES = (0.5, 0.9, 0.99)
Percentiles = tuple[float, float, float]

POLL = 0.02  # seconds between two looks at the counts
TURNS = 3  # latencies that a trial measures, at least: within one, reads complete in bursts
LONGEST = 4.0  # seconds of a trial, in those that were asked for: a slow store gets that many for its turns
BATCH, BATCH_BYTES = 64, 64 << 20  # reads of a batch, and the bytes at which fewer suffice
COOLING = 1.0  # seconds of rest after a trial that the store throttled
THROTTLED = 0.1  # share of the requests from which that is so


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of a trial.

    Attributes:
        concurrency: fetches in flight.
        seconds: in which it was measured.
        reads: completed in them.
        nbytes: of these.
        whole: percentiles of a read's seconds.
        first: of those to its first byte, where they were taken.
        throttled: requests that were throttled or timed out.
        cores: CPU seconds a second of this process.
        loop: of the thread of the event loop.
        starved: seconds a second that threads of this process waited for a core.
        failed: why there is no result.
    """

    concurrency: int
    seconds: float = 0.0
    reads: int = 0
    nbytes: int = 0
    whole: Percentiles | None = None
    first: Percentiles | None = None
    throttled: int = 0
    cores: float = 0.0
    loop: float = 0.0
    starved: float = 0.0
    failed: str | None = None

    @property
    def rate(self) -> float:
        """Reads a second."""
        return self.reads / self.seconds if self.seconds else 0.0

    @property
    def bandwidth(self) -> float:
        """Bytes a second."""
        return self.nbytes / self.seconds if self.seconds else 0.0

    @property
    def throttled_share(self) -> float:
        """The share of the requests that were throttled."""
        return self.throttled / (self.throttled + self.reads) if self.throttled else 0.0


class Trials:
    """Trials of one store.

    Args:
        listing: what is read.
        until: the time, by `time.perf_counter`, after which none goes on.
    """

    def __init__(self, listing: Listing, until: float) -> None:
        self._listing = listing
        self._until = until
        self._seed = 0
        self.mean_size = listing.mean_size
        self.batch_size = max(1, min(BATCH, int(BATCH_BYTES / self.mean_size)))

    @property
    def seconds_left(self) -> float:
        """Seconds until all has to end."""
        return self._until - time.perf_counter()

    def memory_budget(self, concurrency: int) -> int:
        """The loader's `memory_budget` that so many fetches in flight need, in bytes; the default if that suffices."""
        ahead = concurrency + 6 * self.batch_size
        needed = 1.5 * ahead * self.mean_size
        return MEMORY_BUDGET if needed <= MEMORY_BUDGET else math.ceil(needed / 2**30) << 30

    async def run(
        self, concurrency: int, seconds: float, *, part: float = 1.0, first_byte: bool = False, strict: bool = False
    ) -> Trial:
        """Load with so many fetches in flight, and measure for so many seconds.

        Args:
            concurrency: fetches in flight.
            seconds: to measure; longer where the latency is.
            part: the part of each read's bytes that is read.
            first_byte: whether the time to the first byte is taken.
            strict: whether a request that fails raises its error.

        Returns:
            The result; with `failed` if requests failed, or the time was not enough.

        Raises:
            StoreError: a request failed, or nothing came in time, and `strict` is true.
        """
        reads = Reads(self._listing, part=part, first_byte=first_byte)
        self._seed += 1
        loader: DataLoader[Any] = DataLoader(
            reads,
            batch_size=self.batch_size,
            sampler=_Endless(len(reads), self._seed),
            collate_fn=_count,
            concurrency=concurrency,
            memory_budget=self.memory_budget(concurrency),
        )
        consumer = asyncio.ensure_future(_consume(loader))
        try:
            trial = await _measure(reads, consumer, concurrency, seconds, self._until)
            trial_loop = loader.report().engine_cpu
            if strict and trial.failed:
                raise StoreUnreachableError(
                    f"reading: {trial.failed}, with {concurrency} requests in flight for "
                    f"{LONGEST * seconds:.0f} s. Try a larger --seconds",
                    url=self._listing.url,
                )
        except HeadraceError as error:
            if strict:
                raise
            return Trial(concurrency, failed=" ".join(str(error).split()))
        finally:
            consumer.cancel()
            await asyncio.gather(consumer, return_exceptions=True)
            await loader.aclose()
        if trial.throttled_share > THROTTLED:
            await asyncio.sleep(max(0.0, min(COOLING, self.seconds_left)))
        return _with_loop(trial, trial_loop)


async def _consume(loader: DataLoader[Any]) -> None:
    async for _ in loader:
        pass


async def _measure(
    reads: Reads, consumer: asyncio.Future[None], concurrency: int, seconds: float, until: float
) -> Trial:
    clock = time.perf_counter
    # The first turn connects; a second one levels the bursts in which requests began.
    settled = await _wait(consumer, lambda: reads.count >= 2 * concurrency, min(until, clock() + LONGEST * seconds))
    if not settled and not reads.count:
        return Trial(concurrency, failed="no read was completed in time")
    mark, nbytes, throttled = reads.count, reads.nbytes, reads.throttle_events
    began, cpu, starved = clock(), time.process_time(), _starved()
    latest = min(until, began + LONGEST * seconds)
    await _wait(consumer, lambda: clock() >= began + seconds and reads.count >= mark + TURNS * concurrency, latest)
    # Whole turns, where requests go on in bursts.
    turn = percentile(reads.seconds[mark:], 0.5)
    if turn > 0:
        turns = math.ceil((clock() - began) / turn)
        await _wait(consumer, lambda: False, min(latest, began + turns * turn))
    ended = clock()
    return Trial(
        concurrency,
        ended - began,
        reads.count - mark,
        reads.nbytes - nbytes,
        percentiles_of(reads.seconds[mark:]),
        percentiles_of(reads.first[mark:]),
        reads.throttle_events - throttled,
        (time.process_time() - cpu) / (ended - began),
        starved=(_starved() - starved) / (ended - began),
        failed=None if reads.count > mark else "no read was completed in time",
    )


async def _wait(consumer: asyncio.Future[None], condition: Any, until: float) -> bool:
    """Wait for a condition until a time; raises the loader's error."""
    while not condition():
        left = until - time.perf_counter()
        if left <= 0:
            return False
        done, _ = await asyncio.wait([consumer], timeout=min(POLL, left))
        if done:
            consumer.result()
    return True


def _with_loop(trial: Trial, loop: float) -> Trial:
    return dataclasses.replace(trial, loop=loop)


def percentiles_of(values: Sequence[float]) -> Percentiles | None:
    """The median, and the 90th and 99th percentile; None of no values."""
    if not values:
        return None
    low, middle, high = (percentile(values, part) for part in PERCENTILES)
    return low, middle, high


class _Endless:
    """Every index once, in a random order, again and again."""

    def __init__(self, length: int, seed: int) -> None:
        self._length = length
        self._random = np.random.default_rng(seed)

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from self._random.permutation(self._length).tolist()


def _count(batch: Sequence[memoryview]) -> int:
    return sum(map(len, batch))


def _starved() -> float:
    """Seconds that the threads of this process waited for a core so far; 0 where the system does not say."""
    waited = 0
    try:
        threads = os.listdir("/proc/self/task")
    except OSError:  # not Linux
        return 0.0
    for thread in threads:
        try:
            waited += int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1])
        except (OSError, ValueError, IndexError):  # it has ended
            continue
    return waited / 1e9
