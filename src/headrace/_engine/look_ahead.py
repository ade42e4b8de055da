"""Limits of concurrent fetches and of batches planned ahead."""

from __future__ import annotations

import math
import resource

from headrace.options import LoaderOptions, number_of_engines

# Initial number of fetches in flight for concurrency="auto". 64 fetches keep a store with 20 ms of
# latency busy at 3,200 objects/s, and need few of the usual 1,024 descriptors.
AUTO_CONCURRENCY = 64
# Largest number of fetches for "auto", if descriptors suffice. 1,024 fetches keep a store with
# 100 ms of latency busy at 10,000 objects/s, about the capacity of an event loop.
MOST_CONCURRENCY = 1024
# With 6 batches ahead and a slow consumer, plans go out in groups of five. With 2 batches ahead,
# each call of next() would wake the engine (benchmarks/next_latency.py: 20 µs instead of 5).
LEAST_AHEAD = 6
# The look-ahead may grow to hold 8 times the concurrent fetches. With log-normal latencies of
# spread 0.8, a factor of 8 keeps 0.8 to 1.0 of the fetches in flight, and a factor of 4 keeps 0.5
# to 0.9 (benchmarks/simulation.py).
MOST_COVERED = 8
MOST_SMALL = 64  # largest look-ahead for small batches, in batches
# Seconds of work on a batch. Below this time, waking processes is most of the cost of a batch.
QUICK = 0.001
# Largest look-ahead of small batches for each worker with a torch dataset: half of the worker's
# slabs.
MOST_OF_A_WORKER = 16


def most_fetches(options: LoaderOptions) -> int:
    concurrency = options["concurrency"]
    if concurrency == "auto":
        return number_of_engines(options) * most_concurrency()
    return concurrency


def most_concurrency() -> int:
    """Return the largest number of fetches for "auto".

    Each fetch can hold a connection, and so a descriptor. Half of the descriptors are for other
    uses.
    """
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return MOST_CONCURRENCY
    return max(1, min(MOST_CONCURRENCY, descriptors // 2))


def look_ahead(
    workers: int, *, prefetch_factor: int | None, concurrency: int, batch_size: int | None
) -> int:
    """Return the largest number of batches planned and not yet delivered.

    `workers` is at least 1: an engine works without workers too. `concurrency` is 0 if the workers
    read the dataset.
    """
    if prefetch_factor is not None:
        return max(1, prefetch_factor * workers)
    if not concurrency:
        return 2 * workers
    # A batch more than the fetch window covers keeps the window full during the assembly of a
    # batch. LEAST_AHEAD is enough to send plans in groups.
    return max(LEAST_AHEAD, 2 * workers, _covering(concurrency, batch_size))


def most_ahead(least: int, *, concurrency: int, batch_size: int | None) -> int:
    """Return the upper bound for a look-ahead that grows.

    The look-ahead grows if `least` batches leave too few samples to fetch.
    """
    return max(least, MOST_COVERED * _covering(concurrency, batch_size))


def _covering(concurrency: int, batch_size: int | None) -> int:
    """Return the number of batches with `concurrency` samples, plus 1."""
    return math.ceil(concurrency / (batch_size or 1)) + 1


class LookAheadSize:
    """Number of batches planned and not yet delivered.

    The number grows if the number limits the loader. A batch is complete with the arrival of the
    slowest sample. In the meantime, most samples of later batches arrive too, and fewer fetches
    than allowed are in flight.

    Attributes:
        batches: the present number.
        least: the smallest number.
    """

    def __init__(self, least: int, most: int) -> None:
        self.least = least
        self._most = most
        self.batches = least

    def resize(self, least: int, most: int) -> None:
        """Set new bounds, and keep the number of batches beyond `least`.

        For a later epoch or another number of workers.
        """
        self.batches = min(most, least + self.batches - self.least)
        self.least, self._most = least, most

    def extend(self, batches: int) -> None:
        self.batches = min(self._most, self.batches + batches)

    def reduce(self) -> None:
        """Halve the number of batches beyond `least`."""
        self.batches -= (self.batches - self.least + 1) // 2
