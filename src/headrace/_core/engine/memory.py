"""The memory budget: a bound on bytes that are being fetched, or fetched and not consumed."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace._core.batches import BatchPlan, FetchLoad, HostBatch, RawBatch, Rows
from headrace._core.engine.fetch import Deliver, FetchStage
from headrace._core.engine.fetch_recorder import FetchRecorder
from headrace._core.failure import Failure

# Bytes of a sample before one has arrived, where the stage cannot estimate it: much for an image, little for a volume.
# A budget of 1 GiB begins with 1,024 samples, a budget of 8 MiB with 8.
FIRST_GUESS = 1 << 20
MEASURED_SAMPLES = 8  # of a batch; their mean stands for all
MEASURED_ITEMS = 16  # of a list or mapping; a list of a million numbers must not block the loop
WEIGHT = 0.25  # of a batch in the running mean, which follows a change of sizes within a few batches


class BoundedFetch(FetchStage):
    """Admits plans to another stage while the budget allows it, by the running mean of a sample's size.

    Memory is counted by batches. A plan beyond the look-ahead is sent only after a batch was consumed: with the plan of
    number n, those up to n - `look_ahead` have been, by any engine. (Out of order, a late one counts as consumed when
    it arrives, a little early.) After the last plan the consumer reports it. A plan is always admitted when no other is
    being fetched, so the next batch in order is never held back.

    Args:
        make: makes the other stage from its `deliver`.
        budget: bytes.
        look_ahead: plans that may be outstanding.
        deliver: called with each complete batch.
    """

    def __init__(self, make: Callable[[Deliver], FetchStage], budget: int, look_ahead: int, deliver: Deliver) -> None:
        self._stage = make(self._delivered)
        self._budget = budget
        self._look_ahead = look_ahead
        self._deliver = deliver
        self._mean: float | None = None
        self._consumed = -1  # the number of the last batch that has been
        self._waiting: deque[BatchPlan] = deque()
        self._fetching = 0  # batches
        self._held = 0  # samples that are being fetched, or fetched and not consumed
        self._ready: dict[int, int] = {}  # samples of each batch that was delivered and not consumed

    def admit(self, plan: BatchPlan) -> None:
        """Queue a plan."""
        self._waiting.append(plan)
        self.on_consumed(plan.number - self._look_ahead)

    def on_consumed(self, number: int) -> None:
        """Admit plans that wait for the memory of these batches."""
        self._consumed = max(self._consumed, number)
        self._count_consumed()
        self._admit_waiting()

    def missing(self, plan: BatchPlan) -> Sequence[Any]:
        """The missing indices; all of them for a plan that is held back."""
        return plan.indices if plan in self._waiting else self._stage.missing(plan)

    def load(self) -> FetchLoad:
        """That of the other stage, with the plans that are held back, and the memory."""
        memory = int(self._held * (self._mean or 0.0))
        return self._stage.load()._replace(held_plans=len(self._waiting), memory=memory)

    def trace(self, recorder: FetchRecorder | None) -> None:
        """As of the other stage."""
        self._stage.trace(recorder)

    def on_assembled(self, raw: RawBatch, host: HostBatch) -> HostBatch:
        """As of the other stage."""
        return self._stage.on_assembled(raw, host)

    def stop(self) -> None:
        """Begin no more fetches."""
        super().stop()
        self._waiting.clear()
        self._stage.stop()

    def _count_consumed(self) -> None:
        for number in [number for number in self._ready if number <= self._consumed]:
            self._held -= self._ready.pop(number)

    def _admit_waiting(self) -> None:
        while self._waiting:
            samples = len(self._waiting[0].indices)
            size = self._mean or self._stage.estimate_sample_bytes(self._waiting[0]) or FIRST_GUESS
            if self._fetching and (self._held + samples) * size > self._budget:
                return
            self._fetching += 1
            self._held += samples
            self._stage.admit(self._waiting.popleft())

    def _delivered(self, raw: RawBatch) -> None:
        self._fetching -= 1
        self._ready[raw.plan.number] = len(raw.plan.indices)
        size = size_of_a_sample(raw.samples or ())
        if size is not None:
            self._mean = size if self._mean is None else self._mean + WEIGHT * (size - self._mean)
        self._deliver(raw)
        self._count_consumed()
        self._admit_waiting()


def size_of_a_sample(samples: Sequence[Any], most: int = MEASURED_SAMPLES) -> float | None:
    """The mean size of at most so many of the samples in bytes; None if all have failed."""
    if type(samples) is Rows:
        return samples.tensor.nbytes / len(samples)
    good = [sample for sample in samples if not isinstance(sample, Failure)]
    if not good:
        return None
    measured = good[:: -(-len(good) // most)]
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
    if isinstance(sample, Mapping):
        parts: Any = list(sample.values())
    elif isinstance(sample, list | tuple):
        parts = sample
    else:
        parts = list(getattr(sample, "__dict__", {}).values()) or [
            getattr(sample, name, None) for name in getattr(type(sample), "__slots__", ())
        ]
    if not parts:
        return sys.getsizeof(sample)
    measured = parts[:: -(-len(parts) // MEASURED_ITEMS)]
    share = len(parts) / len(measured)
    return sys.getsizeof(sample) + share * sum(_bytes_in(part, depth - 1) for part in measured)
