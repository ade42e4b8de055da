"""The bound on bytes that are fetched, or being fetched, and not yet taken by the consumer."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace._core.batches import BatchPlan, Failure, HostBatch, RawBatch, Rows
from headrace._core.engine.fetch import Deliver, FetchStage

# What a sample is taken for until one has come, where the source cannot foresee it: much for an image, little for a
# volume. A budget of 1 GiB begins with 1,024 samples, a budget of 8 MiB with 8.
FIRST_GUESS = 1 << 20
LOOKED_AT = 8  # samples of a batch that are measured; their mean is taken for all
PARTS = 16  # of a list or a mapping that are measured; a list of a million numbers must not hold up the loop
WEIGHT = 0.25  # of a batch in the running mean: a change of sizes is followed within a few batches


class BoundedFetch(FetchStage):
    """Lets plans through to another source while there is memory for them, by the running mean of a sample's size.

    What is held is known by batches: a plan beyond the look-ahead is sent only when a batch has been taken, so the
    number of plans says how many were. The next batch in order is never held back: a plan passes whenever none that is
    before it is being fetched.

    Args:
        make: makes the source that fetches, from what it delivers to.
        budget: bytes.
        look_ahead: how many plans may be outstanding.
        deliver: takes the batches that are complete.
    """

    def __init__(self, make: Callable[[Deliver], FetchStage], budget: int, look_ahead: int, deliver: Deliver) -> None:
        self._stage = make(self._delivered)
        self._budget = budget
        self._look_ahead = look_ahead
        self._deliver = deliver
        self._mean: float | None = None
        self._admitted = 0
        self._taken = 0
        self._waiting: deque[BatchPlan] = deque()
        self._fetching = 0  # batches
        self._held = 0  # samples that are being fetched, or were and are not taken
        self._ready: deque[int] = deque()  # samples of each batch that has been delivered and not taken

    def admit(self, plan: BatchPlan) -> None:
        """Take on one plan."""
        self._admitted += 1
        self._waiting.append(plan)
        self._note_taken()
        self._let_through()

    def missing(self, plan: BatchPlan) -> Sequence[Any]:
        """The missing indices by the inner source; all of them for a plan that is held back."""
        return plan.indices if plan in self._waiting else self._stage.missing(plan)

    def on_assembled(self, raw: RawBatch, host: HostBatch) -> HostBatch:
        """As the source that fetches does."""
        return self._stage.on_assembled(raw, host)

    def stop(self) -> None:
        """Draw nothing more."""
        super().stop()
        self._waiting.clear()
        self._stage.stop()

    def _note_taken(self) -> None:
        while self._ready and self._taken < self._admitted - self._look_ahead:
            self._taken += 1
            self._held -= self._ready.popleft()

    def _let_through(self) -> None:
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
        self._ready.append(len(raw.plan.indices))
        size = _size_of_a_sample(raw.samples or ())
        if size is not None:
            self._mean = size if self._mean is None else self._mean + WEIGHT * (size - self._mean)
        self._deliver(raw)
        self._note_taken()
        self._let_through()


def _size_of_a_sample(samples: Sequence[Any]) -> float | None:
    """The mean of some of them, in bytes; None if all have failed."""
    if type(samples) is Rows:
        return samples.tensor.nbytes / len(samples)
    good = [sample for sample in samples if not isinstance(sample, Failure)]
    if not good:
        return None
    looked_at = good[:: -(-len(good) // LOOKED_AT)]
    return sum(map(bytes_in, looked_at)) / len(looked_at)


def bytes_in(sample: Any) -> int:
    """About how many bytes of memory a sample holds: its buffers, and those of what it is made of.

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
    looked_at = parts[:: -(-len(parts) // PARTS)]
    share = len(parts) / len(looked_at)
    return sys.getsizeof(sample) + share * sum(_bytes_in(part, depth - 1) for part in looked_at)
