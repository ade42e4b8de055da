"""Options of the demo."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["DemoOptions"]


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options of the demo.

    Attributes:
        latency: the store's time to the first byte, seconds.
        epochs: passes over the training objects.
        batch_size: samples in a batch.
        workers: processes that decode and augment.
        concurrency: fetches in flight.
        seed: of all random numbers.
        copies: of each training object, for the comparison.
    """

    latency: float
    epochs: int
    batch_size: int
    workers: int
    concurrency: int | Literal["auto"]
    seed: int
    copies: int
