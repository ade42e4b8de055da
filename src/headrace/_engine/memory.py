"""Memory budget: a limit on the bytes of batches."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace._records.batches import BatchPlan, FetchLoad, HostBatch, RawBatch, Rows
from headrace._records.failure import Failure

# Samples to admit before the size of a sample is known. Several samples, so that a slow sample, or
# a sample waiting for another sample, does not hold up all samples.
FIRST_SAMPLES = 4
# Samples to admit then, for each sample with a known size: later sizes may be larger.
GROWTH = 4
# Number of measured samples in a batch; the mean stands for all samples.
MEASURED_SAMPLES = 8
# Number of batches to measure at the beginning. Afterwards, a batch in so many is measured (an odd
# number, because sizes may repeat).
MEASURED_BATCHES = 7
# The same interval if only reports need sizes: pyarrow releases Python's lock, and may wait long
# to take the lock again.
MEASURED_RARELY = 64
# Number of measured items in a list or mapping: a list of a million numbers must not block the
# loop.
MEASURED_ITEMS = 16
# Weight of a batch in the running mean. The mean follows a change of sizes within a few measured
# batches.
WEIGHT = 0.25
# Number of measured batches; the largest size of these is expected of later samples.
RECENT = 16
IN_PLAY = 4  # a budget is in play if so many times the expected bytes exceed the budget


class _MeasuredSize:
    """Size of a sample in bytes, measured in some batches.

    Args:
        every: interval of measurements, in batches.

    Attributes:
        mean: running mean; None before the first measurement.
        recent: the last measurements.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        # Number of batches so far. Counted here, because the numbers of an engine's batches may all
        # have the same remainder.
        self._batches = 0
        self.mean: float | None = None
        self.recent: deque[float] = deque(maxlen=RECENT)

    def measure(
        self, size_of: Callable[[], float | None], *, always: bool = False
    ) -> float | None:
        """Return the size in the next batch, if measured: if due or `always`."""
        self._batches += 1
        if (
            not always
            and self._batches > MEASURED_BATCHES
            and self._batches % self._every
        ):
            return None
        size = size_of()
        if size is not None:
            self.mean = (
                size if self.mean is None else self.mean + WEIGHT * (size - self.mean)
            )
            self.recent.append(size)
        return size


class SampleSizes:
    """Sizes of samples in bytes.

    A loader keeps the sizes for all epochs.

    Args:
        every: interval of measurements, in batches.

    Attributes:
        fetched: size of a fetched sample.
        assembled: size of a sample in a batch: a decoded image can take fifty times the bytes.
        samples: number of fetched samples.
    """

    def __init__(self, every: int = MEASURED_BATCHES) -> None:
        self.fetched = _MeasuredSize(every)
        self.assembled = _MeasuredSize(every)
        self.samples = 0

    @property
    def largest(self) -> float:
        """The largest size among the last measurements; 0.0 before the first measurement."""
        return max((*self.fetched.recent, *self.assembled.recent), default=0.0)

    def on_fetched(self, raw: RawBatch, *, always: bool = False) -> float:
        """Return the mean size of the batch's samples: measured if due or `always`, or expected."""
        self.samples += len(raw.plan.indices)
        size = self.fetched.measure(
            lambda: size_of_a_sample(raw.samples or ()), always=always
        )
        if size is None:
            return self.largest
        # The batch may become larger.
        return size * max(1.0, (self.assembled.mean or 0.0) / (self.fetched.mean or 1.0))

    def on_assembled(self, host: HostBatch) -> None:
        if host.size:
            self.assembled.measure(lambda: bytes_in(host.data) / host.size)


