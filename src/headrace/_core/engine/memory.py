"""The memory budget: a bound on bytes that are being fetched, or fetched or in batches and not consumed."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace._core.batches import BatchPlan, FetchLoad, HostBatch, RawBatch, Rows
from headrace._core.engine.fetch import Deliver, FetchStage
from headrace._core.engine.fetch_pool import FetchRecorder
from headrace._core.failure import Failure

# Bytes of a sample before one has arrived: much for an image, little for a volume.
# A budget of 1 GiB begins with 1,024 samples, a budget of 8 MiB with 8.
FIRST_GUESS = 1 << 20
MEASURED_SAMPLES = 8  # of a batch; their mean stands for all
MEASURED_BATCHES = 8  # the first so many batches are measured, and then one in so many
MEASURED_ITEMS = 16  # of a list or mapping; a list of a million numbers must not block the loop
WEIGHT = 0.25  # of a batch in the running mean, which follows a change of sizes within a few measured ones


class SampleSizes:
    """Running means of a sample's size in bytes; of one loader, for all its epochs.

    Attributes:
        fetched: as fetched; None before the first.
        assembled: in its batch; None before the first. Decoding an image can take fifty times its bytes.
    """

    def __init__(self) -> None:
        self.fetched: float | None = None
        self.assembled: float | None = None
        # Counted here: the numbers of an engine's batches may all leave the same rest.
        self._fetched_batches = 0
        self._assembled_batches = 0

    @property
    def larger(self) -> float:
        """The larger of both; 0 before the first."""
        return max(self.fetched or 0.0, self.assembled or 0.0)

    def on_fetched(self, raw: RawBatch) -> None:
        """Measure the samples of a batch, if it is one of the first or one in so many."""
        self._fetched_batches += 1
        if _is_measured(self._fetched_batches):
            size = size_of_a_sample(raw.samples or ())
            if size is not None:
                self.fetched = _mean(self.fetched, size)

    def on_assembled(self, host: HostBatch) -> None:
        """Measure a batch, if it is one of the first or one in so many."""
        if host.size:
            self._assembled_batches += 1
            if _is_measured(self._assembled_batches):
                self.assembled = _mean(self.assembled, bytes_in(host.data) / host.size)


def _is_measured(count: int) -> bool:
    return count <= MEASURED_BATCHES or not count % MEASURED_BATCHES


def _mean(mean: float | None, value: float) -> float:
    return value if mean is None else mean + WEIGHT * (value - mean)


class BoundedFetch(FetchStage):
    """Admits plans to another stage while the budget allows it, by the running mean of a sample's size.

    Memory is counted by batches, from the first fetch until the consumer has taken the batch. Each plan says which
    those are, of any engine. (Out of order, a late one counts as taken when it arrives, a little early.) The consumer
    also says it when it waits, if it has taken one since the last plan, and with each batch that left plans waiting
    here. The next batch that it can take is always admitted, whatever its size.

    Until the first batch is assembled, no more is admitted than is fetched at once: what a transform makes of a sample
    is not known before.

    Args:
        make: makes the other stage from its `deliver`.
        budget: bytes.
        deliver: called with each complete batch.
        sizes: of the samples; those of earlier epochs are the first guess.
    """

    def __init__(
        self,
        make: Callable[[Deliver], FetchStage],
        budget: int,
        deliver: Deliver,
        sizes: SampleSizes,
    ) -> None:
        self._stage = make(self._delivered)
        self._budget = budget
        self._deliver = deliver
        self._sizes = sizes
        self._assembled = sizes.assembled is not None  # a batch, of this epoch or before
        self._consumed = -1  # the number of the last batch that has been taken
        self._waiting: deque[BatchPlan] = deque()  # ascending
        self._for_memory = False  # whether these wait for it, and not for the first batch
        self._fetching: dict[int, int] = {}  # samples of each batch that is being fetched, by its number
        self._ready: dict[int, int] = {}  # of each that was delivered and not taken
        self._held = 0  # the sum of both

    def admit(self, plan: BatchPlan) -> None:
        in_order = not self._waiting or self._waiting[-1].number < plan.number
        self._waiting.append(plan)
        if not in_order:  # of an engine that has ended
            self._waiting = deque(sorted(self._waiting, key=lambda waiting: waiting.number))
        self.on_consumed(plan.taken)

    def on_consumed(self, number: int) -> None:
        """Admit plans that wait for the memory of these batches."""
        self._consumed = max(self._consumed, number)
        self._count_consumed()
        self._admit_waiting()

    def missing(self, plan: BatchPlan) -> Sequence[Any]:
        """The missing indices; all of them for a plan that is held back."""
        return plan.indices if plan in self._waiting else self._stage.missing(plan)

    def load(self) -> FetchLoad:
        """That of the other stage, with the plans that wait for memory, and the memory."""
        load = self._stage.load()
        return load._replace(
            held_plans=len(self._waiting) if self._for_memory else 0,
            memory=int(self._held * self._sizes.larger),
            memory_samples=self._held,
            unused=0 if self._waiting else load.unused,
        )

    def trace(self, recorder: FetchRecorder | None) -> None:
        self._stage.trace(recorder)

    def on_assembled(self, raw: RawBatch, host: HostBatch) -> HostBatch:
        """Admit what waited for the first batch, and do as the other stage does."""
        if not self._assembled:
            self._assembled = True  # also by one without samples, which has no size: the next must not wait for it
            self._admit_waiting()
        return self._stage.on_assembled(raw, host)

    def stop(self) -> None:
        super().stop()
        self._waiting.clear()
        self._stage.stop()

    def _count_consumed(self) -> None:
        for number in [number for number in self._ready if number <= self._consumed]:
            self._held -= self._ready.pop(number)

    def _admit_waiting(self) -> None:
        while self._waiting:
            plan = self._waiting[0]
            samples = len(plan.indices)
            size = self._sizes.larger or FIRST_GUESS
            self._for_memory = (self._held + samples) * size > self._budget
            waits = self._for_memory or self._waits_for_sizes(plan)
            if self._held and waits and not self._is_next(plan):
                return
            self._fetching[plan.number] = samples
            self._held += samples
            self._stage.admit(self._waiting.popleft())

    def _waits_for_sizes(self, plan: BatchPlan) -> bool:
        """Whether no batch was assembled yet, and more samples are held than are fetched at once."""
        at_once = None if self._assembled else self._stage.fetched_at_once(plan)
        return at_once is not None and self._held > at_once

    def _is_next(self, plan: BatchPlan) -> bool:
        """Whether it comes before all that is held: an engine that has ended may have had it first."""
        return all(plan.number < min(held) for held in (self._fetching, self._ready) if held)

    def _delivered(self, raw: RawBatch) -> None:
        number = raw.plan.number
        self._ready[number] = self._fetching.pop(number)
        self._deliver(raw)
        self._count_consumed()
        self._admit_waiting()


def size_of_a_sample(samples: Sequence[Any]) -> float | None:
    """The mean size of some of the samples in bytes; None if all have failed."""
    if type(samples) is Rows:
        return samples.tensor.nbytes / len(samples)
    good = [sample for sample in samples if not isinstance(sample, Failure)]
    if not good:
        return None
    measured = good[:: -(-len(good) // MEASURED_SAMPLES)]
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
        parts = list(getattr(sample, "__dict__", {}).values()) or [
            getattr(sample, name, None) for name in getattr(type(sample), "__slots__", ())
        ]
    if not parts:
        return sys.getsizeof(sample)
    measured = parts[:: -(-len(parts) // MEASURED_ITEMS)]
    share = len(parts) / len(measured)
    return sys.getsizeof(sample) + share * sum(_bytes_in(part, depth - 1) for part in measured)
