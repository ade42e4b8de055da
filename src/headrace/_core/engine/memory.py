"""The memory budget: a bound on bytes that are being fetched, or fetched or in batches and not consumed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace._core.batches import BatchPlan, FetchLoad, HostBatch, RawBatch, Rows
from headrace._core.failure import Failure

# before the size of one is known: one that is slow, or waits for another, does not hold up all
FIRST_SAMPLES = 4
MEASURED_SAMPLES = 8  # of a batch; their mean stands for all
# the first so many are measured, and then one in so many (odd: sizes may repeat), or in
MEASURED_BATCHES = 7
# where only reports need it: pyarrow gives Python's lock away, and may wait long for it
MEASURED_RARELY = 64
MEASURED_ITEMS = 16  # of a list or mapping; a list of a million numbers must not block the loop
# of a batch in the running mean, which follows a change of sizes within a few measured ones
WEIGHT = 0.25


class SampleSizes:
    """Running means of a sample's size in bytes; of one loader, for all its epochs. None before the first."""

    def __init__(self, every: int = MEASURED_BATCHES) -> None:
        self._every = every  # batches
        self.fetched: float | None = None
        # in its batch: decoding an image can take fifty times its bytes
        self.assembled: float | None = None
        # Batches so far. Counted here: the numbers of an engine's batches may all leave the same
        # rest.
        self._counts = {"fetched": 0, "assembled": 0}

    @property
    def larger(self) -> float:
        return max(self.fetched or 0.0, self.assembled or 0.0)

    def on_fetched(self, raw: RawBatch) -> None:
        self._measure("fetched", lambda: size_of_a_sample(raw.samples or ()))

    def on_assembled(self, host: HostBatch) -> None:
        if host.size:
            self._measure("assembled", lambda: bytes_in(host.data) / host.size)

    def _measure(self, name: str, size_of: Callable[[], float | None]) -> None:
        """Measure a batch, if it is one of the first or one in so many."""
        self._counts[name] = count = self._counts[name] + 1
        if (count <= MEASURED_BATCHES or not count % self._every) and (
            size := size_of()
        ) is not None:
            mean = getattr(self, name)
            setattr(self, name, size if mean is None else mean + WEIGHT * (size - mean))


class MemoryBudget:
    """Admits plans while their memory is within the budget, by the running mean of a sample's size.

    Memory is counted by batches, from the first fetch until the consumer has taken the batch. Each
    plan says which those are, of any engine. (Out of order, a late one counts as taken when it
    arrives, a little early.) The consumer also says it when it waits, if it has taken one since the
    last plan, and with each batch that left plans waiting here. The next batch that it can take is
    always admitted, whatever its size.

    Until the first batch is fetched, it alone is admitted, or a few samples in smaller batches: the
    size of a sample is not known. Until the first batch is assembled, no more is admitted than is
    fetched at once: what a transform makes of a sample is not known.
    """

    def __init__(self, nbytes: int, sizes: SampleSizes) -> None:
        self._nbytes = nbytes
        self._sizes = sizes  # those of earlier epochs are the first guess
        self._assembled = sizes.assembled is not None  # a batch, of this epoch or before
        self._consumed = -1  # the number of the last batch that has been taken
        # of each batch that is being fetched, or fetched and not taken
        self._samples: dict[int, int] = {}
        self._held = 0  # the sum of these
        self._fetched: set[int] = set()  # of these
        self._short = False  # whether plans wait for memory, and not for the first batch

    def take(self, plan: BatchPlan, at_once: int | None) -> bool:
        """Count the memory of a plan, if it may be admitted; `at_once` samples are fetched at once."""
        held, samples = self._held, len(plan.indices)
        self._short = (held + samples) * self._sizes.larger > self._nbytes
        unknown = self._sizes.fetched is None and held + samples > FIRST_SAMPLES
        waits = (
            self._short
            or unknown
            or (not self._assembled and at_once is not None and held > at_once)
        )
        # an engine that has ended may have had it first
        if held and waits and plan.number > min(self._samples):
            return False
        self._held += samples - self._samples.get(plan.number, 0)
        self._samples[plan.number] = samples
        return True

    def on_fetched(self, number: int) -> None:
        if number <= self._consumed:
            self._forget(number)
        else:
            self._fetched.add(number)

    def on_assembled(self) -> None:
        """Note that a batch has its size, or none: the next must not wait for one without samples."""
        self._assembled = True

    def on_consumed(self, number: int) -> None:
        if number <= self._consumed:
            return
        self._consumed = number
        for taken in [each for each in self._fetched if each <= number]:
            self._fetched.remove(taken)
            self._forget(taken)

    def _forget(self, number: int) -> None:
        self._held -= self._samples.pop(number)

    def load(self, load: FetchLoad, waiting: int) -> FetchLoad:
        """A stage's load, with the memory, and with the plans that wait here."""
        return load._replace(
            held_plans=waiting if self._short else 0,
            memory=int(self._held * self._sizes.larger),
            unused=0 if waiting else load.unused,
        )


def size_of_a_sample(samples: Sequence[Any]) -> float | None:
    """The mean size of some of the samples in bytes; None if all have failed."""
    if type(samples) is Rows:
        return float(samples.whole.nbytes / len(samples))
    good = [sample for sample in samples if not isinstance(sample, Failure)]
    if not good:
        return None
    measured = good[:: -(-len(good) // MEASURED_SAMPLES) | 1]
    return sum(map(bytes_in, measured)) / len(measured)


def bytes_in(sample: Any) -> int:
    """The approximate size of a sample in memory, in bytes: its buffers and those of its items.

    Example:
        >>> bytes_in({"image": bytes(1000), "label": memoryview(bytes(24))}) // 1000
        1
    """
    try:
        return int(_bytes_in(sample, 4))
    except Exception:  # user code: properties, sequences of its own
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
        slots = (getattr(sample, name, None) for name in getattr(type(sample), "__slots__", ()))
        parts = [*getattr(sample, "__dict__", {}).values(), *slots]
    if not parts:
        return sys.getsizeof(sample)
    measured = parts[:: -(-len(parts) // MEASURED_ITEMS)]
    share = len(parts) / len(measured)
    return sys.getsizeof(sample) + share * sum(_bytes_in(part, depth - 1) for part in measured)