class MemoryBudget:
    """Admits plans within a memory budget.

    A batch counts from the first fetch until the consumer takes the batch. A fetched batch counts
    with its size; a sample to be fetched counts with the largest of the last sizes. If a quarter
    of the budget is in use, all batches are measured, and no more samples are admitted than are
    fetched at once. So samples may grow along the order, or be of different sizes. The limit does
    not hold where a request serves many samples, because more plans give larger requests.
    Each plan names the batches taken, on all engines.
    (If batches arrive out of order, a late batch counts as taken on arrival, a little too early.)
    The consumer also reports a taken batch before waiting, and after each batch sent while plans
    were waiting here. The next batch for the consumer is always admitted, whatever the size.

    Before the first batch is fetched, the size of a sample is unknown. Only this batch is admitted,
    or a few samples in smaller batches; then `GROWTH` samples for each fetched sample, without this
    limit where a request serves many samples. Before the
    first batch is assembled, the size of a transformed sample is unknown. No more samples are
    admitted than are fetched at once.
    """

    def __init__(self, nbytes: int, sizes: SampleSizes, *, joins: bool = False) -> None:
        self._nbytes = nbytes
        self._joins = joins  # whether a request serves many samples
        self._sizes = sizes  # the sizes of earlier epochs are the first estimate
        # Whether a batch was assembled, in this epoch or earlier.
        self._assembled = sizes.assembled.mean is not None
        self._consumed = -1  # number of the last batch taken by the consumer
        # Number of samples for each batch in memory: in the fetch stage, or not yet taken.
        self._samples: dict[int, int] = {}
        self._held = 0  # the sum of `_samples`
        self._fetched: dict[int, float] = {}  # bytes of the fetched batches in `_samples`
        self._fetched_bytes = 0.0  # the sum of `_fetched`
        self._unfetched = 0  # number of samples of the other batches
        self._short = False  # whether plans wait for memory, and not for the first batch

    def take(self, plan: BatchPlan, at_once: int | None) -> bool:
        """Count the memory of a plan, if the plan may be admitted.

        Args:
            plan: The plan.
            at_once: The number of samples fetched at once, if known.

        Returns:
            Whether the plan is admitted.
        """
        samples = len(plan.indices)
        expected = self._expected(samples)
        self._short = expected > self._nbytes
        waits = self._short
        if self._sizes.fetched.mean is None or not self._joins:
            most = FIRST_SAMPLES + GROWTH * self._sizes.samples
            waits = waits or self._unfetched + samples > most
        if at_once is not None:
            if not self._assembled:
                waits = waits or self._held > at_once
            if not self._joins and self._is_in_play(expected):
                waits = waits or self._unfetched > at_once
        # The next batch is admitted in any case. An ended engine may have fetched the batch before.
        if waits and self._held and plan.number > min(self._samples):
            return False
        if plan.number not in self._samples:
            self._held += samples
            self._unfetched += samples
            self._samples[plan.number] = samples
        return True

    def _expected(self, more: int) -> float:
        """Return the expected bytes in memory, with `more` samples."""
        return self._fetched_bytes + (self._unfetched + more) * self._sizes.largest

    def _is_in_play(self, expected: float) -> bool:
        return IN_PLAY * expected > self._nbytes

    def on_fetched(self, raw: RawBatch) -> None:
        number = raw.plan.number
        samples = self._samples[number]
        size = self._sizes.on_fetched(raw, always=self._is_in_play(self._expected(0)))
        self._unfetched -= samples
        self._fetched[number] = samples * size
        self._fetched_bytes += self._fetched[number]
        if number <= self._consumed:
            self._forget(number)

    def on_assembled(self) -> None:
        """Note the assembly of a batch, with or without samples.

        Later batches must not wait for the size of an empty batch.
        """
        self._assembled = True

    def on_consumed(self, number: int) -> None:
        if number <= self._consumed:
            return
        self._consumed = number
        for taken in [each for each in self._fetched if each <= number]:
            self._forget(taken)

    def _forget(self, number: int) -> None:
        self._held -= self._samples.pop(number)
        self._fetched_bytes -= self._fetched.pop(number)

    def load(self, load: FetchLoad, waiting: int) -> FetchLoad:
        """Return the load of a stage, with the plans that wait for memory."""
        return load._replace(
            held_plans=waiting if self._short else 0,
            unused=0 if waiting else load.unused,
        )


def size_of_a_sample(samples: Sequence[Any]) -> float | None:
    """Return the mean size of some samples in bytes.

    None if all samples have failed.
    """
    if type(samples) is Rows:
        return float(samples.whole.nbytes / len(samples))
    good = [sample for sample in samples if not isinstance(sample, Failure)]
    if not good:
        return None
    measured = good[:: -(-len(good) // MEASURED_SAMPLES) | 1]
    return sum(map(bytes_in, measured)) / len(measured)


def bytes_in(sample: Any) -> int:
    """Return the approximate size of a sample in bytes.

    The size includes buffers, and the buffers of items.

    Example:
        >>> bytes_in({"image": bytes(1000), "label": memoryview(bytes(24))}) // 1000
        1
    """
    try:
        return int(_bytes_in(sample, 4))
    except Exception:  # user code: properties, or a sequence class
        return sys.getsizeof(sample, 0)


def _bytes_in(sample: Any, depth: int) -> float:
    nbytes = getattr(sample, "nbytes", None)  # memoryview, NumPy, torch
    if isinstance(nbytes, int):
        return nbytes
    if isinstance(sample, bytes | bytearray | str) or not depth:
        return sys.getsizeof(sample)
    if isinstance(sample, list | tuple):
        parts: Any = sample
    elif isinstance(sample, Mapping):
        parts = list(sample.values())
    else:
        slots = (
            getattr(sample, name, None) for name in getattr(type(sample), "__slots__", ())
        )
        parts = [*getattr(sample, "__dict__", {}).values(), *slots]
    if not parts:
        return sys.getsizeof(sample)
    measured = parts[:: -(-len(parts) // MEASURED_ITEMS)]
    share = len(parts) / len(measured)
    return sys.getsizeof(sample) + share * sum(
        _bytes_in(part, depth - 1) for part in measured
    )
