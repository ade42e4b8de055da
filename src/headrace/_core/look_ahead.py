"""How many samples may be fetched at once, and how many batches may be planned ahead."""

from __future__ import annotations

import math
import resource

from headrace.options import LoaderOptions, number_of_engines

# Fetches in flight with which concurrency="auto" starts. 64 keep a store of 20 ms busy at 3,200
# objects/s, and need few of the usual 1,024 descriptors.
AUTO_CONCURRENCY = 64
# Its maximum, if the descriptors suffice: 1,024 keep a store of 100 ms busy at 10,000 objects/s,
# about the capacity of one event loop.
MOST_CONCURRENCY = 1024
# With 6 batches ahead plans go out by fives while the consumer is the slower one; with 2 each call
# of next() would wake the engine (benchmarks/next_latency.py: 20 µs instead of 5).
LEAST_AHEAD = 6
# How many times the concurrent fetches the look-ahead may grow to hold. With latencies of a
# log-normal distribution of spread 0.8 that keeps 0.8 to 1.0 of the fetches in flight, and 4 times
# 0.5 to 0.9 (benchmarks/simulation.py).
MOST_COVERED = 8
MOST_SMALL = 64  # batches to which the look-ahead of small ones may grow
QUICK = 0.001  # seconds of work on a batch, below which waking processes for it is most of its cost
MOST_OF_A_WORKER = (
    16  # of those, for each worker that reads a torch dataset: half of the slabs that it may have
)


def most_fetches(options: LoaderOptions) -> int:
    concurrency = options["concurrency"]
    return number_of_engines(options) * most_concurrency() if concurrency == "auto" else concurrency


def most_concurrency() -> int:
    """How many fetches "auto" may come to: each can hold a connection, and half of the descriptors are for the rest."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return MOST_CONCURRENCY
    return max(1, min(MOST_CONCURRENCY, descriptors // 2))


def look_ahead(
    workers: int, *, prefetch_factor: int | None, concurrency: int, batch_size: int | None
) -> int:
    """How many batches may be planned and not yet delivered.

    `workers` is at least one: an engine works without workers too. `concurrency` is 0 where they
    read the dataset.
    """
    if prefetch_factor is not None:
        return max(1, prefetch_factor * workers)
    if not concurrency:
        return 2 * workers
    # One batch beyond what the fetch window covers, so that the window is full while a batch is
    # being assembled; and enough that plans can be sent in groups.
    return max(LEAST_AHEAD, 2 * workers, _covering(concurrency, batch_size))


def most_ahead(least: int, *, concurrency: int, batch_size: int | None) -> int:
    """How many batches may be planned and not yet delivered where `least` leave too few samples to be fetched."""
    return max(least, MOST_COVERED * _covering(concurrency, batch_size))


def _covering(concurrency: int, batch_size: int | None) -> int:
    """One batch more than so many samples are in."""
    return math.ceil(concurrency / (batch_size or 1)) + 1


class LookAheadSize:
    """How many batches of a loader may be planned and not yet delivered: a number that grows where it is the limit.

    A batch is complete when its slowest sample has arrived. Meanwhile most samples of the batches
    after it arrive too, so that fewer fetches are in flight than may be.

    Attributes:
        batches: the number now.
        least: the least number.
    """

    def __init__(self, least: int, most: int) -> None:
        self.least = least
        self._most = most
        self.batches = least

    def resize(self, least: int, most: int) -> None:
        """Keep the number of batches beyond the least one, for a later epoch or another number of workers."""
        self.batches = min(most, least + self.batches - self.least)
        self.least, self._most = least, most

    def extend(self, batches: int) -> None:
        self.batches = min(self._most, self.batches + batches)

    def reduce(self) -> None:
        """Plan half as many beyond the first number."""
        self.batches -= (self.batches - self.least + 1) // 2
