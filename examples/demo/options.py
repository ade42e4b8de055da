"""What `headrace demo` was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headrace.options import AUTO_CONCURRENCY

__all__ = ["DemoOptions"]


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What `headrace demo` was asked for.

    Attributes:
        latency: the store's time to the first byte, in seconds.
        epochs: passes over the training objects.
        batch_size: samples in a batch.
        workers: processes that decode and augment.
        concurrency: fetches in flight.
        seed: of everything random.
    """

    latency: float
    epochs: int
    batch_size: int
    workers: int
    concurrency: int | Literal["auto"]
    seed: int

    @property
    def fetches(self) -> int:
        """Fetches in flight, as a number."""
        return AUTO_CONCURRENCY if self.concurrency == "auto" else self.concurrency
